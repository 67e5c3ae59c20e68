"""Variance-reduced gradients: corrections by a full gradient at a snapshot of the parameters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp.backend import conditional
from jaxcomp.base import Period
from jaxcomp.gates.periods import period as as_period
from jaxcomp.numerics import addition, counting
from jaxcomp.transforms.differences import check_two_points
from jaxcomp.types import Array, PyTree

_FAR, _BACK = 3 * 2**29, 2**29
"""The count of steps from which on an epoch sets it back, so that no end of an epoch overflows."""


class SnapshotState(NamedTuple):
    """State of `variance_reduced`.

    Attributes:
        taken: the number of steps, less 2²⁹ as often as an epoch begins beyond 3 · 2²⁹.
        begun: the number of steps before this epoch.
        ends: the number of steps before the next epoch.
        snapshot: the parameters of the full gradient.
        full: the full gradient there, at least in float32.
        total: the sum of the parameters after the steps of this epoch, at least in float32.
    """

    taken: Array
    begun: Array
    ends: Array
    snapshot: PyTree
    full: PyTree
    total: PyTree


def variance_reduced(
    every: "int | Period | Callable[[Array], Any]",
) -> optax.GradientTransformationExtraArgs:
    """Replaces a minibatch gradient by `∇ℓ(x) − ∇ℓ(x̃) + ∇f(x̃)`, whose variance vanishes (SVRG).

    `f` is this worker's loss on all of its data, `ℓ` that on the minibatch of this step, and `x̃`
    the mean of the iterates of the last epoch. A step takes two minibatch gradients, and the first
    of an epoch a full one too. Before a mean over workers, wrap it with `jaxcomp.per_worker`.

    The update takes both as functions: `tx.update(grads, state, params, grad_fn=grad_fn,
    full_grad_fn=full_grad_fn)`.

    Args:
        every: the steps of an epoch: a number, a schedule of the number of steps taken, or a
            `Period` without measurements, such as `jaxcomp.gates.Growing(10, 1.5)`.

    Raises:
        ValueError: for a period that measures the models' variance; on use, without `params`,
            `grad_fn` or `full_grad_fn`.

    Example:
        >>> tx = variance_reduced(every=100)
        >>> x = jnp.ones(2)
        >>> data = jnp.array([[1.0, 3.0], [3.0, 1.0]])
        >>> on_all = lambda x: x - data.mean(0)
        >>> on_one = lambda x: x - data[0]
        >>> tx.update(on_one(x), tx.init(x), x, grad_fn=on_one, full_grad_fn=on_all)[0]
        Array([-1., -1.], dtype=float32)

    References:
        Johnson and Zhang, Accelerating stochastic gradient descent using predictive variance
        reduction, 2013.
    """
    period = as_period(every)
    if period.measures:
        raise ValueError(
            "`every` must be a period that does not measure the variance of models, got "
            f"{period!r}; use a number or jaxcomp.gates.Growing(10, 1.5)"
        )

    def init_fn(params: PyTree) -> Any:
        zero, nothing = jnp.zeros((), jnp.int32), jax.tree.map(addition.zeros, params)
        copy = jax.tree.map(jnp.array, params)
        return SnapshotState(
            zero,
            jnp.zeros_like(zero),
            jnp.zeros_like(zero),
            copy,
            nothing,
            jax.tree.map(jnp.zeros_like, nothing),  # Separate, so that both may be donated.
        )

    def update_fn(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        grad_fn: Callable[[PyTree], PyTree] | None = None,
        full_grad_fn: Callable[[PyTree], PyTree] | None = None,
        **extra: Any,
    ) -> tuple[PyTree, Any]:
        del extra
        check_two_points(params, grad_fn)
        if not callable(full_grad_fn):
            raise ValueError(
                "`full_grad_fn` must be a function from parameters to this worker's gradient on "
                f"all of its data, got {full_grad_fn!r}"
            )
        assert grad_fn is not None
        assert params is not None
        state = _begun(period, state, params, full_grad_fn)
        there = grad_fn(_at(state.snapshot, params))
        reduced = jax.tree.map(
            lambda g, s, mu: (g - s + mu).astype(g.dtype), updates, there, state.full
        )
        return reduced, state._replace(taken=counting.after(state.taken))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _begun(
    period: Period,
    state: SnapshotState,
    params: PyTree,
    full_grad_fn: Callable[[PyTree], PyTree],
) -> SnapshotState:
    """The state with a new snapshot if an epoch begins with this step."""
    passed = state.taken - state.begun
    total = jax.tree.map(lambda t, x: jnp.where(passed > 0, t + x, t), state.total, params)

    def new(total: PyTree, state: SnapshotState, params: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        def mean(t: Array, x: Array) -> Array:
            after = (t / jnp.maximum(passed, 1).astype(t.dtype)).astype(x.dtype)
            return jnp.where(passed > 0, after, x)

        snapshot = jax.tree.map(mean, total, params)
        full = _at(full_grad_fn(snapshot), state.full)
        return _at(snapshot, state.snapshot), full, jax.tree.map(jnp.zeros_like, total)

    def same(total: PyTree, state: SnapshotState, params: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        del params
        return state.snapshot, state.full, total

    begins = state.taken >= state.ends
    snapshot, full, total = conditional.either(begins, new, same, total, state, params)
    length = period.steps((), state.taken)
    taken = jnp.where(begins & (state.taken > _FAR), state.taken - _BACK, state.taken)
    return SnapshotState(
        taken=taken,
        begun=jnp.where(begins, taken, state.begun),
        ends=jnp.where(begins, taken + length, state.ends),
        snapshot=snapshot,
        full=full,
        total=total,
    )


def _at(tree: PyTree, like: PyTree) -> PyTree:
    """A tree in the dtypes of another one."""
    return jax.tree.map(lambda x, other: x.astype(other.dtype), tree, like)
