"""Control variates: what corrects the local steps of clients whose data differ."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp.backend import xla
from jaxcomp.exchange.guarding import cast_like
from jaxcomp.numerics import addition, exact
from jaxcomp.types import Array, PyTree


class ControlledParams(NamedTuple):
    """The parameters of a method with control variates: `LocalSteps(control=True)`.

    Codecs and policies see both trees, under the paths `params/…` and `control/…`.

    Attributes:
        params: the model's parameters.
        control: `c`, the mean of the clients' control variates, at least in float32.
    """

    params: PyTree
    control: PyTree


def add_control(params: PyTree) -> ControlledParams:
    """Parameters with a control variate of zeros, for a method such as `scaffold`.

    Args:
        params: the model's parameters, or their shapes and dtypes.

    Example:
        >>> add_control({"w": jnp.ones(2)}).control["w"]
        Array([0., 0.], dtype=float32)
    """

    def zeros(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, addition.wide(leaf.dtype))
        return addition.zeros(leaf)

    return ControlledParams(params, jax.tree.map(zeros, params))


def trained(control: bool, params: PyTree) -> PyTree:
    """The parameters that optimizers step, of a method with or without control variates.

    Raises:
        ValueError: for control variates and parameters without one.
    """
    if not control:
        return params
    if not isinstance(params, ControlledParams):
        raise ValueError(
            "`params` must be jaxcomp.federated.add_control(params) for a method with control "
            f"variates, got {type(params).__name__}"
        )
    return params.params


def correct(
    optimizer: optax.GradientTransformation, correction: PyTree
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that adds a correction to each gradient, and sums the gradients.

    Its state is `(state, sum)`, which begins with that of the optimizer and zeros.
    """
    inner = optax.with_extra_args_support(optimizer)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        own, total = state
        total = jax.tree.map(lambda s, g: s + g.astype(s.dtype), total, updates)
        wide = jax.tree.map(lambda g, by: g.astype(by.dtype) + by, updates, correction)
        updates, own = inner.update(cast_like(wide, updates), own, params, **extra)
        return updates, (own, total)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def change(variate: PyTree, total: PyTree, steps: Array) -> PyTree:
    """`cᵢ − ḡᵢ`, in the sign of a gradient; zero without a step.

    Args:
        variate: `cᵢ`.
        total: the sum of the round's gradients.
        steps: their number.
    """
    # Whether a quotient is a product with a rounded reciprocal, and whether that is fused with the
    # difference, would depend on the program.
    taken = jnp.maximum(steps, 1)
    part = exact.reciprocal(taken.astype(jnp.float32))

    def one(c: Array, s: Array) -> Array:
        mean = s / taken if s.dtype == jnp.float64 else xla.block_fma(s * part)
        return jnp.where(steps > 0, c - mean, 0)

    return jax.tree.map(one, variate, total)


def without_unsent(update: ControlledParams, unsent: PyTree) -> ControlledParams:
    """A client's update, to which the residual adds what it holds of its parameters alone.

    The change of a control variate is taken from what was sent of it so far, which already counts
    the rest as missing: with the residual it would be sent twice.
    """
    if unsent is None:
        return update
    return update._replace(control=jax.tree.map(jnp.subtract, update.control, unsent.control))


def move(variate: PyTree, sent: ControlledParams, weight: Array) -> PyTree:
    """A client's control variate once its message is accepted: it moves by what was sent.

    Args:
        variate: `cᵢ`.
        sent: the message as the server decodes it.
        weight: how much of the client's weight the message has.
    """
    return jax.tree.map(
        lambda c, s: c - xla.block_fma(weight.astype(c.dtype) * s), variate, sent.control
    )


def server_update(
    optimizer: optax.GradientTransformation,
    mean: ControlledParams,
    state: PyTree,
    params: ControlledParams,
    participation: Array,
) -> tuple[ControlledParams, PyTree]:
    """The server's step: `c` moves by the mean over all clients, those without a message too.

    Args:
        optimizer: that of the model's parameters.
        mean: the mean of the messages.
        state: the optimizer's state.
        params: the parameters.
        participation: the weight by which the mean was divided, over that of all clients.
    """
    moved, state = optimizer.update(mean.params, state, params.params)
    control = jax.tree.map(lambda x: -participation.astype(x.dtype) * x, mean.control)
    return ControlledParams(moved, control), state
