"""Memory over a graph: a step over another graph is refused, and a move sums the mirrors anew."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import graphs
from jaxcomp.mesh import per_worker
from jaxcomp.mesh.per_worker import PerWorker

WORKERS, SILENT = 8, 3
PARAMS = {"w": jnp.zeros((5, 37)), "b": jnp.zeros(3)}
EF21 = jaxcomp.Link(jaxcomp.top_k(0.3), jaxcomp.Shift())
WITHOUT = graphs.Without(graphs.Ring(), silent=(SILENT,))
RING = graphs.Ring()


def gossip(graph, link=EF21):
    return jaxcomp.gossip(optax.sgd(0.0), jaxcomp.Gossip(link, graph), "w", mixing=0.3)


def inside(state):
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x[:, None] if per_worker.marked(path) else x, state
    )


def outside(state):
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x[:, 0] if per_worker.marked(path) else x[0], state
    )


def mixed(tx, state, steps):
    """The state after some steps of the rate zero, which only mix."""

    def step(state):
        return tx.update(jax.tree.map(jnp.zeros_like, PARAMS), state, PARAMS)[1]

    axes = jax.tree_util.tree_map_with_path(
        lambda path, _: 0 if per_worker.marked(path) else None, state
    )
    run = jax.jit(jax.vmap(step, in_axes=(axes,), axis_name="w"))
    for _ in range(steps):
        state = outside(run(inside(state)))
    return state


@pytest.fixture(scope="module")
def apart():
    """A state over the ring, of workers that have mixed, and are not yet alike."""
    state = outside(
        jax.vmap(gossip(RING).init, in_axes=None, axis_name="w", axis_size=WORKERS)(PARAMS)
    )
    rng = np.random.default_rng(0)
    offset = jax.tree.map(
        lambda p: jnp.asarray(30 * rng.standard_normal((WORKERS, *p.shape)), p.dtype), PARAMS
    )
    return mixed(gossip(RING), state._replace(offset=PerWorker(offset, "offset")), 3)


def models(state):
    return np.concatenate(
        [np.asarray(x, np.float64).reshape(WORKERS, -1) for x in jax.tree.leaves(state.offset)], 1
    )


@pytest.mark.full
def test_a_step_over_another_graph_is_refused(apart):
    with pytest.raises(ValueError, match=r"(?s)the graph Without\(.*got one over Ring\(\).*resize"):
        mixed(gossip(WITHOUT), apart, 1)
    unnamed = apart._replace(memory=apart.memory.tree)
    with pytest.raises(ValueError, match=r"the graph Ring\(\), got one over an unnamed graph"):
        mixed(gossip(RING), unnamed, 1)


@pytest.mark.full
def test_a_move_to_another_graph_keeps_models_and_sums_mirrors_anew(apart):
    tx = gossip(WITHOUT)
    moved = jaxcomp.resize_workers(tx, apart, PARAMS, WORKERS)
    np.testing.assert_array_equal(models(moved), models(apart))
    (matrix,) = WITHOUT.matrices(WORKERS)
    old, new = (state.memory.tree.feedback for state in (apart, moved))
    for own, kept, mirror in zip(old.own.tree, new.own.tree, new.mirror.tree, strict=True):
        np.testing.assert_array_equal(own, kept)
        want = np.einsum("ij,j...->i...", matrix, np.asarray(own, np.float64))
        np.testing.assert_allclose(mirror, want, rtol=1e-5, atol=1e-5)
    after = models(mixed(tx, moved, 4))
    before, rest = models(moved), np.arange(WORKERS) != SILENT
    np.testing.assert_array_equal(after[SILENT], before[SILENT])
    np.testing.assert_allclose(after[rest].mean(0), before[rest].mean(0), rtol=0, atol=1e-4)
    apart_by = [np.linalg.norm(x[rest] - x[rest].mean(0)) for x in (before, after)]
    assert apart_by[1] < 0.8 * apart_by[0]
    same = jaxcomp.resize_workers(gossip(RING), apart, PARAMS, WORKERS)
    assert jax.tree.all(jax.tree.map(lambda x, y: x is y, same, apart))


@pytest.mark.full
def test_graph_and_number_of_workers_change_together(apart):
    tx = gossip(graphs.metropolis([(0, 1), (1, 2)], workers=3))
    moved = jaxcomp.resize_workers(tx, apart, PARAMS, 3)
    for own, mirror in zip(*(x.tree for x in moved.memory.tree.feedback), strict=True):
        np.testing.assert_allclose(own, mirror, rtol=1e-4, atol=1e-4)
    mixed(tx, moved, 1)
    with pytest.raises(ValueError, match="`state` must be a state of `tx`"):
        jaxcomp.resize_workers(gossip(RING, jaxcomp.qsgd_inf(bits=4)), apart, PARAMS, WORKERS)


def test_a_checkpoint_names_its_graph(apart):
    from flax import serialization

    stored = serialization.to_bytes(apart)
    back = serialization.from_bytes(apart, stored)
    assert jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x, y), back, apart))
    other = jaxcomp.resize_workers(gossip(WITHOUT), apart, PARAMS, WORKERS)
    with pytest.raises(ValueError, match=r"must hold 'on_Without_\w+' .*got \['on_Ring_\w+'\]"):
        serialization.from_bytes(other, stored)
    names = [
        {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)}
        for state in (apart, other)
    ]
    memory = {name for name in names[0] if name.startswith(".memory")}
    assert memory
    assert not memory & names[1]


def test_links_without_mirrors_go_on_over_another_graph():
    free = jaxcomp.qsgd_inf(bits=4)
    states = [
        jax.tree.structure(jax.eval_shape(gossip(graph, free).init, PARAMS))
        for graph in (RING, WITHOUT)
    ]
    assert states[0] == states[1]
