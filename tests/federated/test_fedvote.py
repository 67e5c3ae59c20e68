"""FedVote: votes are unbiased, the server inverts their mean, and deployed networks work."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn import datasets

import jaxcomp
from jaxcomp import codecs, federated
from jaxcomp.federated import server
from jaxcomp.testing import codec as codec_, rows

CLIENTS = 10


@pytest.mark.parametrize("values", [2, 3])
def test_votes_are_unbiased_between_minus_one_and_one(values):
    codec = codecs.Votes(values=values)
    x = jnp.asarray(np.linspace(-1.25, 1.25, 301), jnp.float32)
    draws = 4096
    many = jax.jit(jax.vmap(lambda key: jaxcomp.roundtrip(codec, key, x)))
    votes = np.asarray(many(jax.random.split(jax.random.key(0), draws)))
    wanted = {2: [-1, 1], 3: [-1, 0, 1]}[values]
    assert set(np.unique(votes)) == set(wanted)
    inside = np.clip(np.asarray(x), -1, 1)
    variance = 1 - inside**2 if values == 2 else np.abs(inside) - inside**2
    off = np.abs(votes.mean(0) - inside)
    assert (off <= 6 * np.sqrt(variance / draws) + 2.0**-20).all()
    np.testing.assert_allclose(votes.var(0).mean(), variance.mean(), rtol=0.02)


@pytest.mark.core("2")
@pytest.mark.parametrize("values", [2, 3])
def test_votes_follow_the_rules_of_every_codec(values):
    codec = codecs.Votes(values=values)
    x = jnp.tanh(jax.random.normal(jax.random.key(1), (700,)))
    codec_.assert_keeps_shape(codec)
    codec_.assert_deterministic(codec, x)
    codec_.assert_sums(codec, x)
    codec_.assert_shows_nonfinite(codec, x)
    rows.assert_follows_first(codec)
    rows.assert_keeps_zeros(codec)
    bits = {2: 1, 3: 1.6}[values]
    full = jax.ShapeDtypeStruct((5120,), jnp.float32)
    assert jaxcomp.wire_bytes(codec, full) <= 5120 * bits / 8 + 10 * 6


def features():
    """Digits as batches of ten clients, and a test set."""
    data = datasets.load_digits()
    x = ((data.data - data.data.mean()) / data.data.std()).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(x))
    return x[order], data.target[order].astype(np.int32)


X, Y = features()


def normal(h):
    return (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)


def logits(weights, x):
    for name in ("a", "b"):
        x = jax.nn.relu(normal(x @ weights[name]))
    return weights["size"] * normal(x @ weights["c"])


def loss(weights, batch):
    x, y = batch
    return optax.softmax_cross_entropy_with_integer_labels(logits(weights, x), y).mean()


def accuracy(weights):
    return float((logits(weights, X[1500:]).argmax(-1) == Y[1500:]).mean())


def batches(numbers, number):
    rng = np.random.default_rng(number)
    chosen = rng.integers(0, 150, (CLIENTS, 20, 32)) + 150 * np.arange(CLIENTS)[:, None, None]
    return X[chosen[numbers]], Y[chosen[numbers]]


def initial():
    rng = np.random.default_rng(0)
    shapes = {"a": (64, 128), "b": (128, 128), "c": (128, 10)}
    params = {name: rng.normal(0, 0.3, shape) for name, shape in shapes.items()}
    return jax.tree.map(np.float32, {**params, "size": np.array(2.0)})


LATENT = federated.Latent(loss)


@pytest.fixture(scope="module", params=[2, 3], ids=["binary", "ternary"])
def run(request):
    """A simulation after one round, and the method."""
    method = federated.fedvote(LATENT, values=request.param)
    sim = federated.Simulation(method, initial(), CLIENTS, batches, chunk=5)
    return request.param, method, sim, sim.round(), sim.params


@pytest.mark.full
def test_a_round_is_the_votes_of_adam_steps_inverted(run):
    values, _, _, report, after = run
    key = server.round_key(jnp.zeros(2, jnp.uint32), 0)
    adam = optax.adam(0.01)

    @jax.jit
    def steps(params, client_batches):
        state = adam.init(params)
        for step in range(20):
            batch = jax.tree.map(lambda a, s=step: a[s], client_batches)
            grads = jax.grad(lambda p, b: loss(forward(p), b))(params, batch)
            updates, state = adam.update(grads, state)
            params = optax.apply_updates(params, updates)
        return params

    def forward(params):
        return {n: jnp.tanh(1.5 * x) if x.ndim == 2 else x for n, x in params.items()}

    votes, sizes = [], []
    for client in range(CLIENTS):
        given = jax.tree.map(lambda a: a[0], batches(np.array([client]), 0))
        end = steps(initial(), given)
        policy = LATENT.policy(codecs.Votes(values=values))
        sent = jaxcomp.roundtrip(policy, key, forward(end), worker=client)
        votes.append(sent)
        sizes.append(end["size"])
    for name in ("a", "b", "c"):
        mean = np.mean([np.asarray(one[name], np.float64) for one in votes], axis=0)
        want = np.arctanh(np.clip(mean, -(1 - 1e-4), 1 - 1e-4)) / 1.5
        off = np.abs(np.asarray(after[name]) - want)
        # The last bits of a parameter decide a few of the votes.
        assert np.mean(off > 1e-4) < 0.01
    np.testing.assert_allclose(after["size"], np.mean(sizes), rtol=1e-5)
    assert report.up == CLIENTS * jaxcomp.wire_bytes(policy, initial())
    assert report.up / CLIENTS < (1.02 if values == 2 else 1.62) * 25856 / 8 + 128


@pytest.mark.core("ternary")
def test_deployed_networks_work(run):
    """The most likely binary and ternary weights classify digits that no client has."""
    values, _, sim, _, _ = run
    before = accuracy(LATENT.deploy(initial(), values))
    sim.run(27)
    deployed = LATENT.deploy(sim.params, values)
    wanted = {2: {-1.0, 1.0}, 3: {-1.0, 0.0, 1.0}}[values]
    assert set(np.unique(deployed["a"])) == wanted
    assert before < 0.5
    assert accuracy(LATENT.weights(sim.params)) > 0.92
    assert accuracy(deployed) > 0.85


def test_the_inverse_restores_latent_parameters():
    params = initial()
    update, _ = LATENT.inverse().update(LATENT.weights(params), optax.EmptyState(), params)
    for name in ("a", "b", "c"):
        np.testing.assert_allclose(update[name], 0, atol=1e-5)
    assert update["size"] == -2  # A mean difference of φ − θ, not a vote.


def test_only_matching_matrices_are_latent():
    some = federated.Latent(loss, where=("a", "b*"))
    weights = some.weights(initial())
    assert np.array_equal(weights["c"], initial()["c"])
    assert not np.array_equal(weights["a"], initial()["a"])
    assert set(np.unique(some.deploy(initial())["b"])) == {-1.0, 1.0}
    with pytest.raises(ValueError, match="`where` must match a leaf"):
        federated.Latent(loss, where="size").weights(initial())
    with pytest.raises(ValueError, match="`k` must be a positive number"):
        federated.Latent(loss, k=0)
    with pytest.raises(ValueError, match="`where` must be a glob"):
        federated.Latent(loss, where=())
    with pytest.raises(ValueError, match="`values` must be one of 2, 3, got 4"):
        LATENT.deploy(initial(), 4)
    with pytest.raises(ValueError, match="`values` must be one of 2, 3, got 4"):
        codecs.Votes(values=4)
