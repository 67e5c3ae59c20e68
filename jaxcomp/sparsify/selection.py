"""Selection of the indices of large elements.

Magnitudes are compared by their bits as integers, which have the same order, with NaN on top. So
non-finite elements are always selected, and every platform finds the same indices.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Int, Int32, Integer, UInt32

from jaxcomp.sparsify import bitmap
from jaxcomp.sparsify.bitmap import Words
from jaxcomp.sparsify.competitors import TOP, Parts, PerPart, Row, size_bits
from jaxcomp.types import Array

_LONG = 2**17
"""Smallest row whose threshold is first estimated from a sample."""

_MANY = 2**20
"""Smallest array whose shorter rows are not selected by `lax.top_k` either, on a CPU."""

_SAMPLED = 400
"""Elements of a sample above the threshold, for an error of about 5 %."""

_HALVED = 2**20
"""Smallest array whose upper and lower 16 bits are searched one after the other."""

_STEP = 2**19
"""First step of a search from a wrong estimate: a sixteenth of a power of two."""

_TOPS = 3
"""Groups of a short row, as a multiple of the elements that are wanted."""


@functools.partial(jax.jit, static_argnums=1)
def top_k(x: Array, k: int) -> UInt32[Array, "n k"]:
    """The indices of the `k` largest `|x|` of each row, ascending.

    Ties go to the lower index. NaN counts as larger than Inf, so that it is always selected.

    Example:
        >>> top_k(jnp.array([[1.0, -3.0, 0.0, 2.0]]), 2)
        Array([[1, 3]], dtype=uint32)
    """
    if x.shape[1] >= _LONG:
        return _of_many(x, k)
    if x.size < _MANY:
        return _of_few(x, k)
    # Of 25 million floats in buckets of 512 to 65,536, encoding one takes a CPU 2.6 to 4.7 ns at
    # 0.1 % where `lax.top_k` takes 3.8 to 4.2, 2.7 to 4.0 against 6.2 to 8.8 at 1 %, and 4.8 to 6.5
    # against 24 to 49 at 10 %. Other platforms were not measured.
    own = functools.partial(_of_many, k=k)
    return lax.platform_dependent(x, cpu=own, default=functools.partial(_of_few, k=k))


def _of_few(x: Array, k: int) -> UInt32[Array, "n k"]:
    """`top_k` by partial sorting, which compiles in a tenth of the time."""
    # A CPU selects float32 forty times faster than integers, with NaN on top as well.
    places = lax.platform_dependent(
        jnp.abs(x.astype(jnp.float32)),
        cpu=lambda size: lax.top_k(size, k)[1],
        default=lambda size: lax.top_k(size_bits(size), k)[1],
    )
    return jnp.sort(places, axis=1).astype(jnp.uint32)


def _of_many(x: Array, k: int) -> UInt32[Array, "n k"]:
    """`top_k` among the few candidates above an estimate, digit by digit."""
    n, size = x.shape
    if size < _LONG:
        room, low = k + k // 4 + 3 * math.isqrt(k) + 8, _least_reached(x, k)
    else:  # A tenth more than wanted: a sample that errs by 5 % still gives enough.
        room, low = k + k // 4 + 1024, estimate(x, round(1.1 * k), _SAMPLED)
    room, low = min(size, room), jnp.clip(low, 1, TOP - 1)
    hits = bitmap.of(size_bits(x) >= low)
    found = bitmap.count(hits)

    def narrow(x: Array, low: Array) -> Words:
        ks, rooms = (jnp.full_like(low, number) for number in (k, room))
        return enclose(x, ks, rooms, low, Row(size))

    missed = jnp.any((found < k) | (found > room))
    hits = lax.cond(missed, narrow, lambda *_: hits, x, low)
    found = bitmap.count(hits)
    places = bitmap.places(hits, room, bitmap.from_first(n))
    real = lax.broadcasted_iota(jnp.int32, places.shape, 1) < found[:, None]
    candidates = jnp.where(real, size_bits(take(x, places)), -1)
    last = kth_largest(candidates, k, Row(room))
    above, equal = bitmap.of(candidates > last), bitmap.of(candidates == last)
    chosen = above | bitmap.first(equal, k - bitmap.count(above)[:, None])
    chosen = bitmap.places(chosen, k, bitmap.from_first(n))
    return jnp.take_along_axis(places, chosen, axis=1).astype(jnp.uint32)


def _least_reached(x: Array, k: int) -> Int32[Array, "n 1"]:
    """A threshold that at least `k` elements of each row reach, and usually few more.

    It is the upper half of the `k`-th largest of the maxima of groups of elements.
    """
    n, size = x.shape
    groups = size // max(1, size // (_TOPS * k))
    # Few groups are split into more, and folded afterwards: otherwise lanes would be idle.
    fold = max(1, min(size // groups, 64 // groups))
    each = size // (groups * fold)
    elements = size_bits(x[:, : each * fold * groups]).reshape(n, each, fold * groups)
    tops = lax.optimization_barrier((jnp.max(elements, axis=1) >> 16).astype(jnp.int16))
    if fold > 1:
        tops = lax.optimization_barrier(jnp.max(tops.reshape(n, fold, groups), axis=1))
    return kth_largest(tops, k, Row(tops.shape[1])).astype(jnp.int32) << 16


def some(
    bitmap_: Words, room: int, start: UInt32[Array, " n"], needed: Int32[Array, " n"]
) -> tuple[UInt32[Array, "n room"], Int32[Array, " n"]]:
    """The indices of at most `room` of the ones of each row, ascending, and their number.

    If there are more ones, a cyclic run of them with a random start is left out, so that all have
    the same probability of being sent.

    Args:
        bitmap_: a bitmap from `bitmap.of`.
        room: the largest number of indices; those beyond the returned number are unspecified.
        start: a random word for each row.
        needed: the index of a one of each row that must be included, or -1.

    Example:
        >>> row = bitmap.of(jnp.array([[True, False, True, True]]))
        >>> some(row, 2, jnp.array([4], jnp.uint32), jnp.array([-1]))
        (Array([[0, 3]], dtype=uint32), Array([2], dtype=int32))
    """
    total = bitmap.count(bitmap_)
    over = jnp.maximum(total - room, 0)
    begin = (start % jnp.maximum(total, 1).astype(jnp.uint32)).astype(jnp.int32)
    begin = jnp.where(
        needed < 0, begin, bitmap.rank(bitmap_, jnp.maximum(needed, 0)[:, None])[:, 0] + 1
    )
    around = jnp.maximum(begin + over - total, 0)
    gap = jnp.where(around > 0, room, begin)
    places = bitmap.places(bitmap_, room, bitmap.Kept(around, gap, over))
    return places.astype(jnp.uint32), jnp.minimum(total, room)


def take(x: Array, places: Int32[Array, "n k"]) -> Array:
    """The elements at these indices of each row."""
    return jnp.take_along_axis(x, places, axis=1, mode="clip")


def kth_largest(
    sizes: Int[Array, "n size"], k: int | Int32[Array, "#n parts"], parts: Parts
) -> Int[Array, "n parts"]:
    """The `k`-th largest of each part, or zero, digit by digit."""
    if sizes.dtype.itemsize < 4 or sizes.size < _HALVED:
        return _by_digits(sizes, k, parts, 8 * sizes.dtype.itemsize - 1)
    # First the upper halves, then the lower halves of those that share the upper one: each of the
    # many passes over memory is half as long.
    upper = lax.optimization_barrier((sizes >> 16).astype(jnp.int16))
    top = _by_digits(upper, k, parts, 15)
    # Nothing is above the largest number, where one more would wrap around to the smallest.
    last = jnp.iinfo(jnp.int16).max
    left = k - jnp.where(top == last, 0, parts.at_least(upper, top + 1))
    lower = jnp.where(upper == parts.spread(top), sizes & 0xFFFF, 0).astype(jnp.uint16)
    rest = _by_digits(lax.optimization_barrier(lower), left, parts, 16)
    return (top.astype(sizes.dtype) << 16) | rest.astype(sizes.dtype)


def _by_digits(
    sizes: Integer[Array, "n size"], k: int | Int32[Array, "#n parts"], parts: Parts, digits: int
) -> Integer[Array, "n parts"]:
    search = functools.partial(_search, k=k, parts=parts, digits=digits)
    # A GPU counts fifteen trials nearly as fast as one, and each pass is several launches.
    one, four = (functools.partial(search, width=width) for width in (1, 4))
    return lax.platform_dependent(sizes, cuda=four, default=one)


def _search(
    sizes: Integer[Array, "n size"],
    k: int | Int32[Array, "#n parts"],
    parts: Parts,
    digits: int,
    width: int,
) -> Integer[Array, "n parts"]:
    """Finds `width` digits in each pass."""

    def find(found: Array, shift: Any, width: int) -> Array:
        shift = jnp.asarray(shift).astype(found.dtype)
        if width == 1:
            trial = found | (jnp.ones_like(found) << shift)
            return jnp.where(parts.at_least(sizes, trial) >= k, trial, found)
        trials = found[None] | (jnp.arange(1, 2**width, dtype=found.dtype)[:, None, None] << shift)
        reached = jax.vmap(lambda trial: parts.at_least(sizes, trial) >= k)(trials)
        return found | (jnp.sum(reached, axis=0, dtype=found.dtype) << shift)

    passes, first = divmod(digits, width)
    found = jnp.zeros_like(sizes, shape=(len(sizes), len(parts.sizes)))
    found = find(found, width * passes, first) if first else found

    def next_digits(number: Array, found: Array) -> Array:
        return find(found, width * (passes - 1 - number), width)

    return lax.fori_loop(0, passes, next_digits, found)


def enclose(x: Any, k: PerPart, room: PerPart, trial: PerPart, parts: Parts) -> Words:
    """At least `k` and at most `room` elements of each part, with its `k` largest among them.

    They are those that reach a threshold, unless more are equal than there is room for, or fewer
    than `k` are not zero: then the first ones of the equal elements, or of the zeros, are added.
    """
    hits, above = _bracket(x, k, room, trial, parts)
    over = jnp.any(parts.ones(hits) > room)
    cut = functools.partial(at_most, room=room, parts=parts)
    hits = lax.cond(over, cut, lambda hits, _: hits, hits, above)
    found = parts.ones(hits)

    def fill(hits: Words, found: PerPart) -> Words:
        return hits | parts.first(~hits, jnp.maximum(k - found, 0))

    return lax.cond(jnp.any(found < k), fill, lambda hits, _: hits, hits, found)


def at_most(reached: Words, above: Words, room: PerPart, parts: Parts) -> Words:
    """Those above a threshold, and as many of those at it as there is room for."""
    left = jnp.maximum(room - parts.ones(above), 0)
    return above | parts.first(reached & ~above, left)


def _bracket(
    x: Any, k: PerPart, room: PerPart, trial: PerPart, parts: Parts
) -> tuple[Words, Words]:
    """The elements of each part that reach a threshold, and those that reach the next one.

    At least `k` reach it, or all that are not zero, and at most `room` unless more are equal. The
    first trial is positive. The elements are read in the body of the loop alone: of leaves that are
    not joined, each is a kernel.
    """

    def is_undecided(low, found, high):
        return (low == 0) | ((found > room) & (high - low > 1))

    def go_on(state):
        low, found, high, *_ = state
        return jnp.any(is_undecided(low, found, high))

    def narrow(state):
        low, found, high, trial, step, hits, above = state
        # The barrier keeps the compiler from storing the bits of all elements before the loop.
        elements, trial = lax.optimization_barrier((x, trial))
        words = parts.reach(elements, trial)
        here = parts.ones(words)
        open_ = is_undecided(low, found, high)
        enough = open_ & ((here >= k) | (trial <= 1))
        fewer = open_ & ~enough
        hits = jnp.where(parts.per_word(enough, hits), words, hits)
        above = jnp.where(parts.per_word(fewer, hits), words, above)
        low, found = jnp.where(enough, trial, low), jnp.where(enough, here, found)
        high = jnp.where(fewer, trial, high)
        # Growing steps until the threshold is bracketed, then bisection.
        outside = jnp.where(enough, trial + step, trial - step)
        inside = (outside > low) & (outside < high) & ((low == 0) | (high == TOP))
        trial = jnp.where(inside, outside, low + (high - low) // 2)
        return low, found, high, trial, step * 2, hits, above

    zeros, none = jnp.zeros_like(trial), parts.none(trial)
    start = (zeros, zeros, zeros + TOP, trial, zeros + _STEP, none, none)
    *_, hits, above = lax.while_loop(go_on, narrow, start)
    return hits, above


def estimate(x: Array, k: int, above: int) -> Int32[Array, "n 1"]:
    """An estimate of the threshold that `k` elements of each row reach, as `size_bits`.

    It uses a sample at equal distances that contains about `above` of these elements.
    """
    size = x.shape[1]
    stride = int(max(1, min(size * 2**-16, k / above)))
    # Use an odd distance, since rows of a matrix tend to have even lengths.
    sample = size_bits(x[:, :: stride - 1 + stride % 2] if stride >= 3 else x)
    wanted = min(sample.shape[1], max(1, round(k * sample.shape[1] / size)))
    return kth_largest(sample, wanted, Row(sample.shape[1]))


def count(hits: Array) -> Int32[Array, "n 1"]:
    """The number of hits in each row."""
    return Row(hits.shape[1]).count(hits)
