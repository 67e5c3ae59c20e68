"""Rotations as Pallas kernels for a GPU.

One program holds a few blocks, or one, and reads and writes each element once. It works on sixteen
parts of a block, element by element: four stages of the network. Then what was side by side is
dealt to different parts, through the memory that threads share, for the next four; after all
stages every element is back in its place.
"""

import jax.numpy as jnp
from jax import lax

from jaxcomp.backend import axes, triton
from jaxcomp.backend.triton import pallas as pl
from jaxcomp.rotate.reference import Seeds, flip_at
from jaxcomp.types import Array

ELEMENTS = 4096
"""The fewest elements of a program: 32 for each thread of four warps."""

LARGEST = 8192
"""Elements of the largest block that a program can hold."""

_STAGES = 4
"""Stages between two exchanges. With five, a block of 4,096 would be exchanged as often, and take
nearly twice as long to compile."""


def refuses(block: int) -> str | None:
    """The reason why this kernel cannot process such blocks, or None."""
    if block > LARGEST:
        return f"a block must have at most {LARGEST} elements, and this one has {block}"
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


def _network(parts: list[Array], radices: list[int]) -> Array:
    """The transform of each row of `[rows, block]`, from its parts."""
    rows, block = parts[0].shape[0], parts[0].shape[1] * len(parts)
    x = _interleaved(_butterflies(parts))
    for radix in radices[1:]:
        pieces = lax.split(x.reshape(rows, radix, -1), [1] * radix, axis=1)
        x = _interleaved(_butterflies([piece.reshape(rows, -1) for piece in pieces]))
    return x.reshape(rows, block)


def _butterflies(parts: list[Array]) -> list[Array]:
    """The stages of the network between whole parts, the largest distance first."""
    stride = len(parts) // 2
    while stride:
        for number, first in enumerate(parts):
            if not number & stride:
                second = parts[number + stride]
                parts[number], parts[number + stride] = first + second, first - second
        stride //= 2
    return parts


def _interleaved(parts: list[Array]) -> Array:
    """The first elements of all parts, then the second ones, and so on.

    First one after another, each in the registers where it is, then transposed. Stacked along the
    last axis at once, a block of 4,096 would be exchanged between threads seven times, not three.
    """
    (rows, _), count = parts[0].shape, len(parts)
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=True)
        stacked = [jnp.stack(pair, axis=-1) for pair in pairs]
        parts = [jnp.transpose(pair, (0, 2, 1)).reshape(rows, -1) for pair in stacked]
    return jnp.transpose(parts[0].reshape(rows, count, -1), (0, 2, 1))


def _radices(block: int) -> list[int]:
    """Distributes the stages evenly over passes between exchanges, the longest passes first."""
    stages = block.bit_length() - 1
    passes = -(-stages // _STAGES)
    return [2 ** ((stages + i) // passes) for i in reversed(range(passes))]


def _call(
    name: str, blocks: Array, seeds: Seeds, down: int | float, up: int | float, interpret: bool
) -> Array:
    """The transform with random signs: before it to "rotate", after it to "unrotate"."""
    n, block = blocks.shape
    radices, per = _radices(block), max(1, ELEMENTS // block)
    stride = block // radices[0]

    def kernel(high_ref, low_ref, begin_ref, x_ref, out_ref):
        # If the last program has too few blocks, it repeats the last one.
        rows = jnp.minimum(pl.program_id(0) * per + lax.iota(jnp.int32, per), n - 1)
        high, low, begin = (
            triton.load(ref.at[rows])[:, None] for ref in (high_ref, low_ref, begin_ref)
        )

        def place(columns):
            shape = per, columns.shape[1]
            return jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(columns, shape)

        def signed(x, columns):
            return flip_at(x, high, low, begin + columns.astype(jnp.uint32))

        parts = []
        for part in range(radices[0]):
            columns = part * stride + lax.iota(jnp.int32, stride)[None]
            x = triton.load(x_ref.at[place(columns)])
            x = x * jnp.float32(down)
            parts.append(signed(x, columns) if name == "rotate" else x)
        x = _network(parts, radices)
        columns = lax.iota(jnp.int32, block)[None]
        x = signed(x, columns) if name == "unrotate" else x
        triton.store(out_ref.at[place(columns)], x * jnp.float32(up))

    arrays = axes.match_vma(*(word[:, 0] for word in seeds), blocks)
    (out,) = triton.call(
        kernel,
        [(blocks.shape, blocks.dtype)],
        arrays,
        programs=pl.cdiv(n, per),
        warps=per * block // 1024,
        name=name,
        interpret=interpret,
    )
    return out
