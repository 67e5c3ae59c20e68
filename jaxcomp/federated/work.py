"""A client's work in a round: steps of a local optimizer from the server's parameters."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp.types import Array, PyTree

Loss = Callable[[PyTree, Any], Array]


@dataclasses.dataclass(frozen=True)
class LocalSteps:
    """Steps of an optax optimizer, one for each of a client's batches.

    `θ ← φ`, then `θ ← θ + optimizer(∇loss(θ, batch))` for each batch.

    Args:
        loss: `loss(params, batch)`, a scalar: the mean over the examples of a batch.
        optimizer: any optax transformation that takes the descent step itself.
        keep: whether the optimizer's state stays with the client from round to round; else each
            round begins with a new one.

    Raises:
        ValueError: if `loss` is not callable, or `optimizer` is not an optax transformation.

    Example:
        >>> work = LocalSteps(lambda w, x: jnp.mean((w - x) ** 2), optax.sgd(0.5))
        >>> theta, _, losses = work.run(jnp.zeros(()), (), jnp.ones((3, 4)), 3)
        >>> float(theta), losses.shape
        (1.0, (3,))

    References:
        McMahan et al., `Communication-efficient learning of deep networks from decentralized data
        <https://arxiv.org/abs/1602.05629>`_, 2017.
    """

    loss: Loss
    optimizer: optax.GradientTransformation
    keep: bool = False

    def __post_init__(self):
        if not callable(self.loss):
            raise ValueError(
                f"`loss` must be a function loss(params, batch) -> scalar, got {self.loss!r}"
            )
        if not (hasattr(self.optimizer, "init") and hasattr(self.optimizer, "update")):
            raise ValueError(
                "`optimizer` must be an optax transformation such as optax.sgd(0.1), "
                f"got {self.optimizer!r}"
            )

    def init(self, params: PyTree) -> PyTree:
        """What a client keeps from round to round."""
        return self.optimizer.init(params) if self.keep else ()

    def run(
        self, params: PyTree, kept: PyTree, batches: Any, steps: Array | int
    ) -> tuple[PyTree, PyTree, Array]:
        """The parameters after the steps, what the client keeps, and the loss before each step.

        Args:
            params: where the client begins.
            kept: what it kept, as `init` makes it.
            batches: arrays with a leading axis of steps.
            steps: how many of the batches are used; the loss of the others is NaN.
        """
        inner = kept if self.keep else self.optimizer.init(params)

        def step(carry: tuple[PyTree, PyTree], given: Any) -> tuple[Any, Array]:
            number, batch = given
            value, grads = jax.value_and_grad(self.loss)(carry[0], batch)
            updates, after = self.optimizer.update(grads, carry[1], carry[0])
            taken = optax.apply_updates(carry[0], updates), after
            active = number < steps
            carry = jax.tree.map(lambda new, old: jnp.where(active, new, old), taken, carry)
            return carry, jnp.where(active, value, jnp.nan)

        count = jax.tree.leaves(batches)[0].shape[0]
        numbers = jnp.arange(count, dtype=jnp.int32)
        (params, inner), losses = lax.scan(step, (params, inner), (numbers, batches))
        return params, inner if self.keep else (), losses


def difference(start: PyTree, end: PyTree) -> PyTree:
    """What a client sends by default: `φ − θ`, in the sign of a gradient."""
    return jax.tree.map(jnp.subtract, start, end)
