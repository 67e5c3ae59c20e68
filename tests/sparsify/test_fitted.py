"""Thresholds from fitted laws, and the stages that reach a share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paths import TESTS
from scipy import special

from jaxcomp.sparsify import (
    choices,
    fitted,
    selection,
    tails,
)


def eta(law, a, share):
    found = tails.moments(jnp.asarray(a, jnp.float32).reshape(1, 1, -1), log=True)
    nats = jnp.full((1, 1), -np.log(share), jnp.float32)
    return float((getattr(tails, law)(found, nats) * found.unit)[0, 0])


@pytest.mark.core("gamma_approximate-0.35625")
@pytest.mark.parametrize(
    ("law", "want"),
    [
        ("exponential", 0.64378),
        ("pareto", 0.66381),
        ("gamma", 0.60381),
        ("gamma_approximate", 0.35625),
    ],
)
def test_thresholds_in_closed_form(law, want):
    assert eta(law, (0.1, 0.2, 0.3, 0.4, 1.0), 0.2) == pytest.approx(want, rel=1e-3)


def test_the_second_stage_is_fitted_to_what_exceeds_the_first():
    a = np.arange(1.0, 9.0)
    for stages, want in ((1, 4.5 * np.log(8)), (2, 7.1129)):
        rule = fitted.Fitted(fraction=0.125, stages=stages)
        got = rule.threshold(jnp.asarray(a, jnp.float32)[None], None)
        assert float(got[0, 0]) == pytest.approx(want, rel=1e-5)


@pytest.mark.core("5")
@pytest.mark.parametrize("size", [5, 513, 600, 1024])
def test_the_padding_of_the_last_part_is_no_zero(size):
    """Zeros of the bucket raise the share of the others; those that fill up a part must not."""
    a = np.random.default_rng(size).exponential(size=size).astype(np.float32)
    rule = fitted.Fitted(fraction=0.2, stages=1)
    got = float(jax.jit(lambda x: rule.threshold(x, None))(jnp.asarray(a)[None])[0, 0])
    assert got == pytest.approx(a.mean() * np.log(size / choices.share(0.2, size)), rel=1e-4)
    half = np.where(np.arange(size) % 2, a, 0)
    number = np.count_nonzero(half)
    got = float(jax.jit(lambda x: rule.threshold(x, None))(jnp.asarray(half)[None])[0, 0])
    share = choices.share(0.2, size)
    assert got == pytest.approx(half.sum() / number * np.log(number / share), rel=1e-4, abs=1e-5)


@pytest.mark.core("1.0")
@pytest.mark.parametrize("shape", [0.2, 0.7, 1.0, 3.0])
def test_the_gamma_law_is_inverted(shape):
    a = special.gammaincinv(shape, (np.arange(20_000) + 0.5) / 20_000)
    s = np.log(a.mean()) - np.log(a).mean()
    fit = (3 - s + np.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    want = special.gammaincinv(fit, 0.99) * a.mean() / fit
    assert eta("gamma", a, 0.01) == pytest.approx(want, rel=5e-3)


def test_stages_that_find_their_share_stay_as_they_are():
    """Each decision about the number of stages counts only the steps since the last one."""
    rule = fitted.Fitted(fraction=0.01)
    begin, ratio = rule.init(1, 1), jnp.ones((1, 1))
    states = jax.jit(
        lambda state: jax.lax.scan(
            lambda state, _: (rule._adapt(state, ratio),) * 2, state, None, length=16
        )
    )(begin)[1]
    np.testing.assert_array_equal(states.number, np.full((16, 1, 1), begin.number))
    np.testing.assert_array_equal(states.aim, np.zeros((16, 1, 1)))


def law(name, key, n):
    normal = jax.random.normal(key, (1, n))
    return {
        "laplace": lambda: jax.random.laplace(key, (1, n)),
        "gaussian": lambda: normal,
        "heavy": lambda: normal**3,
        "t3": lambda: jax.random.t(key, 3.0, (1, n)),
    }[name]()


TABLE = {
    ("exponential", "laplace", 0.001): (0.98, 0.98, 1.02, 1.00),
    ("exponential", "gaussian", 0.01): (0.02, 0.63, 1.13, 1.31),
    ("pareto", "gaussian", 0.01): (1.64, 0.92, 0.92, 0.94),
    ("gamma", "gaussian", 0.01): (0.15, 1.06, 1.06, 1.08),
    ("exponential", "gaussian", 0.001): (0.0, 0.08, 0.69, 1.07),
    ("pareto", "gaussian", 0.001): (6.88, 1.18, 0.91, 0.90),
    ("gamma", "gaussian", 0.001): (0.0, 1.41, 1.05, 1.06),
    ("exponential", "heavy", 0.001): (26.1, 2.89, 1.10, 0.77),
    ("gamma", "heavy", 0.001): (3.27, 0.91, 1.05, 0.97),
    ("pareto", "heavy", 0.001): (1.02, 0.91, 1.05, 0.97),
    ("exponential", "t3", 0.001): (4.57, 3.49, 1.15, 0.65),
    ("pareto", "t3", 0.001): (1.47, 0.95, 0.92, 0.92),
}
"""Found over target for one to four stages, n = 2²⁰."""


@functools.partial(jax.jit, static_argnums=0)
def found_over_target(rule, x, stages):
    level = rule.threshold(x, stages)
    return selection.count(jnp.abs(x) >= level)[0, 0] / (rule.fraction * x.shape[1])


@pytest.mark.slow
@pytest.mark.parametrize("case", TABLE, ids=str)
def test_fixed_stages_find_the_share_of_the_table(case):
    name, kind, share = case
    x = law(kind, jax.random.key(3), 2**20)
    rule = fitted.Fitted(fraction=share, law=name)
    got = [float(found_over_target(rule, x, jnp.full((1, 1), m))) for m in (1, 2, 3, 4)]
    for ratio, want in zip(got, TABLE[case], strict=True):
        # 2²⁰ elements of heavy tails differ from draw to draw.
        assert ratio == pytest.approx(want, rel=0.12, abs=0.08 if share == 0.001 else 0.03), got


def real_gradients(n):
    """Of a transformer's layer and its embedding, halfway through its training, as float16."""
    with np.load(TESTS / "data" / "gradient.npz") as file:
        leaves = [file[name].ravel() for name in ("down", "embedding")]
    return np.stack([leaf[:n] for leaf in leaves if leaf.size >= n]).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.01, 0.001])
@pytest.mark.parametrize(("name", "most"), [("exponential", 1.25), ("pareto", 1.2)])
def test_the_number_of_stages_is_found(name, most, share):
    """Within 30 steps, whatever the law, and where no number of stages would do by itself."""
    n = 102_400 if share == 0.001 else 2**15
    rule, kinds = fitted.Fitted(fraction=share, law=name), ("laplace", "gaussian", "t3", "heavy")
    real = jnp.asarray(real_gradients(n))

    @jax.jit
    def last_steps(keys):
        def step(state, key):
            x = jnp.concatenate([*(law(kind, key, n) for kind in kinds), real])
            level = rule.threshold(x, state.number, state.aim)
            found = selection.count(jnp.abs(x) >= level)
            ratio = found / (share * n)
            return rule._adapt(state, ratio), ratio

        return jax.lax.scan(step, rule.init(len(kinds) + len(real), 1), keys)[1][30:].mean(0)[:, 0]

    ratios = np.asarray(last_steps(jax.random.split(jax.random.key(0), 36)))
    drawn, others = ratios[: len(kinds)], ratios[len(kinds) :]
    assert ((1 / most <= drawn) & (drawn <= most)).all(), drawn
    assert (np.abs(others - 1) <= most - 1).all(), others
