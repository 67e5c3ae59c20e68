"""A client's work in a round: steps of a local optimizer from the server's parameters."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp.transforms import worker_round
from jaxcomp.types import Array, PyTree

Loss = Callable[[PyTree, Any], Array]
Signal = Callable[[PyTree, PyTree], PyTree]


@dataclasses.dataclass(frozen=True)
class LocalSteps:
    """Steps of an optax optimizer, one for each of a client's batches.

    `θ ← φ`, then `θ ← θ + optimizer(∇loss(θ, batch))` for each batch.

    Args:
        loss: `loss(params, batch)`, a scalar: the mean over the examples of a batch.
        optimizer: any optax transformation that takes the descent step itself.
        keep: whether the optimizer's state stays with the client from round to round; else each
            round begins with a new one.
        offsets: whether a client's parameters are kept as their differences from the server's, at
            least in float32, as `jaxcomp.local_updates` does: a round then has its bits, and
            parameters in bfloat16 lose no small steps. What is sent is that difference.

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
    offsets: bool = False

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
        own = worker_round.start(params) if self.offsets else params
        own, inner, losses = self.train(params, own, kept, batches, steps)
        return worker_round.here(params, own) if self.offsets else own, inner, losses

    def update(
        self, signal: Signal, params: PyTree, kept: PyTree, batches: Any, steps: Array | int
    ) -> tuple[PyTree, PyTree, Array]:
        """What a client sends, what it keeps, and the loss before each step.

        Args:
            signal: `signal(start, end)`; with `offsets` it is `φ − θ`.
            params: where the client begins.
            kept: what it kept, as `init` makes it.
            batches: arrays with a leading axis of steps.
            steps: how many of the batches are used.
        """
        own = worker_round.start(params) if self.offsets else params
        own, inner, losses = self.train(params, own, kept, batches, steps)
        sent = worker_round.delta(own, params) if self.offsets else signal(params, own)
        return sent, inner, losses

    def train(
        self,
        start: PyTree,
        own: PyTree,
        kept: PyTree,
        batches: Any,
        steps: Array | int,
        *,
        guard: bool = False,
    ) -> tuple[PyTree, PyTree, Array]:
        """The steps, of the parameters or of their differences from the start.

        Args:
            start: the server's parameters.
            own: the client's; with `offsets`, their differences from the server's.
            kept: what it kept, as `init` makes it.
            batches: arrays with a leading axis of steps.
            steps: how many of the batches are used; the loss of the others is NaN.
            guard: whether a step is left out that is not finite, as in `local_updates`.
        """

        def step(carry: tuple[PyTree, PyTree], given: Any) -> tuple[Any, Array]:
            (own, inner), (number, batch) = carry, given
            theta = worker_round.here(start, own) if self.offsets else own
            value, grads = jax.value_and_grad(self.loss)(theta, batch)
            own, inner, taken = worker_round.step(
                self.optimizer,
                grads,
                inner,
                theta,
                own,
                takes=number < steps,
                guard=guard,
                whole=not self.offsets,
            )
            return (own, inner), jnp.where(taken, value, jnp.nan)

        inner = kept if self.keep else self.optimizer.init(start)
        count = jax.tree.leaves(batches)[0].shape[0]
        numbers = jnp.arange(count, dtype=jnp.int32)
        (own, inner), losses = lax.scan(step, (own, inner), (numbers, batches))
        return own, inner if self.keep else (), losses


def difference(start: PyTree, end: PyTree) -> PyTree:
    """What a client sends by default: `φ − θ`, in the sign of a gradient."""
    return jax.tree.map(jnp.subtract, start, end)
