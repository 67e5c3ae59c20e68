"""Adam with a frozen variance, so that its momentum can be compressed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp.backend import conditional
from jaxcomp.exchange import guarding
from jaxcomp.misuse import own_gradients
from jaxcomp.numerics import addition, counting
from jaxcomp.optimizers import means, moments
from jaxcomp.types import Array, AxisName, PyTree


class OneBitAdamState(NamedTuple):
    """State of `scale_by_one_bit_adam`.

    Attributes:
        count: the number of steps.
        mu: the first moment, the same on all workers; at least in float32.
        nu: the second moment, at least in float32; frozen from step `freeze_step` on.
        dense: the state of the mean in the warm-up.
        compressed: the state of the mean after the warm-up.
    """

    count: Array
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
    """Adam on dense means first, then with compressed momentum and a frozen variance.

    Up to step `freeze_step` this is `optax.scale_by_adam` on the dense mean. After that `v` is
    frozen, each worker sends `b1·m + (1 − b1)·gᵢ`, and the compressed mean is the next `m` on all
    workers; the update is `m/(√v̂ + ε)`. Each step runs only one of the two means. In a chain it
    replaces `compressed_mean` and `optax.scale_by_adam`, and takes local gradients.

    Args:
        dense: the mean of the warm-up, such as `compressed_mean(Dense(), axis_name)`.
        compressed: the mean of the momentum, with error feedback if its codec is biased.
        axis_name: the mapped axis of both.
        freeze_step: the number of warm-up steps; several multiples of `1/(1 − b2)`.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: `ε`.

    Raises:
        ValueError: for a mean that is not a transformation, or settings out of range.

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
        The warm-up corrects the bias of both moments as Adam does, and freezes the corrected
        variance, `v̂ = v/(1 − b2^T)`, so that the step size does not jump at the end of the
        warm-up; the momentum is not corrected afterwards. The published code never corrects, which
        makes no difference after a warm-up of several thousand steps.

        An element without a gradient in the warm-up is not updated afterwards: one bit cannot
        represent zero, and it would be divided by `ε` alone. In the published code the user masks
        such momentum.
    """
    exact, lossy = means.check("dense", dense), means.check("compressed", compressed)
    adam = moments.Adam(freeze_step, b1, b2, eps)

    def init_fn(params: PyTree) -> Any:
        return OneBitAdamState(
            count=jnp.zeros((), jnp.int32),
            mu=jax.tree.map(addition.zeros, params),
            nu=jax.tree.map(addition.zeros, params),
            dense=exact.init(params),
            compressed=lossy.init(params),
        )

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        updates = own_gradients.check(updates, axis_name)

        # Both branches return the updates, and the next state without its count.
        def warm_up(grads: PyTree, count: Array, state: Any, params: PyTree | None) -> tuple:
            mean, after = exact.update(grads, state.dense, params, **extra)
            mu, nu = adam.first(mean, state.mu), adam.second(mean, state.nu)
            scaled = jax.tree.map(jnp.divide, adam.unbiased(mu, count), adam.root(nu, count))
            return scaled, mu, nu, after, state.compressed

        def frozen(grads: PyTree, count: Array, state: Any, params: PyTree | None) -> tuple:
            del count
            own = moments.mask(adam.first(grads, state.mu), state.nu)
            own = guarding.cast_like(own, grads)
            mean, after = lossy.update(own, state.compressed, params, **extra)
            mu = moments.mask(guarding.cast_like(mean, state.mu), state.nu)
            scaled = jax.tree.map(jnp.divide, mu, adam.root(state.nu, freeze_step))
            return scaled, mu, state.nu, state.dense, after

        count = counting.after(state.count)
        early = conditional.uniform(count <= freeze_step, axis_name)
        scaled, *after = conditional.either(early, warm_up, frozen, updates, count, state, params)
        return guarding.cast_like(scaled, updates), OneBitAdamState(count, *after)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
