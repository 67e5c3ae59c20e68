"""Regularizers with their proximal points in a diagonal metric."""

import abc
import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxcomp import checks
from jaxcomp.backend import axes
from jaxcomp.base.interface import Interface
from jaxcomp.numerics import norms
from jaxcomp.types import Array

_STEPS = 60
"""Bisections: more than the digits of a float64."""


class Regularizer(Interface, abstract=True):
    """A function `φ` of each leaf, defined by its proximal point."""

    @abc.abstractmethod
    def nearest(self, z: Array, metric: Array, times: Array) -> Array:
        """The `x` that minimises `½ Σ metric · (x − z)² + times · φ(x)`.

        Args:
            z: a whole leaf, float32 or float64.
            metric: like `z`, not negative; an element of metric zero is free.
            times: a scalar, not negative.
        """


@dataclasses.dataclass(frozen=True)
class L1(Regularizer):
    """`weight · Σ|x|`, which makes unimportant elements exactly zero.

    Args:
        weight: `λ`.

    Raises:
        ValueError: if `weight` is not positive.

    Example:
        >>> L1(0.5).nearest(jnp.array([2.0, -0.3]), jnp.ones(2), jnp.ones(()))
        Array([ 1.5, -0. ], dtype=float32)
    """

    weight: float

    def __post_init__(self):
        checks.positive("weight", self.weight)

    def nearest(self, z: Array, metric: Array, times: Array) -> Array:
        pull = times * self.weight
        return jnp.where(pull > 0, _soft(z, metric, pull), z)


@dataclasses.dataclass(frozen=True)
class SquaredL2(Regularizer):
    """`weight/2 · Σx²`.

    Args:
        weight: `λ`.

    Raises:
        ValueError: if `weight` is not positive.

    Example:
        >>> SquaredL2(1.0).nearest(jnp.array([2.0, -0.3]), jnp.ones(2), jnp.ones(()))
        Array([ 1.  , -0.15], dtype=float32)
    """

    weight: float

    def __post_init__(self):
        checks.positive("weight", self.weight)

    def nearest(self, z: Array, metric: Array, times: Array) -> Array:
        return z * _shrinkage(metric, times * self.weight)


@dataclasses.dataclass(frozen=True)
class GroupLasso(Regularizer):
    """`weight · ‖x‖` of each leaf as one group, which makes unimportant leaves exactly zero.

    Args:
        weight: `λ`.

    Raises:
        ValueError: if `weight` is not positive.

    Example:
        >>> GroupLasso(5.0).nearest(jnp.array([6.0, 8.0]), jnp.ones(2), jnp.ones(())).round(4)
        Array([3., 4.], dtype=float32)
        >>> GroupLasso(10.0).nearest(jnp.array([6.0, 8.0]), jnp.ones(2), jnp.ones(()))
        Array([0., 0.], dtype=float32)
    """

    weight: float

    def __post_init__(self):
        checks.positive("weight", self.weight)

    def nearest(self, z: Array, metric: Array, times: Array) -> Array:
        # If `x` is not zero, `x = z · Ht/(Ht + pull)` with `t = ‖x‖`, so `t` is the root of
        # `Σ (Hz/(Ht + pull))² = 1`. Units of the largest element of `Hz` keep squares in range.
        given = metric * z
        unit = norms.unit(norms.largest(given)).astype(z.dtype)
        u, pull = given * unit, times * self.weight * unit
        size, far = jnp.sqrt(jnp.sum(u**2)), _norm(jnp.where(metric > 0, z * unit, 0))
        near = (size - pull) / jnp.max(metric, initial=jnp.finfo(z.dtype).tiny)

        def short(t: Array) -> Array:
            return jnp.sum((u / _divisor(metric * t + pull)) ** 2) > 1

        low, high = _bisect(short, near, far)
        x = z * _shrinkage(metric * (low + high) / 2, pull)
        x = jnp.where(size <= pull, 0, x)  # False for NaN.
        return jnp.where(pull > 0, x, z)


