"""Entropy coders: round trips to the bit, prefixes where there is no room, rates as published."""

import functools
import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.suite import few_or_all, slow

from jaxcomp.entropy import elias, huffman, rans, rice, stream
from jaxcomp.entropy.coder import Coder
from jaxcomp.entropy.elias import Elias
from jaxcomp.entropy.huffman import Huffman
from jaxcomp.entropy.rans import Rans
from jaxcomp.entropy.rice import Rice

CODERS = [Elias(), Elias("delta", sparse=True), Rice(), Huffman(), Rans()]
MORE = [Elias("gamma"), Elias(sparse=True), Rice(k=2), Huffman(limit=8), Rans(lanes=4)]
ALL = CODERS + MORE
SIZES = [0, 1, 7, 5000]


@functools.partial(jax.jit, static_argnums=(0, 4))
def encode(coder, symbols, count, table, words):
    return coder.encode(symbols, count, table, words)


@functools.partial(jax.jit, static_argnums=(0, 3))
def decode(coder, words, kept, size, table):
    return coder.decode(words, kept, size, table)


@functools.partial(jax.jit, static_argnums=0)
def table_of(coder, counts):
    return coder.table(counts)


def ample(coder, size):
    return -(-coder.worst_bits(size, 256) // 32)


def rows(size, seed=0):
    """Sparse, dense, short, all zero, all largest, empty."""
    rng = np.random.default_rng(seed)
    symbols = rng.integers(1, 256, (6, size))
    symbols[0, rng.random(size) < 0.9] = 0
    symbols[1] = np.minimum(rng.geometric(0.4, size) - 1, 255)
    symbols[3], symbols[4] = 0, 255
    count = np.array([size, size, size // 3, size, size, 0])
    return jnp.asarray(symbols, jnp.uint32), jnp.asarray(count, jnp.int32)


def weights(symbols):
    return jnp.asarray(np.bincount(np.asarray(symbols).ravel(), minlength=256), jnp.float32)


def prefixes(symbols, kept):
    return np.where(np.arange(symbols.shape[1]) < np.asarray(kept)[:, None], symbols, 0)


@pytest.mark.core("Elias(code='omega', sparse=False)-(30,)")
@pytest.mark.parametrize(
    ("coder", "rooms"),
    [(coder, (30,)) for coder in CODERS] + [slow(coder, (0, 1, 30)) for coder in ALL],
    ids=repr,
)
def test_rows_come_back_as_far_as_they_fit(coder, rooms):
    assert isinstance(coder, Coder)
    size, whole = 512, ample(coder, 512)
    symbols, count = rows(size)
    table = table_of(coder, weights(symbols))
    for seed in range(3):
        symbols, count = rows(size, seed)
        coded = encode(coder, symbols, count, table, whole)
        np.testing.assert_array_equal(coded.kept, count)
        assert np.all(coded.bits <= coder.worst_bits(size, 256))
        got = decode(coder, coded.words, coded.kept, size, table)
        np.testing.assert_array_equal(got, prefixes(symbols, count))
    for words in rooms:
        some = encode(coder, symbols, count, table, words)
        assert some.words.shape == (6, words)
        assert np.all(some.bits <= 32 * words)
        assert np.all(some.kept <= count)
        assert words != 30 or np.any((some.kept > 0) & (some.kept < count))
        padded = jnp.pad(some.words, ((0, 0), (0, whole - words)))
        got = decode(coder, padded, some.kept, size, table)
        np.testing.assert_array_equal(got, prefixes(symbols, some.kept))
        more = jnp.minimum(some.kept + 1, count)
        if coder not in (Rans(), Rans(lanes=4), Rice()):  # The last fits its parameter to the row.
            bits = encode(coder, symbols, more, table, whole).bits
            np.testing.assert_array_equal(bits > 32 * words, some.kept < count)


@pytest.mark.parametrize(
    ("coder", "sizes", "cramped"),
    [(Rice(), [1], False), (Rans(), [5000], False), *(slow(coder, SIZES, True) for coder in ALL)],
    ids=repr,
)
def test_any_size(coder, sizes, cramped):
    """The cases with room for every symbol, and with room for none."""
    for size in sizes:
        symbols, count = rows(size)
        table = table_of(coder, weights(symbols) if size else jnp.ones(256))
        for words in (ample(coder, size), 0) if cramped else (ample(coder, size),):
            coded = encode(coder, symbols, count, table, words)
            got = decode(coder, coded.words, coded.kept, size, table)
            np.testing.assert_array_equal(got, prefixes(symbols, coded.kept))
            assert np.all(coded.bits <= 32 * words)
            assert not words or np.all(coded.kept == count)


@pytest.mark.parametrize("coder", few_or_all(CODERS, MORE), ids=repr)
def test_no_room_and_nothing_to_code(coder):
    """These are traced, not run: their shapes say it."""
    like = jax.ShapeDtypeStruct
    table = jax.eval_shape(coder.table, like((256,), jnp.float32))
    for size, words in ((0, 3), (7, 0), (7, 1), (5000, 2)):
        args = like((6, size), jnp.uint32), like((6,), jnp.int32), table
        coded = jax.eval_shape(lambda *args, words=words: coder.encode(*args, words), *args)
        assert coded.words.shape == (6, words)
        assert coded.kept.shape == coded.bits.shape == (6,)
        got = jax.eval_shape(
            lambda words, kept, table, size=size: coder.decode(words, kept, size, table),
            coded.words,
            coded.kept,
            table,
        )
        assert (got.shape, got.dtype) == ((6, size), jnp.uint32)


@pytest.mark.core("Elias(code='omega', sparse=False)")
@pytest.mark.parametrize("coder", few_or_all(CODERS, MORE), ids=repr)
def test_garbage_is_decoded_to_garbage(coder):
    rng = np.random.default_rng(1)
    size, whole = 512, ample(coder, 512)
    table = table_of(coder, jnp.ones(256))
    for trial in range(20):
        words = rng.integers(0, 2**32, (6, whole), dtype=np.uint64).astype(np.uint32)
        kept = jnp.asarray(rng.integers(-(2**31), 2**31, 6), jnp.int32).at[0].set(size)
        words = words if trial % 2 else words * np.uint32(trial % 4)
        anything = jax.tree.map(
            lambda x: jnp.asarray(rng.integers(0, 2**32, x.shape, dtype=np.uint64), jnp.uint32),
            table,
        )
        got = decode(coder, words, kept, size, anything if trial > 9 else table)
        assert got.shape == (6, size)
        assert np.all(got <= 255)
        np.testing.assert_array_equal(got, prefixes(got, kept))


@pytest.mark.full
@pytest.mark.parametrize(
    "coder", few_or_all([Rans(lanes=2)], [Elias(sparse=True), Huffman(), Rice()]), ids=repr
)
def test_coders_agree_under_jit_vmap_and_eager(coder):
    symbols, count = rows(7)
    table = table_of(coder, weights(symbols))
    want = encode(coder, symbols, count, table, 20)
    eager = coder.encode(symbols[:2], count[:2], table, 20)
    mapped = jax.vmap(lambda s, c: coder.encode(s[None], c[None], table, 20))
    for a, b, c in zip(want, eager, jax.jit(mapped)(symbols, count), strict=True):
        np.testing.assert_array_equal(a[:2], b)
        np.testing.assert_array_equal(a, c[:, 0])
    undo = jax.jit(jax.vmap(lambda w, k: coder.decode(w[None], k[None], 7, table)[0]))
    np.testing.assert_array_equal(undo(want.words, want.kept), prefixes(symbols, count))


def _bits(number, code):
    word = elias.codeword(jnp.array(number, jnp.uint32), code)
    parts = ((word.head, word.head_bits), (word.tail, word.tail_bits))
    return "".join(str(int(part) >> i & 1) for part, bits in parts for i in range(int(bits)))


def test_elias_codewords_are_the_published_ones():
    golden = {1: "0", 2: "100", 3: "110", 4: "101000", 8: "1110000", 16: "10100100000"}
    for number, want in {**golden, 100: "1011011001000"}.items():
        assert _bits(number, "omega") == want
    assert _bits(5, "gamma") == "00101"
    assert _bits(17, "delta") == "001010001"
    numbers = jnp.array([100, 1000, 2**31 - 1], jnp.uint32)
    assert elias.length(numbers, "omega").tolist() == [13, 17, 42]
    assert elias.length(numbers, "gamma").tolist() == [13, 19, 61]
    assert elias.length(numbers, "delta").tolist() == [11, 16, 39]


@pytest.mark.core("gamma")
@pytest.mark.parametrize("code", elias.CODES)
def test_elias_reads_what_it_writes(code):
    numbers = jnp.array([1, 2, 3, 4, 15, 16, 255, 2**16 - 1, 2**16, 2**31 - 1], jnp.uint32)[:, None]
    word = elias.codeword(numbers, code)
    start = jnp.full(numbers.shape, 5)
    words = stream.write(word.head, start, 4) | stream.write(word.tail, start + word.head_bits, 4)
    got, end = jax.jit(elias.read, static_argnums=2)(words, start[:, 0], code)
    np.testing.assert_array_equal(got, numbers[:, 0])
    np.testing.assert_array_equal(end - 5, elias.length(numbers, code)[:, 0])


def test_golden_streams_of_elias():
    """QSGD's bits: 0 → ω(1); +1 → ω(2), 0; −2 → ω(3), 1; and a gap of 2, a sign, ω(1)."""
    symbols, count = jnp.array([[0, 1, 4]], jnp.uint32), jnp.array([3])
    dense = encode(Elias(), symbols, count, (), 1)
    assert int(dense.words[0, 0]) == int(("0" + "1000" + "1101")[::-1], 2)
    sparse = encode(Elias(sparse=True), symbols, count, (), 1)
    body = "100" + "0" + "0" + "0" + "1" + "100"
    assert int(sparse.words[0, 0]) == int(("01" + body)[::-1], 2)
    assert int(sparse.bits[0]) == 2 + len(body)


@pytest.mark.parametrize(
    ("density", "entropy", "cost", "best"),
    [
        (0.1, 4.690, 4.756, 3),
        (0.01, 8.079, 8.108, 6),
        (0.001, 11.408, 11.495, 9),
        (0.0001, 14.730, 14.788, 13),
    ],
)
def test_rice_costs_what_the_formula_says(density, entropy, cost, best):
    assert rice.parameter(density) == best
    numbers = np.random.default_rng(0).geometric(density, (1, 200_000)) - 1
    numbers = jnp.asarray(numbers, jnp.uint32)
    mean = float(jnp.mean(rice.length(numbers, best).astype(jnp.float32)))
    assert abs(mean - cost) < 0.02
    assert mean < entropy + 0.1
    if density == 0.01:
        part = numbers[:, :500].reshape(2, 250)
        words = jax.jit(rice.encode, static_argnums=(1, 2))(part, best, 80)
        got = jax.jit(rice.decode, static_argnums=(1, 2))(words, 250, best)
        np.testing.assert_array_equal(got, part)


def test_rice_fits_its_parameter_to_the_elements_without_padding():
    """The parameter of a row is that of its fraction of nonzero levels."""
    count, every = np.array([512, 400, 64, 40]), np.array([[2], [10], [2], [10]])
    place = np.arange(512)
    hits = (place % every == 0) & (place < count[:, None])
    got = jax.jit(Rice()._best)(jnp.asarray(hits), jnp.asarray(count))
    want = [rice.parameter(float(row.sum() / n)) for row, n in zip(hits, count, strict=True)]
    assert got.tolist() == want == [0, 3, 0, 3]


def laws():
    gauss = np.exp(-0.5 * (0.45 * (np.arange(16) + 1) // 2) ** 2)
    skewed = np.r_[0.99, np.full(15, 0.01 / 15)]
    return {
        "gaussian": gauss / gauss.sum(),
        "skewed": skewed,
        "uniform": np.full(16, 1 / 16),
        "two": np.r_[0.7, 0.3, np.zeros(14)],
        "one": np.r_[1.0, np.zeros(15)],
        "laplace": np.exp(-0.5 * np.arange(16)) / np.exp(-0.5 * np.arange(16)).sum(),
    }


def entropy_of(p):
    p = np.asarray(p, float) / np.sum(p)
    return float(-np.sum(p[p > 0] * np.log2(p[p > 0])))


@pytest.mark.core("laplace")
@pytest.mark.parametrize("name", laws())
def test_rans_meets_the_entropy(name):
    p, size = laws()[name], 2**16
    symbols = np.random.default_rng(0).choice(16, (1, size), p=p)
    counts = np.bincount(symbols[0], minlength=16)
    table = table_of(Rans(), jnp.asarray(counts, jnp.float32))
    frequency = np.asarray(table, float)
    assert frequency.sum() == 4096
    assert frequency.min() >= 1
    entropy = entropy_of(counts)
    seen = counts > 0
    cross = -np.sum(counts[seen] / size * np.log2(frequency[seen] / 4096))
    # Symbols that never occur still take a slot: 15 of 4096 are 0.0053 bits.
    assert cross - entropy < 1e-4 + 1.5 * np.sum(~seen) / 4096
    count = jnp.array([size], jnp.int32)
    words = 9000
    coded = encode(Rans(), jnp.asarray(symbols, jnp.uint32), count, table, words)
    lanes = 32
    assert float(coded.bits[0]) <= 1.01 * cross * size + 48 * lanes
    got = decode(Rans(), coded.words, coded.kept, size, table)
    np.testing.assert_array_equal(got, symbols)
    assert int(coded.kept[0]) == size


def test_rans_divides_exactly():
    """At all multiples of divisors and next to them, where a rounded quotient would be wrong."""
    rng = np.random.default_rng(0)
    by = np.r_[np.arange(1, 4096), rng.integers(1, 4096, 50_000)].astype(np.uint64)
    most = by << 20
    near = rng.integers(0, 2**20, by.size).astype(np.uint64) * by + by - 1
    for x in (most - 1, np.minimum(near, most - 1), np.maximum(near, by) - by, by, by - 1):
        given = jnp.asarray(x.astype(np.uint32)), jnp.asarray(by.astype(np.uint32))
        quotient, rest = jax.jit(rans._divide)(*given)
        np.testing.assert_array_equal(quotient, x // by)
        np.testing.assert_array_equal(rest, x % by)


def test_rans_knows_its_own_streams():
    coder, (symbols, count) = Rans(lanes=4), rows(512)
    table = table_of(coder, weights(symbols))
    coded = encode(coder, symbols, count, table, 300)
    checked = jax.jit(coder.checked, static_argnums=2)
    assert np.all(checked(coded.words, coded.kept, 512, table)[1])
    for changed in (
        coded._replace(kept=coded.kept - 1),
        coded._replace(words=coded.words ^ 4),
        coded._replace(words=coded.words.at[:, -1].add(1)),
    ):
        assert not np.any(checked(changed.words, changed.kept, 512, table)[1])


@pytest.mark.parametrize("counts", [[0.0] * 5, [1.0], [3e38] * 4, [1e-40, 1.0, 0.0]], ids=str)
def test_any_weights_make_a_table(counts):
    counts = jnp.array(counts)
    frequency = np.asarray(rans.frequencies(counts))
    assert frequency.sum() == 4096
    assert 1 <= frequency.min() <= frequency.max() <= 4095
    lengths = np.asarray(huffman.lengths(counts), float)
    assert np.sum(2.0**-lengths) == (0.5 if counts.size == 1 else 1.0)


def _huffman_cost(weights):
    heap = list(weights)
    heapq.heapify(heap)
    cost = 0.0
    while len(heap) > 1:
        pair = heapq.heappop(heap) + heapq.heappop(heap)
        cost += pair
        heapq.heappush(heap, pair)
    return cost


@pytest.mark.parametrize("name", ["gaussian", "skewed", "uniform", "laplace"])
def test_huffman_is_the_best_code_of_whole_bits(name):
    p = laws()[name]
    make = jax.jit(huffman.lengths, static_argnums=1)
    lengths = np.asarray(make(jnp.asarray(p, jnp.float32), 15), float)
    assert np.sum(2.0**-lengths) == 1
    cost = float(p @ lengths)
    assert cost == pytest.approx(_huffman_cost(p), rel=1e-5)
    assert cost <= entropy_of(p) + p.max() + 0.086
    short = np.asarray(make(jnp.asarray(p, jnp.float32), 5), float)
    assert np.sum(2.0**-short) == 1
    assert short.max() <= 5
    assert cost - 1e-6 <= p @ short <= 4 + 1e-6


def test_settings_of_coders_are_checked():
    for make, name in (
        (lambda: Elias("beta"), "code"),
        (lambda: Rice(k=31), "k"),
        (lambda: Huffman(limit=16), "limit"),
        (lambda: Huffman(limit=3).table(jnp.ones(9)), "limit"),
        (lambda: Rans(lanes=0), "lanes"),
        (lambda: Rans().table(jnp.ones(257)), "symbols"),
        (lambda: rice.parameter(0.0), "fraction"),
    ):
        with pytest.raises(ValueError, match=f"`{name}` must be"):
            make()
