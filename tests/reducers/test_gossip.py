"""Gossip: its law, its bytes, messages that are not finite, and what it refuses."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import graphs
from jaxcomp.exchange import reduce, state as state_
from jaxcomp.exchange.plan import Plan
from jaxcomp.layout import trees
from jaxcomp.numerics import noise

AXIS, WORKERS = "workers", 8
LIKE = {"w": jnp.zeros((48, 130)), "b": jnp.zeros(7), "e": jnp.zeros((0, 3))}
QSGD, SIGN, TOP = jaxcomp.qsgd_inf(bits=4), jaxcomp.sign(), jaxcomp.top_k(0.1)
RESIDUAL = jaxcomp.Link(SIGN, jaxcomp.Residual())
EF21 = jaxcomp.Link(TOP, jaxcomp.Shift())
CASES = {
    "ring, 4 bits": jaxcomp.Gossip(QSGD),
    "torus, shifts": jaxcomp.Gossip(EF21, graphs.Torus(2, 4)),
    "one peer, residuals": jaxcomp.Gossip(RESIDUAL, graphs.OnePeer()),
    "pairs": jaxcomp.Gossip(QSGD, graphs.RandomPairs()),
    "in turns": jaxcomp.Gossip(
        RESIDUAL, graphs.Alternating((graphs.Ring(), graphs.Torus(2, 4), graphs.OnePeer()))
    ),
}


STAR = jaxcomp.Gossip(QSGD, graphs.metropolis([(0, k) for k in range(1, 8)], workers=8))
"""Its centre sends seven messages a round, the others one."""


def drawn(seed, workers=WORKERS):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal((workers, *x.shape)), x.dtype), LIKE
    )


@functools.lru_cache
def runner(reducer):
    """The result of a step of all workers, with memory, and messages and payloads as stacks."""

    def step(key, tree, memory):
        found = reduce.reduce(Plan.of(reducer, tree, AXIS), key, tree, memory)
        return found.mean, found.state, found.sent, found.message

    @functools.partial(jax.vmap, in_axes=None, axis_name=AXIS, axis_size=WORKERS)
    def begin(like):
        return state_.init(Plan.of(reducer, like, AXIS))

    mapped = jax.vmap(step, in_axes=(None, 0, 0), axis_name=AXIS)
    return jax.jit(mapped), begin(LIKE)


@pytest.mark.core("pairs")
@pytest.mark.parametrize("name", CASES)
def test_a_worker_gets_the_weighted_sum_of_what_its_neighbours_sent(name):
    reducer = CASES[name]
    run, memory = runner(reducer)
    matrices = reducer.graph.matrices(WORKERS)
    plan = Plan.of(reducer, LIKE, sizes=(WORKERS,)).layout
    for number in range(3):
        means, memory, sent, _ = run(noise.fold(noise.raw(3), number), drawn(number), memory)
        if (
            reducer.uplink.feedback.facts.mirrors
        ):  # The result is the mirror: the neighbours' memories.
            sent = [x[:, 0] for x in memory.feedback.own.tree]
        choices = matrices if reducer.graph.drawn else [matrices[number % len(matrices)]]
        stacks = jax.vmap(lambda tree: tuple(trees.stacks(plan, tree)[0]))(means)
        assert len(stacks) == len(sent) == 2  # One of a codec, and one of leaves sent whole.
        errors = [
            max(
                np.abs(np.asarray(got) - np.einsum("ij,j...->i...", matrix, own)).max()
                for got, own in zip(stacks, sent, strict=True)
            )
            for matrix in choices
        ]
        assert min(errors) < 1e-5, errors


def compiled(tx, workers=WORKERS, like=LIKE):
    mesh = jax.make_mesh((workers,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def update(grads, state, params):
        return tx.update(jaxcomp.local(grads, "data"), state, params)

    run = jaxcomp.data_parallel(update, mesh, "data", batch_argnums=())
    state = jax.eval_shape(lambda: jaxcomp.init_state(tx, like, mesh, "data"))
    return run.lower(like, state, like).compile({"xla_backend_optimization_level": 0})


@pytest.mark.core("ring, 4 bits")
@pytest.mark.parametrize("name", ["ring, 4 bits", "torus, shifts", "one peer, residuals", "star"])
def test_a_program_sends_a_payload_to_each_neighbour_and_nothing_to_all(name):
    reducer = CASES.get(name, STAR)
    moved = jaxcomp.collective_bytes(compiled(jaxcomp.gossip(optax.sgd(0.1), reducer, "data")))
    payload = jaxcomp.wire_bytes(reducer.uplink.codec, LIKE)
    degree = graphs.degree(reducer.graph, WORKERS)
    assert moved == {"collective-permute": math.ceil(degree * payload)}
    assert jaxcomp.wire_bytes(reducer, LIKE, workers=WORKERS) == math.ceil(degree * payload)


def test_bytes_do_not_grow_with_the_workers_and_a_plan_says_so():
    reducer = jaxcomp.Gossip(QSGD)
    few, many = (jaxcomp.wire_bytes(reducer, LIKE, workers=n) for n in (8, 64))
    assert few == many == 2 * jaxcomp.wire_bytes(reducer.uplink.codec, LIKE)
    assert jaxcomp.wire_bytes(reducer, LIKE, workers=1) == 0
    assert jaxcomp.wire_bytes(jaxcomp.Gossip(QSGD, graphs.OnePeer()), LIKE, workers=64) == few // 2
    assert "Gossip" in str(jaxcomp.describe(reducer, LIKE, workers=8))
    far = jaxcomp.planning.Network(bandwidth=12.5e6, latency=0.05)
    ways = {"gossip": reducer, "two shots": jaxcomp.TwoShot(QSGD, QSGD)}
    found = jaxcomp.plan(1_000_000, 64, far, codecs=ways, link_only=True)
    times = {one.way.name: one.mean for one in found.forecasts}
    assert found.best.way.name == "gossip"
    assert times["gossip"] < times["two shots"] / 10  # Two messages against 126.


def test_a_star_is_planned_by_its_centre_and_counted_on_average():
    assert graphs.degree(STAR.graph, 8) == 14 / 8
    assert graphs.degree(graphs.Without(graphs.Ring(), silent=(3,)), 8) == 12 / 8
    assert graphs.degree(graphs.RandomPairs(), 5) == 4 / 5
    slow = jaxcomp.planning.Network(bandwidth=1e6, latency=0.0)
    ways = {"star": STAR, "all": jaxcomp.Gossip(QSGD, graphs.Complete())}
    found = jaxcomp.plan(100_000, 8, slow, codecs=ways, link_only=True)
    times = {one.way.name: one.mean for one in found.forecasts}
    # Both send seven payloads one after another from their busiest worker.
    np.testing.assert_allclose(times["star"], times["all"], rtol=1e-3)


@pytest.mark.core("none")
@pytest.mark.parametrize("link", [QSGD, RESIDUAL, EF21], ids=["none", "residual", "shift"])
def test_a_message_that_is_not_finite_stays_on_its_worker(link):
    """Sender and receivers leave it out alike: all else is as if that worker were silent."""
    reducer, bad = jaxcomp.Gossip(link), 2
    run, memory = runner(reducer)
    _, memory, *_ = run(noise.raw(0), drawn(0), memory)
    tree = drawn(1)
    spoilt = {**tree, "w": tree["w"].at[bad, 3, 5].set(jnp.nan)}
    means, after, *_ = run(noise.raw(1), spoilt, memory)
    others = [worker for worker in range(WORKERS) if worker != bad]
    for leaf in jax.tree.leaves(means):
        assert np.isfinite(np.asarray(leaf)[others]).all()
    for leaf in jax.tree.leaves(after.feedback):
        assert np.isfinite(np.asarray(leaf)).all()
    own, kept = (jax.tree.leaves(_own(m.feedback)) for m in (memory, after))
    for old, new in zip(own, kept, strict=True):
        np.testing.assert_array_equal(np.asarray(old)[bad], np.asarray(new)[bad])
    if reducer.uplink.feedback.facts.mirrors:
        matrix = reducer.graph.matrices(WORKERS)[0]
        mirror, memories = (np.asarray(x.tree[0], np.float64) for x in after.feedback[::-1])
        np.testing.assert_allclose(
            mirror, np.einsum("ij,j...->i...", matrix, memories), rtol=0, atol=1e-5
        )


def _own(feedback):
    return feedback.own if hasattr(feedback, "own") and hasattr(feedback, "mirror") else feedback


def test_what_cannot_work_is_refused_with_what_would():
    ring = jaxcomp.Gossip(QSGD)
    with pytest.raises(ValueError, match=r"(?s)same mean.*jaxcomp\.gossip\(inner, reducer"):
        jaxcomp.compressed_mean(ring, AXIS)
    with pytest.raises(ValueError, match="`outer` must be a reducer of payloads"):
        jaxcomp.Hierarchical(jaxcomp.Dense(), ring)
    with pytest.raises(ValueError, match="gossip mixes parameters, got MomentumCorrection"):
        jaxcomp.Gossip(jaxcomp.Link(TOP, jaxcomp.MomentumCorrection()))
    with pytest.raises(ValueError, match="every worker uses by itself"):
        jaxcomp.Gossip(jaxcomp.terngrad(shared=True))
    tx = jaxcomp.gossip(optax.sgd(0.1), jaxcomp.Gossip(EF21, graphs.OnePeer()), AXIS)
    step = jax.vmap(lambda x: tx.update(x, tx.init(x), x), axis_name=AXIS)
    with pytest.raises(ValueError, match="must not change from round to round with"):
        step(jnp.zeros((4, 32, 32)))
    with pytest.raises(ValueError, match="`graph` must be a"):
        jaxcomp.Gossip(QSGD, "ring")
    with pytest.raises(ValueError, match=r"`reducer` must be a jaxcomp\.Gossip"):
        jaxcomp.gossip(optax.sgd(0.1), jaxcomp.Dense(), AXIS)
    with pytest.raises(ValueError, match="`mixing`"):
        jaxcomp.gossip(optax.sgd(0.1), ring, AXIS, mixing=1.5)
    with pytest.raises(ValueError, match=r"`stay` must be False without jaxcomp\.Shift"):
        jaxcomp.gossip(optax.sgd(0.1), ring, AXIS, stay=True)
    with pytest.raises(ValueError, match="`tracking` must be False with"):
        jaxcomp.gossip(optax.sgd(0.1), ring, AXIS, tracking=True, every=2)
