"""The mean over those who sent an element, against a numpy model of DeMo's rule."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp.numerics import noise

WORKERS, CHUNK, K, DECAY = 8, 8, 6, 0.9
SHAPE = (32, CHUNK)  # Squares of consecutive elements are tiles along both dimensions here.
GRADS = np.random.default_rng(3).standard_normal((2, WORKERS, *SHAPE)).astype(np.float32)
GRADS += np.random.default_rng(4).standard_normal(SHAPE).astype(np.float32)
LINK = jaxcomp.Link(
    jaxcomp.Policy(jaxcomp.demo(k=K, chunk=CHUNK), min_size=0), jaxcomp.Residual(decay=DECAY)
)


def basis(n):
    k, j = np.arange(n)[:, None], np.arange(n)[None]
    rows = np.sqrt(2 / n) * np.cos(np.pi * (2 * j + 1) * k / (2 * n))
    rows[0] /= np.sqrt(2)
    return rows


def published(grads, over, weights=None):
    """The authors' steps: momentum, the largest coefficients of tiles, their mean, back."""
    a, momentum, means = basis(CHUNK), np.zeros((WORKERS, *SHAPE)), []
    for step in range(len(grads)):
        own = np.ones(WORKERS) if weights is None else weights[step]
        momentum = DECAY * momentum + grads[step]
        tiles = a @ momentum.reshape(WORKERS, -1, CHUNK, CHUNK) @ a.T
        flat = tiles.reshape(WORKERS, -1, CHUNK**2)
        chosen = np.zeros(flat.shape)
        np.put_along_axis(chosen, np.argsort(-np.abs(flat), axis=-1)[..., :K], 1, -1)
        chosen = chosen * own[:, None, None]
        total, count = (flat * chosen).sum(0), chosen.sum(0)
        mean = total / (np.maximum(count, 1) if over == "senders" else WORKERS)
        means.append((a.T @ mean.reshape(-1, CHUNK, CHUNK) @ a).reshape(SHAPE))
        sent = a.T @ (flat * chosen).reshape(tiles.shape) @ a
        momentum = momentum - sent.reshape(momentum.shape)
    return np.stack(means)


def run(tx, grads=GRADS):
    """The means of all steps and the last state, with a leading axis of workers."""

    def steps(grads):
        state, means = tx.init({"w": grads[0]}), []
        for grad in grads:
            mean, state = tx.update({"w": grad}, state)
            means.append(mean["w"])
        return jnp.stack(means), state

    rows = jnp.asarray(grads).swapaxes(0, 1)
    return jax.jit(jax.vmap(steps, axis_name="data"))(rows)


def signs_agree(a, b):
    return np.mean(np.sign(a) == np.sign(b))


def test_demo_over_senders_is_the_published_rule():
    over = {"senders": jaxcomp.Gather(LINK, over="senders"), "workers": jaxcomp.Gather(LINK)}
    means = {}
    for name, reducer in over.items():
        means[name] = np.asarray(run(jaxcomp.compressed_mean(reducer, "data"))[0])[0]
        want = published(GRADS, name)
        np.testing.assert_allclose(means[name], want, atol=2e-5)
    want = published(GRADS, "senders")
    clear = np.abs(want) > 1e-4
    assert signs_agree(means["senders"][clear], want[clear]) == 1
    assert signs_agree(means["workers"], want) < 0.99  # What the two means differ in.


@pytest.mark.full
def test_the_mean_over_senders_counts_those_who_take_part():
    """Weights of a gate are drawn from a key that all share, so the model knows them."""
    gate = jaxcomp.gates.Bernoulli(0.5)
    tx = jaxcomp.compressed_mean(jaxcomp.Gather(LINK, over="senders"), "data", gate=gate)

    def with_weights(grads):
        state = tx.init({"w": grads[0]})
        means, weights = [], []
        for number in range(grads.shape[0]):
            key = noise.fold(state.gate.gate_key, state.step)
            sends = gate.open(key, {"w": grads[number]}, (), "data")
            mean, state = tx.update({"w": grads[number]}, state)
            means.append(mean["w"])
            weights.append(sends.weight)
        return jnp.stack(means), jnp.stack(weights)

    rows = jnp.asarray(GRADS).swapaxes(0, 1)
    means, weights = jax.jit(jax.vmap(with_weights, axis_name="data"))(rows)
    weights = np.asarray(weights).T
    assert 0 < weights.sum() < weights.size
    want = published(GRADS, "senders", weights)
    np.testing.assert_allclose(np.asarray(means)[0], want, atol=2e-5)


@pytest.mark.full
def test_elements_that_nobody_sent_are_zero_and_what_is_not_finite_is_seen():
    link = jaxcomp.Link(
        jaxcomp.Policy(jaxcomp.top_k(fraction=2 / 256), min_size=0), jaxcomp.Residual()
    )
    tx = optax.chain(jaxcomp.compressed_mean(jaxcomp.Gather(link, over="senders"), "data"))
    grads = np.zeros((2, WORKERS, *SHAPE), np.float32)
    grads[0, :, 0, 0] = np.arange(1, WORKERS + 1)
    grads[0, 3, 5, 5] = 8.0
    grads[1, 2, 7, 7] = np.nan
    mean, after = np.asarray(run(tx, grads=grads)[0])[0]
    assert mean[0, 0] == pytest.approx(4.5)
    assert mean[5, 5] == 8.0
    assert np.count_nonzero(mean) == 2
    assert not np.isfinite(after[7, 7])


def test_what_has_no_mean_over_senders_is_refused():
    with pytest.raises(ValueError, match="codecs that send every element"):
        jaxcomp.Gather(jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual()), over="senders")
    with pytest.raises(ValueError, match="a feedback that has a mirror"):
        jaxcomp.Gather(jaxcomp.Link(jaxcomp.top_k(), jaxcomp.Shift()), over="senders")
    with pytest.raises(ValueError, match="`over` must be"):
        jaxcomp.Gather(LINK, over="everyone")
