"""Narrow parameters move as float32 parameters do, under every method."""

import functools
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import methods

import jaxcomp

WORKERS, STEPS = 2, 8
RNG = np.random.default_rng(0)
SIGNS = np.where(RNG.random((WORKERS, 3, 50)) < 0.5, -1, 1)
TARGETS = jnp.asarray(SIGNS[:1] * RNG.uniform(2, 3, (WORKERS, 3, 50)), jnp.float32)
"""So far away that no step reaches them: no sign of a gradient depends on rounding."""


NARROW = {d: d for d in ("bfloat16", "float16", "float32")}
WIDE = dict.fromkeys(NARROW, "float32")


def train(name, dtypes, halves=1):
    """The last parameters of each worker, of leaves with these dtypes and equal gradients.

    With two `halves`, parameters and state leave JAX between them, as in a checkpoint.
    """
    make, codec = methods.METHODS.get(name) or methods.GOSSIP[name]
    tx = make(codec and methods.IDENTITY, methods.RATE)

    def began(_):
        params = {leaf: jnp.zeros((3, 50), dtype) for leaf, dtype in dtypes.items()}
        return params, tx.init(params)

    def steps(carry, target):
        def gradient(at):
            return {leaf: at[leaf].astype("float32") - target for leaf in dtypes}

        def step(carry, _):
            params, state = carry
            grads = gradient(jaxcomp.view(params, state))
            points = {"grad_fn": gradient, "full_grad_fn": gradient}
            updates, state = tx.update(grads, state, params, **points)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, carry, length=STEPS // halves)[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        over_workers = functools.partial(jax.vmap, axis_name=methods.AXIS)
        carry = jax.jit(over_workers(began))(TARGETS)
        program = jax.jit(over_workers(steps))
        for _ in range(halves):
            carry = jax.tree.map(np.asarray, program(carry, TARGETS))
        return jax.vmap(jaxcomp.view, axis_name=methods.AXIS)(*carry)


@pytest.mark.core("ef21", "local_sgd")
@pytest.mark.parametrize("name", methods.METHODS | methods.GOSSIP)
def test_narrow_parameters_move_as_float32_does_and_resume_bit_for_bit(name):
    narrow, wide = train(name, NARROW), train(name, WIDE)
    for leaf, found in narrow.items():
        assert found.dtype == leaf
        assert np.abs(wide[leaf]).min() > 0.05
        # Each step rounds once.
        off = STEPS * float(jnp.finfo(leaf).eps)
        np.testing.assert_allclose(found.astype("float32"), wide[leaf], rtol=off)
    chex.assert_trees_all_equal(train(name, NARROW, halves=2), narrow)
