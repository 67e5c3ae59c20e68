"""Bitmaps, selection, and places as words."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxcomp.entropy import stream
from jaxcomp.numerics import segments as segments_
from jaxcomp.sparsify import (
    bitmap,
    choices,
    deltas,
    fitted,
    indices,
    logarithm,
    selection,
)
from jaxcomp.sparsify.competitors import Leaves

SHAPES = [(3, 50), (2, 1024), (4, 5000), (1, 100_001)]


def bits_of(words, size):
    bits = (np.asarray(words)[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1
    flat = bits.reshape(len(words), -1).astype(bool)
    assert not flat[:, size:].any()
    return flat[:, :size]


@pytest.mark.core("3-50")
@pytest.mark.parametrize(("n", "size"), SHAPES)
def test_bitmaps_count_rank_and_select(n, size):
    rng = np.random.default_rng(size)
    hits = rng.random((n, size)) < 0.2
    words = jax.jit(bitmap.of)(jnp.asarray(hits))
    np.testing.assert_array_equal(bits_of(words, size), hits)
    ones = hits.sum(1)
    np.testing.assert_array_equal(bitmap.count(words), ones)
    k = int(ones.min()) // 2
    base, gap = rng.integers(0, 3, n), rng.integers(0, k + 1, n)
    skip = rng.integers(0, ones - k - base)
    kept = bitmap.Kept(*(jnp.asarray(part, jnp.int32) for part in (base, gap, skip)))
    ranks = np.arange(k) + base[:, None] + np.where(np.arange(k) >= gap[:, None], skip[:, None], 0)
    want = np.stack([np.nonzero(row)[0][r] for row, r in zip(hits, ranks, strict=True)])
    places = jax.jit(bitmap.places, static_argnums=1)(words, k, kept)
    np.testing.assert_array_equal(places, want)
    np.testing.assert_array_equal(jax.jit(bitmap.rank)(words, places), ranks)
    some = rng.integers(0, ones + 3)
    first = bits_of(jax.jit(bitmap.first)(words, jnp.asarray(some, jnp.int32)[:, None]), size)
    for row, kept_row, number in zip(hits, first, some, strict=True):
        np.testing.assert_array_equal(np.nonzero(kept_row)[0], np.nonzero(row)[0][:number])


def largest(x, k):
    """Places of the largest, by a stable sort: ties to the lower place, NaN on top."""
    sizes = np.abs(np.asarray(x, np.float32)).view(np.int32).astype(np.int64)
    return np.sort(np.argsort(-sizes, axis=1, kind="stable")[:, :k], axis=1)


def inputs(n, size):
    rng = np.random.default_rng(size)
    x = rng.standard_normal((n, size)).astype(np.float32)
    few = np.zeros_like(x)
    few[:, ::7] = 1
    bad = x.copy()
    bad[:, rng.integers(0, size, 3)] = np.nan
    bad[:, 1] = -np.inf
    return {
        "normal": x,
        "many ties": np.round(x),
        "fewer values than k": few,
        "not finite": bad,
        "denormal": x * np.float32(1e-40),
        "zeros": np.zeros_like(x),
        "one size": np.where(x > 0, np.float32(2.5), np.float32(-2.5)),
    }


@pytest.mark.core("3-50-5")
@pytest.mark.parametrize(
    ("n", "size", "k"),
    [(3, 50, 5), (2, 1024, 1024), (2, 600, 1), (1, 200_001, 2000), (2, 140_000, 50_000)],
)
def test_the_largest_are_exactly_those_of_a_stable_sort(n, size, k):
    run = jax.jit(functools.partial(selection.top_k, k=k))
    for name, x in inputs(n, size).items():
        np.testing.assert_array_equal(run(jnp.asarray(x)), largest(x, k), err_msg=name)


@pytest.mark.core("20-500-5")
@pytest.mark.parametrize(("n", "size", "k"), [(20, 500, 5), (3, 4100, 410)])
def test_those_of_many_short_rows_are_too(n, size, k):
    """As a million elements would be selected, and where large ones are all of one group."""
    run = jax.jit(functools.partial(selection._of_many, k=k))
    crowded = inputs(n, size)["normal"]
    crowded[0, :: size // (3 * k)] *= 100
    for name, x in {**inputs(n, size), "crowded": crowded}.items():
        np.testing.assert_array_equal(run(jnp.asarray(x)), largest(x, k), err_msg=name)


@pytest.mark.full
def test_a_bad_sample_costs_passes_not_exactness():
    """Every sampled element is large, and none of the others."""
    x = np.random.default_rng(0).uniform(0.0, 1.0, (1, 300_000)).astype(np.float32)
    x[:, ::3] += 10
    for k in (1000, 120_000):
        np.testing.assert_array_equal(selection.top_k(jnp.asarray(x), k), largest(x, k))


@functools.partial(jax.jit, static_argnums=1)
def some(hits, room, start):
    """The places of hits, as many as there is room for."""
    return selection.some(bitmap.of(hits), room, start, jnp.full(len(hits), -1, jnp.int32))


@pytest.mark.full
@given(
    seed=st.integers(0, 2**31 - 1),
    density=st.sampled_from([0.0, 0.01, 0.05]),
    room=st.sampled_from([1, 60]),
)
@settings(deadline=None, max_examples=40)
def test_what_does_not_fit_is_a_run_that_begins_at_random(seed, density, room):
    rng = np.random.default_rng(seed)
    hits = rng.random((2, 3000)) < density
    start = rng.integers(0, 2**32, 2, dtype=np.uint32)
    places, number = some(hits, room, start)
    for row, found, count, begin in zip(hits, np.asarray(places), number, start, strict=True):
        ones = np.nonzero(row)[0]
        over = max(len(ones) - room, 0)
        left = {(begin + j) % max(len(ones), 1) for j in range(over)}
        kept = [place for j, place in enumerate(ones) if j not in left]
        assert list(found[: int(count)]) == kept


def test_no_place_is_favoured_where_room_is_short():
    hits = jnp.ones((1, 2048), bool)
    words, none = bitmap.of(hits), jnp.full(1, -1, jnp.int32)
    starts = jax.random.bits(jax.random.key(0), (4096, 1), jnp.uint32)
    run = jax.jit(jax.vmap(lambda s: selection.some(words, 512, s, none)[0][0]))
    chosen = np.bincount(np.asarray(run(starts)).ravel(), minlength=2048) / 4096
    assert abs(chosen.mean() - 0.25) < 1e-9
    assert np.abs(chosen - 0.25).max() < 6 * np.sqrt(0.25 * 0.75 / 4096)


@pytest.mark.full
def test_a_needed_place_is_never_left_out():
    hits = jnp.ones((1, 2048), bool)
    for place in (0, 1, 1000, 2047):
        needed = jnp.full(1, place, jnp.int32)
        places, _ = selection.some(bitmap.of(hits), 3, jnp.zeros(1, jnp.uint32), needed)
        assert place in np.asarray(places)


CODINGS = [
    *(indices.Raw(), indices.Packed(), indices.Bitmap()),
    *(indices.EliasFano(), indices.RiceGaps(), deltas.Deltas()),
]


@pytest.mark.core("3-50-5-Raw()")
@pytest.mark.parametrize("code", CODINGS, ids=repr)
@pytest.mark.parametrize(("n", "size", "k"), [(3, 50, 5), (2, 1, 1), (1, 5000, 700), (2, 64, 64)])
def test_places_come_back(code, n, size, k):
    rng = np.random.default_rng(k)
    places = np.sort([rng.choice(size, k, replace=False) for _ in range(n)]).astype(np.uint32)
    words = jax.jit(code.encode, static_argnums=1)(jnp.asarray(places), size)
    assert words.dtype == jnp.uint32
    decode = jax.jit(code.decode, static_argnums=(1, 2))
    np.testing.assert_array_equal(decode(words, k, size), places)


@given(seed=st.integers(0, 2**31 - 1), k=st.sampled_from([1, 7, 200]))
@settings(deadline=None, max_examples=30)
def test_streams_of_bits_come_back(seed, k):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 33, (2, k))
    codes = (rng.integers(0, 2**32, (2, k)) % (1 << lengths)).astype(np.uint32)
    begins = jax.jit(stream.begins)(jnp.asarray(lengths, jnp.int32))
    words = jax.jit(stream.write, static_argnums=2)(jnp.asarray(codes), begins, k + 1)
    got = jax.jit(stream.read)(words, begins, jnp.asarray(lengths, jnp.int32))
    np.testing.assert_array_equal(got, codes)


@pytest.mark.full
def test_deltas_fall_back_where_places_are_uneven():
    """Every block has one long gap: the width of that for all 128 would not fit."""
    even = np.arange(0, 2**18, 130, dtype=np.uint32)[None]
    starts = np.repeat(np.arange(2016) // 126 * 16_000, 1)
    uneven = (starts + np.arange(2016) % 126).astype(np.uint32)[None]
    for places, flag in ((even, 0), (uneven, 1)):
        code, k = deltas.Deltas(), places.shape[1]
        words = jax.jit(code.encode, static_argnums=1)(jnp.asarray(places), 2**18)
        assert int(words[0, 0]) == flag
        decode = jax.jit(code.decode, static_argnums=(1, 2))
        np.testing.assert_array_equal(decode(words, k, 2**18), places)
        used = int(jax.jit(code.bits)(jnp.asarray(places))[0])
        assert (used <= 32 * words.shape[1]) == (flag == 0)


@pytest.mark.full
def test_elias_fano_has_its_size():
    """The vector of eight places below 48: two low bits each, and 20 bits of bitmap."""
    places = jnp.array([[3, 4, 7, 13, 14, 15, 21, 43]], jnp.uint32)
    code = indices.EliasFano()
    assert code._split(8, 48) == (2, 20)
    np.testing.assert_array_equal(code.decode(code.encode(places, 48), 8, 48), places)
    for share, most in ((0.1, 5.3), (0.01, 8.6), (0.001, 12.0)):
        k = int(share * 2**20)
        like = jax.ShapeDtypeStruct((1, k), jnp.uint32)
        words = jax.eval_shape(lambda p: code.encode(p, 2**20), like)
        assert 32 * words.shape[1] / k <= most


@pytest.mark.full
@pytest.mark.parametrize("code", CODINGS[3:], ids=repr)
def test_places_come_back_where_slots_are_spare(code):
    """The spare ones repeat a place, or are beyond the end: those before them must not suffer."""
    for size, used, k in ((300, [3, 50, 51, 299], 9), (64, [63], 64), (1000, [], 5), (9, [8], 9)):
        rows = [used + [spare] * (k - len(used)) for spare in (used[-1] if used else 0, size)]
        words = code.encode(jnp.array(rows, jnp.uint32), size)
        got = jax.jit(code.decode, static_argnums=(1, 2))(words, k, size)
        np.testing.assert_array_equal(got[:, : len(used)], [used, used])


@pytest.mark.core("0.0001-14.788")
@pytest.mark.parametrize(
    ("share", "want"), [(0.1, 4.756), (0.01, 8.108), (0.001, 11.495), (0.0001, 14.788)]
)
def test_rice_takes_what_it_should(share, want):
    """Its length on random places, `r + 1 / (1 − (1 − p)^2ʳ)`, and its most on the worst."""
    size, code = 2**22, indices.RiceGaps()
    k = round(share * size)
    places = np.sort(np.random.default_rng(0).choice(size, k, replace=False)).astype(np.uint32)
    used = int(jax.jit(code.bits, static_argnums=1)(jnp.asarray(places)[None], size)[0])
    assert used / k == pytest.approx(want, rel=0.01)
    low, _ = code._split(k, size)
    gaps = np.zeros(k, np.int64)
    gaps[: (size - k) >> low] = 1 << low
    gaps[0] += ((size - k) >> low << low) - gaps.sum()
    worst = (np.cumsum(gaps + 1) - 1).astype(np.uint32)[None]
    words = jax.jit(code.encode, static_argnums=1)(jnp.asarray(worst), size)
    decode = jax.jit(code.decode, static_argnums=(1, 2))
    np.testing.assert_array_equal(decode(words, k, size), worst)
    fano = jax.eval_shape(lambda p: indices.EliasFano().encode(p, size), jnp.asarray(worst))
    assert words.shape[1] <= 1.05 * fano.shape[1]


@pytest.mark.full
def test_logarithms_are_close_and_exact_at_powers_of_two():
    x = np.exp(np.random.default_rng(0).uniform(-80, 80, 10_000)).astype(np.float32)
    off = np.asarray(logarithm.log2_fixed(jnp.asarray(x))) / 2**12 - np.log2(x.astype(float))
    assert np.abs(off).max() < 1e-3
    assert abs(off.mean()) < 4e-4
    off = np.asarray(logarithm.log2(jnp.asarray(x))) - np.log2(x.astype(float))
    assert np.abs(off).max() < 2e-5
    y = np.random.default_rng(1).uniform(-30, 30, 10_000).astype(np.float32)
    off = np.asarray(logarithm.exp2(jnp.asarray(y))) / np.exp2(y.astype(float)) - 1
    assert np.abs(off).max() < 2e-5
    numbers = np.arange(-120, 120, dtype=np.float32)
    powers = np.ldexp(np.float32(1), numbers.astype(int))
    np.testing.assert_array_equal(logarithm.log2(jnp.asarray(powers)), numbers)
    np.testing.assert_array_equal(logarithm.exp2(jnp.asarray(numbers)), powers)


@pytest.mark.parametrize("value", [0.0, -1.0, 1.5, "all", True])
@pytest.mark.wrong_types
def test_shares_are_checked(value):
    for rule in (choices.Largest, choices.Sampled, lambda f: fitted.Fitted(fraction=f)):
        with pytest.raises(ValueError, match="`fraction` must be a number in"):
            rule(value)


def test_other_settings_are_checked():
    with pytest.raises(ValueError, match="`value` must be a positive number"):
        choices.AtLeast(0.0, 0.1)
    with pytest.raises(ValueError, match="`law` must be one of 'exponential'"):
        fitted.Fitted(fraction=0.1, law="normal")
    with pytest.raises(ValueError, match="`stages` must be from 1 to 30"):
        fitted.Fitted(fraction=0.1, stages=0)
    with pytest.raises(ValueError, match="`most` must be a number at least 1"):
        choices.Sampled(0.1, most=0.5)


@pytest.mark.core("int32")
@pytest.mark.parametrize("dtype", ["int32", "int16", "uint16"])
def test_several_digits_of_the_kth_largest_are_found_in_a_pass(dtype):
    """As a GPU does: the same numbers as digit by digit, for whole rows and for segments."""
    segments = segments_.Segments((1000, 30, 1), 32)
    digits = 16 if dtype == "uint16" else np.iinfo(dtype).bits - 1
    draw = np.random.default_rng(0).integers(0, 2**digits, (3, segments.rows * 32))
    draw[1] = 2**digits - 1  # Nothing is larger.
    sizes = jnp.asarray(draw.astype(dtype))
    for parts, k in (
        (selection.Row(sizes.shape[1]), 17),
        (Leaves(segments), jnp.array([[100, 3, 1]])),
    ):
        search = functools.partial(selection._search, sizes, k, parts, digits)
        np.testing.assert_array_equal(search(4), search(1))
    want = np.sort(draw, axis=1)[:, -17:-16]
    row = selection.Row(sizes.shape[1])
    np.testing.assert_array_equal(selection._search(sizes, 17, row, digits, 4), want)


def test_the_kth_largest_of_many_elements_goes_by_halves_and_is_exact():
    """Upper halves in common, ties, fewer elements than `k`, and NaN of the largest upper half."""
    sizes = (3 * 2**18, 2**18 - 7, 2**18, 2**10)
    segments = segments_.of(sizes)
    assert segments.size >= selection._HALVED
    draw = np.random.default_rng(0)
    rows, ks = np.full((1, segments.size), -1, np.int32), (1000, 40_000, 10, 100)
    for start, size in zip(segments.starts, sizes, strict=True):
        rows[0, start : start + size] = draw.integers(0x3F800000, 0x3F820000, size)
    rows[0, segments.starts[1] : segments.starts[1] + 50_000] = 0x3F810007
    rows[0, segments.starts[2] : segments.starts[2] + sizes[2]] = -1
    rows[0, segments.starts[2] : segments.starts[2] + 9] = 5
    nans = draw.integers(0x7FFF0000, 0x7FFFFFFF, sizes[3])
    rows[0, segments.starts[3] : segments.starts[3] + sizes[3]] = nans
    found = jax.jit(selection.kth_largest, static_argnums=2)(
        rows, jnp.asarray([ks]), Leaves(segments)
    )
    first = -np.partition(-rows[0, : sizes[0]], ks[0] - 1)[ks[0] - 1]
    begin = segments.starts[1]
    second = -np.partition(-rows[0, begin : begin + sizes[1]], ks[1] - 1)[ks[1] - 1]
    assert np.asarray(found).tolist() == [[first, second, 0, np.sort(nans)[-ks[3]]]]
