"""A round of local updates as one program: a scan over its steps, then one exchange."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import core, lax

from jaxcomp import checks
from jaxcomp.backend import axes
from jaxcomp.exchange import over_workers
from jaxcomp.mesh.gradients import local
from jaxcomp.transforms.local_steps import LocalUpdatesState, RoundOf
from jaxcomp.transforms.view import view
from jaxcomp.types import Array, AxisName, PyTree


def local_round(
    tx: optax.GradientTransformation,
    value_and_grad: Callable[[PyTree, Any], tuple[Any, PyTree]],
    axis_name: AxisName,
) -> Callable[[PyTree, Any, Any], tuple[PyTree, Any, Any]]:
    """All steps of a round of `local_updates` as one function, with one exchange at its end.

    The result is that of the steps one by one, bit for bit. The exchange is not in a conditional,
    so the program of a round is smaller, and simulations are faster. With fragments, a delay,
    synchronous steps or an `every` that is no number, exchanges are conditional, and happen where
    they would step by step.

    Give it the state at the beginning of a round, and finish a round that a restored state is in
    the middle of step by step. If it ends earlier than the batches, all workers leave out the steps
    up to the last, which exchanges, and count them in `state.skipped`.

    Args:
        tx: `jaxcomp.local_updates`, possibly wrapped. A number `every` must be that of the batches.
        value_and_grad: `value, grads = value_and_grad(params, batch)` of this worker alone, as from
            `jax.value_and_grad(loss_fn)`. It must not average the loss over the workers.
        axis_name: the mapped axis of the workers.

    Returns:
        A function `params, state, values = run(params, state, batches)` to be called inside the
        mapped function. A worker's `batches` have a leading axis of steps: `data_parallel` splits
        an array `[workers * steps, batch, …]` into them. `values` has what `value_and_grad`
        returned in each step; floating scalars are averaged over the workers, in one collective.

    Raises:
        ValueError: if there is no batch, `state` holds no state of `local_updates`, or the number
            of batches is not that of the steps of a round.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.local_updates(optax.sgd(0.1), None, "data", every=4)
        >>> loss_fn = lambda w, x: ((x @ w - 1) ** 2).mean()
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> w = jnp.ones(3)
        >>> state = jaxcomp.init_state(tx, w, mesh, "data")
        >>> run = local_round(tx, jax.value_and_grad(loss_fn), "data")
        >>> run = jaxcomp.data_parallel(run, mesh, "data")
        >>> w, state, losses = run(w, state, jnp.ones((4, 8, 3)))
        >>> losses.shape, int(state.taken)
        ((4,), 4)
    """
    checks.transformation("tx", tx)
    tx = optax.with_extra_args_support(tx)

    def run(params: PyTree, state: Any, batches: Any) -> tuple[PyTree, Any, Any]:
        axes.require(axis_name)
        lengths = {jnp.shape(x)[0] for x in jax.tree.leaves(batches)}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(
                "`batches` must have a leading axis of the same number of steps in every array, "
                f"got lengths {sorted(lengths)}"
            )
        inside = _exchanges_inside(state)
        (steps,) = lengths

        def one(carry: tuple[PyTree, Any], batch: Any, exchange: Any) -> tuple[Any, Any]:
            params, state = carry
            here = local(view(params, state), axis_name)
            value, grads = value_and_grad(here, batch)
            updates, state = tx.update(grads, state, params, exchange=exchange)
            return (optax.apply_updates(params, updates), state), value

        if inside:
            carry, values = lax.scan(lambda c, x: one(c, x, None), (params, state), batches)
            return *carry, _averaged(values, axis_name)
        first = jax.tree.map(lambda x: x[:-1], batches)
        last = jax.tree.map(lambda x: x[-1], batches)

        def alone(state: Any, batch: Any) -> tuple[Any, Any]:
            (_, state), value = one((params, state), batch, RoundOf(steps, last=False))
            return state, value

        state, values = lax.scan(alone, state, first)
        carry, value = one((params, state), last, RoundOf(steps, last=True))
        values = jax.tree.map(lambda xs, x: jnp.concatenate([xs, x[None]]), values, value)
        return *carry, _averaged(values, axis_name)

    return run


def steps_alone(state: PyTree) -> int:
    """The number of next steps in which no exchange of `local_updates` is due.

    Those steps may run a program without collectives, `tx.update(..., exchange=False)`; the one
    after them must not. It counts the steps in which a pseudo-gradient is taken, and those in which
    its mean moves the centre after a delay.

    It reads a number from the devices, and so waits for the last step: call it once for all the
    steps that it counts.

    Args:
        state: the state of the transformation, outside of the mapped function, alone or inside of
            that of a chain or a wrapper.

    Raises:
        ValueError: if `state` holds no state of `local_updates`, or is traced.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.local_updates(optax.sgd(0.1), None, "data", every=4)
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> steps_alone(jaxcomp.init_state(tx, jnp.ones(3), mesh, "data"))
        3
    """
    lefts = [node.left for node in _states(state)]
    if any(isinstance(left, core.Tracer) for left in lefts):
        raise ValueError(
            "`state` must be that of a step that has ended, got a traced one; inside a program, "
            "tx.update(..., exchange=None) decides while it runs"
        )
    return min(int(np.asarray(left).min()) for left in lefts)


def _exchanges_inside(state: Any) -> bool:
    """Whether a round may have exchanges before its last step, or a delay after one."""

    def inside(node: LocalUpdatesState) -> bool:
        pending = [fragment.pending for fragment in node.fragments]
        return len(pending) > 1 or any(part != () for part in (*pending, node.shared, node.period))

    return any(inside(node) for node in _states(state))


def _states(state: PyTree) -> list[LocalUpdatesState]:
    """The states of `local_updates` in this one."""

    def is_state(node: Any) -> bool:
        return isinstance(node, LocalUpdatesState)

    found = [node for node in jax.tree.leaves(state, is_leaf=is_state) if is_state(node)]
    if not found:
        raise ValueError(
            "`state` must hold the state of jaxcomp.local_updates, which exchanges once a round, "
            f"got {type(state).__name__}"
        )
    return found


def _averaged(values: PyTree, axis_name: AxisName) -> PyTree:
    """Floating scalars of each step as means over the workers."""
    leaves, treedef = jax.tree.flatten(values)
    at = [n for n, x in enumerate(leaves) if x.ndim == 1 and jnp.issubdtype(x.dtype, jnp.floating)]
    own: tuple[Array, ...] = tuple(axes.vary(leaves[n], axis_name) for n in at)
    for n, mean in zip(at, over_workers.mean(own, axis_name), strict=True):
        leaves[n] = mean
    return jax.tree.unflatten(treedef, leaves)
