"""Clipping of each worker's own gradient, before it is compressed."""

import math

import jax
import jax.numpy as jnp
import optax

from jaxcomp import checks
from jaxcomp.backend import axes
from jaxcomp.numerics import norms
from jaxcomp.types import AxisName, PyTree


def clip_local(max_norm: float, axis_name: AxisName) -> optax.GradientTransformation:
    """Clips each worker's gradient at the norm that matches `max_norm` for their mean.

    `g ← g · min(1, √N · max_norm / ‖g‖)` for `N` workers: the mean of independent gradients of
    equal norm is `√N` times smaller than each. Chain it before `compressed_mean`, so that an
    outlier of one worker does not enter its feedback state. It has no state.

    Args:
        max_norm: the norm at which the mean of all workers' gradients would be clipped.
        axis_name: the mapped axis, or a tuple of them.

    Raises:
        ValueError: if `max_norm` is not a positive number; on use, if the axis is not bound.

    Example:
        >>> tx = clip_local(2.5, axis_name="data")
        >>> grads = jnp.array([[3.0, 4.0], [0.0, 0.0], [30.0, 40.0], [0.0, -6.0]])
        >>> jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(grads)
        Array([[ 3.,  4.],
               [ 0.,  0.],
               [ 3.,  4.],
               [ 0., -5.]], dtype=float32)

    References:
        Lin et al., `Deep gradient compression <https://arxiv.org/abs/1712.01887>`_, 2018.

    Note:
        The paper sums `Gₖ = g/N` over workers and clips `Gₖ` at `max_norm/√N`. Here `g` is
        averaged, so `g` is clipped at `√N · max_norm`. As in the paper, the norm is that of the
        whole gradient; dense leaves count, and are clipped too. The published code clips leaf by
        leaf. Use `optax.masked` to exclude leaves. A non-finite gradient stays non-finite.
    """
    checks.positive("max_norm", max_norm)

    def clip(updates: PyTree, params: PyTree | None = None) -> PyTree:
        del params
        axes.require(axis_name)
        unit = norms.unit(norms.largest(updates))
        bound = max_norm * math.sqrt(axes.size(axis_name))
        # Compute in units of the largest element, because the norm itself may be out of range.
        # NaN compares as small, so the gradient keeps its NaN; Inf times zero is NaN.
        norm = jnp.sqrt(norms.energy(updates, unit))
        return jax.tree.map(
            lambda g: jnp.where(norm > bound * unit, g * unit * (bound / norm), g).astype(g.dtype),
            updates,
        )

    return optax.stateless(clip)
