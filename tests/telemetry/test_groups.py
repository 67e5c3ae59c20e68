"""Statistics by groups of leaves, and of values that codecs clip."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import telemetry
from jaxcomp.numerics import noise

SIGN, TERN = jaxcomp.sign(), jaxcomp.terngrad()


def tree(seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    return {
        "embed": {"kernel": jax.random.normal(keys[0], (64, 48))},
        "head": {"kernel": 100 * jax.random.normal(keys[1], (48, 40)), "bias": jnp.ones(40)},
        "mid": {"kernel": jax.random.normal(keys[2], (33, 65))},
    }


POLICY = jaxcomp.Policy(
    SIGN, rules=(jaxcomp.Rule("embed/*", jaxcomp.blockwise(bits=4)), jaxcomp.Rule("mid/*", None))
)


def after(codec, stats, steps=2, workers=2, **settings):
    """The state of the first worker after some steps, simulated by `vmap`."""
    tx = jaxcomp.compressed_mean(codec, "data", stats=stats, **settings)

    def run(seed):
        state = tx.init(tree())
        for step in range(steps):
            x = jax.tree.map(lambda p, step=step: p * (1 + step + seed), tree())
            _, state = tx.update(x, state)
        return state

    states = jax.jit(jax.vmap(run, axis_name="data"))(jnp.arange(float(workers)))
    return jax.tree.map(lambda leaf: leaf[0], states)


@pytest.mark.full
def test_groups_are_those_of_the_policys_rules():
    state = after(POLICY, "rules")
    groups = state.stats.groups
    assert sorted(groups) == ["default", "dense", "embed/*", "mid/*"]
    assert groups["embed/*"].relative_error < 0.05 < groups["default"].relative_error
    assert groups["dense"].relative_error == groups["mid/*"].relative_error == 0
    described = {line.path: line.payload_bytes for line in jaxcomp.describe(POLICY, tree()).lines}
    assert float(groups["embed/*"].payload_bytes) == described["embed/kernel"]
    assert float(groups["dense"].payload_bytes) == described["head/bias"] == 160
    total = sum(float(group.payload_bytes) for group in groups.values())
    assert total == float(state.stats.payload_bytes)


@pytest.mark.full
def test_each_group_is_as_if_its_leaves_were_a_mean_of_their_own():
    """A residual, two reducers, and the whole beside its parts."""
    for reducer in (jaxcomp.Gather, lambda link: jaxcomp.TwoShot(link, link)):
        link = jaxcomp.Link(jaxcomp.blockwise(bits=4), jaxcomp.Residual())
        state = after(reducer(link), lambda path: path.split("/")[0])
        groups = state.stats.groups
        assert sorted(groups) == ["embed", "head", "mid"]
        # All kernels are of a normal law, so their errors are alike although their sizes are not.
        errors = [float(group.relative_error) for group in groups.values()]
        np.testing.assert_allclose(errors, float(state.stats.relative_error), rtol=0.1)
        ratios = [float(group.residual_ratio) for group in groups.values()]
        assert min(ratios) > 0
        np.testing.assert_allclose(ratios, float(state.stats.residual_ratio), rtol=0.1)
        for name in ("residual_norm", "gradient_norm"):
            norms = [float(getattr(group, name)) for group in groups.values()]
            whole = float(getattr(state.stats, name))
            np.testing.assert_allclose(np.linalg.norm(norms), whole, rtol=1e-5)
    one = after(jaxcomp.Gather(link), lambda path: "all")
    whole, only = one.stats._asdict(), one.stats.groups["all"]._asdict()
    for name, value in only.items():
        np.testing.assert_allclose(value, whole[name], rtol=1e-6)


@pytest.mark.core("Quantizer-int-int1")
@pytest.mark.parametrize(
    ("codec", "least", "most"),
    [
        (TERN, 0.008, 0.016),  # 2.5 standard deviations: 1.2 % of a normal law.
        (jaxcomp.eden(bits=2, rotations=2), 0.11, 0.15),
        (jaxcomp.eden(bits=4, rotations=2), 0.004, 0.009),
        (jaxcomp.codecs.Clipped(codec=jaxcomp.qsgd_inf(bits=4), sigmas=2.0), 0.03, 0.06),
        (SIGN, 0, 0),
        (jaxcomp.qsgd_inf(bits=4), 0, 0),
        (jaxcomp.top_k(fraction=0.1), 0, 0),
        (jaxcomp.thc(), 0, 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_saturation_of_a_normal_law(codec, least, most):
    state = after(codec, "rules", steps=1)
    for found in (state.stats.saturation, state.stats.groups["default"].saturation):
        assert least <= float(found) <= most


@pytest.mark.full
def test_clipped_counts_the_elements_that_decode_to_an_end():
    """In comparison with what is decoded, in buckets that are not full."""
    codec = jaxcomp.codecs.Quantizer(
        levels=jaxcomp.codecs.Uniform(7),
        scale=jaxcomp.codecs.RootMeanSquare(times=1.5),
        rounding=jaxcomp.codecs.Nearest(),
    )
    x = jax.random.normal(jax.random.key(3), (4, 200)).at[3].set(0)
    count = jnp.array([200, 200, 150, 200])
    x = jnp.where(jnp.arange(200) < count[:, None], x, 0)
    key = jaxcomp.Key(*2 * [jnp.asarray(noise.words(0))], jnp.uint32(0))
    payload, _ = codec.encode(key, x, count, ())
    decoded = codec.decode(key, payload, x)
    end = jnp.abs(decoded).max(axis=1, keepdims=True)
    beyond = (jnp.abs(x) > end * (1 + 1e-6)).sum(axis=1)
    np.testing.assert_array_equal(codec.clipped(key, x, count), jnp.stack([beyond, count], 1))
    assert beyond[:3].min() > 5
    for edge in (0.0, 1e30, 1e-30, jnp.nan):
        assert int(codec.clipped(key, jnp.full((1, 8), edge), jnp.array([8]))[0, 0]) == 0


@pytest.mark.full
def test_a_closed_gate_sends_nothing_by_groups():
    gate = jaxcomp.gates.Every(2)
    groups = after(SIGN, "rules", steps=1, gate=gate).stats.groups
    sent = after(SIGN, "rules", steps=2, gate=gate).stats.groups
    bytes_ = sorted((float(groups["default"].payload_bytes), float(sent["default"].payload_bytes)))
    assert bytes_[0] == 0 < bytes_[1]


@pytest.mark.full
def test_the_program_is_the_same_without_statistics(mesh):
    """Off is free: no statistic is traced, and no state is kept."""

    def lowered(**settings):
        tx = jaxcomp.compressed_mean(jaxcomp.terngrad(), "data", **settings)
        state = jaxcomp.init_state(tx, tree(), mesh, "data")
        step = jaxcomp.data_parallel(
            lambda s, g: tx.update(jax.tree.map(lambda x: x[0], g), s), mesh, "data"
        )
        stacked = jax.tree.map(lambda x: jnp.stack([x] * 8), tree())
        return state, re.sub(r"loc\(.*?\)", "", step.lower(state, stacked).as_text())

    (state, off), (_, plain), (_, on) = lowered(stats=False), lowered(), lowered(stats="rules")
    assert state.stats == ()
    assert off == plain != on
    assert "is_finite" not in off or off.count("all_reduce") < on.count("all_reduce")


@pytest.mark.full
def test_a_record_and_its_alarms_have_the_groups():
    state = after(POLICY, "rules")
    found = telemetry.record(state)
    assert found["embed/*/relative_error"] < found["default/relative_error"]
    assert {"relative_error", "saturation", "dense/payload_bytes"} <= set(found)
    means = {
        name: jaxcomp.compressed_mean(SIGN, "data", stats=lambda path: "all") for name in ("a", "b")
    }
    two = optax.partition(means, lambda params: {"embed": "a", "head": "b", "mid": "b"})
    state = jax.vmap(lambda _: two.init(tree()), axis_name="data")(jnp.arange(2))
    assert {"a/all/relative_error", "b/all/relative_error", "a/lost"} <= set(
        telemetry.record(state)
    )
    alarms = telemetry.Alarms(window=2)
    noisy = [{"step": float(k), "embed/*/saturation": 0.5} for k in range(4)]
    (alarm,) = [alarm for record in noisy for alarm in alarms(record)]
    assert str(alarm).startswith("step 1: values are clipped of embed/*. More than a fifth")


@pytest.mark.wrong_types
@pytest.mark.parametrize("stats", [1, "leaves", ("a",)])
def test_other_groupings_are_refused(stats):
    with pytest.raises(ValueError, match="`stats` must be True, False, 'rules'"):
        jaxcomp.compressed_mean(SIGN, "data", stats=stats)


def test_groups_that_cannot_be_told_are_refused():
    reducer = jaxcomp.Hierarchical(jaxcomp.Dense(), jaxcomp.Gather(jaxcomp.qsgd_inf(bits=4)))
    with pytest.raises(
        ValueError, match="`stats` must be True or False for a reducer over several"
    ):
        jaxcomp.compressed_mean(reducer, ("a", "b"), stats="rules")
    tx = jaxcomp.compressed_mean(SIGN, "data", stats=lambda path: None)
    with pytest.raises(ValueError, match="`stats` must return the name of a group, got None"):
        jax.vmap(lambda _: tx.init(tree()), axis_name="data")(jnp.arange(2))
