"""Projected steps, and the mean of all iterates."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp.numerics import addition
from jaxcomp.types import Array, PyTree


def projected(projection: Callable[[PyTree], PyTree]) -> optax.GradientTransformationExtraArgs:
    """Projects the next parameters onto a set: `x + u ← Π(x + u)`.

    Chain it after all transformations that change the step.

    Args:
        projection: `Π`, a function from parameters to the nearest allowed ones.

    Raises:
        ValueError: for a projection that is not a function; on use, without `params`.

    Example:
        >>> tx = projected(lambda x: optax.projections.projection_l2_ball(x, 1.0))
        >>> x = jnp.array([1.0, 0.0])
        >>> updates, _ = tx.update(jnp.array([3.0, 0.0]), tx.init(x), x)
        >>> updates
        Array([0., 0.], dtype=float32)
    """
    if not callable(projection):
        raise ValueError(
            "`projection` must be a function from parameters to parameters, such as lambda x: "
            f"optax.projections.projection_l2_ball(x, 1.0), got {projection!r}"
        )

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        del extra
        _require(params)
        inside = projection(jax.tree.map(jnp.add, params, updates))
        return jax.tree.map(jnp.subtract, inside, params), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_fn)


class AveragedState(NamedTuple):
    """State of `averaged`.

    Attributes:
        passed: the number of steps.
        average: the mean of the parameters after each step.
    """

    passed: Array
    average: PyTree


def averaged() -> optax.GradientTransformationExtraArgs:
    """Keeps the mean of all iterates: `x̄ ← x̄ + (x − x̄)/t`, at least in float32. Chain it last.

    Raises:
        ValueError: on use, without `params`.

    Example:
        >>> tx = averaged()
        >>> x = jnp.zeros(1)
        >>> _, state = tx.update(jnp.ones(1), tx.init(x), x)
        >>> average(state)
        Array([1.], dtype=float32)
    """

    def init_fn(params: PyTree) -> Any:
        start = jax.tree.map(lambda x: jnp.array(x, addition.wide(jnp.result_type(x))), params)
        return AveragedState(jnp.zeros((), jnp.int32), start)

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        del extra
        _require(params)
        passed = state.passed + 1

        def move(mean: Array, x: Array, u: Array) -> Array:
            there = (x + u.astype(x.dtype)).astype(mean.dtype)
            return mean + (there - mean) / passed.astype(mean.dtype)

        average = jax.tree.map(move, state.average, params, updates)
        return updates, AveragedState(passed, average)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def average(state: PyTree) -> PyTree:
    """The mean of all iterates, from the state of a chain with `averaged`.

    Args:
        state: the state of the chain.

    Raises:
        ValueError: if the state has no such mean.

    Example:
        >>> tx = optax.chain(optax.sgd(0.1), averaged())
        >>> average(tx.init(jnp.ones(2)))
        Array([1., 1.], dtype=float32)
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, AveragedState))
    found = [node for node in nodes if isinstance(node, AveragedState)]
    if not found:
        raise ValueError(
            "`state` must be that of a chain with jaxcomp.optimizers.averaged(), such as "
            f"jaxcomp.algorithms.dq_psgd, got {type(state).__name__} without a mean"
        )
    return found[0].average


def _require(params: PyTree | None) -> None:
    if params is None:
        raise ValueError(
            "`params` must be given to the update, got None: use tx.update(grads, state, params)"
        )
