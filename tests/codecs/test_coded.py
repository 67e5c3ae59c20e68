"""Entropy-coded quantizers: their payload, unsent elements, and distance from the limits."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.suite import KEY, compilations, few_or_all, label, law, slow
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxcomp
from jaxcomp.backend import xla
from jaxcomp.layout import batches as batches_, trees
from jaxcomp.theory import limits

CODERS = [
    jaxcomp.codecs.Rans(),
    jaxcomp.codecs.Huffman(),
    jaxcomp.codecs.Elias("omega"),
    jaxcomp.codecs.Elias("delta", sparse=True),
    jaxcomp.codecs.Rice(),
]


@functools.partial(jax.jit, static_argnums=0)
def run(codec, key, x):
    count = jnp.full(x.shape[0], x.shape[1], jnp.int32)
    payload, state = codec.encode(key, x, count, codec.init(x))
    return payload, state, codec.decode(key, payload, x)


def batch(codec, x, number=0):
    """One encoding of rows: payload, new state, decoded rows."""
    return run(codec, batches_.batch_key(KEY, number, 0), x)


def measured(bits, scale, law_name):
    """Bits on the wire, relative error, share that came back, and elements that were lost."""
    codec = jaxcomp.ecsq(bits, scale=scale, rotations=2 if scale == "unbiased" else 1)
    x = law(law_name, 2**18).reshape(2, -1)
    _, state, decoded = batch(codec, x)
    energy = float(jnp.sum(x * x))
    error = float(jnp.sum((decoded - x) ** 2)) / energy
    wire = 8 * jaxcomp.wire_bytes(codec, x.reshape(-1)) / x.size
    return wire, error, float(jnp.sum(decoded * x)) / energy, float(state.spent.lost)


@pytest.mark.full
@pytest.mark.parametrize("bits", few_or_all([1], [2, 3, 4]))
def test_rotated_and_coded_it_is_near_the_unbiased_bound(bits):
    """At bits on the wire, with all that is sent counted, a step for each block of 4,096 included,
    and next to nothing left out.
    """
    wire, error, share, lost = measured(bits, "unbiased", "heavy")
    assert wire == bits
    assert lost < 20
    assert abs(share - 1) < 1e-3
    assert error < 1.66 * limits.unbiased_bound(wire)


@pytest.mark.full
@pytest.mark.parametrize("bits", few_or_all([4], [1, 2, 3]))
def test_rotated_and_coded_it_is_near_the_rate_distortion_function(bits):
    wire, error, _, lost = measured(bits, "minimum_error", "gaussian")
    assert wire == bits
    assert lost < 20
    assert wire + 0.5 * np.log2(error) < 0.3  # Bits above it.


@pytest.mark.full
def test_twice_rotated_it_is_unbiased_even_where_one_element_is_all():
    codec = jaxcomp.ecsq(2, bucket_size=4096, scale="unbiased", rotations=2)
    x = jnp.zeros(4096).at[7].set(1.0).at[9].set(-0.5)
    keys = jnp.arange(128, dtype=jnp.uint32)
    draws = jax.lax.map(
        lambda i: jaxcomp.roundtrip(codec, jnp.stack([i, i + 7]), x), keys, batch_size=16
    )
    mean, spread = np.mean(draws, axis=0), np.std(draws, axis=0) / np.sqrt(len(keys))
    assert codec.unbiased
    assert np.max(np.abs(mean - np.asarray(x)) / spread) < 6


ROOMY = (jaxcomp.qsgd_inf(bits=3, bucket_size=600), jaxcomp.nuqsgd(bucket_size=600))


@pytest.mark.core("Elias(code='omega',sparse=False)-Q(U*")
@pytest.mark.parametrize(
    ("coder", "codec"),
    few_or_all(
        [(coder, ROOMY[number % 2]) for number, coder in enumerate(CODERS)],
        itertools.product(CODERS, ROOMY),
    ),
    ids=label,
)
def test_nothing_is_lost_where_there_is_room(coder, codec):
    """The decoded bucket is the quantizer's own, bit for bit; a bucket that would be longer coded
    is sent as it is.
    """
    x = jnp.stack([law("gaussian", 600), law("heavy", 600), jnp.ones(600), jnp.zeros(600)])
    coded = jaxcomp.codecs.Coded(codec=codec, coder=coder)
    payload, state, decoded = batch(coded, x)
    own, _, wanted = batch(codec, x)
    np.testing.assert_array_equal(decoded, wanted)
    assert coded.unbiased
    assert float(state.spent.lost) == 0
    assert payload.words.shape == own.words.shape
    assert int(payload.kept[3]) == 600  # Zeros are short.
    assert 0 < float(state.spent.spare) < 4 * own.words.size


@pytest.mark.full
def test_levels_with_no_zero_and_ternary_ones_have_numbers_too():
    x = law("gaussian", 1000).reshape(2, 500)
    for codec in (
        jaxcomp.terngrad(clip=None, bucket_size=500),
        jaxcomp.qsgd_inf(bits=4, bucket_size=500, levels="midrise"),
        jaxcomp.qsgd_inf(bits=4, bucket_size=500, subtractive=True),
    ):
        _, _, decoded = batch(jaxcomp.codecs.Coded(codec=codec), x)
        np.testing.assert_array_equal(decoded, batch(codec, x)[2])


@pytest.mark.core("Rans(lanes=None, symbols_a_lane=2048)")
@pytest.mark.parametrize("coder", [CODERS[0], CODERS[2]], ids=repr)
def test_what_does_not_fit_is_zero_and_counted(coder):
    """Every element is sent eventually, since streams start at random positions."""
    codec = jaxcomp.qsgd_inf(bits=4, bucket_size=512)
    coded = jaxcomp.codecs.Coded(codec=codec, coder=coder, capacity=2)
    x = law("gaussian", 2048).reshape(4, 512)
    arrived = np.zeros(x.shape, bool)
    for number in range(12):
        payload, state, decoded = batch(coded, x, number)
        wanted = np.asarray(batch(codec, x, number)[2])
        there = np.asarray(decoded) == wanted
        assert (np.asarray(decoded)[~there] == 0).all()
        assert int(state.spent.lost) == np.sum(~there) > 0
        assert payload.words.shape == (4, 32)
        arrived |= there
    assert arrived.all()
    assert not coded.unbiased


@pytest.mark.full
def test_a_residual_sends_what_did_not_fit(mesh):
    """The statistics count the lost elements and the unused room."""
    coded = jaxcomp.codecs.Coded(codec=jaxcomp.blockwise(bits=4, bucket_size=1024), capacity=1.5)
    tx = jaxcomp.compressed_mean(
        jaxcomp.Gather(
            jaxcomp.Link(jaxcomp.Policy(coded, min_size=0, min_ndim=0), jaxcomp.Residual())
        ),
        "data",
        stats=True,
    )
    grads = {"w": jnp.stack([law("heavy", 2048, seed=i) for i in range(8)])}
    like = {"w": jnp.zeros(2048)}
    state = jaxcomp.init_state(tx, like, mesh, "data")
    grads = jax.device_put(grads, NamedSharding(mesh, P("data")))
    run = jaxcomp.data_parallel(
        lambda state, grads: tx.update(jax.tree.map(lambda g: g[0], grads), state), mesh, "data"
    )
    total, lost = jnp.zeros(2048), []
    for _ in range(30):
        mean, state = run(state, grads)
        total += mean["w"]
        lost.append(float(state.stats.lost))
    wanted = 30 * np.mean(np.asarray(grads["w"]), axis=0)
    assert min(lost) > 0
    assert float(state.stats.spare_bytes) < 64  # If elements do not fit, no room is left.
    assert np.linalg.norm(total - wanted) < 0.1 * np.linalg.norm(wanted)


@pytest.mark.full
@pytest.mark.parametrize("reducer", [jaxcomp.Gather, jaxcomp.TwoShot])
def test_tables_follow_what_all_workers_send(reducer, mesh):
    """From the counts of all: what is sparser than the law takes fewer bits from then on, and
    replicas stay alike.
    """
    quantizer = jaxcomp.qsgd_inf(bits=4, bucket_size=1024)
    spare = {}
    grads = {"w": jnp.stack([law("heavy", 4096, seed=i).reshape(2, -1) for i in range(8)])}
    like = {"w": jnp.zeros((2, 2048))}
    for memory in (None, 0.5):
        coded = jaxcomp.codecs.Coded(codec=quantizer, memory=memory)
        links = [jaxcomp.Policy(coded, min_size=0)] * (1 if reducer is jaxcomp.Gather else 2)
        tx = jaxcomp.compressed_mean(reducer(*links), "data", stats=True)
        state = jaxcomp.init_state(tx, like, mesh, "data")
        given = jax.device_put(grads, NamedSharding(mesh, P("data")))
        run = jaxcomp.data_parallel(
            lambda state, grads, tx=tx: tx.update(jax.tree.map(lambda g: g[0], grads), state),
            mesh,
            "data",
        )
        for _ in range(3):
            mean, state = run(state, given)
        spare[memory] = float(state.stats.spare_bytes)
        shards = [np.asarray(shard.data) for shard in mean["w"].addressable_shards]
        assert all((shard == shards[0]).all() for shard in shards)
        exact = np.mean(np.asarray(grads["w"]), axis=0)
        assert np.linalg.norm(mean["w"] - exact) < 0.7 * np.linalg.norm(exact)
    assert spare[0.5] > 1.05 * spare[None]


@pytest.mark.full
def test_qsgd_has_the_entropy_that_its_paper_promises():
    """`s = √n`: at most 2.58 bits, while Elias' codes as they are take more than 2.8."""
    n, s = 127**2, 127
    codes = {}
    for name in ("gaussian", "laplace"):
        x = law(name, n)[None]
        payload, _, _ = batch(jaxcomp.qsgd(bits=8, bucket_size=n), x)
        codes[name] = np.asarray(jaxcomp.bits.unpack(payload.words, bits=8, size=n))[0]
    flat = jnp.ones((1, n)) * jnp.where(jnp.arange(n) % 2 == 0, 1, -1)
    payload, _, _ = batch(jaxcomp.qsgd(bits=8, bucket_size=n), flat)
    codes["flat"] = np.asarray(jaxcomp.bits.unpack(payload.words, bits=8, size=n))[0]
    entropies = {}
    for name, found in codes.items():
        share = np.bincount(found, minlength=2 * s + 1) / n
        entropies[name] = -np.sum(share[share > 0] * np.log2(share[share > 0]))
    assert max(entropies.values()) <= 2.58
    assert abs(entropies["gaussian"] - 2.158) < 0.03
    elias = jaxcomp.elias_qsgd(bits=8, bucket_size=n)
    _, state, _ = batch(elias, law("gaussian", n)[None])
    spent = 8 - 8 * float(state.spent.spare) / n
    assert 2.8 < spent < 3.0
    _, state, _ = batch(jaxcomp.codecs.Coded(codec=elias.codec), law("gaussian", n)[None])
    # Of 255 levels each has at least 1/4096, though hardly twenty occur.
    floor = -np.log2(1 - 235 / 4096)
    assert 8 - 8 * float(state.spent.spare) / n < 1.01 * entropies["gaussian"] + floor + 48 * 4 / n


