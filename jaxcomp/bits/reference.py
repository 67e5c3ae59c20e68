"""Packing in plain `jax.numpy`: the specification, and the path that a CPU takes."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, UInt32

from jaxcomp.backend import xla
from jaxcomp.bits.grid import Grid
from jaxcomp.bits.planes import Bits, lanes, planes
from jaxcomp.numerics import addition, noise
from jaxcomp.quantize.totals import IN_XLA
from jaxcomp.types import Array, ArrayLike


def pack(codes: UInt32[Array, "n size"], bits: Bits) -> UInt32[Array, "n words"]:
    """Codes, one bucket per row, as words."""
    n, size = codes.shape
    packed = []
    for plane in planes(bits):
        width = lanes(size, plane)
        full = size // width
        fields, whole = np.arange(plane.fields)[None, :, None], len(planes(bits)) == 1
        # One reduction instead of a slice per field: it reads the codes once, without storing them.
        rows = codes[:, : full * width].reshape(n, full, width)
        words = jnp.sum(plane.put(rows, fields[:, :full], whole=whole), axis=1, dtype=jnp.uint32)
        if full * width < size:  # Padded separately: inside the loop it takes three times as long.
            last = jnp.pad(codes[:, full * width :], ((0, 0), (0, (full + 1) * width - size)))
            words = words + plane.put(last, fields[:, full], whole=whole)
        packed.append(words)
    return packed[0] if len(packed) == 1 else jnp.concatenate(packed, axis=1)


def unpack(packed: UInt32[Array, "n words"], bits: Bits, size: int) -> UInt32[Array, "n size"]:
    """The first `size` codes of each row of words."""
    n = packed.shape[0]
    codes, start = None, 0
    for plane in planes(bits):
        width = lanes(size, plane)
        fields = np.arange(plane.fields)[None, :, None]
        part = plane.take(packed[:, None, start : start + width], fields)
        part = part.reshape(n, plane.fields * width)[:, :size]
        codes = part if codes is None else codes | part
        start += width
    assert codes is not None  # `planes` is never empty.
    return codes


def encode(
    grid: Grid,
    x: Array,
    count: Array,
    key: UInt32[Array, "2"],
    first: Array,
    scale: Float32[Array, " n"] | None = None,
) -> tuple[UInt32[Array, "n words"], Float32[Array, " n"]]:
    """Quantises and packs: the words and the step of each bucket."""
    scales = grid.scale(x, count[:, None], IN_XLA) if scale is None else scale[:, None]
    step, factor = grid.step(scales, x.dtype, IN_XLA)
    codes = grid.codes(x, factor, *noise.rows(key, first, x.shape))
    return pack(codes, grid.bits), step[:, 0]


def decode_sum(
    grid: Grid,
    packed: UInt32[Array, "workers n words"],
    steps: Float32[Array, "workers n"],
    like: ArrayLike,
) -> Array:
    """Unpacks, scales and accumulates the payloads of all workers in their order."""
    size, (plane, *others) = like.shape[1], planes(grid.bits)
    width = lanes(size, plane)
    filled = size if others else plane.fields * width

    def total(packed, steps):
        def term(index):
            codes = unpack(packed[index], grid.bits, filled)
            return (grid.values(codes) * steps[index][:, None]).astype(addition.wide(like.dtype))

        return addition.in_order(term, packed.shape[0]).astype(like.dtype)

    if filled == size or not xla.large(packed.shape[1] * size):
        filled = size
        return total(packed, steps)
    # Cut afterwards: a loop over the shorter rows would read word by word.
    return xla.compile_separately(total, width)(packed, steps)[:, :size]
