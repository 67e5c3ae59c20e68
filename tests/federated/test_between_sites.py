"""DiLoCo and its relatives between sites have the bits of `local_updates` over the same workers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import algorithms, federated
from jaxcomp.optimizers import delayed_nesterov

SITES, STEPS, ROUNDS = 3, 4, 3
FOUR, SPARSE = jaxcomp.qsgd_inf(bits=4), jaxcomp.chunk_top_k(16, 128)
INNER = optax.adamw(1e-2)


def loss(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) @ params["out"] - y) ** 2)


def first():
    draw = np.random.default_rng(0)
    shapes = {"w": (64, 48), "b": (48,), "out": (48, 40)}
    return {k: draw.normal(0, 0.1, shape).astype(np.float32) for k, shape in shapes.items()}


def batches(numbers, round):
    draws = [np.random.default_rng([number, round]) for number in numbers]
    x, y = (np.stack([d.normal(size=(STEPS, 8, n)) for d in draws]) for n in (64, 40))
    return x.astype(np.float32), y.astype(np.float32)


def over_workers(tx):
    """The parameters after the rounds of a transformation over the sites."""
    mesh = jax.make_mesh((SITES,), ("sites",), axis_types=(jax.sharding.AxisType.Auto,))
    params = jax.tree.map(jnp.asarray, first())
    state = jaxcomp.init_state(tx, params, mesh, "sites")
    specs = (P(), jaxcomp.state_specs(state, "sites"))

    def step(params, state, batch):
        own = jax.tree.map(lambda x: x[0], batch)
        grads = jax.grad(loss)(jaxcomp.view(params, state), own)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    run = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(*specs, P("sites")), out_specs=specs, check_vma=False
        )
    )
    for round in range(ROUNDS):
        data = batches(range(SITES), round)
        for number in range(STEPS):
            batch = jax.tree.map(lambda x, number=number: x[:, number], data)
            params, state = run(params, state, batch)
    return params


def between_sites(method):
    sim = federated.Simulation(method, first(), SITES, batches, key=3)
    sim.run(ROUNDS)
    return sim.params


same = {"every": STEPS, "inner": INNER, "key": 3}
METHODS = {
    "diloco": (
        federated.diloco(FOUR, loss, inner=INNER),
        algorithms.diloco(jaxcomp.Gather(FOUR), "sites", **same),
    ),
    "dense": (
        federated.diloco(None, loss, inner=INNER),
        algorithms.diloco(jaxcomp.Dense(), "sites", **same),
    ),
    "muloco": (
        federated.muloco(jaxcomp.blockwise(bits=4), loss, learning_rate=0.02),
        algorithms.muloco(
            jaxcomp.blockwise(bits=4), "sites", learning_rate=0.02, every=STEPS, key=3
        ),
    ),
    "sparseloco": (
        federated.sparseloco(SPARSE, loss, inner=INNER),
        algorithms.sparseloco(SPARSE, "sites", **same),
    ),
    "sparseloco, senders": (
        federated.sparseloco(SPARSE, loss, inner=INNER, over="senders"),
        algorithms.sparseloco(SPARSE, "sites", over="senders", **same),
    ),
}
TWO = ("diloco", "sparseloco, senders")


def streams(codec, reducer, **given):
    """Streaming DiLoCo between sites, and over workers."""
    every = STEPS * given["fragments"]
    return (
        federated.streaming_diloco(codec, loss, inner=INNER, **given),
        algorithms.streaming_diloco(reducer, "sites", **(same | {"every": every}), **given),
    )


@pytest.mark.parametrize(
    "name", [*TWO, *(pytest.param(m, marks=pytest.mark.full) for m in METHODS if m not in TWO)]
)
def test_bits_are_those_of_local_updates(name):
    method, tx = METHODS[name]
    got, want = between_sites(method), over_workers(tx)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert not np.array_equal(got["w"], first()["w"])


@pytest.mark.parametrize(
    ("fragments", "delay"),
    [
        pytest.param(2, 0, marks=pytest.mark.full),
        (2, 2),
        pytest.param(1, 2, marks=pytest.mark.full),
    ],
)
def test_streaming_has_the_bits_of_local_updates(fragments, delay):
    """Fragments in turn, and steps that are taken before the exchange has ended."""
    method, tx = streams(FOUR, jaxcomp.Gather(FOUR), fragments=fragments, delay=delay, mix=0.0)
    got, want = between_sites(method), over_workers(tx)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert not np.array_equal(got["w"], first()["w"])


@pytest.mark.full
def test_streaming_with_a_mix_is_that_of_local_updates():
    """To rounding: sites know the centre's step as the difference of two centres."""
    method, tx = streams(None, jaxcomp.Dense(), fragments=2, delay=1, mix=0.5)
    got, want = between_sites(method), over_workers(tx)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), got, want)
    moved = np.abs(np.asarray(got["w"]) - first()["w"]).max()
    assert moved > 1e-2


