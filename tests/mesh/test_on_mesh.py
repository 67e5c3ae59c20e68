"""`on_mesh`: frameworks that call `tx.init` get the state of all workers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp

PARAMS = {"w": jnp.eye(64)}
X = jax.random.normal(jax.random.key(0), (16, 64))
TX = optax.chain(jaxcomp.compressed_mean(jaxcomp.sign(), "data"), optax.sgd(0.1))


def alike(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert [x.sharding for x in jax.tree.leaves(one)] == [
        x.sharding for x in jax.tree.leaves(other)
    ]


def test_the_state_is_that_of_init_state(mesh):
    tx = jaxcomp.on_mesh(TX, mesh, "data")
    wanted = jaxcomp.init_state(TX, PARAMS, mesh, "data")
    alike(tx.init(PARAMS), wanted)
    alike(jaxcomp.init_state(tx, PARAMS, mesh, "data"), wanted)
    alike(jaxcomp.on_mesh(tx, mesh, "data").init(PARAMS), wanted)
    shapes = jaxcomp.place(jax.eval_shape(tx.init, PARAMS), mesh, "data")
    assert [x.sharding for x in jax.tree.leaves(shapes)] == [
        x.sharding for x in jax.tree.leaves(wanted)
    ]


def test_the_state_moves_to_other_workers(mesh):
    tx = jaxcomp.on_mesh(TX, mesh, "data")
    state = tx.init(PARAMS)
    moved = jaxcomp.resize_workers(tx, state, PARAMS, 4)
    jax.tree.map(np.testing.assert_array_equal, moved, jaxcomp.resize_workers(TX, state, PARAMS, 4))


def test_the_memory_of_one_worker_names_on_mesh(mesh):
    """In the shapes of a target for a restore, it cannot be copied to the workers."""
    with pytest.raises(ValueError, match=r"must know the number of workers.*jaxcomp\.on_mesh\(tx"):
        TX.init(PARAMS)
    top = jaxcomp.compressed_mean(jaxcomp.top_k(fraction=0.1), "data")
    shapes = jax.eval_shape(top.init, PARAMS)
    with pytest.raises(ValueError, match=r"8 workers, got that of 1 .*jaxcomp\.on_mesh\(tx, mesh"):
        jaxcomp.place(shapes, mesh, "data")
