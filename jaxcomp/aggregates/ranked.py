"""Aggregates that order the workers' values of each element."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp import checks
from jaxcomp.base import Aggregate
from jaxcomp.numerics import addition, ordering
from jaxcomp.types import Array, PyTree


@dataclasses.dataclass(frozen=True)
class CoordinateMedian(Aggregate):
    """The median of each element over the workers that are present.

    For an even number of workers it is the mean of the two values in the middle. As long as fewer
    than half of the workers are Byzantine, every element is within the range of the honest values;
    half of them move it anywhere. Positive weights count alike.

    Example:
        >>> import jaxcomp
        >>> messages = jnp.array([[1.0, -2.0], [2.0, -1.0], [1e30, 1e30]])
        >>> jaxcomp.aggregates.combine(CoordinateMedian(), messages, jnp.ones(3), ()).value
        Array([ 2., -1.], dtype=float32)

    References:
        Yin et al., `Byzantine-robust distributed learning: towards optimal statistical rates
        <https://arxiv.org/abs/1803.01498>`_, 2018.

    Note:
        The median of skewed values is not their mean, so without Byzantine workers the result is
        biased: most elements of a sparse message are zero, and so is their median.
    """

    def combine(self, messages: PyTree, weights: Array, state: tuple) -> tuple[PyTree, tuple]:
        present = weights > 0
        count = jnp.sum(present, dtype=jnp.int32)
        low, high = jnp.maximum(count - 1, 0) // 2, count // 2

        def median(rows: Array) -> Array:
            ranked = _rank(rows, present)
            # Halves are exact, and their sum does not overflow.
            middle = 0.5 * ordering.at(ranked, low) + 0.5 * ordering.at(ranked, high)
            return jnp.where(count > 0, middle, 0).astype(rows.dtype)

        return jax.tree.map(median, messages), state


@dataclasses.dataclass(frozen=True)
class TrimmedMean(Aggregate):
    """The mean of each element without its largest and smallest values.

    Of `n` workers that are present, the `⌊trim · n⌋` smallest and as many of the largest values of
    each element are left out. If at most `⌊trim · n⌋` workers are Byzantine, every element is
    within the range of the honest values; one more moves it anywhere. Positive weights count alike.

    Args:
        trim: the fraction that is left out at each end, from 0 to below 0.5.

    Raises:
        ValueError: for another fraction.

    Example:
        >>> import jaxcomp
        >>> messages = jnp.array([[1.0], [2.0], [4.0], [-1e30]])
        >>> jaxcomp.aggregates.combine(TrimmedMean(0.25), messages, jnp.ones(4), ()).value
        Array([1.5], dtype=float32)

    References:
        Yin et al., `Byzantine-robust distributed learning: towards optimal statistical rates
        <https://arxiv.org/abs/1803.01498>`_, 2018.
    """

    trim: float = 0.2

    def __post_init__(self):
        checks.number("trim", self.trim, 0.0)
        if self.trim >= 0.5:
            raise ValueError(
                f"`trim` must be below 0.5, since it is cut at both ends, got {self.trim!r}; "
                "jaxcomp.aggregates.CoordinateMedian() leaves out all but the middle"
            )

    def combine(self, messages: PyTree, weights: Array, state: tuple) -> tuple[PyTree, tuple]:
        present = weights > 0
        count = jnp.sum(present, dtype=jnp.int32)
        numbers = np.arange(weights.shape[0] + 1)
        cut = jnp.asarray(np.floor(self.trim * numbers + 1e-9), jnp.int32)[count]
        rank = jnp.arange(weights.shape[0])
        kept = ((rank >= cut) & (rank < count - cut)).astype(weights.dtype)

        def mean(rows: Array) -> Array:
            ranked = _rank(rows, present)
            if isinstance(ranked, jax.Array):
                return addition.weighted_mean(ranked, kept).astype(rows.dtype)
            before, after = addition.mean_factors(len(ranked))
            factor = addition.hold_factor(before, ranked[0].dtype)
            # In one pass over the network's outputs, which a stack would compute one by one.
            total = functools.reduce(
                jnp.add, [jnp.where(kept[i] > 0, x * factor, 0) for i, x in enumerate(ranked)]
            )
            share = len(ranked) / jnp.maximum(jnp.sum(kept), 1)
            return addition.saturate(total * jnp.asarray(after, total.dtype) * share, rows.dtype)

        return jax.tree.map(mean, messages), state


def _rank(rows: Array, present: Array) -> Array | Sequence[Array]:
    """The values of each element in ascending order; infinite ones in place of absent workers."""
    wide = addition.widen(rows)
    here = present.reshape(-1, *[1] * (wide.ndim - 1))
    return ordering.sort_columns(jnp.where(here, wide, jnp.inf))