@pytest.mark.parametrize(
    ("fragments", "delay"), [(1, 2), pytest.param(2, 0, marks=pytest.mark.full)]
)
def test_steps_that_are_not_finite_are_left_out(fragments, delay):
    """One NaN in the delay's batches, or in an unsent fragment, costs its step alone."""
    method = federated.streaming_diloco(
        FOUR, loss, fragments=fragments, delay=delay, mix=0.5, inner=INNER
    )

    def spoilt(numbers, round):
        x, y = batches(numbers, round)
        if round == 1:
            x[0, STEPS - 1] = np.nan
        return x, y

    sim = federated.Simulation(method, first(), SITES, spoilt)
    assert [report.accepted for report in sim.run(5)] == [SITES] * 5
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(sim.params))


@pytest.mark.full
def test_one_array_streams_and_unused_batches_are_not_touched():
    """Clients that use fewer steps take the delay's from those, whatever comes after them."""
    method = federated.streaming_diloco(
        None, lambda w, x: jnp.mean((w - x) ** 2), fragments=1, delay=1, inner=optax.sgd(0.25)
    )

    def padded(value):
        def given(numbers, round):
            del round
            x = np.full((len(numbers), 4, 1, 2), value, np.float32)
            x[:, :3] = np.arange(1, 4)[:, None, None]
            return x

        return given

    found = []
    for value in (0.0, 1e6):
        steps = lambda numbers, round: np.full(len(numbers), 3)  # noqa: E731
        sim = federated.Simulation(method, jnp.zeros(2), 2, padded(value), steps=steps)
        sim.run(3)
        found.append(np.asarray(sim.params))
    np.testing.assert_array_equal(*found)
    assert 0.5 < found[0][0] < 3


