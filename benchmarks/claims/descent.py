"""Stochastic descent on problems whose solution is known: rates and seeds in one program."""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import reporting
from convergence import AXIS, Way, stepped
from rich.progress import track
from sklearn import datasets

import jaxcomp
from jaxcomp.testing import problems

SEEDS = 5
Make = Callable[[Any, Any], Way]
"""From a learning rate and a raw key, both traced, to a method."""


def method(make: Callable[..., Any], codec: Any, **given: Any) -> Make:
    """A method with this codec, and descent where it returns a mean."""
    return lambda rate, key: Way(stepped(make, codec, rate, key=key, **given))


def plain(reducer: Any) -> Make:
    """Gradient descent along this reducer's mean."""

    def make(rate: Any, key: Any) -> Way:
        mean = jaxcomp.compressed_mean(reducer, AXIS, key=key)
        return Way(optax.chain(mean, optax.sgd(rate)))

    return make


class Oracle(NamedTuple):
    """How workers estimate their gradients.

    Attributes:
        batch: rows of each estimate, drawn with replacement; 0 for full gradients.
        noise: which part of the noise at the solution is left: 1 for plain sampling; with 0 the
            noise vanishes at the solution, where the workers' gradients still differ.
    """

    batch: int = 8
    noise: float = 1.0

    def gradient(self, problem: Any, key: Any, x: Any, data: Any) -> Any:
        """One worker's estimate at `x`, from the rows that the key draws."""
        if not self.batch:
            return problem.gradient(x, *data)
        total = data[1].shape[0]
        rows = jax.random.randint(key, (self.batch,), 0, total)
        part = [column[rows] for column in data]
        if isinstance(problem, problems.Quadratics):  # Its loss is a sum over rows.
            part = [np.sqrt(total / self.batch) * column for column in part]
        drawn = problem.gradient(x, *part)
        if self.noise == 1:
            return drawn
        there = problem.solution
        left = problem.gradient(there, *part) - problem.gradient(there, *data)
        return drawn - (1 - self.noise) * left


class Runs(NamedTuple):
    """Results of every rate and seed, `[rates, seeds, ...]`.

    Attributes:
        errors: after each step, at the iterate.
        averaged: after each step, at the mean of all iterates.
        tail: at the mean of the second half.
        bits: that a worker has sent and received, after each step; zeros without prices.
        steep: the squared norm of the mean loss's gradient, after each step.
        x: the parameters in the end.
        watched: what `watch` gave, after each step.
    """

    errors: np.ndarray
    averaged: np.ndarray
    tail: np.ndarray
    bits: np.ndarray
    steep: np.ndarray
    x: np.ndarray
    watched: np.ndarray

    @property
    def floors(self) -> np.ndarray:
        """The mean error of the last quarter of all steps, `[rates, seeds]`."""
        return _late(self.errors)

    @property
    def steepness(self) -> np.ndarray:
        """The mean squared gradient of the last quarter of all steps, `[rates, seeds]`."""
        return _late(self.steep)


