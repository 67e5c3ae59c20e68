"""The fast Walsh-Hadamard transform of blocks, and the random signs that make it a rotation.

The transform adds and subtracts, in one order: that of the butterfly network with the largest
stride first. So its result has the same bits on every platform, fused with whatever comes before
and after, under `jit`, `vmap` and eagerly (numbers below the normal ones aside, which a CPU counts
as zero). It is not normalised: its entries are ±1, and dividing by √block is left to the caller,
who may know a better place for it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float32, UInt32

from jaxcomp import compiler, noise
from jaxcomp.protocols import Array

LARGEST = 2**15
"""The largest block."""

_STAGES = 4
"""Stages of the network that one pass over memory does at most: every result adds up all its terms
anew, and five stages have 32."""

_CHUNK = 2**19
"""Elements that a CPU transforms at a time: few enough for its cache, enough for its threads."""

_SIGN = 0x80000000


class Seeds(NamedTuple):
    """What the signs of blocks are made of, `uint32[blocks, 1]` each.

    Attributes:
        high: the first seed word of the bucket that the block is of.
        low: the second.
        begin: where in its bucket the block begins.
    """

    high: Array
    low: Array
    begin: Array


def transform(x: Float32[Array, "n size"], block: int) -> Float32[Array, "n size"]:
    """`H x` of each block, where `H[i, j] = -1` to the number of bits that `i` and `j` share.

    It is symmetric, so it is its own adjoint, and its own inverse times the block. An element that
    is not finite leaves no element of its block finite.

    Args:
        x: the buckets, of whole blocks.
        block: consecutive elements that are transformed together, a power of two.

    Raises:
        ValueError: for another block, or if `x` is not of whole ones.

    Example:
        >>> transform(jnp.array([[1.0, 2.0, 3.0, 4.0]]), 4)
        Array([[10., -2., -4.,  0.]], dtype=float32)
    """
    check(x, block)
    return _transform(x, block)


def rotate(
    x: Float32[Array, "n size"], high: UInt32[Array, " n"], low: UInt32[Array, " n"], block: int
) -> Float32[Array, "n size"]:
    """`H D x` of each block, where `D` are random signs.

    Args:
        x: the buckets, of whole blocks.
        high: the first seed word of each bucket, as from `noise.seeds`.
        low: the second. Noise that must be independent of the signs needs other seeds.
        block: consecutive elements that are rotated together, a power of two.

    Returns:
        The rotated buckets, √block times as long.

    Raises:
        ValueError: for another block, or if `x` is not of whole ones.

    Example:
        >>> high, low = noise.seeds(noise.raw(7), jnp.uint32(0), 1)
        >>> rotate(jnp.array([[0.0, 8.0, 0.0, 0.0]]), high, low, 4)
        Array([[ 8., -8.,  8., -8.]], dtype=float32)
    """
    check(x, block)
    return _rotate(x, high, low, block)


def unrotate(
    z: Float32[Array, "n size"], high: UInt32[Array, " n"], low: UInt32[Array, " n"], block: int
) -> Float32[Array, "n size"]:
    """`D H z` of each block: the adjoint of `rotate`, and its inverse times the block.

    Args:
        z: the rotated buckets.
        high: the first seed word of each bucket, as it was rotated with.
        low: the second.
        block: consecutive elements that were rotated together.

    Raises:
        ValueError: for a block that is no power of two, or if `z` is not of whole ones.

    Example:
        >>> high, low = noise.seeds(noise.raw(7), jnp.uint32(0), 1)
        >>> z = rotate(jnp.array([[1.0, 2.0, 3.0, 4.0]]), high, low, 4)
        >>> unrotate(z, high, low, 4) / 4
        Array([[1., 2., 3., 4.]], dtype=float32)
    """
    check(z, block)
    return _unrotate(z, high, low, block)


def check(x: Array, block: int) -> None:
    """Raises a `ValueError` if these buckets are not of blocks that can be transformed."""
    if not isinstance(block, int) or not 2 <= block <= LARGEST or block & (block - 1):
        raise ValueError(f"`block` must be a power of two from 2 to {LARGEST}, got {block!r}")
    if x.ndim != 2 or x.dtype != jnp.float32 or x.shape[1] % block:
        raise ValueError(
            f"`x` must be float32[n, size], the size a multiple of the block, {block}, "
            f"got {x.dtype}{list(x.shape)}"
        )


# Compiled for eager callers too: for them the loop below would be compiled anew at each call.
@functools.partial(jax.jit, static_argnums=1)
def _transform(x: Array, block: int) -> Array:
    return over_blocks(lambda part, _: butterflies(part), x.reshape(-1, block)).reshape(x.shape)


@functools.partial(jax.jit, static_argnums=3)
def _rotate(x: Array, high: Array, low: Array, block: int) -> Array:
    def rotated(part, seeds):
        return butterflies(flip(part, seeds))

    blocks, seeds = x.reshape(-1, block), block_seeds(x, high, low, block)
    return over_blocks(rotated, blocks, seeds).reshape(x.shape)


@functools.partial(jax.jit, static_argnums=3)
def _unrotate(z: Array, high: Array, low: Array, block: int) -> Array:
    blocks, seeds = z.reshape(-1, block), block_seeds(z, high, low, block)
    return over_blocks(butterflies, blocks, seeds).reshape(z.shape)


def block_seeds(x: Float32[Array, "n size"], high: Array, low: Array, block: int) -> Seeds:
    """The seeds of each block of the buckets `x`, from those of each bucket."""
    n, count = x.shape[0], x.shape[1] // block
    begin = lax.broadcasted_iota(jnp.uint32, (n, count), 1) * jnp.uint32(block)
    high, low = (jnp.broadcast_to(word[:, None], (n, count)) for word in (high, low))
    return Seeds(high.reshape(-1, 1), low.reshape(-1, 1), begin.reshape(-1, 1))


def over_blocks(
    f: Callable[[Array, Any], Array], blocks: Float32[Array, "blocks block"], seeds: Any = None
) -> Float32[Array, "blocks block"]:
    """`f(blocks, seeds)`, a function of each row by itself, done as it suits the platform.

    A CPU takes as many rows at a time as its cache holds, and puts the result in the place of the
    argument: what several passes over memory cost is not the arithmetic but memory, above all the
    first touch of every new page.
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
        # Outside of what is compiled as one: with a result of another shape, the inner loop would
        # divide to find its place, and take four times as long.
        x = x.reshape(rows, block // (radix * stride), radix, stride)
        # Fused, a pass would do the work of the one before again for each of its terms. A barrier
        # is gone before a CPU's compiler fuses for the last time; a function of its own is not.
        if seeds is None or stride > 1:
            x = compiler.outlined(_pass)(x)
        else:
            x = compiler.outlined(_flipped_pass)(x, seeds)
        x = lax.optimization_barrier(x)
    return x.reshape(rows, block)


def flip(x: Float32[Array, "rows ..."], seeds: Seeds) -> Float32[Array, "rows ..."]:
    """Rows, or views of rows, with random signs."""
    high, low, begin = (word.reshape(-1, *[1] * (x.ndim - 1)) for word in seeds)
    position = begin + lax.iota(jnp.uint32, math.prod(x.shape[1:])).reshape(1, *x.shape[1:])
    sign = noise.at(high, low, position) & jnp.uint32(_SIGN)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) ^ sign, jnp.float32)


def _radices(block: int) -> list[int]:
    """The stages of the network dealt to passes, as evenly as they go, the fewest first.

    Elements far from each other tend to fall on the same lines of a cache.
    """
    stages = block.bit_length() - 1
    passes = -(-stages // _STAGES)
    return [2 ** ((stages + i) // passes) for i in range(passes)]


def _pass(x: Float32[Array, "rows groups radix stride"]) -> Array:
    """The stages between the `radix` elements at this stride: each result a tree of its terms."""
    terms = [x[:, :, i : i + 1, :] for i in range(x.shape[2])]
    number = np.arange(x.shape[2]).reshape(1, 1, -1, 1)
    while len(terms) > 1:
        half = len(terms) // 2
        # A product by ±1 is exact, so it may be fused with the sum.
        sign = jnp.asarray(np.where(number & half, -1, 1), jnp.float32)
        terms = [a + sign * b for a, b in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]


def _flipped_pass(x: Float32[Array, "rows groups radix stride"], seeds: Seeds) -> Array:
    return flip(_pass(x), seeds)
