"""The same operations as Pallas kernels for a TPU.

A vector register holds 8 × 128 elements, and an array whose rows are not a multiple of 128 long
wastes memory and lanes. So eight buckets share a row of words: `[n / 8, 8 * words]` in memory is
`[n, words]` and always fills whole registers. A bucket is loaded as every eighth row of a block;
its codes are shifted to their places, the lanes of a register that hold parts of the same word are
added up by rotating it, and the words are put beside those of the other seven buckets.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.backend import axes
from jaxcomp.bits.grid import Grid
from jaxcomp.bits.planes import Bits, Plane, TritPlane, lanes, planes, words as words_of
from jaxcomp.lazy import Lazy
from jaxcomp.numerics import noise
from jaxcomp.quantize.totals import IN_KERNEL, INTERPRETED
from jaxcomp.types import Array, ArrayLike

pl, pltpu = Lazy("jax.experimental.pallas"), Lazy("jax.experimental.pallas.tpu")

LANES = 128
TOGETHER = 8
"""Buckets in a row of words."""

LARGEST = 8192
"""Elements of the largest bucket whose eight neighbours fit in the memory of a core."""

_BLOCK = 2**17
"""Elements of a block: half a megabyte of float32."""


def refuses(bits: Bits, size: int, dtype: Any) -> str | None:
    """The reason why this kernel cannot process these buckets, or None."""
    if size % LANES or not LANES <= size <= LARGEST:
        return f"a bucket must be a multiple of {LANES} up to {LARGEST}, and this one has {size}"
    if bits > 8:
        return f"codes must have at most 8 bits, and these have {bits}"
    if words_of(size, bits) % (LANES // TOGETHER):
        return (
            f"the words of a bucket must be a multiple of {LANES // TOGETHER}, and {size} codes of "
            f"{bits} bits take {words_of(size, bits)}"
        )
    for plane in planes(bits):
        width = lanes(size, plane)
        if width * plane.fields != size or (LANES % width and width % LANES):
            return f"{size} codes of {bits} bits do not fill whole registers"
    if jnp.dtype(dtype) == jnp.float16:
        return "elements must not be float16, which a TPU cannot load"
    if jnp.dtype(dtype).itemsize > 4:
        return f"elements must have at most 32 bits, and these are {jnp.dtype(dtype).name}"
    return None


def pack(codes: Array, bits: Bits, *, interpret: bool = False) -> Array:
    """The kernel of `bits.pack`."""
    n, size = codes.shape
    groups, words = _groups(n, size), words_of(size, bits)

    def kernel(codes_ref, words_ref, tile_ref):
        _lay_out(tile_ref, codes_ref[...])
        pieces = []
        for bucket in range(TOGETHER):
            pieces += _pieces(_bucket(tile_ref, bucket), bits, bucket)
        _put(words_ref, pieces)

    packed = _call(
        kernel,
        [_buckets(groups, size)],
        [codes],
        [_shared_words(groups, words)],
        [((pl.cdiv(n, TOGETHER), TOGETHER * words), jnp.uint32)],
        interpret,
        scratch=[_tile(groups, size, jnp.uint32)],
    )[0]
    return packed.reshape(-1, words)[:n]


def unpack(packed: Array, bits: Bits, size: int, *, interpret: bool = False) -> Array:
    """The kernel of `bits.unpack`."""
    n, words = packed.shape
    groups = _groups(n, size)

    def kernel(words_ref, codes_ref, tile_ref):
        row = words_ref[...]
        for bucket in range(TOGETHER):
            _set_bucket(tile_ref, bucket, _codes(row, bits, size, bucket))
        codes_ref[...] = _read_out(tile_ref)

    return _call(
        kernel,
        [_shared_words(groups, words)],
        [_share(packed)],
        [_buckets(groups, size)],
        [((n, size), jnp.uint32)],
        interpret,
        scratch=[_tile(groups, size, jnp.uint32)],
    )[0]


def encode(
    grid: Grid,
    x: Array,
    count: Array,
    key: Array,
    first: Array,
    scale: Array | None = None,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """The kernel of `bits.encode`."""
    (n, size), dtype = x.shape, x.dtype
    groups, words = _groups(n, size), words_of(x.shape[1], grid.bits)
    given = count if scale is None else scale
    how = INTERPRETED if interpret else IN_KERNEL

    def kernel(seeds_ref, given_ref, x_ref, words_ref, steps_ref, tile_ref):
        _lay_out(tile_ref, x_ref[...].astype(jnp.float32))
        given = given_ref[...]
        # Traced once for all eight buckets.
        scale_of, codes_of = jax.jit(grid.scale, static_argnums=2), jax.jit(grid.codes)
        lane = lax.broadcasted_iota(jnp.int32, (groups, LANES), 1)
        scales = jnp.zeros((groups, LANES), jnp.float32)
        for bucket in range(TOGETHER):
            mine = given[:, bucket : bucket + 1]
            if scale is None:
                mine = scale_of(_bucket(tile_ref, bucket), mine, how)
            scales = jnp.where(lane == bucket, mine, scales)
        step, factor = grid.step(scales, dtype, how)
        steps_ref[...] = step
        group = lax.broadcasted_iota(jnp.int32, (groups, LANES), 0) + pl.program_id(0) * groups
        number = seeds_ref[0, 2] + (group * TOGETHER + lane).astype(jnp.uint32)
        high, low = noise.absorb(seeds_ref[0, 0], seeds_ref[0, 1], number)
        position = lax.broadcasted_iota(jnp.int32, (groups, size), 1).astype(jnp.uint32)
        pieces = []
        for bucket in range(TOGETHER):
            column = slice(bucket, bucket + 1)
            own = (factor[:, column], high[:, column], low[:, column])
            codes = codes_of(_bucket(tile_ref, bucket), *own, position)
            pieces += _pieces(codes, grid.bits, bucket)
        _put(words_ref, pieces)

    seeds, rows = jnp.concatenate([key, first[None]])[None], pl.cdiv(n, TOGETHER)
    packed, steps = _call(
        kernel,
        [pl.BlockSpec(memory_space=pltpu.SMEM), _shared_words(groups, 1), _buckets(groups, size)],
        [seeds, _share(given[:, None]), x],
        [_shared_words(groups, words), pl.BlockSpec((groups, LANES), lambda i: (i, 0))],
        [((rows, TOGETHER * words), jnp.uint32), ((rows, LANES), jnp.float32)],
        interpret,
        scratch=[_tile(groups, size, jnp.float32)],
    )
    return packed.reshape(-1, words)[:n], steps[:, :TOGETHER].reshape(-1)[:n]


def decode_sum(
    grid: Grid, packed: Array, steps: Array, like: ArrayLike, *, interpret: bool = False
) -> Array:
    """The kernel of `bits.decode_sum`."""
    (workers, n, words), size = packed.shape, like.shape[1]
    groups = _groups(n, size)

    def kernel(words_ref, steps_ref, out_ref, tile_ref):
        worker = pl.program_id(1)
        row, step = words_ref[0], steps_ref[0]
        for bucket in range(TOGETHER):
            value = grid.values(_codes(row, grid.bits, size, bucket))
            value = value * step[:, bucket : bucket + 1]

            @pl.when(worker == 0)
            def _(value=value, bucket=bucket):
                _set_bucket(tile_ref, bucket, value)

            @pl.when(worker > 0)
            def _(value=value, bucket=bucket):
                _set_bucket(tile_ref, bucket, _bucket(tile_ref, bucket) + value)

        @pl.when(worker == workers - 1)
        def _():
            out_ref[...] = _read_out(tile_ref).astype(like.dtype)

    def of_worker(lanes):
        return pl.BlockSpec((1, groups, TOGETHER * lanes), lambda i, worker: (worker, i, 0))

    return _call(
        kernel,
        [of_worker(words), of_worker(1)],
        [_share(packed), _share(steps[:, :, None])],
        [pl.BlockSpec((TOGETHER * groups, size), lambda i, worker: (i, 0))],
        [((n, size), like.dtype)],
        interpret,
        scratch=[_tile(groups, size, jnp.float32)],
        grid=(pl.cdiv(n, TOGETHER * groups), workers),
    )[0]


class Piece(NamedTuple):
    """Words of one bucket: `array[:, l]` is word `l % period` of those that begin at `begin`."""

    array: Array
    period: int
    begin: int


def _pieces(codes: Array, bits: Bits, bucket: int) -> list[Piece]:
    """The words of a bucket, for their places in the row that eight buckets share."""
    groups, size = codes.shape
    begin, found = bucket * words_of(size, bits), []
    for plane in planes(bits):
        width = lanes(size, plane)
        for part in range(0, width, LANES):
            total = jnp.zeros((groups, LANES), jnp.uint32)
            for chunk, field in _chunks(plane, size, groups, part):
                total = total + plane.put(codes[:, chunk : chunk + LANES], field)
            turn = LANES // 2
            while turn >= width:  # Adds the lanes that contain parts of the same word.
                total = total + pltpu.roll(total, turn, 1)
                turn //= 2
            found.append(Piece(total, min(width, LANES), begin + part))
        begin += width
    return found


def _put(words_ref: Any, pieces: list[Piece]) -> None:
    """Stores the words of all buckets side by side."""
    chunks: dict[int, Array] = {}
    for array, period, begin in pieces:
        turned = pltpu.roll(array, begin % period, 1) if begin % period else array
        for chunk in range(begin // LANES, (begin + period - 1) // LANES + 1):
            inside = _inside(array.shape, chunk, begin, period)
            chunks[chunk] = jnp.where(inside, turned, chunks.get(chunk, jnp.zeros_like(turned)))
    for chunk, array in chunks.items():
        words_ref[:, chunk * LANES : (chunk + 1) * LANES] = array


def _codes(row: Array, bits: Bits, size: int, bucket: int) -> Array:
    """The codes of one of the eight buckets whose words are in a row: the inverse of `_pieces`."""
    groups, begin = row.shape[0], bucket * words_of(size, bits)
    chunks: dict[int, Array] = {}
    for plane in planes(bits):
        width = lanes(size, plane)
        for part in range(0, width, LANES):
            period = min(width, LANES)
            words = _cut(row, begin + part, period)
            for chunk, field in _chunks(plane, size, groups, part):
                codes = plane.take(words, field)
                chunks[chunk] = chunks[chunk] | codes if chunk in chunks else codes
        begin += width
    return jnp.concatenate([chunks[chunk] for chunk in sorted(chunks)], axis=1)


def _cut(row: Array, begin: int, period: int) -> Array:
    """`period` words of a row, repeated over all lanes: the inverse of `_put`."""
    total = jnp.zeros((row.shape[0], LANES), jnp.uint32)
    for chunk in range(begin // LANES, (begin + period - 1) // LANES + 1):
        part = row[:, chunk * LANES : (chunk + 1) * LANES]
        total = total + jnp.where(_inside(part.shape, chunk, begin, period), part, jnp.uint32(0))
    turn = period
    while turn < LANES:
        total = total + pltpu.roll(total, turn, 1)
        turn *= 2
    back = -begin % period
    return pltpu.roll(total, back, 1) if back else total


def _chunks(
    plane: Plane | TritPlane, size: int, groups: int, part: int
) -> list[tuple[int, int | Array]]:
    """The position of the codes of these words: the first of 128 columns, and the field."""
    width = lanes(size, plane)
    if width >= LANES:
        return [(field * width + part, field) for field in range(plane.fields)]
    lane = lax.broadcasted_iota(jnp.int32, (groups, LANES), 1)
    group = lane >> (width.bit_length() - 1)
    return [(chunk, chunk // width + group) for chunk in range(0, size, LANES)]


def _inside(shape: tuple[int, ...], chunk: int, begin: int, period: int) -> Array:
    lane = lax.broadcasted_iota(jnp.int32, shape, 1) + chunk * LANES
    return (lane >= begin) & (lane < begin + period)


def _groups(n: int, size: int) -> int:
    """Groups of eight buckets in a block: a multiple of the eight rows of a register."""
    rows = min(_BLOCK // (TOGETHER * size), pl.cdiv(n, TOGETHER))
    return max(8, pl.cdiv(rows, 8) * 8)


def _tile(groups: int, size: int, dtype: Any) -> Any:
    """A 32-bit block of width 128, from which every eighth row can be selected."""
    return pltpu.VMEM((size // LANES, TOGETHER * groups, LANES), dtype)


def _lay_out(tile_ref: Any, block: Array) -> None:
    for chunk in range(tile_ref.shape[0]):
        tile_ref[chunk] = block[:, chunk * LANES : (chunk + 1) * LANES]


def _read_out(tile_ref: Any) -> Array:
    return jnp.concatenate([tile_ref[chunk] for chunk in range(tile_ref.shape[0])], axis=1)


def _bucket(tile_ref: Any, bucket: int) -> Array:
    """The same one of the eight buckets of every group."""
    rows = pl.ds(bucket, tile_ref.shape[1] // TOGETHER, stride=TOGETHER)
    chunks = range(tile_ref.shape[0])
    return jnp.concatenate([tile_ref[chunk, rows, :] for chunk in chunks], axis=1)


def _set_bucket(tile_ref: Any, bucket: int, values: Array) -> None:
    rows = pl.ds(bucket, tile_ref.shape[1] // TOGETHER, stride=TOGETHER)
    for chunk in range(tile_ref.shape[0]):
        tile_ref[chunk, rows, :] = values[:, chunk * LANES : (chunk + 1) * LANES]


def _buckets(groups: int, size: int) -> Any:
    return pl.BlockSpec((TOGETHER * groups, size), lambda i: (i, 0))


def _shared_words(groups: int, words: int) -> Any:
    return pl.BlockSpec((groups, TOGETHER * words), lambda i: (i, 0))


def _share(x: Array) -> Array:
    """Reshapes `[..., n, words]` to `[..., n / 8, 8 * words]`, padded with zeros."""
    *lead, n, words = x.shape
    missing = -n % TOGETHER
    if missing:
        x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, missing), (0, 0)])
    return x.reshape(*lead, -1, TOGETHER * words)


def _call(
    kernel: Callable[..., None],
    in_specs: list[Any],
    arrays: list[Array],
    out_specs: list[Any],
    outputs: list[tuple[tuple[int, ...], Any]],
    interpret: bool,
    scratch: Sequence[Any] = (),
    grid: tuple[int, ...] | None = None,
) -> Any:
    arrays = list(axes.match_vma(*arrays))
    blocks = pl.cdiv(outputs[0][0][0], out_specs[0].block_shape[0])
    return pl.pallas_call(
        kernel,
        out_shape=[axes.result(shape, dtype, arrays[-1]) for shape, dtype in outputs],
        grid=grid or (blocks,),
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=scratch,
        interpret=pltpu.InterpretParams() if interpret else False,
        name=f"jaxcomp_{kernel.__qualname__.split('.')[0]}",
    )(*arrays)
