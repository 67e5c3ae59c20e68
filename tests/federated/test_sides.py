"""Side information: server and clients keep the same guesses, and these make messages better."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import federated
from jaxcomp.federated import History, LastMean, Uplink
from jaxcomp.layout import trees

CLIENTS, SIZE = 8, 2048
RNG = np.random.default_rng(0)
TARGETS = RNG.normal(size=(CLIENTS, 1, 4, SIZE // 64, 64)).astype(np.float32)
SCALES = np.float32(0.3 + RNG.random((SIZE // 64, 64)))


def loss(params, batch):
    """A quadratic with an optimum of its own for each client, which differs from the mean's."""
    return jnp.sum(SCALES * (params["w"] - batch.mean(0)) ** 2) / 2 + jnp.sum(params["b"] ** 2)


PARAMS = {"w": np.zeros((SIZE // 64, 64), np.float32), "b": np.ones(3, np.float32)}
BEST = TARGETS.mean((0, 1, 2))


def simulation(up, *, rate=0.5, **settings):
    work = federated.LocalSteps(loss, optax.sgd(rate))
    chosen = {n: settings.pop(n) for n in ("sampling", "mean", "server") if n in settings}
    method = federated.Method(work, up, **chosen)
    batches = lambda numbers, _: TARGETS[numbers]  # noqa: E731
    return federated.Simulation(method, PARAMS, CLIENTS, batches, chunk=4, **settings)


def distance(sim):
    return float(np.mean((np.asarray(sim.params["w"]) - BEST) ** 2))


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.full
def test_history_is_the_same_on_both_sides_after_losses():
    up = Uplink(jaxcomp.wyner_ziv(levels=8, bucket_size=512), History())
    faults = federated.Faults(lost=0.4)
    sim = simulation(up, faults=faults, sampling=federated.Exactly(5))
    reports = sim.run(6)
    assert 0 < sum(report.accepted for report in reports) < 6 * 5
    rows = sim.table.read(np.arange(CLIENTS))
    assert_same(rows.side, rows.memory.side)
    kept = np.asarray(rows.side["w"])
    assert (np.abs(kept).max((1, 2)) > 0).sum() >= 5


@pytest.mark.full
def test_the_last_mean_is_the_last_step():
    sim = simulation(Uplink(jaxcomp.wyner_ziv(levels=8), LastMean()))
    sim.run(2)
    before = sim.params
    sim.round()
    assert_same(sim.state.shared, jax.tree.map(jnp.subtract, before, sim.params))


@pytest.mark.full
def test_what_a_client_believes_is_what_the_server_reads():
    up = Uplink(jaxcomp.wyner_ziv(levels=4, bucket_size=512), History())
    rng = np.random.default_rng(1)
    update = {n: jnp.asarray(rng.normal(size=np.shape(x)), jnp.float32) for n, x in PARAMS.items()}
    close = jax.tree.map(lambda x: x + 0.01 * jnp.sin(x * 1e3), update)
    memory = federated.uplink.init(up, PARAMS)._replace(side=close)
    key = jnp.array([1, 2], jnp.uint32)
    plan = up.plan(PARAMS)
    sent = federated.uplink.message(up, plan, key, 3, 1.0, update, memory, (), PARAMS)
    guesses = up.side.at_server((), close, PARAMS)
    read = federated.uplink.read(plan, key, 3, sent.payload, guesses)
    tree = trees.assemble(plan, *read)
    assert_same(tree, sent.accepted.side)
    error = np.abs(np.asarray(tree["w"] - update["w"]))
    assert 0 < error.max() < 0.05
    assert_same(sent.refused.side, close)


@pytest.mark.full
@pytest.mark.parametrize("bits", [2, 4])
def test_history_sends_what_no_quantizer_without_memory_can(bits):
    """Clients' updates do not become small; their changes do."""
    found = {}
    for name, up in {
        "history": Uplink(jaxcomp.wyner_ziv(levels=2**bits, bucket_size=512), History()),
        "quantizer": Uplink(jaxcomp.qsgd_inf(bits=bits)),
        "rotated": Uplink(jaxcomp.rotated_uniform(bits=bits, bucket_size=512)),
    }.items():
        sim = simulation(up)
        sim.run(24)
        found[name] = distance(sim)
    assert found["history"] < 1e-6
    assert found["history"] < min(found["quantizer"], found["rotated"]) / 300


@pytest.mark.full
def test_a_blind_client_needs_no_memory_once_the_server_has_one():
    """Before, its promise is broken: the first guess is zero."""
    codec = jaxcomp.wyner_ziv(levels=16, bucket_size=512)
    first = simulation(Uplink(codec, History()))
    first.run(4)
    blind = jaxcomp.wyner_ziv(levels=16, bucket_size=512, distance=0.3, relative=True, blind=True)
    second = simulation(Uplink(blind, History(server_only=True)))
    everyone = np.arange(CLIENTS)
    known = first.table.read(everyone).side
    rows = second.table.read(everyone)
    assert not jax.tree.leaves(rows.memory.side)
    second.table.write(everyone, rows._replace(side=known))
    second.state = second.state._replace(params=first.params)
    second._centres = [first.params]
    begin = distance(second)
    second.run(12)
    assert distance(second) < begin / 15
    cold = simulation(Uplink(blind, History(server_only=True)))
    cold.run(4)
    assert distance(cold) > 10 * begin


def test_a_codec_without_guesses_has_no_side():
    with pytest.raises(ValueError, match="`side` must be NoSide"):
        Uplink(jaxcomp.qsgd_inf(bits=4), History())
    with pytest.raises(ValueError, match="`server_only` must be one of False, True"):
        History(server_only=1.5)
