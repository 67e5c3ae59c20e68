"""Simulations: the same bits however clients are grouped, nothing lost, all bytes counted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import clients as world

import jaxcomp
from jaxcomp import aggregates, federated
from jaxcomp.federated import server
from jaxcomp.layout import trees

ROUNDS = 4

VOTES = jaxcomp.Link(
    jaxcomp.Policy(jaxcomp.codecs.Votes(values=3), min_size=0, min_ndim=0), jaxcomp.NoFeedback()
)


@pytest.fixture(scope="module")
def digest() -> str:
    sim = world.simulation()
    sim.run(ROUNDS)
    return world.digest(sim.params)


@pytest.mark.full
@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_chunks_change_no_bit(chunk, digest):
    sim = world.simulation(chunk=chunk)
    sim.run(ROUNDS)
    assert world.digest(sim.params) == digest


@pytest.mark.full
@pytest.mark.parametrize("devices", [2, 8])
def test_devices_change_no_bit(devices, digest):
    mesh = jax.make_mesh((devices,), ("clients",), devices=jax.devices()[:devices])
    sim = world.simulation(chunk=2, mesh=mesh)
    sim.run(ROUNDS)
    assert world.digest(sim.params) == digest


@pytest.mark.full
@pytest.mark.parametrize("where", ["rows", "device"])
def test_blocks_and_tables_change_no_bit(where, digest, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxcomp.federated.simulation._BLOCK", 1)  # A block is one chunk,
    monkeypatch.setattr("jaxcomp.federated.simulation._SMALL", 1)  # or one client.
    sim = world.simulation(table="device" if where == "device" else tmp_path / where)
    sim.run(ROUNDS)
    assert world.digest(sim.params) == digest


@pytest.mark.core("memory")
@pytest.mark.parametrize("where", ["memory", "device", "rows"])
def test_a_checkpoint_goes_on_bit_for_bit(where, digest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = world.simulation()
    first.run(ROUNDS // 2)
    first.save(tmp_path / "kept")
    first.run(1)  # Changes neither the checkpoint nor its table.
    second = world.simulation(table=where)
    second.restore(tmp_path / "kept")
    reports = second.run(ROUNDS - ROUNDS // 2)
    assert world.digest(second.params) == digest
    assert reports[0].round == ROUNDS // 2
    whole = world.simulation()
    whole.run(ROUNDS)
    assert (whole.ledger.up, whole.ledger.down) == (second.ledger.up, second.ledger.down)


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    world.simulation().save(tmp_path / "kept")
    other = federated.Simulation(world.METHOD, world.params(), world.CLIENTS + 1, world.batches)
    with pytest.raises(ValueError, match="`folder` must hold a checkpoint of the same method"):
        other.restore(tmp_path / "kept")
    with pytest.raises(ValueError, match="`folder` must hold a checkpoint of a simulation"):
        other.restore(tmp_path / "none")
    other.restore(tmp_path / "none", missing_ok=True)
    (tmp_path / "former").mkdir()
    (tmp_path / "former" / "state.npz").write_bytes(b"mine")
    for use in (other.save, other.restore):
        with pytest.raises(ValueError, match="`folder` must be new, empty, or a folder in which"):
            use(tmp_path / "former")
    assert (tmp_path / "former" / "state.npz").read_bytes() == b"mine"


def test_a_damaged_checkpoint_is_not_read(tmp_path):
    """Of the rows, too, in which every bit is a number that could be right."""
    sim = world.simulation()
    for _ in range(2):
        sim.save(tmp_path / "kept")
        sim.run(1)
    newest = tmp_path / "kept" / "0000000002"
    for name in ("0.rows", "state"):
        data = (newest / name).read_bytes()
        (newest / name).write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
        other = world.simulation()
        with pytest.warns(UserWarning, match=f"{name} is damaged"):
            other.restore(tmp_path / "kept")
        assert int(other.state.round) == 0
        (newest / name).write_bytes(data)
    sim.restore(tmp_path / "kept")
    assert int(sim.state.round) == 1


@pytest.mark.full
def test_a_round_of_dense_means_is_federated_averaging():
    method = federated.Method(world.WORK, jaxcomp.Policy(None), sampling=federated.Exactly(10))
    sim = world.simulation(method, faults=federated.Faults())
    cohort = method.sampling.cohort(server.round_key(sim.key, 0), world.CLIENTS)

    def alone(number):
        theta = world.params()
        for step in range(world.STEPS):
            grads = jax.grad(world.loss)(theta, (world.X[number, step], world.Y[number, step]))
            theta = jax.tree.map(lambda p, g: p - 0.2 * g, theta, grads)
        return theta

    ends = [alone(number) for number in cohort]
    mean = jax.tree.map(lambda *xs: sum(xs) / len(xs), *ends)
    report = sim.round()
    assert (report.sampled, report.accepted) == (10, 10)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), sim.params, mean)


def test_nothing_is_lost():
    """What clients gave is what the server added and what residuals hold: to the last unit."""
    rounds, lost = 5, 0.3
    # A "loss" whose gradient is the data, in integers: a client's update is the sum of its batches.
    work = federated.LocalSteps(lambda p, x: sum(jnp.vdot(p[k], x[k]) for k in p), optax.sgd(1.0))
    draw = np.random.default_rng(5)
    shapes = {"kernel": (40, 30), "bias": (7,)}
    data = {
        k: draw.integers(-50, 50, (world.CLIENTS, rounds, 2, *s)).astype(np.float32)
        for k, s in shapes.items()
    }
    link = jaxcomp.Link(jaxcomp.Policy(jaxcomp.top_k(fraction=0.1)), jaxcomp.Residual())
    # The parameters stay zero, so that differences from them are integers.
    method = federated.Method(work, link, server=optax.sgd(0.0))
    like = {k: jnp.zeros(s) for k, s in shapes.items()}
    sums = []

    def given(numbers, round):
        return {k: x[numbers, round] for k, x in data.items()}

    sim = federated.Simulation(
        method, like, world.CLIENTS, given, faults=federated.Faults(lost=lost), chunk=8
    )
    real_step = server.step

    def step(method, key, state, total, weights):
        sums.append(jax.tree.map(np.asarray, total))
        return real_step(method, key, state, total, weights)

    server.step = step
    try:
        reports = sim.run(rounds)
    finally:
        server.step = real_step
    assert 0.5 < sum(r.accepted for r in reports) / (rounds * world.CLIENTS) < 0.9
    plan = trees.layout(link.policy, like)
    kept = jax.tree.map(lambda *xs: np.sum(xs, axis=0, dtype=np.float64), *sums)
    left = sim.table.read(np.arange(world.CLIENTS)).memory
    rest = jax.tree.map(lambda x: x.sum(axis=0, dtype=np.float64), (left.feedback, left.dense))
    out = trees.assemble(plan, kept.stacks, kept.dense)
    held = trees.assemble(plan, rest[0].residual, rest[1].residual)
    for name, x in data.items():
        given_ = x.sum(axis=(0, 1, 2), dtype=np.float64)
        np.testing.assert_array_equal(np.asarray(out[name]) + np.asarray(held[name]), given_)
        assert np.any(np.asarray(held[name])), name


def test_clients_take_their_own_numbers_of_steps():
    method = federated.Method(world.WORK, jaxcomp.Policy(None))
    taken = np.arange(world.CLIENTS) % (world.STEPS + 1)
    some = world.simulation(
        method, faults=federated.Faults(), steps=lambda numbers, round: taken[numbers]
    )
    some.round()
    data = world.X.copy()
    for number, steps in enumerate(taken):
        data[number, steps:] = np.nan  # Not used.
    spoilt = federated.Simulation(
        method,
        world.params(),
        world.CLIENTS,
        lambda numbers, round: (data[numbers], world.Y[numbers]),
        steps=lambda numbers, round: taken[numbers],
        chunk=8,
    )
    report = spoilt.round()
    assert world.digest(some.params) == world.digest(spoilt.params)
    assert report.accepted == world.CLIENTS


def test_a_client_that_diverges_is_left_out_and_its_memory_stays():
    data = world.X.copy()
    data[3] = np.inf
    sim = federated.Simulation(
        dataclasses.replace(world.METHOD, sampling=federated.Everyone()),
        world.params(),
        world.CLIENTS,
        lambda numbers, round: (data[numbers], world.Y[numbers]),
        chunk=8,
    )
    report = sim.round()
    assert report.accepted == world.CLIENTS - 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(sim.params))
    row = sim.table.read(np.array([3]))
    assert not any(np.any(x) for x in jax.tree.leaves(row))


def test_weights_are_those_of_a_weighted_mean():
    weights = np.random.default_rng(2).integers(1, 9, world.CLIENTS)
    method = federated.Method(world.WORK, jaxcomp.Policy(None))
    sim = world.simulation(method, weights=weights, faults=federated.Faults())
    sim.round()
    run = jax.jit(lambda x, y: world.WORK.run(world.params(), (), (x, y), world.STEPS)[0])
    ends = [run(world.X[n], world.Y[n]) for n in range(world.CLIENTS)]
    mean = jax.tree.map(lambda *xs: np.average(xs, axis=0, weights=weights), *ends)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), sim.params, mean)


def spoilt(method, hostile, times):
    """A round in which the first clients train on data that are many times as large."""
    data = world.X.copy()
    data[:hostile] *= times
    sim = federated.Simulation(
        method,
        world.params(),
        world.CLIENTS,
        lambda numbers, round: (data[numbers], world.Y[numbers]),
        chunk=8,
    )
    before = sim.params
    report = sim.round()
    return jax.tree.map(jnp.subtract, sim.params, before), report


@pytest.mark.full
def test_a_median_is_that_of_the_clients_updates():
    median = aggregates.CoordinateMedian()
    method = federated.Method(world.WORK, jaxcomp.Policy(None), aggregate=median)
    run = jax.jit(lambda x, y: world.WORK.run(world.params(), (), (x, y), world.STEPS)[0])
    ends = [run(world.X[n], world.Y[n]) for n in range(world.CLIENTS)]
    wanted = jax.tree.map(lambda p, *xs: np.median(xs, axis=0) - p, world.params(), *ends)
    moved, report = spoilt(method, 0, 1)
    assert report.accepted == world.CLIENTS
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), moved, wanted)
    # Of 40 clients, 18 hostile ones move it by little, and the mean by much.
    held, _ = spoilt(method, 18, 1e3)
    assert optax.tree.norm(held) < 5 * optax.tree.norm(moved)
    mean, _ = spoilt(dataclasses.replace(method, aggregate=aggregates.Mean()), 18, 1e3)
    assert optax.tree.norm(mean) > 50 * optax.tree.norm(moved)


@pytest.mark.full
def test_a_clipped_mean_bounds_each_client():
    clipped = aggregates.ClippedMean(norm=0.5)
    method = federated.Method(world.WORK, jaxcomp.Policy(None), aggregate=clipped)
    honest, _ = spoilt(method, 0, 1)
    moved, report = spoilt(method, 3, 1e3)
    difference = jax.tree.map(jnp.subtract, moved, honest)
    assert 0.01 < optax.tree.norm(difference) <= 3 * 2 * 0.5 / world.CLIENTS * 1.001
    assert report.accepted == world.CLIENTS


@pytest.mark.full
@pytest.mark.parametrize(
    "rule", [aggregates.TrimmedMean(0.1), aggregates.Credible(rule="hard")], ids=repr
)
def test_grouping_changes_no_bit_of_an_aggregate(rule):
    """Rules that need all messages get the same rows, however many fill a block up."""
    method = federated.Method(
        world.WORK,
        VOTES,
        sampling=federated.Independently(0.4),
        aggregate=rule,
    )
    mesh = jax.make_mesh((2,), ("clients",), devices=jax.devices()[:2])
    found = set()
    for settings in ({"chunk": 5}, {"chunk": 16}, {"chunk": 3, "mesh": mesh}):
        sim = world.simulation(method, **settings)
        sim.run(2)
        found.add(world.digest((sim.params, sim.state.aggregate)))
    assert len(found) == 1


@pytest.mark.full
def test_credibility_belongs_to_the_client():
    """Rows of the state follow the numbers of the sampled clients, also from a checkpoint."""
    method = federated.Method(
        world.WORK,
        VOTES,
        sampling=federated.Exactly(10),
        aggregate=aggregates.Credible(rule="hard"),
    )
    sim = world.simulation(method, faults=federated.Faults())
    sim.round()
    known = np.asarray(sim.state.aggregate.credibility)
    drawn = method.sampling.cohort(server.round_key(sim.key, 0), world.CLIENTS)
    assert set(np.flatnonzero(known != 1)) <= set(drawn)
    assert (known[drawn] < 1).any()


@pytest.mark.full
def test_independent_sampling_is_unbiased_over_all():
    """With `mean="all"` the expected step is that of all clients."""
    method = federated.Method(
        world.WORK, jaxcomp.Policy(None), mean="all", sampling=federated.Independently(0.5)
    )
    everyone = world.simulation(
        dataclasses.replace(method, sampling=federated.Everyone()), faults=federated.Faults()
    )
    everyone.round()
    sim = world.simulation(method, faults=federated.Faults())
    start, ends = sim.state, []
    for seed in range(40):
        sim.key = jaxcomp.federated.server.noise.raw(seed)
        sim.state, sim._centres = start, [start.params]
        sim.round()
        ends.append(sim.params["out"])
    wanted, found = everyone.params["out"], np.mean(ends, axis=0)
    one = np.linalg.norm(ends[0] - wanted)
    assert np.linalg.norm(found - wanted) < one / 3


@pytest.mark.full
def test_old_parameters_count_less():
    faults = federated.Faults(old=0.5, longest=2)
    sim = world.simulation(dataclasses.replace(world.METHOD, staleness=1.0), faults=faults)
    sim.run(3)
    key = server.round_key(sim.key, 2)
    arrives, ages = faults.draw(key, np.arange(1000), 3)
    assert arrives.all()
    assert {0, 1, 2} == set(ages)
    assert 0.4 < (ages > 0).mean() < 0.6
    np.testing.assert_allclose(faults.times(arrives, ages, 1.0), 1 / (1 + ages))
    # Clients did begin from old parameters: the round differs from one without.
    fresh = world.simulation(dataclasses.replace(world.METHOD, staleness=1.0))
    fresh.run(3)
    assert world.digest(fresh.params) != world.digest(sim.params)


@pytest.mark.full
def test_a_shift_learns_what_differs_between_clients():
    """Full participation, clients that pull apart: only a shift's error vanishes."""
    targets = np.random.default_rng(3).normal(size=(16, 1, 1, 600)).astype(np.float32) * 10

    def error(link):
        work = federated.LocalSteps(
            lambda w, x: jnp.mean(jnp.sum((w - x) ** 2, -1)) / 2, optax.sgd(0.5)
        )
        method = federated.Method(work, link, mean="all")
        sim = federated.Simulation(method, jnp.zeros(600), 16, lambda n, r: targets[n], chunk=16)
        sim.run(60)
        return float(np.abs(sim.params - targets.mean(axis=(0, 1, 2))).max())

    codec = jaxcomp.Policy(jaxcomp.qsgd_inf(bits=4), min_size=0, min_ndim=0)
    assert error(jaxcomp.Link(codec, jaxcomp.Shift(0.4))) < 1e-3
    assert error(jaxcomp.Link(codec)) > 1e-2


