"""Sparsifiers as codecs: their payloads, their residuals, and their cost."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.suite import law
from scipy import fft

import jaxcomp
from jaxcomp.codecs.cosine import Cosine
from jaxcomp.codecs.sparsifier import Sparsifier
from jaxcomp.layout import batches as batches_, trees
from jaxcomp.numerics import noise
from jaxcomp.sparsify.choices import AtLeast
from jaxcomp.sparsify.deltas import Deltas
from jaxcomp.sparsify.indices import Bitmap, Packed, Raw

SIZE = 5000


def steps(codec, grads):
    """The sent part and the residual of each step."""

    def step(carry, inputs):
        residual, state = carry
        number, grad = inputs
        key = batches_.batch_key(noise.fold(noise.raw(1), number), 0, 0)
        message = (grad + residual)[None]
        count = jnp.full(1, SIZE, jnp.int32)
        payload, state = codec.encode(key, message, count, state)
        sent = codec.decode(key, payload, message)[0]
        return (message[0] - sent, state), (sent, message[0])

    init = codec.init(jax.ShapeDtypeStruct((1, SIZE), jnp.float32))
    numbers = jnp.arange(len(grads))
    return jax.jit(lambda g: jax.lax.scan(step, (jnp.zeros(SIZE), init), (numbers, g)))(grads)


RAW = {
    "top_k": jaxcomp.top_k(fraction=0.01),
    "sidco": jaxcomp.sidco(fraction=0.01),
    "dgc": jaxcomp.dgc(fraction=0.01),
    "threshold, too little room": jaxcomp.threshold(0.5, fraction=0.01),
}


@pytest.mark.core("top_k")
@pytest.mark.parametrize("name", RAW)
def test_what_is_not_sent_stays_exactly(name):
    """Each element is sent as it is or stays as it is, where there is too little room too."""
    grads = jnp.stack([law("heavy", SIZE, seed) for seed in range(12)])
    (residual, _), (sent, messages) = steps(RAW[name], grads)
    room = RAW[name].choice.room(SIZE)
    number = np.count_nonzero(sent, axis=1)
    assert (number <= room).all()
    assert number[-1] > 0
    kept = np.asarray(messages) - np.asarray(sent)
    np.testing.assert_array_equal(np.where(sent != 0, sent, kept), messages)
    np.testing.assert_allclose(sent.sum(0) + residual, grads.sum(0), rtol=0, atol=1e-3)
    if "room" in name:
        assert (number == room).all()


@pytest.mark.full
def test_every_choice_works_where_workers_are_typed_as_different(mesh):
    """The types of values in loops and branches that differ between workers satisfy `check_vma`."""
    codecs = [*RAW.values(), jaxcomp.fastsgd(fraction=0.02), jaxcomp.demo(k=2, chunk=16)]
    xs = jnp.stack([law("laplace", 1024, seed) for seed in range(8)])

    def all_of_them(x):
        return [jaxcomp.roundtrip(codec, 0, x[0])[None] for codec in codecs]

    spec = jax.P("data")
    mapped = jax.shard_map(all_of_them, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)
    alone = jax.jit(all_of_them)
    wanted = [alone(x[None]) for x in xs[:2]]
    for number, got in enumerate(jax.jit(mapped)(xs)):
        for worker in range(2):
            np.testing.assert_array_equal(got[worker], wanted[worker][number][0])


def test_values_may_be_quantised():
    """To the last rounding of their own codec: they lie within a step of what they stand for."""
    codec = jaxcomp.top_k(fraction=0.02, values=jaxcomp.qsgd_inf(bits=8, bucket_size=64))
    grads = jnp.stack([law("gaussian", SIZE, seed) for seed in range(4)])
    _, (sent, messages) = steps(codec, grads)
    hits = np.asarray(sent) != 0
    assert (hits.sum(1) == 100).all()
    off = np.abs(np.asarray(messages) - np.asarray(sent))[hits]
    assert off.max() <= np.abs(messages).max() / 127


@pytest.mark.full
def test_values_may_be_embedded():
    """Top-k, then a rotation and even levels: fewer bytes, and a smaller error, than plain levels.

    The error of the values is within their declared bound, also where one of them is far larger.
    """
    embedded = jaxcomp.top_k(0.1, values=jaxcomp.ndsc(bits=4))
    split = jaxcomp.top_k(0.1, values=jaxcomp.ndsc(bits=3.5))
    plain = jaxcomp.top_k(0.1, values=jaxcomp.qsgd_inf(bits=4, bucket_size=128))
    heavy = law("heavy", 20_000)
    inputs = jnp.stack([heavy, jnp.where(jnp.arange(20_000) == 7, 1e4, heavy)])
    keys = jax.random.split(jax.random.key(0), 6)
    energy = np.square(np.sort(np.abs(np.asarray(inputs, np.float64)), axis=1))
    dropped, kept = energy[:, :-2000].sum(1), energy[:, -2000:].sum(1)
    off = {}
    for codec in (split, embedded, plain):
        run = jax.vmap(lambda key, x, c=codec: jaxcomp.roundtrip(c, key, x), in_axes=(0, None))
        found = jax.jit(jax.vmap(run, in_axes=(None, 0)))(keys, inputs)
        square = np.square(np.asarray(found, np.float64) - np.asarray(inputs)[:, None])
        off[codec] = (square.sum(2).mean(1) - dropped) / kept
    for codec in (split, embedded):
        assert (off[codec] > 0).all()
        assert (off[codec] < codec.values.variance_bound(2048)).all()
        assert codec.contractive
    assert off[embedded][0] < 0.85 * off[plain][0]
    sizes = [jaxcomp.wire_bytes(codec, heavy) for codec in (split, embedded, plain)]
    assert sizes == sorted(set(sizes))


@pytest.mark.full
def test_the_largest_are_sent_with_the_energy_that_they_should_have():
    x = law("gaussian", 2**20)
    for share, want in ((0.1, 0.4393), (0.01, 0.0845), (0.001, 0.0127)):
        kept = jax.jit(lambda x, f=share: jaxcomp.roundtrip(jaxcomp.top_k(f), 0, x))(x)
        assert float(jnp.vdot(kept, kept) / jnp.vdot(x, x)) == pytest.approx(want, rel=0.03)


def test_places_cost_what_they_should():
    like = jax.ShapeDtypeStruct((2**20,), jnp.float32)
    k = 10486
    for indices, bits in ((Raw(), 32), (Packed(), 20), (Bitmap(), 100.0)):
        spent = 8 * jaxcomp.wire_bytes(jaxcomp.top_k(0.01, indices=indices), like) / k - 32
        assert spent == pytest.approx(bits, abs=0.1)
    assert 8 * jaxcomp.wire_bytes(jaxcomp.top_k(0.01), like) / k - 32 <= 8.6
    quantised = jaxcomp.top_k(0.01, values=jaxcomp.qsgd_inf(bits=4, bucket_size=128))
    assert 8 * jaxcomp.wire_bytes(quantised, like) / k <= 8.6 + 4 + 32 / 128


@pytest.mark.full
def test_dgc_sends_about_the_share_and_never_beyond_its_room():
    run = jax.jit(lambda x: jaxcomp.roundtrip(jaxcomp.dgc(0.01), 0, x))
    for kind in ("gaussian", "laplace", "heavy"):
        sent = np.count_nonzero(run(law(kind, 2**18)))
        assert 0.8 * 2621 < sent <= 1.3 * 2622


@pytest.mark.full
def test_dgc_selects_again_where_a_sample_misleads():
    """No sampled element is large: far too many exceed the threshold, and the largest are sent."""
    x = np.random.default_rng(0).uniform(1, 2, 300_000).astype(np.float32)
    codec = jaxcomp.dgc(0.01)
    sampled = np.zeros(x.shape, bool)
    sampled[::3] = True  # Of 300,000 every third is looked at.
    x[sampled] *= 1e-3
    sent = np.asarray(jax.jit(lambda x: jaxcomp.roundtrip(codec, 0, x))(jnp.asarray(x)))
    want = np.sort(np.argsort(-x, kind="stable")[:3000])
    np.testing.assert_array_equal(np.nonzero(sent)[0], want)


@pytest.mark.full
def test_dgc_lowers_a_threshold_that_is_too_high():
    x = np.random.default_rng(0).standard_normal(300_000).astype(np.float32)
    x[::3] *= 1.5
    sent = np.count_nonzero(
        jax.jit(lambda x: jaxcomp.roundtrip(jaxcomp.dgc(0.01), 0, x))(jnp.asarray(x))
    )
    assert 0.8 * 3000 <= sent <= 1.3 * 3000


@pytest.mark.full
def test_sidco_learns_its_stages_in_training():
    """Cubed normals at 0.1 %: two stages find three times too many, three find the share."""
    codec = jaxcomp.sidco(fraction=0.002)
    grads = jnp.stack([law("gaussian", SIZE, seed) ** 3 for seed in range(30)])
    (_, state), (sent, _) = steps(codec, grads)
    assert int(state.number[0, 0]) in range(1, codec.choice.most + 1)
    assert np.count_nonzero(sent[-5:]) <= 5 * codec.choice.room(SIZE)
    assert int(state.tried[0, 0]) > 0


@pytest.mark.full
def test_sidco_sends_something_whatever_it_is_given():
    codec = jaxcomp.sidco(fraction=0.001)
    run = jax.jit(lambda x: jaxcomp.roundtrip(codec, 0, x))
    one = jnp.zeros(SIZE).at[77].set(-3.0)
    np.testing.assert_array_equal(run(one), one)
    constant = np.asarray(run(jnp.full(SIZE, 2.0)))
    assert 1 <= np.count_nonzero(constant) <= codec.choice.room(SIZE)
    np.testing.assert_array_equal(run(jnp.zeros(SIZE)), np.zeros(SIZE))


def reads(codec, size):
    """The numbers of kernels of the compiled encoder that read all elements, and a sample."""
    like = jax.ShapeDtypeStruct((size,), jnp.float32)
    text = jax.jit(lambda x: jaxcomp.encode(codec, 0, x)).lower(like).compile().as_text()
    bodies = {match[1]: match[0] for match in re.finditer(r"%(\S+) \([^\n]*\n(?:.*\n)*?\}", text)}
    entry = text[text.index("ENTRY") :].splitlines()
    given = next(re.search(r"%(\S+) = ", line)[1] for line in entry if " parameter(0)" in line)
    names = {given} | {
        re.search(r"%(\S+) = ", line)[1] for line in entry if f"bitcast(%{given})" in line
    }
    every, strided = 0, 0
    for line in entry:
        call = re.search(r" fusion\(([^)]*)\).*calls=%([\w.\-]+)", line)
        if call and names & {name.strip(" %") for name in call[1].split(",")}:
            parts = re.search(r"slice\(.*\[0:\d+:\d\d+\]", bodies[call[2]])
            every, strided = every + (not parts), strided + bool(parts)
    return every, strided


@pytest.mark.full
def test_the_laws_read_less_than_all_elements_once():
    """Of 2²⁵ elements a sixteenth: by parts of 512 the largest, the number and the sum, and the
    squares for the generalised Pareto law, stage after stage. Then one pass makes the bitmap, and
    one takes the chosen values.
    """
    for name, kernels in (("exponential", 3), ("pareto", 5)):
        every, strided = reads(jaxcomp.sidco(0.001, law=name, stages=2), 2**25)
        assert every <= 2
        assert 0 < strided <= 2 * kernels
        assert strided / 16 < 1
    assert reads(jaxcomp.threshold(1.0, 0.01), 2**25) == (2, 0)


@pytest.mark.core("1")
@pytest.mark.parametrize("workers", [1, 3, 20])
def test_sums_of_payloads_are_deterministic(workers):
    """One scatter of ascending places a worker: the same bits as one after another."""
    codec = jaxcomp.top_k(fraction=0.05)
    xs = jnp.stack([law("gaussian", 1000, seed) for seed in range(workers)])
    key, plan = noise.raw(0), trees.layout(codec, xs[0])
    payloads = [jaxcomp.encode(codec, key, x, worker=i).batches[0] for i, x in enumerate(xs)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *payloads)
    own = jnp.stack([batches_.batch_key(key, 0, i).own for i in range(workers)])
    keys = batches_.batch_key(key, 0, 0)._replace(own=own)
    got = jax.jit(lambda k, p: codec.decode_sum(k, p, plan.batches[0].like))(keys, stacked)
    want = np.zeros(1000, np.float32)
    for x in xs:
        want = want + np.asarray(jaxcomp.roundtrip(codec, 0, x))
    np.testing.assert_array_equal(got[0], want)


@pytest.mark.wrong_types
def test_cosines_are_those_of_scipy_and_come_back():
    codec = Cosine(codec=jaxcomp.top_k(fraction=0.5, bucket_size=600), chunk=8)
    x = np.random.default_rng(0).standard_normal((3, 600)).astype(np.float32)
    z, _ = codec.transform(None, jnp.asarray(x), jnp.full(3, 600))
    z = np.asarray(z)
    assert z.shape == (3, 640)
    up = codec._down
    padded = np.pad(x, ((0, 0), (0, 40))).reshape(3, 10, 8, 8)
    want = fft.dctn(padded, axes=(2, 3), norm="ortho")
    np.testing.assert_allclose(up * z.reshape(want.shape), want, atol=1e-5)
    np.testing.assert_allclose(codec.restore(None, jnp.asarray(z), jnp.asarray(x)), x, atol=1e-5)


def test_demo_sends_smooth_squares_in_few_coefficients():
    row, column = jnp.meshgrid(jnp.arange(64.0), jnp.arange(64.0))
    smooth = jnp.cos(row / 20) * jnp.cos(column / 30)
    error = jaxcomp.roundtrip(jaxcomp.demo(k=32), 0, smooth) - smooth
    direct = jaxcomp.top_k(fraction=32 / 4096, bucket_size=4096)
    plain = jaxcomp.roundtrip(direct, 0, smooth) - smooth
    assert float(jnp.linalg.norm(error)) < 0.03 * float(jnp.linalg.norm(plain))
    like = jax.ShapeDtypeStruct((640, 64), jnp.float32)
    assert jaxcomp.wire_bytes(jaxcomp.demo(k=32), like) == 10 * (32 * 4 + 36)
    with pytest.raises(ValueError, match="`k` must be from 1 to 16, got 17"):
        jaxcomp.demo(k=17, chunk=4)


@pytest.mark.full
@pytest.mark.parametrize("per_octave", [1, 2, 4, 8])
def test_fastsgd_is_near_in_logarithms_and_keeps_what_fits(per_octave):
    codec = jaxcomp.fastsgd(fraction=0.02, per_octave=per_octave, most=15)
    x = law("laplace", 20_000)
    sent = np.asarray(jax.jit(lambda x: jaxcomp.roundtrip(codec, 0, x))(x))
    hits = sent != 0
    assert 0 < hits.sum() <= 400
    off = np.log2(np.abs(sent[hits] / np.asarray(x)[hits])) * per_octave
    assert np.abs(off).max() <= 0.5 + 0.02
    assert (np.sign(sent[hits]) == np.sign(x)[hits]).all()
    # An integer threshold: one step lower would not have fitted.
    sizes, top = np.abs(np.asarray(x)), np.abs(np.asarray(x)).max()
    steps = np.round(np.log2(top / np.maximum(sizes, 1e-30)) * per_octave)
    tau = steps[hits].max()
    np.testing.assert_array_equal(hits, steps <= tau)
    assert tau == 15 or (steps <= tau + 1).sum() > 400
    order = np.argsort(np.abs(np.asarray(x)[hits]))
    assert (np.diff(np.abs(sent[hits])[order]) >= 0).all()
    assert codec.contractive


def test_more_places_than_elements_is_all_of_them():
    x = law("gaussian", 3)
    np.testing.assert_array_equal(jaxcomp.roundtrip(jaxcomp.top_k(1.0), 0, x), x)
    np.testing.assert_array_equal(jaxcomp.roundtrip(jaxcomp.threshold(1e-6, 1.0), 0, x), x)
    chex.assert_shape(jaxcomp.roundtrip(jaxcomp.sidco(0.5), 0, x[:1]), (1,))


@pytest.mark.wrong_types
def test_wrong_settings_of_sparsifiers_are_refused():
    with pytest.raises(ValueError, match="`fraction` must be a number in"):
        jaxcomp.top_k(fraction=1.01)
    with pytest.raises(ValueError, match="`values` must be a codec without state"):
        jaxcomp.top_k(values=jaxcomp.sidco())
    with pytest.raises(
        ValueError, match="`values` must be a codec that decodes from its payload alone"
    ):
        jaxcomp.top_k(values=jaxcomp.alq())
    for values in (jaxcomp.qsgd_inf(bits=4), jaxcomp.qsgd(bits=2), jaxcomp.terngrad()):
        with pytest.raises(ValueError, match="`values` must be a codec whose error is below its"):
            jaxcomp.top_k(values=values)
    for values in (jaxcomp.ndsc(bits=0.5), jaxcomp.dsc(bits=2)):  # Errors of 19 and 3 times.
        with pytest.raises(ValueError, match="whose error has no known bound"):
            jaxcomp.top_k(values=values)
        scaled = jaxcomp.codecs.Contractive(codec=values, omega=30.0)
        assert jaxcomp.top_k(values=scaled).contractive
    assert jaxcomp.top_k(values=jaxcomp.qsgd_inf(bits=4, bucket_size=128)).contractive
    with pytest.raises(ValueError, match="`codec` must scale with its input"):
        jaxcomp.codecs.Cosine(codec=jaxcomp.threshold(0.5))
    with pytest.raises(ValueError, match="`most` must be from 0 to 127, got 200"):
        jaxcomp.fastsgd(most=200)
    with pytest.raises(ValueError, match="`block` must be"):
        Deltas(block=0)
    with pytest.raises(ValueError, match="`choice` must be an instance of a choice"):
        Sparsifier(choice=AtLeast)
    with pytest.raises(ValueError, match="every leaf must have a floating dtype"):
        jaxcomp.encode(jaxcomp.top_k(), 0, jnp.arange(10))
