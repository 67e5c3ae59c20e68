"""A client's work in a round: steps of a local optimizer from the server's parameters."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp import checks
from jaxcomp.federated import control as control_
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
        optimizer: any optax transformation that takes the descent step itself. One that takes extra
            arguments gets the server's parameters `φ` as `start`.
        keep: whether the optimizer's state stays with the client from round to round; else each
            round begins with a new one.
        offsets: whether a client's parameters are kept as their differences from the server's, at
            least in float32, as `jaxcomp.local_updates` does: a round then has its bits, and
            parameters in bfloat16 lose no small steps. What is sent is that difference.
        control: whether control variates correct the steps: the optimizer then gets
            `g − cᵢ + c` for a gradient `g`, with `c` the server's and `cᵢ` the client's own. The
            method's parameters must be `jaxcomp.federated.add_control(params)`; what is sent is a
            difference of at least float32 as with `offsets`, and `cᵢ − ḡᵢ`, where `ḡᵢ` is the mean
            of the round's gradients.

    Raises:
        ValueError: if `loss` is not callable, `optimizer` is not an optax transformation, or both
            `keep` and `control` are set.

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
    control: bool = False

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
        if self.control and self.keep:
            raise ValueError(
                "`keep` must be False with control variates, which are all that a client keeps of "
                "its steps, got True"
            )

    def init(self, params: PyTree) -> PyTree:
        """A client's memory from round to round."""
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

        Raises:
            ValueError: with control variates, which `update` alone uses.
        """
        if self.control:
            raise ValueError("`control` must be False to run the steps alone, got True")
        own = worker_round.start(params) if self.offsets else params
        own, inner, losses = self.train(params, own, kept, batches, steps)
        return worker_round.here(params, own) if self.offsets else own, inner, losses

    def update(
        self,
        signal: Signal,
        params: PyTree,
        kept: PyTree,
        batches: Any,
        steps: Array | int,
        variate: PyTree = (),
    ) -> tuple[PyTree, PyTree, Array]:
        """A client's message, its memory, and the loss before each step.

        Args:
            signal: `signal(start, end)`; with `offsets` it is `φ − θ`.
            params: where the client begins.
            kept: what it kept, as `init` makes it.
            batches: arrays with a leading axis of steps.
            steps: how many of the batches are used.
            variate: the client's control variate; `()` without.
        """
        if self.control:
            return self._update_with_control(params, batches, steps, variate)
        own = worker_round.start(params) if self.offsets else params
        own, inner, losses = self.train(params, own, kept, batches, steps)
        sent = worker_round.delta(own, params) if self.offsets else signal(params, own)
        return sent, inner, losses

    def _update_with_control(
        self, params: PyTree, batches: Any, steps: Array | int, variate: PyTree
    ) -> tuple[PyTree, PyTree, Array]:
        """`update` with steps along `g − cᵢ + c`."""
        start, common = params
        optimizer = control_.correct(self.optimizer, jax.tree.map(jnp.subtract, common, variate))
        work = dataclasses.replace(
            self, optimizer=optimizer, keep=True, offsets=True, control=False
        )
        zeros = jax.tree.map(jnp.zeros_like, variate)
        inner = self.optimizer.init(start), zeros
        own, (_, total), losses = work.train(
            start, worker_round.start(start), inner, batches, steps
        )
        taken = jnp.minimum(steps, jax.tree.leaves(batches)[0].shape[0])
        sent = control_.ControlledParams(
            worker_round.delta(own, start), control_.change(variate, total, taken)
        )
        return sent, (), losses

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
                extra=extra,
            )
            return (own, inner), jnp.where(taken, value, jnp.nan)

        takes_more = isinstance(self.optimizer, optax.GradientTransformationExtraArgs)
        extra = {"start": start} if takes_more else None
        inner = kept if self.keep else self.optimizer.init(start)
        count = jax.tree.leaves(batches)[0].shape[0]
        numbers = jnp.arange(count, dtype=jnp.int32)
        (own, inner), losses = lax.scan(step, (own, inner), (numbers, batches))
        return own, inner if self.keep else (), losses


def descent(loss: Loss, learning_rate: Any) -> LocalSteps:
    """Local steps of plain descent, with a number or a schedule of the steps of a round."""
    checks.rate(learning_rate)
    return LocalSteps(loss, optax.sgd(learning_rate))


def difference(start: PyTree, end: PyTree) -> PyTree:
    """The default message of a client: `φ − θ`, in the sign of a gradient."""
    return jax.tree.map(jnp.subtract, start, end)