def _late(values: np.ndarray) -> np.ndarray:
    return values[..., -(values.shape[-1] // 4) :].mean(axis=-1)


def full(problem: Any, x: Any) -> Any:
    """The gradient of the mean loss."""
    return jax.vmap(problem.gradient, in_axes=(None, 0, 0))(x, *problem.data).mean(axis=0)


def run(
    make: Make,
    problem: Any,
    *,
    rates: Sequence[float],
    steps: int,
    oracle: Any = Oracle(),
    seeds: int = SEEDS,
    starts: Any = None,
    every: int = 1,
    watch: Callable[[Any], Any] = lambda x: jnp.zeros(()),
) -> Runs:
    """Descends at every rate from every seed; a run that diverges has errors that are not finite.

    Args:
        make: the method.
        problem: has `data`, `gradient`, `error` and `solution`, of which the size is taken.
        rates: the learning rates.
        steps: of each run.
        oracle: of the gradients.
        seeds: the number of seeds of codecs and rows.
        starts: `[seeds, size]`; None for zero.
        every: steps from one kept error to the next.
        watch: a number of the parameters, to keep with the errors.
    """
    first = jnp.zeros((seeds, problem.solution.size)) if starts is None else jnp.asarray(starts)

    def one(rate: Any, seed: Any, x: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(7), seed)
        way = make(rate, jax.random.key_data(key))
        tx: Any = optax.with_extra_args_support(way.tx)

        def worker(params: Any, number: Any, data: Any, key: Any, state: Any) -> Any:
            key = jax.random.fold_in(key, number)

            def grad_fn(at: Any) -> Any:
                return {"x": oracle.gradient(problem, key, at["x"][0], data)[None]}

            now = grad_fn(jaxcomp.view(params, state))
            return tx.update(now, state, params, grad_fn=grad_fn)

        everyone = jax.vmap(worker, in_axes=(None, 0, 0, None, 0), axis_name=AXIS)
        workers = jnp.arange(problem.workers)

        def step(carry: Any, t: Any) -> Any:
            params, state, mean, tail = carry
            turn = jax.random.fold_in(key, t)
            updates, state = everyone(params, workers, problem.data, turn, state)
            params = {"x": params["x"] + updates["x"][0]}
            mean = mean + (params["x"][0] - mean) / (t + 1)
            tail = tail + jnp.where(t >= steps // 2, params["x"][0], 0) / (steps - steps // 2)
            return (params, state, mean, tail), None

        def several(carry: Any, t: Any) -> Any:
            carry, _ = jax.lax.scan(step, carry, t * every + jnp.arange(every))
            at, mean = carry[0]["x"][0], carry[2]
            own = jax.tree.map(lambda leaf: leaf[0], carry[1])
            spent = jnp.asarray(way.prices.spent(own) if way.prices else 0.0)
            steep = jnp.sum(full(problem, at) ** 2)
            return carry, (problem.error(at), problem.error(mean), spent, steep, watch(at))

        params = {"x": x[None]}
        state = jax.vmap(lambda _: tx.init(params), axis_name=AXIS)(workers)
        begin = (params, state, jnp.zeros_like(x), jnp.zeros_like(x))
        (params, _, _, tail), found = jax.lax.scan(several, begin, jnp.arange(steps // every))
        return *found, problem.error(tail), params["x"][0]

    seeded = jax.vmap(one, in_axes=(None, 0, 0))
    together = jax.jit(jax.vmap(seeded, in_axes=(0, None, None)))
    found = together(jnp.asarray(rates), jnp.arange(seeds), first)
    errors, averaged, bits, steep, watched, tail, x = (np.asarray(part) for part in found)
    return Runs(errors, averaged, tail, bits, steep, x, watched)


def run_all(
    ways: Mapping[str, Make], problem: Any, title: str = "methods", **settings: Any
) -> dict[str, Runs]:
    """The same descent by several methods."""
    return {
        name: run(make, problem, **settings)
        for name, make in track(ways.items(), description=title)
    }


def quietly(measure: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """A measurement without the warnings of links that lose what they drop, which it measures."""

    @functools.wraps(measure)
    def wrapped() -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*what it drops is lost for good.*")
            warnings.filterwarnings("ignore", message=".*not known to be contractive.*")
            return measure()

    return wrapped


def in_float64(measure: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """`quietly`, and in float64, whatever the process has."""

    @functools.wraps(measure)
    def wrapped() -> dict[str, Any]:
        with jax.enable_x64(True):
            return quietly(measure)()

    return wrapped


def spread(values: Any) -> list[float]:
    """The median, the smallest and the largest, in four digits."""
    numbers = np.asarray(values, np.float64)
    numbers = np.where(np.isfinite(numbers), numbers, np.inf)
    found = np.median(numbers), numbers.min(), numbers.max()
    return [float(f"{x:.4g}") for x in found]


def shown(three: Sequence[float]) -> str:
    """A median with its range."""
    middle, least, most = three
    return f"{middle:.2g} ({least:.2g} to {most:.2g})"


def best(values: np.ndarray) -> int:
    """The index of the rate whose median over seeds is the smallest."""
    middle = np.median(np.where(np.isfinite(values), values, np.inf), axis=1)
    return int(np.argmin(middle))


def least(*margins: float) -> float:
    """The least of several margins, between a thousandth and a thousand."""
    return float(np.clip(np.nan_to_num(np.min(margins)), 1e-3, 1e3))


def within(limit: float, value: float) -> float:
    """The margin of a value that must be at most a limit."""
    return np.inf if value <= 0 else limit / value


def between(low: float, value: float, high: float) -> float:
    """The margin of a value that must be between two limits."""
    return min(value / low, within(high, value))


def breast_cancer(workers: int = 8) -> problems.Logistic:
    """Logistic regression whose rows are sorted before they are dealt."""
    features, labels = datasets.load_breast_cancer(return_X_y=True)
    return problems.logistic(features, labels, workers)


def moments(length: int, number: int = 40) -> list[int]:
    """Indices, evenly spaced on a log scale."""
    return [int(t) for t in reporting.moments(length, number)]
