"""A run of a few workers as one program, for tests of the state after a non-finite step."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.mesh import per_worker

AXIS = "workers"


def runner(tx, like):
    """A program of the gradients of all steps, and of which steps are taken at all.

    It returns the last state, how many steps were skipped so far after each, whether the updates
    were all finite, and whether any of them moved.
    """
    params = {"x": jnp.zeros(like.shape[2:], like.dtype)}

    def step(state, given):
        grads, taken = given

        def own(state, grads):
            grads = {"x": grads}
            found = {"grad_fn": lambda p: grads, "full_grad_fn": lambda p: grads}
            return tx.update(grads, state, params, **found)

        updates, after = jax.vmap(own, axis_name=AXIS)(state, grads)
        after = jax.tree.map(lambda new, old: jnp.where(taken, new, old), after, state)
        x = updates["x"]
        return after, (skipped(after), jnp.isfinite(x).all(), (x != 0).any())

    @jax.jit
    def run(grads, taken):
        state = jax.vmap(lambda _: tx.init(params), axis_name=AXIS)(jnp.arange(like.shape[1]))
        return jax.lax.scan(step, state, (grads, taken))

    def call(grads, without=()):
        taken = np.ones(like.shape[0], bool)
        taken[list(without)] = False
        state, traces = run(grads, taken)
        return state, *map(np.asarray, traces)

    return call


def skipped(state):
    """The steps that all wrappers in a state have skipped."""

    def is_skip(node):
        return hasattr(node, "skipped")

    def of(node):
        if per_worker.is_per_worker(node.skipped):  # Each worker leaves out steps of its own.
            return node.skipped.tree.sum()
        return node.skipped[0]

    found = [x for x in jax.tree.leaves(state, is_leaf=is_skip) if is_skip(x)]
    return sum((of(node) for node in found), jnp.zeros((), jnp.int32))


def assert_finite(state, about=""):
    """No array of a state contains non-finite values."""
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(x.dtype, jnp.floating):
            where = about + jax.tree_util.keystr(path)
            assert np.isfinite(np.asarray(x, np.float32)).all(), where


def assert_equal(state, other, about=""):
    """Two states are the same, bit for bit."""
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(got, want, err_msg=about)
