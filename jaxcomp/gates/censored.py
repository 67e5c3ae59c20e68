"""The gate that lets through what has changed enough to matter."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp import checks
from jaxcomp.base import Feedback, Gate, Opened
from jaxcomp.numerics import norms, summing
from jaxcomp.types import Array, AxisName, PyTree


class CensoredState(NamedTuple):
    """The parameters of the last step, as `Censored` needs them.

    Attributes:
        gate_params: the parameters of the step before.
        gate_known: whether there was one.
    """

    gate_params: PyTree
    gate_known: Array


@dataclasses.dataclass(frozen=True)
class Censored(Gate):
    """A worker sends only if its gradient has changed enough since it last sent.

    Worker `m` sends iff `‖δ_m‖² > threshold · ‖θ^k − θ^{k−1}‖²`, where `δ_m` is its message: over
    `Shift`, the change against what the others already have of it. In the first step all send. With
    `L_m² ≤ threshold`, for `L_m` the smoothness of a worker's loss and lossless messages, it never
    sends twice in a row.

    Needs the parameters, `tx.update(grads, state, params)`, and keeps those of the step before.

    Args:
        threshold: `ε₁`; `0.1 / α²` for a learning rate `α` of the mean gradient.

    Raises:
        ValueError: for a negative threshold; without `Shift`; on use, without `params`.

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
        round in which some are silent costs as much as a full one, because collectives have fixed
        sizes: bytes are saved when all are, and `messages` in the state counts what a network
        that sends what there is would have carried. With stochastic gradients, whose noise never
        settles, little is censored. A message that is not finite is sent, so that it shows.
    """

    threshold: float
    closes = True
    idles = True
    measures = True

    def __post_init__(self):
        checks.number("threshold", self.threshold, 0.0)

    def check(self, feedback: Feedback) -> None:
        """Raises a `ValueError` for a feedback whose messages are not changes."""
        if not feedback.mirrors:
            raise ValueError(
                "`gate` Censored needs messages that are changes, so that silence means no "
                f"change: use Link(codec, Shift()), got {feedback!r}"
            )

    def factor(self, workers: int) -> float:
        return 1.0

    def init(self, like: PyTree) -> CensoredState:
        return CensoredState(jax.tree.map(jnp.zeros_like, like), jnp.asarray(np.False_))

    def open(
        self,
        key: Array,
        tree: PyTree,
        state: CensoredState,
        axis_name: AxisName,
        params: PyTree | None = None,
    ) -> Opened:
        if params is None:
            raise ValueError(
                "`params` must be given to the update of a Censored gate, which compares with "
                "their last step: tx.update(grads, state, params)"
            )
        moved = jax.tree.map(_difference, params, state.gate_params)
        change, unit = _norm(tree)
        step, step_unit = _norm(moved)
        bound = self.threshold**0.5 * step
        # Both sides times both units. Not `>`, so that a NaN is sent and shows.
        sends = ~(change * step_unit <= bound * unit) | ~state.gate_known
        go = lax.pmax(sends.astype(jnp.int32), axis_name) > 0
        known = CensoredState(params, jnp.ones_like(state.gate_known))
        return Opened(go, sends.astype(jnp.float32), known)


def _difference(x: Array, y: Array) -> Array:
    wide = summing.wide(x.dtype)
    return x.astype(wide) - y.astype(wide)


def _norm(tree: PyTree) -> tuple[Array, Array]:
    """The norm of a tree times a unit in which its squares are in range, and the unit."""
    unit = norms.unit(norms.largest(tree))
    return jnp.sqrt(norms.energy(tree, unit)), unit
