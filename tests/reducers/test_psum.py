"""Sums on the way: exact for integers, bounded for floats, and as many bytes as are counted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.suite import label
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.codecs.quantizer import Quantizer
from jaxcomp.exchange import legs
from jaxcomp.exchange.plan import Plan
from jaxcomp.layout import batches as batches_, trees
from jaxcomp.numerics import noise
from jaxcomp.quantize import levels, rounding, scales, steps

WORKERS = 8
TERNARY = jaxcomp.terngrad(clip=None, shared=True, bucket_size=512)
FOUR_BITS = dataclasses.replace(jaxcomp.qsgd_inf(bits=4), shared=True)
LIKE = {
    "w": jax.ShapeDtypeStruct((50, 40), jnp.float32),
    "v": jax.ShapeDtypeStruct((33, 50), jnp.bfloat16),
    "b": jax.ShapeDtypeStruct((64,), jnp.float32),
}


def nearest(steps):
    return Quantizer(
        levels=levels.Uniform(steps=steps),
        scale=scales.MaxAbs(),
        rounding=rounding.Nearest(),
        bucket_size=None,
        shared=True,
    )


def gradients(workers=WORKERS, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.standard_normal((workers, *x.shape)), x.dtype)
        for name, x in LIKE.items()
    }


@pytest.mark.core("Identity(b=None)-True")
@pytest.mark.parametrize(
    ("reducer", "weighted"),
    [
        (jaxcomp.Psum(jaxcomp.codecs.Identity()), True),
        (jaxcomp.Psum(jaxcomp.random_k(fraction=0.1)), True),
        (
            jaxcomp.Psum(
                jaxcomp.Link(jaxcomp.random_k(fraction=0.1, unbiased=False), jaxcomp.Residual())
            ),
            True,
        ),
        (jaxcomp.Psum(TERNARY), False),
        (jaxcomp.Psum(FOUR_BITS), False),
        (jaxcomp.Psum(jaxcomp.int_sgd()), False),
        (jaxcomp.Psum(jaxcomp.thc(bucket_size=512)), False),
    ],
    ids=lambda value: label(value.uplink.codec) if hasattr(value, "uplink") else None,
)
def test_reducer_contract(reducer, weighted):
    jaxcomp.testing.check_reducer(reducer, weighted=weighted)


@pytest.mark.full
def test_as_the_outer_of_two_levels():
    reducer = jaxcomp.Hierarchical(jaxcomp.Dense(), jaxcomp.Psum(FOUR_BITS))
    jaxcomp.testing.check_reducer(reducer, workers=(2, 2), weighted=False)


def summed(codec, xs):
    """The decoded sum of the rows of all workers, and the step that they agreed on."""

    def run(x):
        key = batches_.batch_key(noise.raw(3), 0, 0)
        count = jnp.full(x.shape[0], x.shape[1], jnp.int32)
        agreed = codec.agree(key, x, count, (), "data")
        payload, _ = codec.encode(key, x, count, agreed)
        total = jax.lax.psum(payload.words, "data")
        payload = payload._replace(words=total)
        return codec.decode(key, payload, jax.ShapeDtypeStruct(x.shape, jnp.float32), agreed.step)

    return np.asarray(jax.jit(jax.vmap(run, axis_name="data"))(xs))


@pytest.mark.core("1-1")
@pytest.mark.parametrize(
    ("magnitude", "workers"),
    [*((s, n) for s in (1, 127) for n in (1, 2, 3, 4, 8, 100)), (7, 8), (127, 256)],
)
def test_no_sum_overflows(magnitude, workers):
    """Extreme levels at all workers, alike and against each other in neighbouring fields."""
    codec = nearest(magnitude).summable(workers)
    size, rng = 41, np.random.default_rng(workers)
    signs = np.ones((workers, 4, size), np.float32)
    signs[:, 1] = -1
    signs[:, 2, ::2] = -1
    signs[:, 3] = rng.integers(-1, 2, (workers, size))
    signs[:, :, -1] = 1  # So that every bucket has the same scale.
    found = summed(codec, jnp.asarray(signs * magnitude))
    # The step is a little more than one: as many bits as leave room for an exact product.
    step = found[0, 0, -1] / np.float32(workers * magnitude)
    assert 1 <= step < 1.05
    want = signs.sum(0) * magnitude * step
    assert (want.astype(np.float64) == signs.sum(0, dtype=np.float64) * magnitude * step).all()
    np.testing.assert_array_equal(found, np.broadcast_to(want, found.shape))


def test_fields_widen_and_end():
    assert [TERNARY.summable(n).width for n in (1, 2, 8, 100)] == [2, 3, 5, 8]
    assert [jaxcomp.int_sgd().summable(n).limit for n in (1, 2, 8, 127)] == [31, 31, 15, 1]
    assert all(jaxcomp.int_sgd().summable(n).width <= 8 for n in range(1, 128))
    assert nearest(127).summable(258).width == 16
    with pytest.raises(ValueError, match=r"`workers` must be at most 258 .* got 259; use fewer"):
        nearest(127).summable(259)
    with pytest.raises(ValueError, match=r"`workers` must be at most 127 .* got 128; use more"):
        jaxcomp.int_sgd().summable(128)


def mapped(reducer, mode, mesh):
    """The mean of gradients with a leading workers axis."""
    tx = jaxcomp.compressed_mean(reducer, "data", key=5)

    def mean(grads):
        return tx.update(grads, tx.init(grads))[0]

    if mode == "vmap":
        return jax.jit(jax.vmap(mean, axis_name="data"))

    def body(grads):
        out = mean(jax.tree.map(lambda x: x[0], grads))
        return jax.tree.map(lambda x: x[None], out)

    spec = P("data")
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))


@pytest.mark.full
def test_floats_agree_within_the_bound(mesh):
    grads = gradients()
    for mode in ("typed", "vmap"):
        mean = mapped(jaxcomp.Psum(jaxcomp.codecs.Identity()), mode, mesh)(grads)
        for name in ("w", "v"):
            x = np.asarray(grads[name], np.float64)
            bound = (WORKERS + 1) * float(jnp.finfo(LIKE[name].dtype).eps) * np.abs(x).mean(0)
            off = np.abs(np.asarray(mean[name], np.float64) - x.mean(0))
            assert (off <= bound).all()
            assert (mean[name] == mean[name][:1]).all()


def test_typed_as_the_same_on_all_workers(mesh):
    """The mean may leave `shard_map` as replicated, without another collective."""
    tx = jaxcomp.compressed_mean(jaxcomp.Psum(FOUR_BITS), "data")
    run = jaxcomp.data_parallel(
        lambda state, grads: tx.update(jax.tree.map(lambda x: x[0], grads), state), mesh, "data"
    )
    like = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), LIKE)
    mean, _ = run(jaxcomp.init_state(tx, like, mesh, "data"), gradients())
    assert mean["w"].shape == LIKE["w"].shape


@pytest.mark.core("Q(Uniform(steps=1),MaxAbs,Stochastic,b=512,shared=True)-*")
@pytest.mark.parametrize(
    ("codec", "workers"),
    [
        *((TERNARY, n) for n in (1, 2, 3, 4, 8)),
        *((jaxcomp.random_k(fraction=0.1), n) for n in (1, 3, 8)),
        (jaxcomp.int_sgd(), 3),
        (jaxcomp.thc(bucket_size=512), 4),
    ],
    ids=lambda value: value if isinstance(value, int) else label(value),
)
def test_the_program_of_psum_moves_what_wire_bytes_says(codec, workers):
    reducer = jaxcomp.Psum(codec)
    devices = jax.devices()[:workers]
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((workers,), ("data",), axis_types=auto, devices=devices)
    like = {"w": LIKE["w"], "x": jax.ShapeDtypeStruct((64, 32), jnp.float32), "b": LIKE["b"]}
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((workers, *x.shape), x.dtype), like)
    compiled = (
        mapped(reducer, "typed", mesh).lower(rows).compile({"xla_backend_optimization_level": 0})
    )
    moved = jaxcomp.collective_bytes(compiled)
    assert set(moved) <= {"all-reduce"}
    # Every all-reduce is rounded up to a byte, and the compiler makes one of several.
    assert abs(sum(moved.values()) - jaxcomp.wire_bytes(reducer, like, workers=workers)) <= 3
    plan = Plan.of(reducer, like, sizes=(workers,))
    assert sum(plan.batch_bytes) <= jaxcomp.wire_bytes(reducer, like, 8)


def test_describe_counts_the_sum_of_two():
    like = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    table = jaxcomp.describe(jaxcomp.Psum(jaxcomp.terngrad(clip=None, shared=True)), like, 8)
    assert table.lines[0].bits_per_element == pytest.approx(3.2, rel=1e-4)  # Ten in a word.
    # Six in a word for eight workers, and one scale.
    assert table.link_bytes == 14 * 4 * -(-(1 << 20) // 6) // 8 + 7


@pytest.mark.core("Q(Uniform(steps=7*")
@pytest.mark.parametrize("codec", [FOUR_BITS, jaxcomp.int_sgd(), jaxcomp.random_k()], ids=label)
def test_not_finite_is_seen_by_all(codec):
    run = mapped(jaxcomp.Psum(codec), "vmap", None)
    grads = gradients(3)
    for bad in (np.nan, np.inf, -np.inf):
        mean = run({**grads, "w": grads["w"].at[1, 7, 3].set(bad)})
        assert not np.isfinite(mean["w"][:, 7, 3]).any()


@pytest.mark.core("Q(Uniform(steps=*")
@pytest.mark.parametrize(
    "codec", [FOUR_BITS, jaxcomp.thc(bucket_size=512), jaxcomp.codecs.Identity()], ids=label
)
def test_weight_zero_adds_nothing(codec):
    """A bad value reaches neither the sum nor the shared scale."""
    reducer = jaxcomp.Psum(codec)

    def collect(x, weight):
        plan = Plan.of(reducer, {"w": x}, "data")
        message, _ = trees.stacks(plan.layout, {"w": x})
        got = legs.collect(plan, noise.raw(1), message, legs.init(plan), weight)
        return got.value, got.sent, got.share

    run = jax.jit(jax.vmap(collect, axis_name="data"))
    grads, weight = gradients(3)["w"], jnp.array([1.0, 0.0, 1.0])
    quiet = run(grads.at[1].set(0), weight)
    for bad in (np.nan, np.inf, 1e30):
        part, sent, share = run(grads.at[1].set(bad), weight)
        np.testing.assert_array_equal(part[0], quiet[0][0])
        np.testing.assert_array_equal(sent[0], quiet[1][0])
        assert not sent[0][1].any()
        np.testing.assert_allclose(share, 2 / 3, rtol=1e-6)


@pytest.mark.core("4.0")
@pytest.mark.parametrize("alpha", [1.0, 4.0])
def test_int_sgd_has_the_error_of_the_paper(alpha):
    """At most `‖x‖² / 2n·alpha²` for workers of equal norm."""
    n = 16
    x = jax.random.normal(jax.random.key(0), (n, 100, 100))
    mean = jax.jit(jax.vmap(update(jaxcomp.int_sgd(alpha=alpha)), axis_name="data"))({"w": x})
    error = float(jnp.sum((mean["w"][0] - x.mean(0)) ** 2))
    assert error <= 1.03 * 100**2 / (2 * n * alpha**2)


@pytest.mark.full
def test_thc_has_about_the_error_of_its_levels():
    """And at the same bits less than without a rotation, on a heavy-tailed input."""
    x = jax.random.normal(jax.random.key(0), (4, 64, 128)) ** 3
    run = {
        codec: jax.jit(jax.vmap(update(codec), axis_name="data"))({"w": x})["w"][0]
        for codec in (jaxcomp.thc(bits=4), dataclasses.replace(FOUR_BITS, bucket_size=4096))
    }
    ours, plain = (
        float(jnp.sum((mean - x.mean(0)) ** 2) / jnp.sum(x**2) * 16) for mean in run.values()
    )
    assert ours < 0.03
    assert plain > 10 * ours


def update(codec):
    tx = jaxcomp.compressed_mean(jaxcomp.Psum(codec), "data")
    return lambda grads: tx.update(grads, tx.init(grads))[0]


@pytest.mark.parametrize(
    ("codec", "why"),
    [
        (jaxcomp.sign(), "use shared=True"),
        (jaxcomp.terngrad(), "one scale for all workers: use shared=True"),
        (jaxcomp.top_k(), "do not add up"),
        (jaxcomp.rotated_uniform(), "use shared=True"),
        (jaxcomp.eden(), "one rotation for all workers: use shared=True"),
        (dataclasses.replace(FOUR_BITS, steps=steps.PowerOfTwo()), r"steps=Exact\(\)"),
        (dataclasses.replace(FOUR_BITS, rounding=rounding.Subtractive()), "no subtractive dither"),
    ],
    ids=lambda value: None if isinstance(value, str) else label(value),
)
def test_what_cannot_be_added_says_what_would_work(codec, why):
    policy = jaxcomp.Policy(codec)
    make = functools.partial(jaxcomp.Psum, jaxcomp.Link(policy, jaxcomp.feedback.default(policy)))
    with pytest.raises(ValueError, match=why) as raised:
        make()
    for name in ("Gather", "TwoShot", "random_k", "int_sgd", "thc", "terngrad(shared=True)"):
        assert f"jaxcomp.{name}" in str(raised.value)


@pytest.mark.wrong_types
def test_settings_of_psum_that_do_not_go_together():
    with pytest.raises(ValueError, match="`sum_bits` requires shared=True"):
        dataclasses.replace(FOUR_BITS, sum_bits=8)
    with pytest.raises(ValueError, match="`sum_bits` must be from 2 to 16, got 17"):
        dataclasses.replace(jaxcomp.int_sgd(), sum_bits=17)
    with pytest.raises(ValueError, match="`bits` must be from 2 to 8, got 1"):
        jaxcomp.int_sgd(bits=1)
    with pytest.raises(ValueError, match="`clipped` must be a number in"):
        jaxcomp.thc(clipped=0)
    with pytest.raises(ValueError, match="`codec` must be a codec"):
        jaxcomp.Psum(3)
    alone = jaxcomp.thc().summable(2)
    with pytest.raises(ValueError, match="`side` must be the steps"):
        jaxcomp.roundtrip(alone, 0, jnp.ones(8))
    with pytest.raises(ValueError, match=r"decodes from its payload alone, got .* needs levels"):
        jaxcomp.codecs.Clipped(codec=alone)
