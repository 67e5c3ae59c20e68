"""The gate in which a worker sends only if its gradient has changed enough."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp import checks
from jaxcomp.base import Feedback, Gate, Opened
from jaxcomp.numerics import addition, norms
from jaxcomp.types import Array, AxisName, PyTree


class CensoredState(NamedTuple):
    """The parameters of the last step, as `Censored` needs them.

    Attributes:
        gate_params: the parameters of the previous step.
        gate_known: whether there was a previous step.
    """

    gate_params: PyTree
    gate_known: Array


@dataclasses.dataclass(frozen=True)
class Censored(Gate):
    """A worker sends only if its gradient has changed enough since it last sent.

    Worker `m` sends iff `‖δ_m‖² > threshold · ‖θ^k − θ^{k−1}‖²`, where `δ_m` is its message: with
    `Shift`, the difference from the gradient that the others already have. In the first step all
    workers send. With lossless messages and `L_m² ≤ threshold`, where `L_m` is the smoothness of
    the worker's loss, a worker never sends twice in a row.

    It needs the parameters, `tx.update(grads, state, params)`, and stores those of the previous
    step.

    Args:
        threshold: `ε₁`; `0.1 / α²` for a learning rate `α` of the mean gradient.

    Raises:
        ValueError: for a negative threshold, or without `Shift`; on use, without `params`.

    Example:
        >>> import jaxcomp, optax
        >>> changes = jaxcomp.Gather(jaxcomp.Link(jaxcomp.codecs.Identity(), jaxcomp.Shift()))
        >>> tx = optax.chain(
        ...     jaxcomp.compressed_mean(changes, "data", gate=Censored(0.1 / 0.05**2)),
        ...     optax.sgd(0.05, momentum=0.4),
        ... )

    References:
        Chen, Blum and Sadler, `Communication-efficient federated learning via censored heavy ball
        <https://arxiv.org/abs/2209.11944>`_, 2022; Chen et al., `LAG
        <https://arxiv.org/abs/1805.09965>`_, 2018.

    Note:
        The paper's sum over `M` workers is a mean here, so its `0.1 / (α² M²)` is `0.1 / α²`. A
        round in which only some workers send costs as much as a full one, because collectives have
        fixed sizes: bytes are saved when no worker sends. `messages` in the state counts the
        messages that a network without fixed sizes would have carried. With stochastic gradients,
        the noise makes most messages large enough to be sent. A non-finite message is sent, so
        that it is noticed.
    """

    threshold: float
    closes = True
    idles = True
    measures = True

    def __post_init__(self):
        checks.number("threshold", self.threshold, 0.0)

    def check(self, feedback: Feedback) -> None:
        """Raises a `ValueError` for a feedback whose messages are not differences."""
        if not feedback.facts.mirrors:
            raise ValueError(
                "`gate=Censored(...)` needs messages that are differences, so that an unsent "
                f"message means no change, got {feedback!r}: use Link(codec, Shift())"
            )

    def factor(self, workers: int) -> float:
        return 1.0

    def init(self, like: PyTree) -> CensoredState:
        return CensoredState(jax.tree.map(jnp.zeros_like, like), jnp.asarray(np.False_))

    def open(
        self,
        key: Array,
        tree: Any,
        state: CensoredState,
        axis_name: AxisName,
        params: PyTree = None,
    ) -> Opened:
        if params is None:
            raise ValueError(
                "`params` must be given to the update with a Censored gate, which compares with "
                "their last change, got None: use tx.update(grads, state, params)"
            )
        wide = jax.tree.map(lambda x: x.astype(addition.wide(x.dtype)), (params, state.gate_params))
        moved = jax.tree.map(jnp.subtract, *wide)
        change, unit = _norm(tree)
        step, step_unit = _norm(moved)
        bound = self.threshold**0.5 * step
        # Multiply both sides by both units. A negated `<=` instead of `>` sends a NaN.
        sends = ~(change * step_unit <= bound * unit) | ~state.gate_known
        go = lax.pmax(sends.astype(jnp.int32), axis_name) > 0
        known = CensoredState(params, jnp.ones_like(state.gate_known))
        return Opened(go, sends.astype(jnp.float32), known)


def _norm(tree: PyTree) -> tuple[Array, Array]:
    """The norm of a tree times a unit that keeps its squares in range, and the unit."""
    unit = norms.unit(norms.largest(tree))
    return jnp.sqrt(norms.energy(tree, unit)), unit
