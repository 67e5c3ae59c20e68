"""AdaGrad with a regularizer: each proximal point against a brute solver, both forms by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize

from jaxcomp.optimizers.adagrad import prox_adagrad, rda_adagrad
from jaxcomp.optimizers.regularizers import L1, GroupLasso, L1Ball, L2Ball, SquaredL2

RNG = np.random.default_rng(0)
PENALTIES = {
    L1(0.4): lambda x: 0.4 * np.abs(x).sum(),
    SquaredL2(0.7): lambda x: 0.35 * (x**2).sum(),
    GroupLasso(0.9): lambda x: 0.9 * np.linalg.norm(x),
    GroupLasso(9.0): lambda x: 9.0 * np.linalg.norm(x),
}


def loss(regularizer, z, metric, times):
    """The objective of a proximal point, in halves `x = a − b` of which neither is negative."""

    def value(halves):
        x = np.subtract(*np.split(halves, 2))
        near = 0.5 * (metric * (x - z) ** 2).sum()
        if isinstance(regularizer, L1):  # Smooth in the halves, and the same where one is zero.
            return near + times * regularizer.weight * halves.sum()
        return near + times * PENALTIES.get(regularizer, lambda x: 0.0)(x)

    return value


def solved(regularizer, value, start):
    """The least value, by a solver that knows nothing of proximal points."""
    limits = []
    if isinstance(regularizer, L1Ball):
        limits = [{"type": "ineq", "fun": lambda h: regularizer.radius - h.sum()}]
    if isinstance(regularizer, L2Ball):
        square = regularizer.radius**2
        limits = [
            {"type": "ineq", "fun": lambda h: square - (np.subtract(*np.split(h, 2)) ** 2).sum()}
        ]
    best = scipy.optimize.minimize(
        value,
        start,
        method="SLSQP",
        bounds=[(0, None)] * start.size,
        constraints=limits,
        options={"ftol": 1e-16, "maxiter": 200},
    )
    return best.x


def halves(x):
    return np.concatenate([np.maximum(x, 0), np.maximum(-x, 0)])


BALLS = [L2Ball(1.5), L1Ball(2.0), L1Ball(99.0)]


@pytest.mark.parametrize("regularizer", [*PENALTIES, *BALLS], ids=repr)
def test_proximal_points_are_what_a_solver_finds(regularizer):
    with jax.enable_x64(True):
        near = jax.jit(regularizer.nearest)
        for seed in range(3):
            rng = np.random.default_rng(seed)
            z, metric, times = rng.normal(size=5), rng.uniform(0.2, 3, 5), rng.uniform(0.5, 1.5)
            got = np.asarray(near(z, metric, jnp.asarray(times)))
            value = loss(regularizer, z, metric, times)
            best = solved(regularizer, value, halves(z) + 0.1)
            # At the tip of the norm's cone a solver of smooth problems soon stands still.
            atol = 1e-6 if got.any() else 1e-3
            np.testing.assert_allclose(got, np.subtract(*np.split(best, 2)), atol=atol)
            assert value(halves(got)) <= value(best) + 1e-9


def test_proximal_points_at_the_ends_of_the_range():
    """Without a metric nothing holds an element; tiny, large and bad values come out right."""
    z, metric = jnp.array([3.0, -4.0, 2.0]), jnp.array([1.0, 1.0, 0.0])
    one = jnp.ones(())
    for regularizer, want in (
        (L1(1.0), [2, -3, 0]),
        (SquaredL2(1.0), [1.5, -2, 0]),
        (GroupLasso(2.5), [1.5, -2, 0]),
        (L2Ball(2.5), [1.5, -2, 0]),
        (L1Ball(5.0), [2, -3, 0]),
    ):
        near = jax.jit(regularizer.nearest)
        np.testing.assert_allclose(near(z, metric, one), want, rtol=1e-5)
        assert not np.asarray(near(0 * z, 0 * metric, one)).any()
        assert np.isnan(np.asarray(near(z.at[0].set(jnp.nan), metric, one))[0])
        assert jax.eval_shape(near, z[:0], metric[:0], one).shape == (0,)
        if hasattr(regularizer, "weight"):  # A rate of zero.
            np.testing.assert_array_equal(near(z, metric, 0 * one), z)
        if isinstance(regularizer, GroupLasso):
            for scale in (1e-30, 1e30):  # In both, or the balance is another one.
                same = near(z * scale, metric, one * scale)
                same = np.asarray(same, np.float64) / scale
                np.testing.assert_allclose(same, [1.5, -2, 0], rtol=1e-5)


def follow(tx, params, grads):
    """Parameters after each step; `grads` has a leading axis of steps."""

    def step(carry, grad):
        params, state = carry
        updates, state = tx.update(grad, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    return jax.jit(lambda: jax.lax.scan(step, (params, tx.init(params)), grads)[1])()


def test_without_a_regularizer_both_are_adagrad():
    grads, x = RNG.standard_normal((6, 40)), RNG.standard_normal(40)
    grads[:, 0] = 0  # Nothing to divide by.
    rate = lambda t: 0.3 / (1 + t)  # noqa: E731
    with jax.enable_x64(True):
        mirror = follow(prox_adagrad(rate, delta=0.0), jnp.asarray(x), jnp.asarray(grads))
        dual = follow(rda_adagrad(0.3, delta=0.0), jnp.asarray(x), jnp.asarray(grads))
    squares, total = np.zeros(40), np.zeros(40)
    for t, g in enumerate(grads):
        squares, total = squares + g**2, total + g
        metric = np.where(squares > 0, np.sqrt(squares), 1)
        x = x - rate(t) * g / metric
        np.testing.assert_allclose(mirror[t], x, rtol=1e-13, atol=1e-15)
        np.testing.assert_allclose(dual[t], -0.3 * total / metric, rtol=1e-12, atol=1e-14)


def test_what_a_regularizer_makes_zero_is_zero_and_dual_averaging_makes_more_of_it():
    """A sparse linear model from noisy gradients; zeros are exact in every dtype."""
    solution = np.where(np.arange(60) < 6, 2.0, 0.0)
    noise = jnp.asarray(RNG.standard_normal((300, 60)) * 0.3, jnp.float32)
    txs = {
        "mirror": (prox_adagrad(1.0, L1(0.2)), "float32"),
        "dual": (rda_adagrad(1.0, L1(0.2)), "float32"),
        "group": (prox_adagrad(1.0, GroupLasso(50.0)), "bfloat16"),
        "narrow": (rda_adagrad(1.0, L1(0.2)), "bfloat16"),
        "ball": (prox_adagrad(1.0, L2Ball(0.5)), "float32"),
        "diamond": (rda_adagrad(1.0, L1Ball(0.5)), "float32"),
    }

    def step(carry, shake):
        for name, (tx, dtype) in txs.items():
            x, state = carry[name]
            grad = x - jnp.asarray(solution, dtype) + shake.astype(dtype)
            updates, state = tx.update({"w": grad}, state, {"w": x})
            carry = {**carry, name: (x + updates["w"], state)}
        return carry, None

    start = {name: jnp.ones(60, dtype) for name, (_, dtype) in txs.items()}
    first = {name: (x, txs[name][0].init({"w": x})) for name, x in start.items()}
    last = jax.jit(lambda: jax.lax.scan(step, first, noise)[0])()
    end = {name: np.asarray(x, np.float32) for name, (x, _) in last.items()}
    assert 5 < (end["mirror"] == 0).sum() < (end["dual"] == 0).sum()
    assert (end["dual"][6:] == 0).mean() > 0.9
    assert (end["narrow"][6:] == 0).mean() > 0.9
    for name in ("mirror", "dual"):
        np.testing.assert_allclose(end[name][:6], 1.8, atol=0.4)
    assert not end["group"].any()
    assert np.linalg.norm(end["ball"]) < 0.5 + 1e-5
    assert np.abs(end["diamond"]).sum() < 0.5 + 1e-5


def test_wrong_arguments_of_adagrad_say_so():
    for make in (prox_adagrad, rda_adagrad):
        tx = make(0.1, L1(1.0))
        with pytest.raises(ValueError, match="`params` must be given to the update"):
            tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
        with pytest.raises(ValueError, match=r"`regularizer` must be None or one of jaxcomp.opt"):
            make(0.1, L1)
        with pytest.raises(ValueError, match=r"`learning_rate` must be a number at least 0.0"):
            make(-0.1)
        with pytest.raises(ValueError, match=r"`delta` must be a number at least 0.0"):
            make(0.1, delta=-1.0)
    for make in (L1, GroupLasso, SquaredL2):
        with pytest.raises(ValueError, match="`weight` must be a positive number"):
            make(0.0)
    for make in (L1Ball, L2Ball):
        with pytest.raises(ValueError, match=r"`radius` must be a number at least 0.0, got -1"):
            make(-1)
