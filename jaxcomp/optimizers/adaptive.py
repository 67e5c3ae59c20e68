"""Adaptive steps of a federated server: Adagrad, Adam and Yogi as FedOpt has them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp import checks
from jaxcomp.numerics import addition, counting
from jaxcomp.optimizers import rates
from jaxcomp.types import Array, PyTree

_RULES = {
    "adagrad": lambda v, square, b2: v + square,
    "adam": lambda v, square, b2: b2 * v + (1 - b2) * square,
    "yogi": lambda v, square, b2: v - (1 - b2) * square * jnp.sign(v - square),
}
"""The next second moment, of the last one, the squared gradient and its decay."""


class AdaptiveState(NamedTuple):
    """State of `adaptive_server`.

    Attributes:
        count: the number of steps.
        momentum: `m`.
        square: `v`.
    """

    count: Array
    momentum: PyTree
    square: PyTree


def adaptive_server(
    learning_rate: Any,
    rule: str = "adam",
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    tau: float = 1e-3,
) -> optax.GradientTransformation:
    """The server's adaptive step of FedOpt, which corrects no bias.

    `m ← β₁ m + (1 − β₁) g`, `θ ← θ − η m / (√v + τ)` with `v = τ²` at first, after

    * Adagrad: `v ← v + g²`;
    * Adam: `v ← β₂ v + (1 − β₂) g²`;
    * Yogi: `v ← v − (1 − β₂) g² sign(v − g²)`.

    Optax's rules of these names correct the bias of `m` and `v`, or begin with another `v`.

    Args:
        learning_rate: `η`, a number or an optax schedule of the rounds.
        rule: "adagrad", "adam" or "yogi".
        b1: `β₁`, in [0, 1); the paper takes 0 for Adagrad.
        b2: `β₂`, in [0, 1).
        tau: `τ`, positive: how far from adaptive the steps are, in the units of `g`.

    Raises:
        ValueError: for another rule, or numbers out of range.

    Example:
        >>> server = adaptive_server(0.1, "yogi")
        >>> updates, state = server.update(jnp.ones(1), server.init(jnp.ones(1)))
        >>> updates
        Array([-0.09900501], dtype=float32)

    References:
        Reddi et al., `Adaptive federated optimization <https://arxiv.org/abs/2003.00295>`_, 2021,
        algorithm 2.

    Note:
        The moments of narrow gradients are in float32.
    """
    checks.rate(learning_rate)
    checks.choice("rule", rule, tuple(_RULES))
    checks.decay("b1", b1)
    checks.decay("b2", b2)
    checks.positive("tau", tau)

    def init_fn(params: PyTree) -> AdaptiveState:
        zeros = jax.tree.map(addition.zeros, params)
        square = jax.tree.map(lambda x: jnp.full_like(x, tau**2), zeros)
        return AdaptiveState(jnp.zeros((), jnp.int32), zeros, square)

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, AdaptiveState]:
        del params
        wide = jax.tree.map(lambda g, m: g.astype(m.dtype), updates, state.momentum)
        momentum = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.momentum, wide)
        square = jax.tree.map(lambda v, g: _RULES[rule](v, g * g, b2), state.square, wide)
        step = -rates.at(learning_rate, state.count)
        made = jax.tree.map(
            lambda m, v, g: (step.astype(m.dtype) * m / (jnp.sqrt(v) + tau)).astype(g.dtype),
            momentum,
            square,
            updates,
        )
        return made, AdaptiveState(counting.after(state.count), momentum, square)

    return optax.GradientTransformation(init_fn, update_fn)
