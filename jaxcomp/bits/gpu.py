"""The same operations as Pallas kernels for a GPU.

One program holds a few buckets: it reads their elements from memory once, finds the scale, and
reads them field by field again from its cache to round and pack them.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.backend import axes, triton
from jaxcomp.backend.triton import pallas as pl
from jaxcomp.bits.grid import Grid
from jaxcomp.bits.planes import Bits, Plane, TritPlane, lanes, planes, words as words_of
from jaxcomp.numerics import addition, noise
from jaxcomp.quantize.totals import IN_GPU, INTERPRETED
from jaxcomp.types import Array, ArrayLike

ELEMENTS = 1024
"""The fewest elements of a program, and the elements of each of its warps.

With 512 a warp, the fields of narrow codes leave most threads without an element, and signs take
two to four times as long to pack; with 2,048, some decoders take up to 25 % longer (on an H200).
"""

FITTED = 512
"""The elements of a warp that keeps codes until the step is fitted: with 1,024, a thread needs 197
registers (of 4 bits), and a multiprocessor has room for eight warps."""

LARGEST = 8192
"""Elements of the largest bucket that a program can hold."""

UNROLLED = 8
"""The most fields whose packing is unrolled; more are packed in a loop."""


def refuses(bits: Bits, size: int, dtype: Any) -> str | None:
    """The reason why this kernel cannot process these buckets, or None."""
    if not 1 <= size <= LARGEST:
        return f"a bucket must have 1 to {LARGEST} elements, and this one has {size}"
    if bits > 8:
        return f"codes must have at most 8 bits, and these have {bits}"
    if jnp.dtype(dtype).itemsize > 4:
        return f"elements must have at most 32 bits, and these are {jnp.dtype(dtype).name}"
    return None


def pack(codes: Array, bits: Bits, *, interpret: bool = False) -> Array:
    """The kernel of `bits.pack`."""
    n, size = codes.shape

    def kernel(codes_ref, words_ref):
        rows = _rows(n, size)

        def field(columns, inside):
            return _load(codes_ref, rows, columns, inside)

        _pack(words_ref, rows, bits, size, field)

    return _call(kernel, n, size, [(words_of(size, bits), jnp.uint32)], interpret, codes)[0]


def unpack(packed: Array, bits: Bits, size: int, *, interpret: bool = False) -> Array:
    """The kernel of `bits.unpack`."""
    n = packed.shape[0]

    def kernel(words_ref, codes_ref):
        rows, columns = _rows(n, size), _columns(size)
        codes = _unpack(lambda place: _load(words_ref, rows, place), bits, size, columns)
        _store(codes_ref, rows, columns, columns < size, codes)

    return _call(kernel, n, size, [(size, jnp.uint32)], interpret, packed)[0]


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
    n, size = x.shape
    seeds = jnp.concatenate([key, first[None]])
    given = () if scale is None else (scale[:, None],)
    how = INTERPRETED if interpret else IN_GPU

    def kernel(seeds_ref, count_ref, *refs):
        *scale_ref, x_ref, words_ref, steps_ref = refs
        rows, columns = _rows(n, size), _columns(size)
        inside, counts = columns < size, _load(count_ref, rows, _columns(1))
        whole = _load(x_ref, rows, columns, inside)
        given = _load(scale_ref[0], rows, _columns(1)) if scale_ref else None
        scales = grid.scale(whole, counts, how) if given is None else given
        step, factor = grid.step(scales, x.dtype, how)
        number = seeds_ref[2] + rows.astype(jnp.uint32)
        high, low = noise.absorb(seeds_ref[0], seeds_ref[1], number)

        codes_of = jax.jit(grid.codes)  # Traced only once for all fields.

        def field(columns, inside):
            part = _load(x_ref, rows, columns, inside)
            return codes_of(part, factor, high, low, columns.astype(jnp.uint32))

        if grid.fit:
            codes = grid.codes(whole, factor, high, low, columns.astype(jnp.uint32))
            step = grid.fitted(whole, codes, counts, how)
            _fold(words_ref, rows, grid.bits, size, codes)
        else:
            _pack(words_ref, rows, grid.bits, size, field)
        _store(steps_ref, rows, _columns(1), _columns(1) < 1, step)

    shapes = [(words_of(size, grid.bits), jnp.uint32), (1, jnp.float32)]
    arrays = (seeds, count[:, None], *given, x)
    each = FITTED if grid.fit else ELEMENTS
    packed, steps = _call(kernel, n, size, shapes, interpret, *arrays, each=each)
    return packed, steps[:, 0]


def decode_sum(
    grid: Grid, packed: Array, steps: Array, like: ArrayLike, *, interpret: bool = False
) -> Array:
    """The kernel of `bits.decode_sum`."""
    (workers, n, _), size = packed.shape, like.shape[1]

    def kernel(words_ref, steps_ref, out_ref):
        rows, columns = _rows(n, size), _columns(size)

        def term(worker):
            def load(place):
                return _load(words_ref, rows, place, worker=worker)

            codes = _unpack(load, grid.bits, size, columns)
            step = _load(steps_ref, rows, _columns(1), worker=worker)
            return grid.values(codes) * step

        total = addition.in_kernel(term, workers)
        _store(out_ref, rows, columns, columns < size, total.astype(like.dtype))

    arrays = (packed, steps[:, :, None])
    return _call(kernel, n, size, [(size, like.dtype)], interpret, *arrays)[0]


def _pack(words_ref: Any, rows: Array, bits: Bits, size: int, field: Callable[..., Array]) -> None:
    """Stores the words of these rows; `field(columns, inside)` makes the codes of some columns.

    The codes of a column are made once, for the words of all planes: fields are as long as those of
    the narrowest plane, and a word of a wider one is in a part of its lanes.
    """
    *_, last = every = planes(bits)
    widths = [lanes(size, plane) for plane in every]
    whole = all(
        width * plane.fields == widths[-1] * last.fields
        for width, plane in zip(widths, every, strict=True)
    )
    groups = [every] if whole else [(plane,) for plane in every]
    for start, group in zip((0, *itertools.accumulate(widths)), groups, strict=False):
        _pack_planes(words_ref, rows, start, group, size, field)


def _pack_planes(
    words_ref: Any,
    rows: Array,
    start: int,
    group: tuple[Plane | TritPlane, ...],
    size: int,
    field: Callable[..., Array],
) -> None:
    """Stores the words of planes from `start` on, which have as many fields times lanes."""
    width = lanes(size, group[-1])
    parts = [lanes(size, plane) // width for plane in group]
    lane, together = _columns(width), max(parts)

    def add(step: Any, packed: list[list[Array]]) -> list[list[Array]]:
        packed = [list(words) for words in packed]
        for place in range(together):
            begin = (step * together + place) * width
            inside = (lane < width) & (lane < size - begin)
            codes = jnp.where(inside, field(begin + lane, inside), 0)
            for words, plane, count in zip(packed, group, parts, strict=True):
                number = step * (together // count) + place // count
                words[place % count] += plane.put(codes, number)
        return packed

    empty = jnp.zeros((rows.shape[0], lane.shape[1]), jnp.uint32)
    packed, steps = [[empty] * count for count in parts], group[-1].fields // together
    if group[-1].fields <= UNROLLED:
        for step in range(steps):
            packed = add(step, packed)
    else:  # Unrolling all 32 fields would take ten seconds to compile.
        packed = lax.fori_loop(0, steps, add, packed)
    for words in packed:
        for word in words:
            _store(words_ref, rows, start + lane, lane < width, word)
            start += width


def folds(size: int, bits: Bits) -> bool:
    """Whether the fields of every plane are equal parts of a bucket."""
    widths = [lanes(size, plane) for plane in planes(bits)]
    return size == pl.next_power_of_2(size) and all(size % width == 0 for width in widths)


def _fold(words_ref: Any, rows: Array, bits: Bits, size: int, codes: Array) -> None:
    """Stores the words of these rows, from the codes of whole buckets."""
    start, columns = 0, _columns(size)
    for plane in planes(bits):
        width = lanes(size, plane)
        number = lax.div(columns, jnp.full_like(columns, width))
        parts = plane.put(codes, number).reshape(codes.shape[0], -1, width)
        packed = jnp.sum(parts, axis=1, dtype=jnp.uint32)
        _store(words_ref, rows, start + _columns(width), _columns(width) < width, packed)
        start += width


def _unpack(load: Callable[[Array], Array], bits: Bits, size: int, columns: Array) -> Array:
    """The codes of these columns; `load(place)` reads words."""
    if columns.shape[1] != size:  # The other columns are not stored, but need a valid address.
        columns = jnp.minimum(columns, size - 1)
    codes, start = None, 0
    for plane in planes(bits):
        width = lanes(size, plane)
        # A quotient and a remainder show the compiler that neighbours are adjacent.
        number = lax.div(columns, jnp.full_like(columns, width))
        place = start + lax.rem(columns, jnp.full_like(columns, width))
        part = plane.take(load(place), number)
        codes = part if codes is None else codes | part
        start += width
    assert codes is not None  # `planes` is never empty.
    return codes


def _per_program(size: int) -> int:
    """Buckets that one program holds, their columns padded to a power of two."""
    return max(1, ELEMENTS // pl.next_power_of_2(size))


def _rows(n: int, size: int) -> Array:
    """The buckets of this program; if the last program has too few, it repeats the last bucket."""
    per = _per_program(size)
    return jnp.minimum(pl.program_id(0) * per + lax.iota(jnp.int32, per), n - 1)[:, None]


def _columns(size: int) -> Array:
    return lax.iota(jnp.int32, pl.next_power_of_2(size))[None, :]


def _load(ref: Any, rows: Array, columns: Array, inside: Any = None, worker: Any = None) -> Array:
    shape = (rows.shape[0], columns.shape[1])
    place = (jnp.broadcast_to(rows, shape), jnp.broadcast_to(columns, shape))
    place = place if worker is None else (worker, *place)
    if inside is None:
        return triton.load(ref.at[place])
    inside = jnp.broadcast_to(inside, shape)
    return triton.load(ref.at[place], mask=inside, other=jnp.zeros((), ref.dtype))


def _store(ref: Any, rows: Array, columns: Array, inside: Array, values: Array) -> None:
    shape = (rows.shape[0], columns.shape[1])
    place = (jnp.broadcast_to(rows, shape), jnp.broadcast_to(columns, shape))
    triton.store(ref.at[place], values, mask=jnp.broadcast_to(inside, shape))


def _call(
    kernel: Callable[..., None],
    n: int,
    size: int,
    outputs: list[tuple[int, Any]],
    interpret: bool,
    *arrays: Array,
    each: int = ELEMENTS,
) -> Any:
    """Runs the kernel over `n` buckets; each output has one row per bucket.

    A warp has `each` elements.
    """
    return triton.call(
        kernel,
        [((n, width), dtype) for width, dtype in outputs],
        axes.match_vma(*arrays),
        programs=pl.cdiv(n, _per_program(size)),
        warps=max(1, pl.next_power_of_2(size) // each),
        name=kernel.__qualname__.split(".")[0],
        interpret=interpret,
    )
