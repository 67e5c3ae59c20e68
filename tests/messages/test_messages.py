"""Payloads as bytes: exact, no larger than they must be, the same for ever, and safe to read."""

import base64
import hashlib
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paths import TESTS
from helpers.posted import FIXED, MATRIX, assert_same, draws, message, sealed
from helpers.suite import EVERY, few_or_all, label

import jaxcomp
from jaxcomp.messages import arrays, fingerprint, frame, streams
from jaxcomp.messages.reading import Reader
from jaxcomp.sparsify.indices import Bitmap, RiceGaps

GOLDEN = TESTS / "golden" / "messages.json"
IDENTITY = slice(20, 36)
SECRET = bytes(range(32))

FAMILIES = [
    jaxcomp.cast("bfloat16"),
    jaxcomp.cast("float16"),
    jaxcomp.sign(),
    jaxcomp.qsgd_inf(bits=4),
    jaxcomp.qsgd(bits=3, bucket_size=100),
    jaxcomp.terngrad(),
    jaxcomp.natural(),
    jaxcomp.mx("nvfp4"),
    jaxcomp.eden(bits=2),
    jaxcomp.random_k(fraction=0.1),
    jaxcomp.top_k(fraction=0.05, bucket_size=64),
    jaxcomp.sidco(fraction=0.01),
    jaxcomp.threshold(
        1.0, fraction=0.2, bucket_size=64, values=jaxcomp.natural(), indices=Bitmap()
    ),
    jaxcomp.codecs.Chained(codecs=(jaxcomp.sign(), jaxcomp.qsgd_inf(bits=2))),
]


@pytest.mark.core("Cast(dtype='bfloat16',b=512)")
@pytest.mark.parametrize("codec", few_or_all(FAMILIES, EVERY), ids=label)
def test_every_family_comes_back_bit_for_bit(codec):
    x = draws(MATRIX.shape)
    payload, data = message(codec, x)
    assert len(data) <= jaxcomp.message_limit(codec, x)
    arrays_of = jax.tree.leaves(payload)
    raw = sum(leaf.nbytes for leaf in arrays_of)
    assert jaxcomp.message_limit(codec, MATRIX) <= raw + FIXED + 12 * len(arrays_of)
    got = jaxcomp.from_bytes(codec, data, MATRIX)
    assert_same(got, payload)
    assert sealed(data) == data  # The format is what this file takes it to be.


def test_a_tree_under_a_policy():
    tree = {
        "dense": {"kernel": draws((64, 40)), "bias": draws(40)},
        "empty": jnp.zeros((3, 0)),
        "half": draws((50, 30), 1, jnp.bfloat16),
        "head": draws((8, 160), 2),
        "scale": draws((), 3),
    }
    rules = (jaxcomp.Rule("head", jaxcomp.sidco(fraction=0.1)), jaxcomp.Rule("half", None))
    policy = jaxcomp.Policy(jaxcomp.qsgd_inf(bits=4), rules=rules)
    payload, data = message(policy, tree, secret=SECRET)
    got = jaxcomp.from_bytes(policy, data, jax.eval_shape(lambda: tree), secret=SECRET)
    assert_same(got, payload)
    decoded = jaxcomp.decode(policy, 5, got, tree, worker=3)
    assert_same(decoded, jaxcomp.roundtrip(policy, 5, tree, worker=3))
    for other in ({**tree, "scale": jnp.zeros(1)}, {**tree, "more": jnp.zeros(1)}):
        with pytest.raises(jaxcomp.MessageError, match="same codec and a tree like"):
            jaxcomp.from_bytes(policy, data, other, secret=SECRET)


def test_a_tree_of_nothing():
    payload, data = message(jaxcomp.sign(), {})
    assert len(data) == FIXED
    assert_same(jaxcomp.from_bytes(jaxcomp.sign(), data, {}), payload)


def test_messages_of_double_precision(x64):
    codec, x = jaxcomp.Policy(jaxcomp.cast("float16")), draws(9, dtype=jnp.float64)
    payload, data = message(codec, x)
    assert payload.dense[0].dtype == jnp.float64
    assert_same(jaxcomp.from_bytes(codec, data, x), payload)
    with jax.enable_x64(False), pytest.raises(jaxcomp.MessageError, match="at most"):
        jaxcomp.from_bytes(codec, data, x)