@pytest.mark.full
def test_a_round_of_fragments_sends_one_of_them():
    """Bytes both ways, and what the server keeps of each."""
    method, _ = streams(FOUR, jaxcomp.Gather(FOUR), fragments=3, delay=0, mix=0.0)
    sim = federated.Simulation(method, first(), SITES, batches, key=3)
    reports = sim.run(4)
    sizes = sorted(4 * x.size for x in jax.tree.leaves(first()))
    # All sites get the whole first; then what has moved: three leaves, a fragment each.
    downs = [report.down // SITES for report in reports]
    assert downs[0] == sum(sizes)
    assert sorted(downs[1:]) == sizes
    assert len(sim.state.optimizer) == len(sim.state.mirror) == 3
    assert len({report.up for report in reports[:3]}) == 3


def test_clients_that_stream_keep_their_parameters():
    for wrong, match in (
        ({"work": federated.LocalSteps(loss, INNER)}, "`work` must be LocalSteps"),
        ({"mix": 1.0}, "`mix` must be below 1"),
        ({"delay": -1}, "`delay` must be"),
        ({"fragments": 0}, "`fragments` must be"),
    ):
        kept = federated.LocalSteps(loss, INNER, keep=True, offsets=True)
        with pytest.raises(ValueError, match=match):
            federated.Method(**({"work": kept, "up": FOUR, "fragments": 2} | wrong))
    method = federated.streaming_diloco(FOUR, loss, fragments=2, delay=STEPS)
    sim = federated.Simulation(method, first(), SITES, batches)
    with pytest.raises(ValueError, match="`batches` must have more steps than the delay, 4, got 4"):
        sim.run(1)
    old = federated.Faults(old=0.5, longest=2)
    with pytest.raises(ValueError, match="`faults` must have no old parameters"):
        federated.Simulation(method, first(), SITES, batches, faults=old)


def test_a_mean_over_senders_divides_each_element_by_its_senders():
    """Three sites send different elements of one leaf; the server takes their sum as its step."""
    work = federated.LocalSteps(lambda w, x: jnp.sum(w * x), optax.sgd(1.0))
    codec = jaxcomp.Policy(jaxcomp.top_k(fraction=2 / 6), min_size=0, min_ndim=1)
    method = federated.Method(work, codec, mean="senders")
    data = np.array([[[9, 8, 0, 0, 0, 0]], [[7, 0, 5, 0, 0, 0]], [[0, 4, 0, 3, 0, 0]]], np.float32)
    weights = np.array([1.0, 3.0, 2.0])
    sim = federated.Simulation(
        method, np.zeros(6, np.float32), 3, lambda n, _: data[n], weights=weights
    )
    sim.run(1)
    sent = data[:, 0]
    want = (weights[:, None] * sent).sum(0) / np.maximum((weights[:, None] * (sent != 0)).sum(0), 1)
    np.testing.assert_allclose(sim.params, -want, rtol=1e-6)


def test_a_mean_over_senders_needs_a_sparsifier():
    with pytest.raises(ValueError, match="`mean` must be 'participants' or 'all'"):
        federated.Method(federated.LocalSteps(loss, INNER), FOUR, mean="senders")


def test_offsets_keep_small_steps_of_narrow_parameters():
    """Eight steps of 1/1024 at 1, where bfloat16 has steps of 1/128."""
    batch = jnp.ones((8, 1))
    one = jnp.ones(1, jnp.bfloat16)
    for offsets, moved in ((False, 0.0), (True, 8 / 1024)):
        work = federated.LocalSteps(
            lambda w, x: jnp.sum(w * x), optax.sgd(1 / 1024), offsets=offsets
        )
        signal = federated.Method(work, FOUR).signal
        sent, _, _ = work.update(signal, one, (), batch, 8)
        np.testing.assert_array_equal(np.asarray(sent, np.float32), np.float32(moved))


def test_weights_of_unequal_sites():
    weigh = federated.tokens_squared_per_step
    assert weigh({"tokens": 100, "steps": 4, "loss": 3.0}) == 2500
    assert weigh({"tokens": 0, "steps": 0}) == 0
    for wrong in ({"tokens": 3}, {"tokens": -1, "steps": 1}, {"tokens": float("nan"), "steps": 1}):
        with pytest.raises(ValueError, match="`reported"):
            weigh(wrong)


@pytest.mark.parametrize("spread", [0.0, 0.25])
def test_delayed_nesterov_is_the_written_algorithm(spread):
    every, beta, rate = 3, 0.9, 0.5
    tx = delayed_nesterov(rate, beta, every, spread)
    draw, m, buffer, theta = np.random.default_rng(0), 0.0, 0.0, 0.0
    params = jnp.zeros(())
    state = tx.init(params)
    for number in range(10):
        g = draw.normal()
        updates, state = tx.update(jnp.float32(g), state, params)
        params = params + updates
        buffer += g
        if (number + 1) % every == 0:
            m, buffer = beta * m + buffer / every, 0.0
            theta -= rate * ((1 - spread * every + spread) * beta * m + g / every)
        else:
            theta -= rate * (spread * beta * m + g / every)
        np.testing.assert_allclose(params, theta, rtol=1e-5, atol=1e-6)


def test_delayed_nesterov_of_each_gradient_is_nesterov():
    ours, theirs = delayed_nesterov(0.7, 0.9, 1), optax.sgd(0.7, 0.9, nesterov=True)
    states = [tx.init(jnp.zeros(3)) for tx in (ours, theirs)]
    for number in range(4):
        g = jnp.sin(jnp.arange(3.0) + number)
        (one, states[0]), (other, states[1]) = (
            tx.update(g, s) for tx, s in zip((ours, theirs), states, strict=True)
        )
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_offsets_send_the_difference_alone():
    work = federated.LocalSteps(loss, INNER, offsets=True)
    with pytest.raises(ValueError, match="`signal` must be the difference"):
        federated.Method(work, FOUR, signal=lambda start, end: end)


def test_a_mean_over_senders_of_float64():
    with jax.enable_x64(True):
        work = federated.LocalSteps(lambda w, x: jnp.sum(w * x), optax.sgd(1.0))
        codec = jaxcomp.Policy(jaxcomp.top_k(fraction=0.5), min_size=0, min_ndim=1)
        method = federated.Method(work, codec, mean="senders")
        data = np.array([[[3.0, 1e-9, 0, 1]], [[0, 5, 7, 0]], [[1, 0, 0, 2]]])
        sim = federated.Simulation(method, np.zeros(4), 3, lambda n, _: data[n])
        sim.run(1)
        sent = np.array([[3, 0, 0, 1], [0, 5, 7, 0], [1, 0, 0, 2]])
        want = sent.sum(0) / (sent != 0).sum(0)
        np.testing.assert_allclose(sim.params, -want, rtol=1e-14)
        assert sim.params.dtype == np.float64
