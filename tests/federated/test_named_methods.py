"""Methods that users look for by name equal themselves in float64, and keep their contracts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import named
from helpers.clients import digest

import jaxcomp
from jaxcomp import federated
from jaxcomp.federated import uplink
from jaxcomp.layout import trees
from jaxcomp.optimizers import adaptive_server


def assert_close(got, want, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), got, want)


def variates(sim):
    """The control variates of all clients."""
    return sim.table.read(np.arange(named.CLIENTS)).memory.control


def mean_variate(sim, weights=named.WEIGHTS):
    return jax.tree.map(lambda c: np.average(np.float64(c), axis=0, weights=weights), variates(sim))


@pytest.mark.core("scaffold", "fedbuff")
@pytest.mark.parametrize("name", named.NAMES)
def test_it_is_the_method_in_float64(name):
    """Unequal weights, lost messages and few participants; FedBuff with clients that are late."""
    sim = named.simulated(name)
    params = sim.params.params if name == "scaffold" else sim.params
    assert_close(dict(params), named.reference(name))
    if name == "scaffold":
        _, common, own = named.scaffold()
        assert_close(dict(sim.params.control), common, 5e-6)
        every = {key: np.stack([one[key] for one in own]) for key in common}
        assert_close(dict(variates(sim)), every, 5e-6)


def compressed(name, **given):
    return named.method(name, **{**named.CODECS, **given})


def test_the_server_s_variate_is_the_mean_of_the_clients_whatever_is_lost_or_absent():
    """Lossy messages with a residual: each variate moves by what the server has accepted of it."""
    sim = named.simulated("scaffold", rounds=6, given=compressed("scaffold", down=None))
    assert_close(dict(sim.params.control), mean_variate(sim), 2e-6)
    assert max(np.abs(c).max() for c in jax.tree.leaves(variates(sim))) > 0.2
    assert any(np.any(x) for x in jax.tree.leaves(sim.table.read(np.arange(5)).memory.feedback))


@pytest.mark.full
def test_with_a_compressed_downlink_the_rest_is_in_the_server_s_residual():
    sim = named.simulated("scaffold", rounds=6, given=compressed("scaffold"))
    link = sim.method.downlink
    plan, held = uplink.plan(link, sim.params), link.feedback.unsent(sim.state.down.feedback)
    dense = tuple(jnp.zeros(like.shape, like.dtype) for like in plan.dense_likes)
    owed = trees.assemble(plan, held, dense).control
    assert_close(jax.tree.map(jnp.add, sim.params.control, owed), mean_variate(sim), 2e-6)
    assert np.any(owed["w"])


@pytest.mark.full
def test_a_lost_message_moves_no_variate():
    sim = named.simulated("scaffold", rounds=1, faults=federated.Faults(lost=1.0))
    of_all = variates(sim), sim.params.control
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(of_all))
    assert_close(dict(sim.params.params), named.start(), 0)


@pytest.mark.full
@pytest.mark.parametrize("name", ["scaffold", "fedbuff"])
def test_named_methods_have_the_same_bits_over_a_mesh(name):
    mesh = jax.make_mesh((2,), ("clients",), devices=jax.devices()[:2])
    alone, spread = (
        named.simulated(name, given=compressed(name), chunk=2, mesh=one) for one in (None, mesh)
    )
    assert digest(spread.params) == digest(alone.params)
    if name == "scaffold":
        assert digest(variates(spread)) == digest(variates(alone))


SCALES = np.array([0.2, 1.0, 2.0, 4.0], np.float32)[:, None]
CENTRES = np.random.default_rng(3).normal(size=(4, 64)).astype(np.float32)


def distance(method, rounds):
    """How far from the minimum of four quadratics of different curvature a method ends."""
    data = np.stack([np.broadcast_to(SCALES, CENTRES.shape), CENTRES], axis=1)
    steps = np.broadcast_to(data[:, None], (4, 5, 2, 64))
    control, params = method.work.control, np.zeros(64, np.float32)
    params = federated.add_control(params) if control else params
    sim = federated.Simulation(method, params, 4, lambda numbers, round: steps[numbers])
    sim.run(rounds)
    params = sim.params.params if control else sim.params
    best = (SCALES * CENTRES).sum(0) / SCALES.sum()
    return float(np.linalg.norm(params - best) / np.linalg.norm(best))


def quadratic(params, batch):
    return jnp.sum(batch[0] * (params - batch[1]) ** 2) / 2


def test_variates_remove_the_drift_of_clients_that_differ_also_where_messages_are_compressed():
    """Top-k of a quarter with a residual: the variates' messages do not count the rest twice."""
    dense = federated.fedavg(quadratic, learning_rate=0.1)
    link = jaxcomp.Link(
        jaxcomp.Policy(jaxcomp.top_k(fraction=0.25), min_size=0, min_ndim=0), jaxcomp.Residual()
    )
    controlled = federated.scaffold(link, quadratic, learning_rate=0.1)
    assert distance(dense, 60) > 0.1
    found = distance(controlled, 150)
    assert found < 1e-3


