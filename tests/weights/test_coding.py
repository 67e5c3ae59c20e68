"""Snapshots and patches give back every bit, in every dtype, whatever the numbers are."""

import hashlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import weights
from hypothesis import given, settings, strategies as st

from jaxcomp.weights import checksums as on_device
from jaxcomp_weights import checksums, patterns
from jaxcomp_weights.checksums import Sum

PIECE = 4096
"""Short pieces: arrays of a few thousand numbers have several."""
DTYPES = [name for name in patterns.FORMATS if name not in patterns.PAIRS]
CORE = ("bfloat16", "float32", "int8")


def random_bits(name, size, seed):
    """Any bits: NaN with payloads, infinities, −0, denormals."""
    draw = np.random.default_rng(seed)
    kind = patterns.unsigned(name)
    bits = draw.integers(0, 2 if name == "bool" else np.iinfo(kind).max, size, kind, endpoint=True)
    return (bits & 1 if name == "bool" else bits).view(patterns.dtype(name))


def stepped(array, name, rate, seed):
    """Some numbers a few units in the last place away, and some anywhere."""
    draw = np.random.default_rng(seed)
    bits = array.reshape(-1).view(patterns.unsigned(name)).copy()
    moved = draw.random(bits.size) < rate
    steps = draw.choice([1, -1, 1, -1, 2, -3, 40, -1000], bits.size).astype(np.int64)
    bits[moved] += steps[moved].astype(bits.dtype)
    if name == "bool":
        bits &= 1
    return bits.view(array.dtype).reshape(array.shape)


@pytest.mark.core(*CORE)
@pytest.mark.parametrize("name", DTYPES)
def test_every_bit_comes_back(name):
    """A long leaf in several pieces, short ones of two dtypes that are joined, and empty ones."""
    long, other = random_bits(name, 2 * PIECE + 517, 0), random_bits("float32", 700, 1)
    short = random_bits(name, 33, 2).reshape(3, 11)
    scalar, empty = random_bits(name, 1, 3).reshape(()), random_bits(name, 0, 4).reshape(0, 5)
    old = [long, other, short, scalar, empty]
    layout = weights.layout_of(old, PIECE)
    data, sums = weights.snapshot(old, layout)
    draft = weights.begun(layout, data)
    assert weights.same(draft, old)
    draft.check((tuple(sums),))
    for rate in (0, 0.001, 0.3, 1):
        new = [stepped(x, x.dtype.name, rate, 5) for x in old]
        for coding in weights.CODINGS:
            data, after = weights.patch(old, new, layout, coding, sums)
            found = weights.patched(draft, layout, data)
            assert weights.same(found, new)
            found.check((tuple(after),))
            assert weights.same(draft, old)  # As a reader still shows it.


@pytest.mark.parametrize("coding", weights.CODINGS)
def test_the_longest_steps_come_back(coding):
    """From the most negative number to the largest one, and over −0 and NaN."""
    numbers = [-np.inf, np.inf, -0.0, 0.0, np.nan, 1e-45, -1e-45, 3.4e38, -3.4e38]
    pairs = [(a, b) for a in numbers for b in numbers]
    old, new = (np.array([pair[n] for pair in pairs], np.float32) for n in (0, 1))
    negative = np.uint32(0xFFC00001).view(np.float32)  # A NaN with a sign and a payload.
    ends = np.array([negative, 0.0], np.float32)
    old, new = np.append(old, ends), np.append(new, ends[::-1])
    ends = np.array([np.iinfo(np.int32).min, np.iinfo(np.int32).max, 0], np.int32)
    arrays = [old, ends], [new, ends[::-1].copy()]
    layout = weights.layout_of(arrays[0], PIECE)
    data, sums = weights.snapshot(arrays[0], layout)
    draft = weights.begun(layout, data)
    data, _ = weights.patch(*arrays, layout, coding, sums)
    assert weights.same(weights.patched(draft, layout, data), arrays[1])


