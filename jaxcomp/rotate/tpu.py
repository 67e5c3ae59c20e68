"""Rotations as Pallas kernels for a TPU.

Eight blocks lie in registers of 8 × 128 elements, each register holding as many consecutive
elements of every block as it has lanes. Elements at a distance of at least 128 are in different
registers, and are simply added; nearer ones meet by rotating the lanes of a register.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxcomp.backend import axes
from jaxcomp.lazy import Lazy
from jaxcomp.rotate.reference import Seeds, flip_at
from jaxcomp.types import Array

pl, pltpu = Lazy("jax.experimental.pallas"), Lazy("jax.experimental.pallas.tpu")

LANES = 128
ROWS = 8
"""Blocks that are transformed together: the rows of a register."""

LARGEST = 8192
"""Elements of the largest block that fits in registers eight at a time."""

_HELD = 2**17
"""Elements of one program: half a megabyte of float32."""


def refuses(block: int) -> str | None:
    """The reason why this kernel cannot process such blocks, or None."""
    if not LANES <= block <= LARGEST:
        return f"a block must have {LANES} to {LARGEST} elements, and this one has {block}"
    return None


def rotate(
    blocks: Array, seeds: Seeds, down: int | float, up: int | float, *, interpret: bool = False
) -> Array:
    """The kernel of `reference.rotate`."""

    return _call("rotate", blocks, seeds, down, up, interpret)


def unrotate(
    blocks: Array, seeds: Seeds, down: int | float, up: int | float, *, interpret: bool = False
) -> Array:
    """The kernel of `reference.unrotate`."""

    return _call("unrotate", blocks, seeds, down, up, interpret)


def _network(x: Array) -> Array:
    """The transform of eight blocks, `[block / 128, 8, 128]`."""
    shape, stride = x.shape, x.shape[0] // 2
    while stride:
        pairs = x.reshape(-1, 2, stride, ROWS, LANES)
        first, second = pairs[:, :1], pairs[:, 1:]
        x = jnp.concatenate([first + second, first - second], axis=1).reshape(shape)
        stride //= 2
    lane = lax.broadcasted_iota(jnp.int32, shape, 2)
    turn = LANES // 2
    while turn:
        second = (lane & turn) != 0
        other = jnp.where(second, pltpu.roll(x, turn, 2), pltpu.roll(x, LANES - turn, 2))
        x = other + jnp.where(second, -x, x)
        turn //= 2
    return x


def _call(
    name: str, blocks: Array, seeds: Seeds, down: int | float, up: int | float, interpret: bool
) -> Array:
    """The transform of eight blocks at a time; signs come before it to "rotate", else after it."""
    n, block = blocks.shape
    rows = min(max(_HELD // block, ROWS), pl.cdiv(n, ROWS) * ROWS)
    starts = range(0, block, LANES)

    def kernel(seeds_ref, x_ref, out_ref):
        def eight(number, _):
            own = pl.ds(number * ROWS, ROWS)
            high, low, begin = (seeds_ref[own, word : word + 1] for word in range(3))
            x = jnp.stack([x_ref[own, start : start + LANES] for start in starts])
            register = lax.broadcasted_iota(jnp.int32, x.shape, 0)
            lane = lax.broadcasted_iota(jnp.int32, x.shape, 2)
            position = begin[None] + (register * LANES + lane).astype(jnp.uint32)
            x = x * jnp.float32(down)
            if name == "rotate":
                x = _network(flip_at(x, high[None], low[None], position))
            else:
                x = flip_at(_network(x), high[None], low[None], position)
            x = x * jnp.float32(up)
            for at, start in enumerate(starts):
                out_ref[own, start : start + LANES] = x[at]
            return 0

        lax.fori_loop(0, rows // ROWS, eight, 0)

    words = jnp.concatenate(seeds, axis=1)
    words, blocks = axes.match_vma(words, blocks)
    return pl.pallas_call(
        kernel,
        out_shape=axes.result(blocks.shape, blocks.dtype, blocks),
        grid=(pl.cdiv(n, rows),),
        in_specs=[_rows(rows, len(Seeds._fields)), _rows(rows, block)],
        out_specs=_rows(rows, block),
        interpret=pltpu.InterpretParams() if interpret else False,
        name=f"jaxcomp_{name}",
    )(words, blocks)


def _rows(rows: int, width: int) -> Any:
    return pl.BlockSpec((rows, width), lambda i: (i, 0))
