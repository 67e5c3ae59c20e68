"""An estimate of the mean gradient that compressed gradient differences update."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp import checks
from jaxcomp.backend import axes, conditional
from jaxcomp.base import Codec, Gate, Reducer
from jaxcomp.exchange import guarding
from jaxcomp.feedback import Link
from jaxcomp.layout.policy import Policy
from jaxcomp.misuse import own_gradients
from jaxcomp.numerics import addition, noise
from jaxcomp.reducers.dense import Dense
from jaxcomp.transforms.mean import compressed_mean
from jaxcomp.types import Array, AxisName, PyTree

_Mean = optax.GradientTransformationExtraArgs


class DifferencesState(NamedTuple):
    """State of `compressed_differences`, the same on every worker except the memory of the means.

    Attributes:
        gate_key: the raw key that the gate draws from.
        step: steps taken.
        gate: the gate's own state.
        point: the parameters at which the last gradients were taken.
        estimate: the estimate of the mean gradient at `point`.
        full: the state of the mean of full gradients.
        change: the state of the mean of differences.
    """

    gate_key: Array
    step: Array
    gate: PyTree
    point: PyTree
    estimate: PyTree
    full: Any
    change: Any


def compressed_differences(
    codec: "Codec | Policy | Link | Reducer",
    axis_name: AxisName,
    *,
    restart: Gate,
    full: "Codec | Policy | Link | Reducer | None" = None,
    key: Any = 0,
) -> optax.GradientTransformationExtraArgs:
    """Estimates the mean gradient from compressed gradient differences.

    In the first step, and in steps in which the gate opens, it returns the mean of the gradients.
    In the others it returns the last estimate plus the compressed mean of `∇fᵢ(x) − ∇fᵢ(x⁻)`, both
    on the same minibatch.

    The update takes `grad_fn`, a function from parameters to this worker's gradient on the
    minibatch of this step, as optax's line searches take `value_fn`:
    `tx.update(grads, state, params, grad_fn=grad_fn)`. A `weight` counts in both means.

    Args:
        codec: the codec of the differences.
        axis_name: the mapped axis.
        restart: the gate that decides when full gradients are sent; it must open for all workers
            alike, such as `jaxcomp.gates.Coin(p)` or `jaxcomp.gates.Every(k)`.
        full: the codec or reducer of the full gradients; None sends them dense.
        key: a seed or key, the same on all workers.

    Raises:
        ValueError: for a gate that opens for some workers only; on use, without `params` or
            `grad_fn`.

    Note:
        A step whose estimate is not finite leaves the state unchanged. `grad_fn` is called once,
        and only in steps that send differences.
    """
    _check_restart(restart)
    whole = compressed_mean(Dense() if full is None else full, axis_name, key=key)
    change = compressed_mean(codec, axis_name, key=key)
    seed = noise.words(key)

    def init_fn(params: PyTree) -> Any:
        return DifferencesState(
            gate_key=jnp.array(seed),
            step=jnp.zeros((), jnp.uint32),
            gate=restart.init(params),
            point=jax.tree.map(jnp.array, params),
            estimate=jax.tree.map(addition.zeros, params),
            full=whole.init(params),
            change=change.init(params),
        )

    def update_fn(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        grad_fn: Callable[[PyTree], PyTree] | None = None,
        **extra: Any,
    ) -> tuple[PyTree, Any]:
        check_two_points(params, grad_fn)
        updates = own_gradients.check(updates, axis_name)
        assert grad_fn is not None
        turn = noise.fold(state.gate_key, state.step)
        opened = restart.open(turn, updates, state.gate, axis_name, params)
        go = conditional.uniform(opened.go | (state.step == 0), axis_name)
        restarted = functools.partial(_restarted, whole, extra)
        continued = functools.partial(_continued, change, extra, grad_fn, axis_name)
        estimate, first, second = conditional.either(go, restarted, continued, updates, state)
        new = DifferencesState(
            state.gate_key, state.step + 1, opened.state, params, estimate, first, second
        )
        made = jax.tree.map(lambda y, g: addition.saturate(y, g.dtype), estimate, updates)
        return made, guarding.where_finite(guarding.all_finite(estimate), new, state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def check_two_points(params: PyTree, grad_fn: Any) -> None:
    """Raises a `ValueError` unless gradients can be taken at two points."""
    if params is None or not callable(grad_fn):
        raise ValueError(
            "`params` and `grad_fn` must be given to the update, which compares gradients at two "
            "points of one minibatch: tx.update(grads, state, params, grad_fn=lambda p: "
            f"jax.grad(loss)(p, batch)), got grad_fn={grad_fn!r}"
        )


def _check_restart(restart: Gate) -> None:
    checks.part("restart", restart, Gate)
    if restart.idles or (not restart.closes and restart.factor(2) != 1):
        raise ValueError(
            "`restart` must be a gate that opens for all workers alike, such as "
            f"jaxcomp.gates.Coin(0.1) or jaxcomp.gates.Every(10), got {restart!r}"
        )


def _restarted(
    whole: _Mean, extra: dict[str, Any], grads: PyTree, state: DifferencesState
) -> tuple[PyTree, Any, Any]:
    """The mean of full gradients, and the states of both means after it."""
    estimate, after = whole.update(grads, state.full, **extra)
    return guarding.cast_like(estimate, state.estimate), after, state.change


def _continued(
    change: _Mean,
    extra: dict[str, Any],
    grad_fn: Callable[[PyTree], PyTree],
    axis_name: AxisName,
    grads: PyTree,
    state: DifferencesState,
) -> tuple[PyTree, Any, Any]:
    """The last estimate plus the mean of the differences, and the states of both means."""
    before = grad_fn(axes.vary(state.point, axis_name))
    moved = jax.tree.map(jnp.subtract, grads, before)
    mean, after = change.update(moved, state.change, **extra)
    estimate = jax.tree.map(jnp.add, state.estimate, mean)
    return guarding.cast_like(estimate, state.estimate), state.full, after
