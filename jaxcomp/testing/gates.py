"""The contract of a gate."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.base import Gate
from jaxcomp.numerics import noise
from jaxcomp.testing.programs import SEED
from jaxcomp.testing.settings import assert_hashable


def check_gate(gate: Gate, *, workers: int = 4, steps: int = 24) -> None:
    """Checks all properties of a gate, on workers simulated by `vmap`.

    The gate is a hashable setting; its state keeps structure, shapes and dtypes; the state and `go`
    are the same on all workers; a weight is 0 or 1, and 0 on all workers in a closed round; a gate
    with `closes=False` never closes; and its factor is at least 1.

    Args:
        gate: the gate.
        workers: the number of simulated workers.
        steps: the number of steps.

    Raises:
        AssertionError: with the first property that does not hold.

    Example:
        >>> import jaxcomp
        >>> check_gate(jaxcomp.gates.Bernoulli(0.5))
    """
    assert_hashable(gate)
    if not isinstance(gate, Gate):
        raise AssertionError(f"a gate must derive from jaxcomp.Gate, got {gate!r}")
    like = {"w": jnp.ones((3, 4))}
    factor = gate.factor(workers)
    if not (isinstance(factor, float) and np.isfinite(factor) and factor >= 1):
        raise AssertionError(
            f"{gate!r} must have a float of at least 1 as its factor, got {factor}"
        )

    def step(state: Any, number: Any) -> tuple:
        def one(worker):
            key = noise.fold(noise.raw(SEED), number)
            tree = {"w": jnp.cos(number + 0.1 * worker) * like["w"]}
            params = jax.tree.map(lambda x: x * jnp.sin(0.5 * number), like)
            opened = gate.open(key, tree, state, "data", params)
            weight = jnp.ones(()) if opened.weight is None else opened.weight
            return opened.go, weight, opened.state

        go, weight, new = jax.vmap(one, axis_name="data")(jnp.arange(workers))
        leaves = [go, *jax.tree.leaves(new)]
        alike = jnp.stack([jnp.all(leaf == leaf[:1]) for leaf in leaves]).all()
        return jax.tree.map(lambda x: x[0], new), (go[0], weight, alike)

    start = gate.init(like)
    for got, want in zip(
        jax.tree.leaves(jax.eval_shape(step, start, 0)[0]), jax.tree.leaves(start), strict=True
    ):
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            raise AssertionError(
                f"{gate!r} must keep its state's shapes and dtypes: from {want.dtype}"
                f"{list(want.shape)} to {got.dtype}{list(got.shape)}"
            )
    _, seen = jax.jit(lambda s: jax.lax.scan(step, s, jnp.arange(steps)))(start)
    go, weight, alike = map(np.asarray, seen)
    if not alike.all():
        raise AssertionError(f"{gate!r} must return the same result and state on all workers")
    if not np.isin(weight, (0, 1)).all():
        raise AssertionError(f"{gate!r} must have weights of 0 or 1, got {np.unique(weight)}")
    chosen = (weight == 0).any()
    if chosen and not (go == weight.any(axis=1)).all():
        raise AssertionError(f"{gate!r} must be open if and only if a worker participates")
    if not gate.closes and not go.all():
        raise AssertionError(f"{gate!r} must be open in every step, since `closes` is False")