@pytest.mark.full
@pytest.mark.parametrize("name", named.NAMES)
def test_parameters_in_bfloat16_stay_and_memories_are_in_float32(name):
    begin = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), named.start())
    sim = named.simulated(name, params=begin)
    params = sim.params.params if name == "scaffold" else sim.params
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"bfloat16"}
    state = [x for x in jax.tree.leaves(sim.state.optimizer) if x.ndim]
    assert {x.dtype.name for x in state} <= {"float32"}
    for key, want in named.reference(name).items():
        np.testing.assert_allclose(np.float32(params[key]), want, rtol=0, atol=0.02)
    if name == "scaffold":
        assert_close(dict(sim.params.control), mean_variate(sim), 2e-6)
        assert {x.dtype.name for x in jax.tree.leaves(variates(sim))} == {"float32"}


def late_clients(method, params, data, **settings):
    """Eight clients, of which a quarter each needs 0 to 3 rounds."""
    slow = np.arange(8) % 4
    settings = {"delays": lambda numbers, round: slow[numbers], **settings}
    settings = {"faults": federated.Faults(lost=0.2, longest=3), **settings}
    return federated.Simulation(method, params, 8, data, **settings)


SUMS = np.random.default_rng(1).integers(-9, 10, (10, 8, 2, 64)).astype(np.float32)
LINK = jaxcomp.Link(
    jaxcomp.Policy(jaxcomp.top_k(fraction=0.25), min_size=0, min_ndim=0), jaxcomp.Residual()
)


def summed(**settings):
    """A simulation in whole numbers: a client's update is the sum of its data."""
    method = federated.fedbuff(LINK, lambda w, x: -jnp.sum(w * x), learning_rate=1.0, staleness=0.0)
    method = dataclasses.replace(method, mean="all")  # Divides by eight in every round.
    zero = np.zeros(64, np.float32)
    return late_clients(method, zero, lambda numbers, round: SUMS[round, numbers], **settings)


def test_what_late_clients_gave_is_what_the_server_got_and_residuals_hold(tmp_path):
    """Some messages are lost, and stay in residuals; a restored simulation has the same bits."""
    sim, rounds = summed(), 10
    reports = sim.run(6)
    sim.save(tmp_path)
    reports += sim.run(rounds - 6)
    assert [report.sampled for report in reports[:4]] == [8, 2, 4, 4]
    assert sum(report.accepted for report in reports) < sum(report.sampled for report in reports)
    gave = sum(
        SUMS[began, client].sum(0)
        for client in range(8)
        for began in range(0, rounds - client % 4, client % 4 + 1)
    )
    held = jax.tree.leaves(sim.table.read(np.arange(8)).memory.feedback)[0].sum(0).reshape(-1)
    np.testing.assert_array_equal(8 * np.asarray(sim.params) - held, gave)
    again = summed()
    again.restore(tmp_path)
    again.run(rounds - 6)
    assert digest(again.params) == digest(sim.params)


@pytest.mark.full
def test_a_round_that_failed_begins_again_with_the_same_clients():
    def data(numbers, round):
        if failing and round == 2:
            raise OSError("the data are away")
        return SUMS[round, numbers]

    failing, sim, whole = True, summed(), summed()
    whole.run(4)
    sim.batches = data
    sim.run(2)
    with pytest.raises(OSError, match="the data are away"):
        sim.round()
    failing = False
    sim.run(2)
    assert digest(sim.params) == digest(whole.params)


@pytest.mark.full
def test_the_proximal_term_pulls_to_where_this_round_began():
    """Also where the optimizer's state stays with the client."""
    loss, ones = lambda w, x: jnp.sum(0 * w * x), jnp.ones(4)
    optimizer = optax.chain(federated.proximal(0.5), optax.sgd(0.1, momentum=0.9))
    work = federated.LocalSteps(loss, optimizer, keep=True)
    _, kept, _ = work.update(
        lambda start, end: start - end, ones, work.init(ones), jnp.ones((1, 4)), 1
    )
    grads, _ = federated.proximal(0.5).update(ones, (), 3 * ones, start=ones)
    np.testing.assert_array_equal(grads, 2 * ones)
    sent, _, _ = work.update(jnp.subtract, 7 * ones, kept, jnp.ones((3, 4)), 3)
    assert not np.any(sent)  # Without a gradient, nothing moves it away from there.


