"""AdaGrad for regularized losses: composite mirror descent, and dual averaging."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp import checks
from jaxcomp.numerics import summing
from jaxcomp.optimizers import rates, regularizers
from jaxcomp.optimizers.regularizers import Regularizer
from jaxcomp.types import Array, PyTree


class ProxAdagradState(NamedTuple):
    """State of `prox_adagrad`; float32 at least, since a narrow sum of squares soon stands still.

    Attributes:
        count: steps taken.
        sum_of_squares: of all gradients, element by element.
    """

    count: Array
    sum_of_squares: PyTree


class RdaAdagradState(NamedTuple):
    """State of `rda_adagrad`; float32 at least, as for `prox_adagrad`.

    Attributes:
        count: steps taken.
        sum_of_gradients: of all steps.
        sum_of_squares: of the same, element by element.
    """

    count: Array
    sum_of_gradients: PyTree
    sum_of_squares: PyTree


def prox_adagrad(
    learning_rate: optax.ScalarOrSchedule,
    regularizer: Regularizer | None = None,
    *,
    delta: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """AdaGrad by composite mirror descent: a step, then the proximal point in the step's metric.

    `H = δ + √Σg²`, `z = x − ηg/H`, `x ← argmin ½⟨x − z, H(x − z)⟩ + ηφ(x)`, over the gradients of
    the loss without `φ`. What the regularizer makes zero is zero bit for bit. Chain it last: weight
    decay and clipping belong before it, and whatever scales a step after it undoes the zeros.

    Args:
        learning_rate: `η`, or a schedule of it, which then scales `φ` too.
        regularizer: `φ`; None for plain AdaGrad.
        delta: `δ`; at zero, an element without any gradient yet does not move.

    Raises:
        ValueError: for settings that are negative or no regularizer; on use, without `params`.

    Example:
        >>> import jaxcomp
        >>> from jaxcomp.optimizers.regularizers import L1
        >>> tx = optax.chain(
        ...     jaxcomp.compressed_mean(jaxcomp.threshold_ternary(), axis_name="data"),
        ...     prox_adagrad(0.1, L1(1e-4)),
        ... )
        >>> params = jnp.array([1.0, 0.02])
        >>> alone = prox_adagrad(0.25, L1(0.5))
        >>> updates, _ = alone.update(jnp.array([1.0, 0.1]), alone.init(params), params)
        >>> params + updates
        Array([0.625, 0.   ], dtype=float32)

    References:
        Duchi, Hazan and Singer, `Adaptive subgradient methods for online learning and stochastic
        optimization <https://jmlr.org/papers/v12/duchi11a.html>`_, 2011.

    Note:
        Guarantee: for convex losses, regret of `O(√T)` against the best point, with the gradients'
        own geometry. The groups of `GroupLasso` and the balls are leaves. Under a mesh axis that is
        manual and that leaves are sharded over, they would be the shards.
    """
    _check(learning_rate, regularizer, delta)

    def init_fn(params: PyTree) -> Any:
        return ProxAdagradState(jnp.zeros((), jnp.int32), _zeros(params))

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        del extra
        _require(params)
        rate = rates.at(learning_rate, state.count)
        squares = jax.tree.map(_add_square, updates, state.sum_of_squares)

        def step(g: Array, s: Array, x: Array) -> Array:
            metric, eta = delta + jnp.sqrt(s), rate.astype(s.dtype)
            move = _divided(-eta * g.astype(s.dtype), metric)
            if regularizer is not None:  # Else it is not rounded to the parameters' own digits.
                wide = x.astype(s.dtype)
                move = regularizer.nearest(wide + move, metric, eta) - wide
            return _seen(move, s).astype(x.dtype)

        moves = jax.tree.map(step, updates, squares, params)
        return moves, ProxAdagradState(rates.after(state.count), squares)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def rda_adagrad(
    learning_rate: optax.ScalarOrSchedule,
    regularizer: Regularizer | None = None,
    *,
    delta: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """AdaGrad by regularized dual averaging: the best point for the mean of all gradients so far.

    `H = δ + √Σg²`, `G = Σg`, `x ← argmin ⟨ηG, x⟩ + ½⟨x, Hx⟩ + ηtφ(x)` after `t` steps, over the
    gradients of the loss without `φ`. Its weight grows with `t`, so that more elements are exactly
    zero than by `prox_adagrad`. Chain it last, as that.

    Args:
        learning_rate: `η`. Of a schedule, the present value scales the whole sum of gradients, so
            one that does not increase is meant, and a constant is the paper's.
        regularizer: `φ`; None for plain dual averaging.
        delta: `δ`; at zero, an element without any gradient yet is zero.

    Raises:
        ValueError: for settings that are negative or no regularizer; on use, without `params`.

    Example:
        >>> from jaxcomp.optimizers.regularizers import L1
        >>> params, tx = jnp.zeros(2), rda_adagrad(0.1, L1(0.5))
        >>> updates, _ = tx.update(jnp.array([-1.0, 0.4]), tx.init(params), params)
        >>> params + updates
        Array([0.05, 0.  ], dtype=float32)

    References:
        Duchi, Hazan and Singer, `Adaptive subgradient methods for online learning and stochastic
        optimization <https://jmlr.org/papers/v12/duchi11a.html>`_, 2011; Xiao, `Dual averaging
        methods for regularized stochastic learning and online optimization
        <https://jmlr.org/papers/v11/xiao10a.html>`_, 2010.

    Note:
        Guarantee: as of `prox_adagrad`. Dual averaging starts at zero, wherever the parameters did:
        those given in the beginning count for nothing but the first gradient. They are asked for
        because an update is a difference.
    """
    _check(learning_rate, regularizer, delta)

    def init_fn(params: PyTree) -> Any:
        return RdaAdagradState(jnp.zeros((), jnp.int32), _zeros(params), _zeros(params))

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        del extra
        _require(params)
        rate, count = rates.at(learning_rate, state.count), rates.after(state.count)
        squares = jax.tree.map(_add_square, updates, state.sum_of_squares)
        sums = jax.tree.map(lambda g, t: t + g.astype(t.dtype), updates, state.sum_of_gradients)

        def step(total: Array, s: Array, x: Array) -> Array:
            metric, eta = delta + jnp.sqrt(s), rate.astype(s.dtype)
            best = _divided(-eta * total, metric)
            if regularizer is not None:
                best = regularizer.nearest(best, metric, eta * count.astype(s.dtype))
            return _seen(best - x.astype(s.dtype), s).astype(x.dtype)

        moves = jax.tree.map(step, sums, squares, params)
        return moves, RdaAdagradState(count, sums, squares)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check(
    learning_rate: optax.ScalarOrSchedule, regularizer: Regularizer | None, delta: float
) -> None:
    rates.check(learning_rate)
    regularizers.check(regularizer)
    checks.number("delta", delta, 0.0)


def _require(params: PyTree | None) -> None:
    if params is None:
        raise ValueError(
            "`params` must be given to the update, since the next ones are a proximal point and "
            "not a step: tx.update(grads, state, params), got None"
        )


def _zeros(params: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, summing.wide(x.dtype)), params)


def _add_square(g: Array, s: Array) -> Array:
    return s + jnp.square(g.astype(s.dtype))


def _seen(move: Array, squares: Array) -> Array:
    """The move, and NaN where the sum of squares is not finite: divided by that, it would be zero,
    and no guard would keep the sum out of the state."""
    return jnp.where(jnp.isfinite(squares), move, jnp.nan)


def _divided(x: Array, metric: Array) -> Array:
    """`x/metric`; zero where there is no metric, for then there has been no gradient."""
    return jnp.where(metric > 0, x / jnp.where(metric > 0, metric, 1), 0)