@pytest.mark.full
def test_the_ledger_counts_real_messages():
    method = dataclasses.replace(world.METHOD, up=jaxcomp.Link(world.POLICY, jaxcomp.Residual()))
    exact = world.simulation(messages=world.CLIENTS)
    payloads = []
    received = exact.ledger.received
    exact.ledger.received = lambda *given: payloads.append(given[:2]) or received(*given)
    report = exact.round()
    came, found = payloads[0]
    like = exact.params
    total = 0
    for row in np.flatnonzero(came):
        one = jax.tree.map(lambda x, row=row: np.asarray(x[row]), found)
        total += len(jaxcomp.to_bytes(method.uplink.policy, one, like))
    assert report.up == total
    by_shape = world.simulation().round()
    assert report.accepted == by_shape.accepted > 0
    # A message has a head; the ledger of shapes leaves it out.
    limit = jaxcomp.message_limit(method.uplink.policy, like)
    assert by_shape.up // report.accepted < limit
    assert report.up <= report.accepted * limit


def test_clients_that_return_get_what_they_missed():
    sim = world.simulation(dataclasses.replace(world.METHOD, sampling=federated.Everyone()))
    whole = sum(x.nbytes for x in jax.tree.leaves(sim.params))
    first, second = sim.run(2)
    assert first.down == whole * world.CLIENTS
    one = jaxcomp.wire_bytes(world.DOWN, sim.params)
    assert second.down == one * world.CLIENTS
    ledger = sim.ledger
    ledger.fetched(np.arange(5), 2)
    for _ in range(2):
        ledger.announced(
            server.step(
                sim.method,
                server.round_key(sim.key, 0),
                sim.state,
                server.nothing(sim.method, sim.params),
                server.Weights(jnp.float32(1), jnp.float32(1)),
            )[1],
            moved=True,
        )
    assert ledger.fetched(np.array([0]), 4) == 2 * one
    # Three and more messages are more bytes than the parameters.
    assert ledger.fetched(np.array([39]), 4) == min(3 * one, whole)