@pytest.mark.full
@pytest.mark.parametrize(
    "coder", [jaxcomp.codecs.Rice(), slow(jaxcomp.codecs.Elias(sparse=True))], ids=repr
)
def test_gaps_may_be_as_long_as_the_row(coder):
    """In a row of 2¹⁷ with little in it, at its ends."""
    x = (
        jnp.zeros((1, 2**17))
        .at[0, jnp.array([3, 60_000, 2**17 - 1])]
        .set(jnp.array([1.0, -1, 0.5]))
    )
    codec = jaxcomp.qsgd_inf(bits=4, bucket_size=2**17)
    payload, _, decoded = batch(jaxcomp.codecs.Coded(codec=codec, coder=coder), x)
    assert int(payload.kept[0]) == 2**17
    np.testing.assert_array_equal(decoded, batch(codec, x)[2])


@pytest.mark.full
def test_short_buckets_are_sent_packed_and_tables_are_not_needed_to_decode():
    """A bucket of whose stream little would be left after its beginning; a first table."""
    codec = jaxcomp.ecsq(bits=2)
    x = law("gaussian", 512)
    sent = np.asarray(jaxcomp.roundtrip(codec, 0, x))
    assert np.sum((sent - x) ** 2) < 0.12 * np.sum(np.square(x))
    follows = jaxcomp.codecs.Coded(codec=jaxcomp.qsgd_inf(bits=4), memory=0.5)
    fixed = jaxcomp.codecs.Coded(codec=jaxcomp.qsgd_inf(bits=4))
    for one in (follows, fixed):
        got = jaxcomp.roundtrip(one, 0, x)
        np.testing.assert_array_equal(got, jaxcomp.roundtrip(one.codec, 0, x))