@pytest.mark.full
@pytest.mark.parametrize("rule", ["adagrad", "adam", "yogi"])
def test_adaptive_rules_are_the_paper_s(rule):
    """Gradients that shrink, which Yogi and Adam follow at different speeds."""
    server = adaptive_server(lambda step: 0.1 / (1 + step), rule, b1=0.8, b2=0.9, tau=0.01)
    state, at = server.init(jnp.zeros(5)), np.zeros(5)
    m, v, x = np.zeros(5), np.full(5, 1e-4), jnp.zeros(5)
    for step, g in enumerate(
        np.random.default_rng(0).normal(size=(6, 5)) * [[8], [4], [1], [1], [0.1], [0]]
    ):
        updates, state = server.update(jnp.float32(g), state)
        x = x + updates
        m = 0.8 * m + 0.2 * g
        v = {
            "adagrad": v + g**2,
            "adam": 0.9 * v + 0.1 * g**2,
            "yogi": v - 0.1 * g**2 * np.sign(v - g**2),
        }[rule]
        at = at - 0.1 / (1 + step) * m / (np.sqrt(v) + 0.01)
    np.testing.assert_allclose(x, at, rtol=2e-5)


CONTROLLED = federated.LocalSteps(named.loss, optax.sgd(0.1), control=True)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: named.method("fedprox", mu=-1.0), "`mu` must be a number at least 0"),
        (lambda: named.method("fedadam", tau=0.0), "`tau` must be a positive number"),
        (lambda: named.method("fedyogi", b2=1.0), "`b2` must be below 1"),
        (lambda: named.method("fedbuff", staleness=-1.0), "`staleness` must be a number"),
        (lambda: adaptive_server(0.1, "lion"), "`rule` must be one of 'adagrad', 'adam', 'yogi'"),
        (
            lambda: federated.proximal(0.1).update(jnp.ones(2), (), jnp.ones(2)),
            "`start` must be the parameters from which a round began",
        ),
        (
            lambda: dataclasses.replace(CONTROLLED, keep=True),
            "`keep` must be False with control variates",
        ),
        (
            lambda: CONTROLLED.run(named.start(), (), named.data([0], 0), 1),
            "`control` must be False",
        ),
        (
            lambda: federated.Method(CONTROLLED, jaxcomp.chunk_top_k(), mean="senders"),
            "`mean` must be 'participants', 'all' or 'messages' with control variates",
        ),
        (
            lambda: federated.Method(
                CONTROLLED, jaxcomp.Link(jaxcomp.qsgd_inf(bits=4), jaxcomp.Shift(0.2)), mean="all"
            ),
            r"`up` must have jaxcomp.Residual\(\) or jaxcomp.NoFeedback\(\) with control variates",
        ),
        (
            lambda: federated.Method(
                CONTROLLED, jaxcomp.qsgd(), aggregate=jaxcomp.aggregates.TrimmedMean(0.1)
            ),
            r"`aggregate` must be jaxcomp.aggregates.Mean\(\) with control variates",
        ),
        (
            lambda: named.method("scaffold", jaxcomp.qsgd_inf(bits=2, bucket_size=512)),
            "`up` must have codecs whose error is below their input",
        ),
        (
            lambda: federated.Simulation(
                named.method("scaffold"), named.start(), named.CLIENTS, named.data
            ),
            r"`params` must be jaxcomp.federated.add_control\(params\)",
        ),
        (lambda: summed(delays=3), "`delays` must be a function"),
        (
            lambda: summed(faults=federated.Faults(old=0.1, longest=3)),
            "`delays` must be None with old parameters beside them",
        ),
        (
            lambda: summed(faults=federated.Faults(longest=2)).round(),
            "`delays` must give 8 integers",
        ),
        (
            lambda: late_clients(
                federated.Method(CONTROLLED, jaxcomp.Policy(None)),
                federated.add_control(named.start()),
                named.data,
            ),
            "`delays` must be None with control variates, whose client has moved",
        ),
    ],
)
def test_wrong_use_says_what_would_work(make, says):
    with pytest.raises(ValueError, match=says):
        make()
