"""Adam whose variance is frozen, so that its momentum may be compressed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp.backend import conditional
from jaxcomp.misuse import own_gradients
from jaxcomp.optimizers import means, moments, rates
from jaxcomp.transforms import branches
from jaxcomp.types import Array, AxisName, PyTree


class OneBitAdamState(NamedTuple):
    """State of `scale_by_one_bit_adam`.

    Attributes:
        count: steps taken.
        mu: the first moment, which all workers share.
        nu: the second one; frozen from step `freeze_step` on.
        dense: the state of the mean in the warm-up.
        compressed: that of the mean afterwards.
    """

    count: Array
    mu: PyTree
    nu: PyTree
    dense: Any
    compressed: Any


class _Scaled(NamedTuple):
    updates: PyTree
    mu: PyTree
    nu: PyTree
    dense: Any
    compressed: Any


def scale_by_one_bit_adam(
    dense: optax.GradientTransformation,
    compressed: optax.GradientTransformation,
    axis_name: AxisName,
    *,
    freeze_step: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """Adam on dense means at first, then on compressed means of momentum over a frozen variance.

    Up to step `freeze_step` this is `optax.scale_by_adam` on the dense mean. From then on `v` stays
    as it is, each worker sends `b1·m + (1 − b1)·gᵢ`, and their compressed mean is the next `m`,
    which every worker has; the update is `m/(√v̂ + ε)`. Of the two means, a step runs only its own.

    It takes the place of `compressed_mean` and `optax.scale_by_adam` in a chain, and is given local
    gradients as that.

    Args:
        dense: the mean of the warm-up, such as `compressed_mean(Dense(), axis_name)`.
        compressed: that of momentum, with error feedback if its codec is biased.
        axis_name: the mapped axis of both.
        freeze_step: how many steps of warm-up; some multiples of `1/(1 − b2)`.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: `ε`.

    Raises:
        ValueError: for something that is no transformation, or settings out of range.

    Example:
        >>> import jaxcomp
        >>> link = jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual())
        >>> tx = scale_by_one_bit_adam(
        ...     dense=jaxcomp.compressed_mean(jaxcomp.Dense(), "data"),
        ...     compressed=jaxcomp.compressed_mean(jaxcomp.TwoShot(link, link), "data"),
        ...     axis_name="data",
        ...     freeze_step=5000,
        ... )

    References:
        Tang et al., `1-bit Adam: communication efficient large-scale training with Adam's
        convergence speed <https://arxiv.org/abs/2102.02888>`_, 2021.

    Note:
        The warm-up corrects both moments as Adam does, and the variance is frozen as corrected,
        `v̂ = v/(1 − b2^T)`, so that the steps do not change their length where it ends; the momentum
        is not corrected after it. The published code corrects nowhere, which for a warm-up of
        several thousand steps is the same after it.

        An element without any gradient in the warm-up stays as it is afterwards: one bit cannot say
        zero, and it would be divided by `ε` alone. The published code has such momentum masked by
        hand.
    """
    exact, lossy = means.check("dense", dense), means.check("compressed", compressed)
    adam = moments.Adam(freeze_step, b1, b2, eps)

    def init_fn(params: PyTree) -> Any:
        return OneBitAdamState(
            count=jnp.zeros((), jnp.int32),
            mu=jax.tree.map(jnp.zeros_like, params),
            nu=jax.tree.map(jnp.zeros_like, params),
            dense=exact.init(params),
            compressed=lossy.init(params),
        )

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        own_gradients.check(updates, axis_name)

        def warm_up(
            grads: PyTree, count: Array, state: OneBitAdamState, params: PyTree | None
        ) -> _Scaled:
            mean, after = exact.update(grads, state.dense, params, **extra)
            mu, nu = adam.first(mean, state.mu), adam.second(mean, state.nu)
            scaled = jax.tree.map(jnp.divide, adam.unbiased(mu, count), adam.root(nu, count))
            return _Scaled(scaled, mu, nu, after, state.compressed)

        def frozen(
            grads: PyTree, count: Array, state: OneBitAdamState, params: PyTree | None
        ) -> _Scaled:
            del count
            own = moments.seen(adam.first(grads, state.mu), state.nu)
            mean, after = lossy.update(own, state.compressed, params, **extra)
            mu = moments.seen(mean, state.nu)
            scaled = jax.tree.map(jnp.divide, mu, adam.root(state.nu, freeze_step))
            return _Scaled(scaled, mu, state.nu, state.dense, after)

        count = rates.after(state.count)
        early = conditional.uniform(count <= freeze_step, axis_name)
        state = state._replace(
            dense=branches.fitted(exact, state.dense, state.mu),
            compressed=branches.fitted(lossy, state.compressed, state.mu),
        )
        made = conditional.either(early, warm_up, frozen, updates, count, state, params)
        return made.updates, OneBitAdamState(count, *made[1:])

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