def test_a_fixed_table_is_one_program_that_runs_while_another_is_traced(monkeypatch):
    """In a program over a mesh too; an operation a program would take a second to compile."""
    made, programs = [], []

    def evaluate(*given, run=xla.evaluate):
        with compilations() as found:
            made.append(run(*given))
        programs.append(len(found))
        return made[-1]

    monkeypatch.setattr(xla, "evaluate", evaluate)
    codec = jaxcomp.codecs.Coded(codec=jaxcomp.qsgd_inf(bits=3, bucket_size=384))
    mesh = Mesh(jax.devices()[:2], ("data",))

    like = jax.ShapeDtypeStruct((2, 4096), jnp.float32)

    def update(x):
        return jaxcomp.roundtrip(codec, 0, x)

    jax.eval_shape(jax.shard_map(update, mesh=mesh, in_specs=P("data"), out_specs=P("data")), like)
    assert programs == [1, 1]  # Codes of a law, and the table of their counts.
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(made))


@pytest.mark.parametrize("memory", [None, 0.9])
def test_tables_are_made_under_a_guard_against_transfers(memory):
    codec = jaxcomp.qsgd(bits=3, bucket_size=96)  # No other test has made its tables.
    codec = jaxcomp.codecs.Coded(codec=codec, capacity=2.0, memory=memory)
    x = jax.ShapeDtypeStruct((192,), jnp.float32)
    with jax.transfer_guard("disallow"):
        jax.eval_shape(functools.partial(jaxcomp.roundtrip, codec), KEY, x)


