"""Means of messages, each of which may be shortened first."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxcomp import checks
from jaxcomp.backend import xla
from jaxcomp.base import Aggregate
from jaxcomp.numerics import addition, norms
from jaxcomp.types import Array, PyTree


@dataclasses.dataclass(frozen=True)
class Mean(Aggregate):
    """The weighted mean of the messages, `Σ wᵢ·cᵢ / Σ wᵢ`.

    A single Byzantine worker moves it to any value.

    Example:
        >>> import jaxcomp
        >>> messages = jnp.array([[1.0, 0.0], [3.0, 2.0], [1e9, 1e9]])
        >>> jaxcomp.aggregates.combine(Mean(), messages, jnp.array([1.0, 1.0, 0.0]), ()).value
        Array([2., 1.], dtype=float32)
    """

    linear = True


@dataclasses.dataclass(frozen=True)
class ClippedMean(Aggregate):
    """The weighted mean of messages that are shortened to a Euclidean norm of at most `norm`.

    `Σ wᵢ · min(1, norm/‖cᵢ‖) · cᵢ / Σ wᵢ`, where `‖c‖` is the norm of the whole tree. One worker
    moves the result by at most `2 · norm · wᵢ / Σ w`, whatever it sends; `b` Byzantine workers move
    it by `b` times as much, in a direction of their choice.

    Args:
        norm: the largest norm, in units of the messages.

    Raises:
        ValueError: for a norm that is not positive.

    Example:
        >>> import jaxcomp
        >>> messages = jnp.array([[3.0, 4.0], [0.0, 1.0], [0.0, -1e30]])
        >>> jaxcomp.aggregates.combine(ClippedMean(1.0), messages, jnp.ones(3), ()).value
        Array([0.2..., 0.26666...], dtype=float32)

    References:
        Karimireddy, He and Jaggi, `Learning from history for Byzantine robust optimization
        <https://arxiv.org/abs/2012.10333>`_, 2021.

    Note:
        The paper clips differences from the last aggregate; this clips the messages themselves. The
        influence of rounding is not part of the bound: it is `n · ε` of the norm. In a sharded
        model (`param_specs`) every device clips its own shard.
    """

    norm: float

    def __post_init__(self):
        checks.positive("norm", self.norm)

    def prepare(self, message: PyTree) -> PyTree:
        unit = norms.unit(norms.largest(message))
        length = jnp.sqrt(norms.energy(message, unit))  # In units of the largest element.
        limit = jnp.asarray(self.norm, unit.dtype) * unit
        factor = jnp.where(length > limit, limit / jnp.where(length > 0, length, 1), 1)

        def shorten(x: Array) -> Array:
            wide = x.astype(addition.wide(x.dtype))
            # Not fused with the sum that follows, which must round alike in all programs.
            product = xla.block_fma(wide * factor.astype(wide.dtype))
            return jnp.where(factor == 1, wide, product).astype(x.dtype)

        return jax.tree.map(shorten, message)
