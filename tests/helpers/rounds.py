"""Workers that train alone for a round, on one device: problems, and a run of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp

AXIS, WORKERS = "data", 8
RNG = np.random.default_rng(0)
TARGETS = jnp.asarray(RNG.standard_normal((WORKERS, 8, 64)), jnp.float32)
CURVATURES = jnp.asarray(RNG.uniform(0.5, 1.5, (WORKERS, 8, 64)), jnp.float32)
EXACT = (TARGETS, jnp.ones_like(TARGETS))
"""Gradients without a product, which a program may or may not fuse with the sum over workers."""
PARAMS = {"w": jnp.asarray(RNG.standard_normal((8, 64)), jnp.float32)}
FOUR = {name: jnp.asarray(RNG.standard_normal((4, 64)), jnp.float32) for name in "abcd"}
EVERYTHING = jaxcomp.Policy(jaxcomp.qsgd_inf(bits=4), min_size=0, min_ndim=0)


def local_step(tx, loss_of, **settings):
    """A training step of one worker; the loss is not averaged."""

    def step(params, state, *data):
        here = jaxcomp.local(jaxcomp.view(params, state), AXIS)
        loss, grads = jax.value_and_grad(loss_of)(here, *data)
        updates, state = tx.update(grads, state, params, **settings)
        return optax.apply_updates(params, updates), state, loss

    return step


def quadratic(params, target, curvature):
    """Any tree, each leaf with `½ Σ a (x − b)²` over the rows that it has."""
    return sum(
        jnp.sum(curvature[: len(x)] * (x - target[: len(x)]) ** 2) / 2
        for x in jax.tree.leaves(params)
    )


def trained(tx, steps, params=None, loss_of=quadratic, data=(TARGETS, CURVATURES)):
    """Parameters, state and losses of every step, of workers on one device."""
    params = PARAMS if params is None else params
    workers = len(data[0])

    def everyone(tree):
        return jax.tree.map(lambda x: jnp.stack([x] * workers), tree)

    carry = everyone(params), jax.vmap(lambda _: tx.init(params), axis_name=AXIS)(data[0])
    step = jax.vmap(local_step(tx, loss_of), axis_name=AXIS)

    @jax.jit
    def run(carry):
        def one(carry, _):
            params, state, loss = step(*carry, *data)
            own = jax.vmap(jaxcomp.view)(params, state)
            return (params, state), (params, own, loss, state)

        return jax.lax.scan(one, carry, None, length=steps)[1]

    return run(carry)