@pytest.mark.full
def test_short_leaves_share_a_program_and_nothing_else():
    """Leaves of many sizes have buckets of few; a neighbour does not change what a leaf decodes to.

    Units cost half a per cent of the bytes of a long bucket at most.
    """
    codec = jaxcomp.ecsq(bits=2)
    shapes = {
        "a": 9_408,
        "b": 36_864,
        "c": 65_536,
        "d": 1_000,
        "e": 900,
        "f": 131_072,
        "g": 140_000,
    }
    likes = {name: jax.ShapeDtypeStruct((n,), jnp.float32) for name, n in shapes.items()}
    assert {batch.size for batch in trees.layout(codec, likes).batches} == {1024, 4096, 2**17}
    assert jaxcomp.wire_bytes(codec, likes["c"]) <= 1.005 * 65_536 / 4
    x = {"a": law("gaussian", 9_408), "b": law("laplace", 5_000)}
    alone = jaxcomp.roundtrip(codec, 0, x)
    beside = jaxcomp.roundtrip(codec, 0, x | {"b": jnp.full(5_000, 1e30).at[7].set(jnp.nan)})
    np.testing.assert_array_equal(alone["a"], beside["a"])
    assert np.sum((alone["a"] - x["a"]) ** 2) < 0.1 * np.sum(np.square(x["a"]))


@pytest.mark.wrong_types
def test_wrong_use_of_coded_says_what_would_do():
    with pytest.raises(ValueError, match=r"`codec` must be a quantizer"):
        jaxcomp.codecs.Coded(codec=jaxcomp.top_k())
    with pytest.raises(ValueError, match=r"put it inside: Rotated\(codec=Coded"):
        jaxcomp.codecs.Coded(codec=jaxcomp.eden())
    with pytest.raises(ValueError, match=r"`coder` must be an instance of a coder"):
        jaxcomp.codecs.Coded(codec=jaxcomp.qsgd(), coder="rans")
    with pytest.raises(ValueError, match=r"`capacity` must be"):
        jaxcomp.codecs.Coded(codec=jaxcomp.qsgd(), capacity=0)
    with pytest.raises(ValueError, match=r"`capacity` must be at least 4 bits for levels without"):
        jaxcomp.codecs.Coded(codec=jaxcomp.qsgd(levels="midrise"), capacity=3)
    with pytest.raises(ValueError, match=r"`memory` must be None for a coder without a table"):
        jaxcomp.codecs.Coded(codec=jaxcomp.qsgd(), coder=jaxcomp.codecs.Rice(), memory=0.9)
    with pytest.raises(ValueError, match=r"`memory` must be"):
        jaxcomp.codecs.Coded(codec=jaxcomp.qsgd(), memory=1.5)
    with pytest.raises(
        ValueError, match=r"`capacity` must be at least 4 bits, or None, with subtractive"
    ):
        jaxcomp.codecs.Coded(codec=jaxcomp.qsgd_inf(subtractive=True), capacity=3)
    with pytest.raises(
        ValueError, match=r"`bucket_size` must be at most 67108864 for entropy coding"
    ):
        jaxcomp.wire_bytes(
            jaxcomp.codecs.Coded(codec=jaxcomp.qsgd(bucket_size=None)),
            jax.ShapeDtypeStruct((2**27,), jnp.float32),
        )
    with pytest.raises(ValueError, match=r"`bucket_size` must be a multiple of 4096"):
        jaxcomp.ecsq(bucket_size=5000)
    with pytest.raises(ValueError, match=r"`bits` must be a number from 0.1 to 5"):
        jaxcomp.ecsq(bits=6)
    with pytest.raises(ValueError, match=r"`bucket_size` must be at least 4096"):
        jaxcomp.ecsq(bucket_size=512)
