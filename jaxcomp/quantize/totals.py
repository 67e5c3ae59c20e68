"""Totals and maxima of a bucket that have the same bits however a compiler arranges them.

A float sum depends on its order, and a fused multiply-add rounds once where two instructions
round twice, so `jit`, `vmap` and eager would disagree in the last bits. Sums here are taken in
integers, which have no order; the maximum is taken over the bits of |x|, because a fused float
maximum drops NaN.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float32, Int32

from jaxcomp.backend import xla
from jaxcomp.numerics import exact
from jaxcomp.numerics.segments import Segments
from jaxcomp.types import Array

FRACTION = 21
"""Fractional bits of the terms of `total`: terms of at most 1 are exact to 2⁻²²."""

_ANCHOR = np.float32(1.5 * 2**23)
"""Between 2²³ and 2²⁴ the floats are the integers, and so they are 2²² around this one."""

_LIMB = 15
_LIMBS = 4
"""Limbs of a sum over a segment, whatever the width of its rows."""

_INF = 0x7F800000


class Rows(NamedTuple):
    """The method of reducing rows; every method gives the same bits.

    Attributes:
        staged: whether a long row is reduced in several passes, or all at once.
        digits: whether to divide and take roots by digits on every platform.
        segments: the segments whose rows are reduced together, so that all rows of a segment get
            the same result; None to reduce each row by itself.
    """

    staged: bool
    digits: exact.Digits
    segments: Segments | None = None


IN_XLA = Rows(staged=True, digits=False)
"""For a compiler that turns one long reduction into a slow scalar loop."""

IN_KERNEL = Rows(staged=False, digits=True)
"""For a kernel that holds a row of at most 2¹⁵ elements in registers."""

IN_GPU = Rows(staged=False, digits="instruction")
"""For such a kernel on a GPU."""

INTERPRETED = Rows(staged=False, digits="interpreted")
"""For such a kernel in an interpreter, where XLA compiles it for a CPU."""

# Distant elements that one pass combines: as many as a CPU's compiler unrolls, so that neighbours
# share a register (a sum of 32 takes three times as long as one of 16). At least `_LANES`
# neighbours must remain.
_MAX_FAN = 32
_SUM_FAN = 16
_LANES = 16
_FEW = 4


def max_abs(x: Array, rows: Rows = IN_XLA) -> Float32[Array, "n 1"]:
    """The largest `|x|` of each row; NaN or Inf if the row has one.

    Args:
        x: `[n, size]`.
        rows: how to reduce them.

    Example:
        >>> max_abs(jnp.array([[1.0, -3.0], [0.0, jnp.nan]]))
        Array([[ 3.],
               [nan]], dtype=float32)
    """
    if x.shape[1] == 0:
        return jnp.zeros((x.shape[0], 1), jnp.float32)
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    # Shifted out, the sign costs a CPU a quarter less; a kernel has no unsigned maximum.
    bits = bits.astype(jnp.uint32) << 1 if rows.staged else bits & 0x7FFFFFFF
    bits = _largest(bits, rows)
    bits = (bits >> 1).astype(jnp.int32) if rows.staged else bits
    return lax.bitcast_convert_type(bits, jnp.float32)


def is_finite(x: Float32[Array, "..."]) -> Array:
    """Whether each value is finite, decided from its bits."""
    return (lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF) < _INF


def unit(x: Array, top: Float32[Array, "n 1"], rows: Rows = IN_XLA) -> Float32[Array, "n size"]:
    """`x / top` row by row, zero where `top` is zero or not finite."""
    # A reciprocal overflows below 2^-126 and flushes to zero above 2^126: rows whose top is below
    # count as zero, and rows with a large top are brought down by a power of two first.
    usable = is_finite(top) & (top >= jnp.finfo(jnp.float32).tiny)
    down = jnp.where(top > 1, jnp.float32(2.0**-4), jnp.float32(1))
    inverse = jnp.where(usable, exact.reciprocal(top * down, rows.digits), 0)
    return (x.astype(jnp.float32) * down) * inverse


def total(terms: Float32[Array, "n size"], rows: Rows = IN_XLA) -> Float32[Array, "n 1"]:
    """The sum of each row of terms of at most 1 in size, each rounded to a multiple of 2⁻²¹.

    Args:
        terms: `[n, size]`.
        rows: how to reduce them.

    Example:
        >>> total(jnp.full((1, 1000), 0.25))
        Array([[250.]], dtype=float32)
    """
    if terms.shape[1] == 0:
        return jnp.zeros((terms.shape[0], 1), jnp.float32)
    # The sum with `_ANCHOR` has the integer in its last bits, rounded; a conversion would take four
    # instructions more, to saturate. The product is exact, so it may be fused with the sum.
    anchored = terms * jnp.float32(2**FRACTION) + _ANCHOR
    integers = lax.bitcast_convert_type(anchored, jnp.int32) - _ANCHOR.view(np.int32)
    return _add([integers], 2**FRACTION, rows)


def _largest(bits: Array, rows: Rows) -> Array:
    """The maximum of each row, or segment, of integers."""
    if bits.shape[1] == 1:
        return bits if rows.segments is None else _of_segments(rows.segments, "largest", bits)
    folded = _fold(bits, jnp.max, _fan(bits, _MAX_FAN, rows))
    return _apart(lambda bits: _largest(bits, rows), folded, rows)


def _add(limbs: list[Int32[Array, "n lanes"]], bound: int, rows: Rows) -> Float32[Array, "n 1"]:
    """The sum of each row of numbers of so many limbs, each within `bound`, in 2⁻²¹."""
    if limbs[0].shape[1] == 1:
        limbs = _carry(limbs)
        if rows.segments is not None:
            limbs = [_of_segments(rows.segments, "total", limb) for limb in limbs]
            while len(limbs) < _LIMBS:  # So bits do not depend on how a leaf is cut.
                limbs = _carry(limbs)
        value = jnp.zeros(limbs[0].shape, jnp.float32)
        for place, limb in reversed(list(enumerate(limbs))):
            one = jnp.float32(2.0 ** (_LIMB * place - FRACTION))  # So each product is exact.
            value = value + limb.astype(jnp.float32) * one
        return value
    fan = _fan(limbs[0], _SUM_FAN, rows)
    if bound * fan > 2**30:
        limbs, bound = _carry(limbs), 2**_LIMB
    folded = [_fold(limb, functools.partial(jnp.sum, dtype=jnp.int32), fan) for limb in limbs]
    return _apart(lambda limbs: _add(limbs, bound * fan, rows), folded, rows)


def _of_segments(segments: Segments, reduce: str, rows: Array) -> Array:
    """`[n · rows, 1]` reduced over the rows of each segment, and given to all of them."""
    found = getattr(segments, reduce)(rows.reshape(-1, segments.rows))
    return segments.per_row(found).reshape(rows.shape)


def real(x: Array, count: Array, rows: Rows = IN_XLA) -> Array:
    """Whether each element is one of the first `count: [n, 1]` of its row, or of its segment."""
    place = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    if rows.segments is None:
        return place < count
    begins = jnp.asarray(rows.segments.begins, jnp.int32)[None]
    n = x.shape[0] // rows.segments.rows
    first = rows.segments.per_row(jnp.broadcast_to(begins, (n, rows.segments.number)))
    row = lax.broadcasted_iota(jnp.int32, first.shape, 1) - first
    return place + row.reshape(-1, 1) * rows.segments.width < count


def _apart(f: Callable[..., Any], folded: Any, rows: Rows) -> Any:
    """`f(folded)`, compiled separately for long rows: fused, three levels take twice as long as one
    after another, while two do not.
    """
    left = jax.tree.leaves(folded)[0].shape[1]
    return xla.compile_separately(f)(folded) if rows.staged and left > _MAX_FAN else f(folded)


def _carry(limbs: list[Int32[Array, "n lanes"]]) -> list[Int32[Array, "n lanes"]]:
    """The same number in limbs of 15 bits, with one more of them for the carry."""
    settled, carry = [], jnp.zeros((), jnp.int32)
    for limb in limbs:
        limb = limb + carry
        settled.append(limb & (2**_LIMB - 1))
        carry = limb >> _LIMB
    return [*settled, carry]


def _fan(x: Array, fan: int, rows: Rows) -> int:
    """The number of distant elements to combine in one pass: `fan`, or the whole row."""
    size = x.shape[1]
    if not rows.staged:
        return size
    if fan == _MAX_FAN == size:  # Blocks of 32: in one go, no maximum is vectorised.
        return _FEW
    if size >= fan * _LANES:
        return fan
    return size // _LANES if size >= 4 * _LANES else size


def _fold(x: Array, reduce: Callable[..., Array], fan: int) -> Array:
    """One level of a reduction along rows: `fan` neighbours-at-a-distance become one."""
    n, size = x.shape
    if fan == size:
        return reduce(x, axis=1, keepdims=True)
    lanes = size // fan
    body = reduce(x[:, : lanes * fan].reshape(n, fan, lanes), axis=1)
    if size % fan:
        body = jnp.concatenate([body, x[:, lanes * fan :]], axis=1)
    # Without the barrier, the levels become one reduction again before anything is compiled.
    return lax.optimization_barrier(body)