@dataclasses.dataclass(frozen=True)
class L2Ball(Regularizer):
    """The constraint `‖x‖ ≤ radius` on each leaf.

    Args:
        radius: the radius of the ball.

    Raises:
        ValueError: if `radius` is not positive.

    Example:
        >>> L2Ball(5.0).nearest(jnp.array([6.0, 8.0]), jnp.ones(2), jnp.ones(())).round(4)
        Array([3., 4.], dtype=float32)
    """

    radius: float

    def __post_init__(self):
        checks.positive("radius", self.radius)

    def nearest(self, z: Array, metric: Array, times: Array) -> Array:
        del times
        # `x = z · H/(H + θ)`, where `θ` makes its norm the radius.
        part = z / self.radius
        size = _norm(metric * part)

        def short(theta: Array) -> Array:
            return jnp.sum((part * _shrinkage(metric, theta)) ** 2) > 1

        # Take the upper end of the bracket, for which the point lies within the ball.
        least = jnp.maximum(size - jnp.max(metric, initial=0), 0)
        _, theta = _bisect(short, least, size)
        return jnp.where(_norm(part) <= 1, z, z * _shrinkage(metric, theta))


@dataclasses.dataclass(frozen=True)
class L1Ball(Regularizer):
    """The constraint `Σ|x| ≤ radius` on each leaf.

    Args:
        radius: the radius of the ball.

    Raises:
        ValueError: if `radius` is not positive.

    Example:
        >>> L1Ball(1.0).nearest(jnp.array([2.0, -1.5, 0.1]), jnp.ones(3), jnp.ones(()))
        Array([ 0.75, -0.25,  0.  ], dtype=float32)
    """

    radius: float

    def __post_init__(self):
        checks.positive("radius", self.radius)

    def nearest(self, z: Array, metric: Array, times: Array) -> Array:
        del times

        def short(theta: Array) -> Array:
            return jnp.sum(jnp.abs(_soft(z, metric, theta))) > self.radius

        most = jnp.max(metric * jnp.abs(z), initial=0)
        _, theta = _bisect(short, jnp.zeros_like(most), most)
        inside = jnp.sum(jnp.abs(z)) <= self.radius
        return jnp.where(inside, z, _soft(z, metric, theta))


def check(regularizer: Regularizer | None) -> None:
    """Raises a `ValueError` unless it is a regularizer or None."""
    if regularizer is None:
        return
    if isinstance(regularizer, type) or not isinstance(regularizer, Regularizer):
        raise ValueError(
            "`regularizer` must be None or one of jaxcomp.optimizers, such as L1(1e-4), "
            "SquaredL2(1e-4), GroupLasso(1e-4), L2Ball(1.0) or L1Ball(1.0), got "
            f"{regularizer!r}"
        )


def _soft(z: Array, metric: Array, pull: Array) -> Array:
    """`z` moved towards zero by `pull/metric`, and no further."""
    left = jnp.maximum(jnp.abs(z) - pull / _divisor(metric), 0)
    return jnp.where(metric > 0, jnp.sign(z) * left, 0)


def _shrinkage(metric: Array, pull: Array) -> Array:
    """`metric/(metric + pull)`; one where `pull` is zero."""
    return jnp.where(pull > 0, metric / _divisor(metric + pull), 1)


def _divisor(x: Array) -> Array:
    return jnp.where(x > 0, x, 1)


def _norm(x: Array) -> Array:
    unit = norms.unit(norms.largest(x))
    return (jnp.sqrt(norms.energy(x, unit)) / unit).astype(x.dtype)


def _bisect(short: Callable[[Array], Array], low: Array, high: Array) -> tuple[Array, Array]:
    """A narrow bracket of the point at which `short`, true below it, becomes false."""

    def step(_, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = (low + high) / 2
        below = short(middle)
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    # A loop's carry keeps its type, but the compared values may vary over the workers.
    low, high, _ = axes.match_vma(low, high, short(high))
    return jax.lax.fori_loop(0, _STEPS, step, (low, high))
