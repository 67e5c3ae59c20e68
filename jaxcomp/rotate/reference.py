"""The transform in plain `jax.numpy`: the specification, and the path that a CPU takes."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float32

from jaxcomp.backend import xla
from jaxcomp.numerics import noise
from jaxcomp.types import Array

_STAGES = 4
"""The most stages of the network in one pass over memory: each result of a pass is recomputed from
all of its terms, which are 32 for five stages."""

_CHUNK = 2**19
"""Elements that a CPU transforms at a time: they fit its cache and occupy its threads."""

_SIGN = 0x80000000


class Seeds(NamedTuple):
    """The seeds of the signs of blocks, `uint32[blocks, 1]` each.

    Attributes:
        high: the first seed word of the bucket that the block is of.
        low: the second.
        begin: where in its bucket the block begins.
    """

    high: Array
    low: Array
    begin: Array


def transform(x: Float32[Array, "n size"], block: int) -> Float32[Array, "n size"]:
    """The reference of `hadamard.transform`."""
    return over_blocks(lambda part, _: butterflies(part), x.reshape(-1, block)).reshape(x.shape)


def rotate(
    blocks: Float32[Array, "blocks block"], seeds: Seeds, down: int | float, up: int | float
) -> Array:
    """`up · H D (down · x)` of each row."""

    blocks = blocks * jnp.float32(down)
    rotated = over_blocks(lambda part, own: butterflies(flip(part, own)), blocks, seeds)
    return rotated * jnp.float32(up)


def unrotate(
    blocks: Float32[Array, "blocks block"], seeds: Seeds, down: int | float, up: int | float
) -> Array:
    """`up · D H (down · z)` of each row."""
    return over_blocks(butterflies, blocks * jnp.float32(down), seeds) * jnp.float32(up)


def over_blocks(
    f: Callable[[Array, Any], Array], blocks: Float32[Array, "blocks block"], seeds: Any = None
) -> Float32[Array, "blocks block"]:
    """Applies `f(blocks, seeds)`, a function of each row alone, in blocks that suit the platform.

    A CPU takes as many rows at a time as its cache holds, and puts the result in the place of the
    argument: the cost of several passes is memory traffic, above all the first touch of every new
    page, and not arithmetic.
    """

    def in_chunks(blocks, seeds):
        chunks, rest = divmod(blocks.shape[0], rows)

        def step(blocks, begin, count):
            def part(x):
                return lax.dynamic_slice_in_dim(x, begin, count)

            done = f(part(blocks), jax.tree.map(part, seeds))
            return lax.dynamic_update_slice_in_dim(blocks, done, begin, 0)

        blocks = lax.fori_loop(0, chunks, lambda i, x: step(x, i * rows, rows), blocks)
        return step(blocks, chunks * rows, rest) if rest else blocks

    rows = max(_CHUNK // blocks.shape[1], 1)
    if blocks.shape[0] <= rows:
        return f(blocks, seeds)
    return lax.platform_dependent(blocks, seeds, cpu=in_chunks, default=f)


def butterflies(
    x: Float32[Array, "rows block"], seeds: Seeds | None = None
) -> Float32[Array, "rows block"]:
    """The transform of each row, followed by random signs if there are seeds."""
    (rows, block), stride = x.shape, x.shape[1]
    for radix in _radices(block):
        stride //= radix
        # Outside the function that is compiled separately: with a result of another shape, the
        # inner loop would divide to compute its position, and take four times as long.
        x = x.reshape(rows, block // (radix * stride), radix, stride)
        # If fused, a pass would repeat the work of the pass before it for each of its terms. XLA
        # removes a barrier before a CPU's last fusion, but not a separate function.
        flips = seeds is not None and stride == 1
        x = _separate_flipped_pass(x, seeds) if flips else _separate_pass(x)
        x = lax.optimization_barrier(x)
    return x.reshape(rows, block)


def flip(x: Float32[Array, "rows ..."], seeds: Seeds) -> Float32[Array, "rows ..."]:
    """Applies random signs to rows, or to views of rows."""
    high, low, begin = (word.reshape(-1, *[1] * (x.ndim - 1)) for word in seeds)
    position = begin + lax.iota(jnp.uint32, math.prod(x.shape[1:])).reshape(1, *x.shape[1:])
    return flip_at(x, high, low, position)


def flip_at(x: Array, high: Array, low: Array, position: Array) -> Array:
    """Elements with the random signs of their positions in the buckets with these seeds."""
    sign = noise.at(high, low, position) & jnp.uint32(_SIGN)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) ^ sign, jnp.float32)


def _radices(block: int) -> list[int]:
    """Distributes the stages of the network evenly over passes, the shortest passes first.

    Elements far from each other tend to fall on the same lines of a cache.
    """
    stages = block.bit_length() - 1
    passes = -(-stages // _STAGES)
    return [2 ** ((stages + i) // passes) for i in range(passes)]


def _pass(x: Float32[Array, "rows groups radix stride"]) -> Array:
    """The stages between the `radix` elements at this stride; a result is a tree of its terms."""
    terms = [x[:, :, i : i + 1, :] for i in range(x.shape[2])]
    number = np.arange(x.shape[2]).reshape(1, 1, -1, 1)
    while len(terms) > 1:
        half = len(terms) // 2
        # A product with ±1 is exact, so it may be fused with the sum.
        sign = np.where(number & half, np.float32(-1), np.float32(1))
        terms = [a + sign * b for a, b in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]


def _flipped_pass(x: Float32[Array, "rows groups radix stride"], seeds: Seeds) -> Array:
    return flip(_pass(x), seeds)


# Kept, so that a program has a pass once, however many rotations it makes.
_separate_pass = xla.compile_separately(_pass)
_separate_flipped_pass = xla.compile_separately(_flipped_pass)