@pytest.mark.parametrize("dtype", frame.DTYPES, ids=str)
def test_every_dtype_and_special_values(dtype):
    """Negative zeros, infinities and payloads of NaN are bits like others."""
    items = np.arange(256 * 6, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    array = items.view(np.uint8)[: 256 * dtype.itemsize]
    array = array % 2 == 1 if dtype == np.bool_ else array
    array = array.view(dtype).reshape(16, 16)
    for rows in (
        array,
        array[:0],
        np.where(np.arange(16)[:, None] < 2, array, array.dtype.type(0)),
    ):
        method, body = arrays.encode(rows)
        assert len(body) <= rows.nbytes
        got = arrays.decode(method, memoryview(body), rows)
        assert got.dtype == dtype
        assert got.tobytes() == rows.tobytes()


@pytest.mark.core("1.6")
@pytest.mark.parametrize("bits", [1.6, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16])
def test_words_are_written_as_their_codes(bits):
    draw = np.random.default_rng(3)
    limit = 3 if bits == 1.6 else 2**bits
    codes = np.minimum(draw.geometric(0.7, (9, 640)) - 1, limit - 1).astype(np.uint32)
    words = np.asarray(jaxcomp.bits.pack(jnp.asarray(codes), bits=bits))
    method, body = arrays.encode(words, [bits])
    assert method == arrays.CODES or bits == 1
    np.testing.assert_array_equal(arrays.decode(method, memoryview(body), words, [bits]), words)
    spoilt = words | np.uint32(0xFFFFFFFF)  # No five trits are 255.
    method, body = arrays.encode(spoilt, [bits])
    np.testing.assert_array_equal(arrays.decode(method, memoryview(body), spoilt, [bits]), spoilt)


@pytest.mark.parametrize("size", [1, 2, 5, 500, 8_192, 8_193, 150_000])
def test_streams_come_back_at_their_entropy(size):
    draw = np.random.default_rng(size)
    for symbols in (
        draw.integers(256, size=size),
        np.clip(draw.normal(128, 3, size), 0, 255),
        draw.random(size) < 0.01,
        np.full(size, 7),
    ):
        symbols = symbols.astype(np.uint8)
        measured = streams.measure(symbols)
        body = streams.encode(symbols, measured)
        reader = Reader(body)
        np.testing.assert_array_equal(streams.decode(reader, size), symbols)
        assert reader.left == 0
        assert len(body) <= size + 1
        assert len(body) <= measured.size * 1.01 + 8


@pytest.mark.parametrize("size", [700, 20_000])
def test_a_coded_stream_is_what_the_format_says(size):
    """Read by a reader in plain Python, which has only `docs/messages.md`."""
    want = np.clip(np.random.default_rng(1).normal(9, 2, size), 0, 255).astype(np.uint8)
    reader = Reader(streams.encode(want, streams.measure(want)))
    assert reader.take(1, "kind")[0] == streams.CODED
    frequencies = [reader.number("table") for _ in range(reader.take(1, "table")[0] + 1)]
    begins = np.cumsum([0, *frequencies])
    slots = np.repeat(np.arange(len(frequencies)), frequencies)
    row, lanes = 8_192, 4
    counts = [min(row, size - start) for start in range(0, size, row)]
    lengths = [int.from_bytes(reader.take(2, "length"), "little") for _ in counts]
    for start, count, length in zip(range(0, size, row), counts, lengths, strict=True):
        units = np.frombuffer(reader.take(4 * length, "row"), "<u2").astype(int)
        put, low, high = units[: 3 * lanes].reshape(3, lanes)
        stacks = np.split(units[3 * lanes :], np.cumsum(put))[:-1]
        for lane in range(lanes):
            x, stack, found = int(low[lane] | high[lane] << 16), list(stacks[lane]), []
            for _ in range(lane, count, lanes):
                found.append(slots[x % 4096])
                x = frequencies[found[-1]] * (x >> 12) + x % 4096 - int(begins[found[-1]])
                if x < 2**16:
                    x = x << 16 | int(stack.pop())
            assert (x, stack) == (2**16, [])
            np.testing.assert_array_equal(found[::-1], want[start : start + count][lane::lanes])
    reader.end("the rows")


def test_a_message_takes_what_its_codes_have_in_them():
    """Within two per cent of the entropy of the codes, the steps and what is stated apart."""
    x, codec = draws(1124 * 1024), jaxcomp.qsgd_inf(bits=4)
    payload, data = message(codec, x)
    (batch,) = payload.batches
    codes = np.asarray(jaxcomp.bits.unpack(batch.words, bits=4, size=512))
    share = np.bincount(codes.reshape(-1)) / codes.size
    entropy = -np.sum(share * np.log2(share, where=share > 0, out=np.zeros_like(share)))
    stated = FIXED + 2 * 12 + 40 + batch.steps[0].nbytes
    assert entropy * codes.size / 8 < len(data) < 1.02 * entropy * codes.size / 8 + stated
    assert len(data) < 0.85 * jaxcomp.wire_bytes(codec, x)
    assert_same(jaxcomp.from_bytes(codec, data, x), payload)


def test_large_arrays_are_written_by_zstandard_where_it_is_nearly_as_short():
    draw = np.random.default_rng(5)
    codes = np.clip(np.rint(draw.normal(8, 2, (512, 512))), 0, 15).astype(np.uint32)
    words = np.asarray(jaxcomp.bits.pack(jnp.asarray(codes), bits=4))
    floats = draw.standard_normal(2**15, np.float32)
    sparse = np.where(np.arange(512) < 9, floats[:512], 0) * np.ones((64, 1), np.float32)
    random = draw.integers(2**32, size=(1, 2**15), dtype=np.uint32)
    for array, want in (
        (words, arrays.ZSTD),
        (words.reshape(1, -1), arrays.ZSTD),  # A row too long for a sample.
        (random, arrays.RAW),
        (floats, arrays.PLANES),
        (sparse, arrays.ZSTD),
    ):
        method, body = arrays.encode(array, [4])
        got = arrays.decode(method, memoryview(body), array, [4])
        assert (method, got.tobytes()) == (want, array.tobytes())
    assert arrays.encode(words[:100], [4])[0] == arrays.CODES  # Too small to save any time.


def test_what_cannot_be_compressed_grows_by_the_header_alone():
    words = np.frombuffer(np.random.default_rng(0).bytes(2**16), np.uint32).reshape(64, -1)
    method, body = arrays.encode(words, [1.6, 4, 8])
    assert (method, body) == (arrays.RAW, words.tobytes())
    codec, x = jaxcomp.cast("float32"), draws(64)
    assert len(message(codec, x)[1]) == jaxcomp.message_limit(codec, x) == x.nbytes + FIXED + 7


RICE = jaxcomp.top_k(fraction=0.1, bucket_size=64, indices=RiceGaps())


@pytest.mark.parametrize("codec", [*FAMILIES[2:5], FAMILIES[11], RICE], ids=label)
def test_golden_messages(codec):
    """Messages of former commits are read, and are what is written."""
    x = jnp.round(draws(2_000, 7) ** 3 * 4) / 4
    payload, data = message(codec, x)
    known = json.loads(GOLDEN.read_text())
    name = f"version {fingerprint.VERSION} {label(codec)}"
    if os.environ.get("JAXCOMP_WRITE_GOLDEN"):
        known[name] = base64.b64encode(data).decode()
        GOLDEN.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    assert_same(jaxcomp.from_bytes(codec, base64.b64decode(known[name]), x), payload)
    assert data == base64.b64decode(known[name])


def test_golden_long_streams():
    """Long streams, of which a digest is kept."""
    draw = np.random.default_rng(5)
    symbols = np.clip(draw.normal(20, 3, 40_000), 0, 255).astype(np.uint8)
    body = streams.encode(symbols, streams.measure(symbols))
    assert hashlib.sha256(body).hexdigest()[:16] == "444a59443782c72d"
