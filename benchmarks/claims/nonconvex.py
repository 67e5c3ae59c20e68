"""Losses that are not convex, small enough for hundreds of runs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from convergence import Way

from claims import descent
from claims.descent import Make, Runs
from jaxcomp.testing import problems


class Regularized(NamedTuple):
    """Logistic regression with the bounded regularizer `λ Σ xⱼ²/(1 + xⱼ²)`.

    Attributes:
        features: `[workers, rows, size]`.
        labels: `[workers, rows]`, of −1 and 1.
        weight: `λ`.
        solution: of the size of the parameters; stationary points are not known.
        smoothness: `L` of the mean loss.
    """

    features: Any
    labels: Any
    weight: float
    solution: Any
    smoothness: float

    @property
    def workers(self) -> int:
        return self.labels.shape[0]

    @property
    def data(self) -> tuple[Any, Any]:
        return self.features, self.labels

    @property
    def smoothnesses(self) -> np.ndarray:
        """Of each worker."""
        norms = np.linalg.norm(np.asarray(self.features), ord=2, axis=(1, 2)) ** 2
        return norms / (4 * self.labels.shape[1]) + 2 * self.weight

    def gradient(self, x: Any, features: Any, labels: Any) -> Any:
        pull = labels * jax.nn.sigmoid(-labels * (features @ x))
        return 2 * self.weight * x / (1 + x**2) ** 2 - features.T @ pull / labels.shape[0]

    def error(self, x: Any) -> Any:
        """The squared norm of the gradient, relative to that at zero."""
        start = descent.full(self, jnp.zeros_like(x))
        return jnp.sum(descent.full(self, x) ** 2) / jnp.sum(start**2)


class Network(NamedTuple):
    """A perceptron with one hidden layer, which separates two classes; its loss is not convex.

    Attributes:
        features: `[workers, rows, columns]`.
        labels: `[workers, rows]`, of −1 and 1.
        hidden: units of the hidden layer.
        ridge: the weight of `½‖x‖²`.
        solution: of the size of the parameters; stationary points are not known.
    """

    features: Any
    labels: Any
    hidden: int
    ridge: float
    solution: Any

    @property
    def workers(self) -> int:
        return self.labels.shape[0]

    @property
    def data(self) -> tuple[Any, Any]:
        return self.features, self.labels

    def loss(self, x: Any, features: Any, labels: Any) -> Any:
        columns = features.shape[-1]
        first, last = x[: columns * self.hidden], x[columns * self.hidden :]
        inner = jnp.tanh(features @ first.reshape(columns, self.hidden))
        margin = labels * (inner @ last)
        return jnp.mean(jnp.logaddexp(0, -margin)) + self.ridge / 2 * jnp.sum(x**2)

    def gradient(self, x: Any, features: Any, labels: Any) -> Any:
        return jax.grad(self.loss)(x, features, labels)

    def error(self, x: Any) -> Any:
        """The squared norm of the gradient."""
        return jnp.sum(descent.full(self, x) ** 2)


def regularized(workers: int = 20, weight: float = 0.1) -> Regularized:
    """Of breast cancer, whose rows are sorted before they are dealt."""
    dealt = descent.breast_cancer(workers)
    smoothness = dealt.smoothness - dealt.ridge + 2 * weight
    nothing = jnp.zeros_like(dealt.solution)
    return Regularized(*dealt.data, weight, nothing, smoothness)


def network(workers: int = 9, hidden: int = 8) -> tuple[Network, np.ndarray]:
    """Of breast cancer, and a starting point for each seed."""
    dealt: problems.Logistic = descent.breast_cancer(workers)
    size = (dealt.features.shape[-1] + 1) * hidden
    rng = np.random.default_rng(0)
    starts = rng.standard_normal((descent.SEEDS, size)) / np.sqrt(dealt.features.shape[-1])
    return Network(*dealt.data, hidden, 0.01, jnp.zeros(size)), starts


def run_each(
    make: Callable[[float], Way], problem: Any, *, rates: Sequence[float], **settings: Any
) -> Runs:
    """`descent.run` of methods whose rate cannot be traced, with a program for each rate."""

    def fixed(rate: float) -> Make:
        return lambda traced, key: make(rate)

    found = [descent.run(fixed(rate), problem, rates=[rate], **settings) for rate in rates]
    return Runs(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def cost(runs: Runs, target: float) -> tuple[list[float], int, bool]:
    """The bits until the error is below a target, at the best rate.

    Returns:
        The median and range over seeds; the rate's index; whether most seeds came there.
    """
    there = runs.errors <= target
    first = np.argmax(there, axis=-1)
    spent = np.take_along_axis(runs.bits, first[..., None], axis=-1)[..., 0]
    spent = np.where(there.any(axis=-1), spent, np.inf)
    at = descent.best(spent)
    found = descent.spread(spent[at])
    return found, at, bool(np.isfinite(found[0]))
