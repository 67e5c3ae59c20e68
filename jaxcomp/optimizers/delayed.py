"""An outer optimizer for pseudo-gradients that arrive one by one, some of them late."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp import checks
from jaxcomp.numerics import counting
from jaxcomp.optimizers import rates
from jaxcomp.types import Array, PyTree


class DelayedNesterovState(NamedTuple):
    """State of `delayed_nesterov`.

    Attributes:
        count: the number of steps.
        momentum: `m`.
        buffer: the sum of the gradients since the momentum last moved.
    """

    count: Array
    momentum: PyTree
    buffer: PyTree


def delayed_nesterov(
    learning_rate: Any, momentum: float = 0.9, every: int = 4, spread: float = 0.0
) -> optax.GradientTransformation:
    """Nesterov momentum that moves once in `N` gradients, by their mean; the others step plainly.

    `b ← b + g`; in every `N`-th step `m ← β m + b/N`, `θ ← θ − η ((1 − cN + c) β m + g/N)`,
    `b ← 0`; in all others `θ ← θ − η (c β m + g/N)`.

    A late gradient then changes the momentum as part of a mean, not alone. It has its full weight
    with `staleness=0.0` only, which is not the default of `jaxcomp.federated.Method`.

    Args:
        learning_rate: `η`, a number or an optax schedule of the steps.
        momentum: `β`.
        every: `N`; with 1 it is Nesterov momentum.
        spread: `c` in [0, 1/N]: how much of the momentum each of the other steps takes.

    Raises:
        ValueError: for a number of gradients that is not positive, or a momentum or `spread` out of
            range.

    Example:
        >>> import jaxcomp
        >>> method = jaxcomp.federated.Method(
        ...     jaxcomp.federated.LocalSteps(lambda w, x: jnp.mean((w - x) ** 2), optax.sgd(0.1)),
        ...     jaxcomp.qsgd_inf(bits=4),
        ...     server=delayed_nesterov(0.7, every=4),
        ...     staleness=0.0,
        ... )

    References:
        Liu et al., `Asynchronous Local-SGD training for language modeling
        <https://arxiv.org/abs/2401.09135>`_, 2024, algorithm 3, as coded by the authors of HALoS.
    """
    checks.rate(learning_rate)
    checks.decay("momentum", momentum)
    checks.integer("every", every, 1, counting.LAST)
    checks.number("spread", spread, 0.0, 1 / every)

    def init_fn(params: PyTree) -> DelayedNesterovState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return DelayedNesterovState(jnp.zeros((), jnp.int32), zeros, zeros)

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, DelayedNesterovState]:
        del params
        ends = state.count % every == every - 1
        buffer = jax.tree.map(jnp.add, state.buffer, updates)
        moved = jax.tree.map(lambda m, b: momentum * m + b / every, state.momentum, buffer)
        after = jax.tree.map(lambda new, old: jnp.where(ends, new, old), moved, state.momentum)
        part = jnp.where(ends, 1 - spread * every + spread, spread) * momentum
        step = -rates.at(learning_rate, state.count)
        made = jax.tree.map(
            lambda m, g: (step * (part * m + g / every)).astype(g.dtype), after, updates
        )
        buffer = jax.tree.map(lambda b: jnp.where(ends, jnp.zeros_like(b), b), buffer)
        return made, DelayedNesterovState(counting.after(state.count, every), after, buffer)

    return optax.GradientTransformation(init_fn, update_fn)
