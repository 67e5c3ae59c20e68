"""AdaGrad for regularized losses: composite mirror descent, and dual averaging."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp import checks
from jaxcomp.numerics import addition, counting
from jaxcomp.optimizers import rates, regularizers
from jaxcomp.optimizers.regularizers import Regularizer
from jaxcomp.types import Array, PyTree


class ProxAdagradState(NamedTuple):
    """State of `prox_adagrad`; at least float32, since a narrow sum of squares soon stops growing.

    Attributes:
        count: the number of steps.
        sum_of_squares: the elementwise sum of all squared gradients.
    """

    count: Array
    sum_of_squares: PyTree


class RdaAdagradState(NamedTuple):
    """State of `rda_adagrad`; at least float32, as for `prox_adagrad`.

    Attributes:
        count: the number of steps.
        sum_of_gradients: the sum of all gradients.
        sum_of_squares: the elementwise sum of all squared gradients.
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

    `H = δ + √Σg²`, `z = x − ηg/H`, `x ← argmin ½⟨x − z, H(x − z)⟩ + ηφ(x)`, where `g` is the
    gradient of the loss without `φ`. Elements that the regularizer makes zero are exactly zero.
    Chain it last: put weight decay and clipping before it, because a later scaling of the step
    would destroy the zeros.

    Args:
        learning_rate: `η`, or a schedule of it, which then scales `φ` too.
        regularizer: `φ`; None for plain AdaGrad.
        delta: `δ`; at zero, an element that has had no gradient yet does not move.

    Raises:
        ValueError: for negative settings, or a `regularizer` of another kind; on use, without
            `params`.

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
        own geometry. `GroupLasso` and the balls treat each leaf as one group. If leaves are sharded
        over a manual mesh axis, each shard would be a group instead.
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
            move = _divide(-eta * g.astype(s.dtype), metric)
            if regularizer is not None:  # Else keep the unrounded step.
                wide = x.astype(s.dtype)
                move = regularizer.nearest(wide + move, metric, eta) - wide
            return _spoil(move, s).astype(x.dtype)

        moves = jax.tree.map(step, updates, squares, params)
        return moves, ProxAdagradState(counting.after(state.count), squares)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def rda_adagrad(
    learning_rate: optax.ScalarOrSchedule,
    regularizer: Regularizer | None = None,
    *,
    delta: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """AdaGrad by regularized dual averaging, which uses the sum of all gradients so far.

    `H = δ + √Σg²`, `G = Σg`, `x ← argmin ⟨ηG, x⟩ + ½⟨x, Hx⟩ + ηtφ(x)` after `t` steps, where `g` is
    the gradient of the loss without `φ`. The weight of `φ` grows with `t`, so more elements are
    exactly zero than with `prox_adagrad`. Chain it last, like `prox_adagrad`.

    Args:
        learning_rate: `η`, or a schedule of it, whose current value scales the whole sum of
            gradients. Use a constant, as in the paper, or a schedule that does not increase.
        regularizer: `φ`; None for plain dual averaging.
        delta: `δ`; at zero, an element that has had no gradient yet is zero.

    Raises:
        ValueError: for negative settings, or a `regularizer` of another kind; on use, without
            `params`.

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
        Guarantee: as for `prox_adagrad`. Dual averaging starts at zero: the initial parameters
        affect only the first gradient. The update needs `params` because optax applies it as a
        difference.
    """
    _check(learning_rate, regularizer, delta)

    def init_fn(params: PyTree) -> Any:
        return RdaAdagradState(jnp.zeros((), jnp.int32), _zeros(params), _zeros(params))

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        del extra
        _require(params)
        rate, count = rates.at(learning_rate, state.count), counting.after(state.count)
        squares = jax.tree.map(_add_square, updates, state.sum_of_squares)
        sums = jax.tree.map(lambda g, t: t + g.astype(t.dtype), updates, state.sum_of_gradients)

        def step(total: Array, s: Array, x: Array) -> Array:
            metric, eta = delta + jnp.sqrt(s), rate.astype(s.dtype)
            best = _divide(-eta * total, metric)
            if regularizer is not None:
                best = regularizer.nearest(best, metric, eta * count.astype(s.dtype))
            return _spoil(best - x.astype(s.dtype), s).astype(x.dtype)

        moves = jax.tree.map(step, sums, squares, params)
        return moves, RdaAdagradState(count, sums, squares)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check(
    learning_rate: optax.ScalarOrSchedule, regularizer: Regularizer | None, delta: float
) -> None:
    checks.rate(learning_rate)
    regularizers.check(regularizer)
    checks.number("delta", delta, 0.0)


def _require(params: PyTree | None) -> None:
    if params is None:
        raise ValueError(
            "`params` must be given to the update, which computes a proximal point from them, got "
            "None: use tx.update(grads, state, params)"
        )


def _zeros(params: PyTree) -> PyTree:
    return jax.tree.map(
        lambda x: jnp.zeros(jnp.shape(x), addition.wide(jnp.result_type(x))), params
    )


def _add_square(g: Array, s: Array) -> Array:
    return s + jnp.square(g.astype(s.dtype))


def _spoil(move: Array, squares: Array) -> Array:
    """The move, with NaN where the sum of squares is not finite.

    Division by an infinite sum would give zero, and no guard would undo the step.
    """
    return jnp.where(jnp.isfinite(squares), move, jnp.nan)


def _divide(x: Array, metric: Array) -> Array:
    """`x/metric`; zero where the metric is zero, because there has been no gradient."""
    return jnp.where(metric > 0, x / jnp.where(metric > 0, metric, 1), 0)
