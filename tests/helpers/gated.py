"""Shared helpers of tests of gates: gradients, and a loop over simulated workers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp

WORKERS = 8
LIKE = {"w": jnp.zeros((32, 40)), "b": jnp.zeros(40)}
RNG = np.random.default_rng(0)
GRADS = jax.tree.map(
    lambda p: jnp.asarray(RNG.standard_normal((6, WORKERS, *p.shape)), jnp.float32), LIKE
)
IDENTITY, ALL = jaxcomp.codecs.Identity(), {"min_size": 0, "min_ndim": 0}


def gather(codec, feedback):
    return jaxcomp.Gather(jaxcomp.Link(codec, feedback))


@functools.cache
def compiled(tx):
    def step(state, grads):
        update = functools.partial(tx.update, params=LIKE)
        mean, state = jax.vmap(update, axis_name="data")(grads, state)
        return state, (jax.tree.map(lambda x: x[0], mean), state)

    def run(grads):
        state = jax.vmap(lambda _: tx.init(LIKE), axis_name="data")(jnp.arange(WORKERS))
        return jax.lax.scan(step, state, grads)[1]

    return jax.jit(run)


def run(tx, grads=GRADS):
    """Means and states of all steps, in one loop, of workers that `vmap` simulates."""
    return jax.tree.map(np.asarray, compiled(tx)(grads))


def own(tree):
    return jax.tree.map(lambda x: x[0], tree)


def total(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64).sum(0), tree)


def all_means():
    return jax.tree.map(lambda g: np.asarray(g, np.float64).mean(1).sum(0), GRADS)