@given(
    seed=st.integers(0, 2**31 - 1),
    size=st.sampled_from([PIECE // 4, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE]),
    count=st.sampled_from([1, 2, 900, 1024, 1025]),
    coding=st.sampled_from(weights.CODINGS),
)
@settings(max_examples=30, deadline=None)
def test_any_numbers_of_changes(seed, size, count, coding):
    draw = np.random.default_rng(seed)
    old = (draw.standard_normal(size) * 0.02).astype(ml_dtypes.bfloat16)
    bits = old.view(np.uint16).copy()
    where = draw.choice(size, min(count, size), replace=False)
    bits[where] += draw.choice([1, 65535], where.size).astype(np.uint16)
    new = bits.view(old.dtype)
    layout = weights.layout_of([old], PIECE)
    data, sums = weights.snapshot([old], layout)
    draft = weights.begun(layout, data)
    data, _ = weights.patch([old], [new], layout, coding, sums)
    assert weights.same(weights.patched(draft, layout, data), [new])


def test_sizes_are_near_the_entropy():
    """Normal weights and a step of Adam: within a few percent of the code given the exponent."""
    draw = np.random.default_rng(0)
    size = 1 << 20
    exact = draw.standard_normal(size) * 0.02
    after = exact - 3e-6 * 0.2 * draw.standard_normal(size)
    old, new = (x.astype(np.float32).astype(ml_dtypes.bfloat16) for x in (exact, after))
    layout = weights.layout_of([old], 1 << 20)
    data, sums = weights.snapshot([old], layout)
    top = np.bincount((old.view(np.uint16) >> 7) & 0xFF) / size
    top = top[top > 0]
    assert len(data) * 8 / size < 1.03 * (8 - np.sum(top * np.log2(top)))
    bits = entropy(old, new)
    small, _ = weights.patch([old], [new], layout, "small", sums)
    fast, _ = weights.patch([old], [new], layout, "fast", sums)
    assert len(small) * 8 < 1.1 * bits
    assert len(fast) * 8 < 1.7 * bits


def entropy(old, new):
    """Bits of positions and steps, given the exponent of the old weight."""
    before, after = (patterns.order(x.view("<u2"), "bfloat16").astype(int) for x in (old, new))
    exponent, step, bits = (old.view("<u2") >> 7) & 0xFF, after - before, 0.0
    for one in np.unique(exponent):
        _, counts = np.unique(step[exponent == one], return_counts=True)
        bits -= np.sum(counts * np.log2(counts / counts.sum()))
    return bits


def test_what_does_not_change_is_a_few_bytes():
    old = [np.ones(5 * PIECE, np.float32), np.arange(9, dtype=np.int32)]
    layout = weights.layout_of(old, PIECE)
    _, sums = weights.snapshot(old, layout)
    for coding in weights.CODINGS:
        assert len(weights.patch(old, old, layout, coding, sums)[0]) < 64


def test_random_bits_are_sent_as_they_are():
    old, new = ([random_bits("float32", 2 * PIECE, seed)] for seed in (0, 1))
    layout = weights.layout_of(old, PIECE)
    _, sums = weights.snapshot(old, layout)
    for coding in weights.CODINGS:
        data, _ = weights.patch(old, new, layout, coding, sums)
        assert len(data) < 1.002 * old[0].nbytes + 12_000  # The tables were made for nothing.


def test_files_stay_as_they_are():
    """The bytes of a snapshot and of two patches; a new format needs a new number."""
    index = np.arange(3 * PIECE)
    old = [((index * 40503 % 65536) % 600 + 15000).astype(np.uint16).view(ml_dtypes.bfloat16)]
    bits = old[0].view(np.uint16).copy()
    bits[::37] += 1
    bits[::411] -= 3
    new = [bits.view(ml_dtypes.bfloat16)]
    layout = weights.layout_of(old, PIECE)
    data, sums = weights.snapshot(old, layout)
    files = [data, *(weights.patch(old, new, layout, c, sums)[0] for c in weights.CODINGS)]
    assert [(len(f), hashlib.sha256(f).hexdigest()[:16]) for f in files] == GOLDEN
    assert [str(one) for one in sums] == SUMS


GOLDEN = [
    (15953, "e49903333e103e7a"),
    (728, "7bd1da85cd8bd08e"),
    (511, "d57e9c7b52889658"),
]
SUMS = ["dcc00e4337dee65e"]


def test_checksums_on_the_device_are_those_of_readers():
    bits = np.random.default_rng(0).integers(0, 65536, 5000, np.uint16)
    ends = np.array([700, 701, 5000], np.int32)
    found = on_device.of_window(jnp.asarray(bits), 0, 5000, 0, ends)
    parts = np.split(bits, ends[:-1])
    assert [Sum(int(a), int(b)) for a, b in found] == [checksums.of(part) for part in parts]
    window = on_device.of_window(jnp.asarray(bits), 100, 900, 40, ends)
    its = bits[100:900]
    expected = [
        checksums.of(its[:660], 40),
        checksums.of(its[660:661]),
        checksums.of(its[661:]),
    ]
    assert [Sum(int(a), int(b)) for a, b in window] == expected


@pytest.mark.parametrize("tiles", [20, 40])
def test_checksums_of_changes_are_those_of_the_results(tiles):
    draw = np.random.default_rng(tiles)
    old = draw.integers(0, 65536, 5000, np.uint16)
    ends = np.append(np.sort(draw.integers(0, 5000, tiles - 1)), 5000).astype(np.int32)
    where = np.sort(draw.choice(5000, 300, replace=False)).astype(np.int32)
    new = old.copy()
    new[where] ^= draw.integers(1, 65536, where.size, np.uint16)
    slots = np.append(where, draw.integers(0, 5000, 212)).astype(np.int32)
    given = (jnp.asarray(old), jnp.asarray(new), slots, np.int32(300), np.int32(0), np.int32(0))
    change = on_device.of_changes(*given, ends)
    whole = on_device.of_window(jnp.asarray(new), 0, 5000, 0, ends)
    before = [checksums.of(part) for part in np.split(old, ends[:-1])]
    after = [checksums.of(part) for part in np.split(new, ends[:-1])]
    assert [one + Sum(int(a), int(b)) for one, (a, b) in zip(before, change, strict=True)] == after
    assert [Sum(int(a), int(b)) for a, b in whole] == after


def test_a_checksum_sees_a_change_and_an_exchange():
    bits = np.random.default_rng(0).integers(0, 65536, 1000, np.uint16)
    exchanged, changed = bits.copy(), bits.copy()
    exchanged[[3, 500]] = exchanged[[500, 3]]
    changed[999] ^= 1
    assert len({checksums.of(x) for x in (bits, exchanged, changed)}) == 3
