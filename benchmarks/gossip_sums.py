"""DPSVRG against DSPG on finite sums: a lasso and a sparse logistic regression, for `gossip.py`."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gossip_links import AXIS, IDENTITY
from rich.progress import track

import jaxcomp
from jaxcomp import algorithms, graphs
from jaxcomp.testing.mingling import mingle


class Sparse(NamedTuple):
    """A sum of losses of rows, with a penalty on `Σ|x|`.

    Attributes:
        rows: `[workers, rows, size]`.
        targets: `[workers, rows]`.
        slope: from a row's prediction and target to the derivative of its loss.
        loss: the same, to the loss.
        penalty: the weight of `Σ|x|`.
        rate: a learning rate that suits single rows.
    """

    rows: Any
    targets: Any
    slope: Callable[[Any, Any], Any]
    loss: Callable[[Any, Any], Any]
    penalty: float
    rate: float

    def gradient(self, x: Any, rows: Any, targets: Any) -> Any:
        return rows.T @ self.slope(rows @ x, targets) / len(rows)

    def value(self, x: Any) -> Any:
        return self.loss(self.rows @ x, self.targets).mean() + self.penalty * jnp.sum(jnp.abs(x))

    def least(self, steps: int = 20_000) -> float:
        """The value at the solution, by proximal gradient descent with momentum."""
        rows, targets = self.rows.reshape(-1, self.rows.shape[-1]), self.targets.reshape(-1)
        smooth = float(jnp.linalg.eigvalsh(rows.T @ rows / len(rows))[-1])

        def step(carry: Any, _: Any) -> tuple[Any, None]:
            x, before, t = carry
            ahead = x + (t - 1) / (t + 2) * (x - before)
            z = ahead - self.gradient(ahead, rows, targets) / smooth
            new = jnp.sign(z) * jnp.maximum(jnp.abs(z) - self.penalty / smooth, 0)
            return (new, x, t + 1), None

        zero = jnp.zeros(rows.shape[1])
        (x, _, _), _ = jax.lax.scan(step, (zero, zero, 1.0), None, length=steps)
        return float(self.value(x))


def sparse(workers: int = 8, rows: int = 50, size: int = 20) -> dict[str, Sparse]:
    """A lasso and a sparse logistic regression, whose workers draw around points of their own."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((workers, rows, size))
    true = np.where(np.arange(size) < 5, rng.standard_normal(size), 0)
    own = true + 0.3 * rng.standard_normal((workers, 1, size))
    b = np.sum(a * own, axis=2) + 0.1 * rng.standard_normal((workers, rows))
    y = np.where(np.sum(a * own, axis=2) + rng.logistic(size=(workers, rows)) > 0, 1.0, -1.0)
    square = Sparse(
        jnp.asarray(a),
        jnp.asarray(b),
        lambda p, t: p - t,
        lambda p, t: (p - t) ** 2 / 2,
        penalty=0.05,
        rate=0.01,
    )
    logistic = Sparse(
        jnp.asarray(a),
        jnp.asarray(y),
        lambda p, t: -t * jax.nn.sigmoid(-t * p),
        lambda p, t: jnp.logaddexp(0.0, -t * p),
        penalty=0.02,
        rate=0.04,
    )
    return {"lasso": square, "logistic": logistic}


GRAPHS = {
    "ring": graphs.Ring(),
    "torus": graphs.Torus(2, 4),
    "ring, then pairs": graphs.Alternating((graphs.Ring(), graphs.OnePeer())),
}


SCALES = (1.0, 5.0, 20.0, 50.0)
"""The steps `α` of DSPG over the rate of DPSVRG. With the last one the distance from the start is
gone after the first tenth of the steps, and the noise of the steps is left."""


def curve(tx: Any, problem: Sparse, steps: int, seed: int = 0) -> np.ndarray:
    """The mean over the workers of the loss of all, above its least value, after each step."""
    workers, rows, size = problem.rows.shape
    key, least = jax.random.key(seed), problem.least()

    def oracle(worker: Any, step: Any) -> Any:
        a, b = problem.rows[worker], problem.targets[worker]
        which = jax.random.randint(
            jax.random.fold_in(jax.random.fold_in(key, step), worker), (1,), 0, rows
        )
        batch = lambda x: problem.gradient(x, a[which], b[which])  # noqa: E731
        return batch, lambda x: problem.gradient(x, a, b)

    measure = lambda models: jax.vmap(problem.value)(models).mean() - least  # noqa: E731
    found, _ = mingle(tx, oracle, measure, workers=workers, size=size, steps=steps)
    return np.maximum(np.asarray(found), 1e-16)


def costs(
    steps: int, rows: int, degree: float, payload: int, lengths: Any = None, most: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """The gradients of single rows, and the bytes that a worker has sent, after each step."""
    at = np.arange(steps)
    if lengths is None:
        return at + 1.0, (at + 1) * degree * payload
    position = np.asarray(lengths.position(at))
    gradients = np.cumsum(2 + rows * (position == 0))
    return gradients, np.cumsum(np.minimum(position + 1, most)) * degree * payload


def slope(cost: np.ndarray, gap: np.ndarray) -> float:
    """Of the logarithms, over the last nine tenths of the costs, above the floor of rounding."""
    kept = (cost >= cost[-1] / 10) & (gap > 1e-14)
    if kept.sum() < 10:
        kept = gap > 1e-14
    at = np.unique(np.geomspace(1, kept.sum(), 60).astype(int)) - 1
    return float(np.polyfit(np.log(cost[kept][at]), np.log(gap[kept][at]), 1)[0])


def reduction(steps: int = 20_000) -> dict[str, Any]:
    found = {}
    lengths, most, size = jaxcomp.gates.Growing(10, 1.5), 8, 20
    for (kind, problem), (graph_name, graph) in track(
        [(p, g) for p in sparse().items() for g in GRAPHS.items()], "reduction"
    ):
        workers, rows, _ = problem.rows.shape
        degree = graphs.degree(graph, workers)
        shared = {"regularizer": jaxcomp.optimizers.L1(problem.penalty), "graph": graph}
        tried = []
        for scale in SCALES:
            rate = functools.partial(lambda a, t: a / jnp.sqrt(1.0 + t), scale * problem.rate)
            tx = algorithms.dspg(IDENTITY, AXIS, learning_rate=rate, **shared)
            tried.append(curve(tx, problem, steps))
        dspg = min(tried, key=lambda gap: np.mean(gap[-steps // 20 :]))
        make = functools.partial(
            algorithms.dpsvrg, IDENTITY, AXIS, learning_rate=problem.rate, **shared
        )
        dpsvrg, single = (curve(make(most=m), problem, steps) for m in (most, 1))
        plain = costs(steps, rows, degree, 8 * size)
        reduced = costs(steps, rows, degree, 8 * size, lengths, most)
        found[f"{kind}, {graph_name}"] = {
            "dspg": {"gap": dspg, "gradients": plain[0], "bytes": plain[1]},
            "dpsvrg": {"gap": dpsvrg, "gradients": reduced[0], "bytes": reduced[1]},
            "single": float(np.min(single)),
            "settled": slope(plain[0], tried[-1]),
        }
    return found


def reduced_record(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """One row: the slopes over gradients, and both errors at the largest cost that both reached."""
    record: dict[str, Any] = {key: found[key] for key in ("single", "settled")}
    record["name"] = name
    for cost in ("gradients", "bytes"):
        end = min(found[method][cost][-1] for method in ("dspg", "dpsvrg"))
        record["megabytes" if cost == "bytes" else cost] = end / (1e6 if cost == "bytes" else 1)
        for method in ("dspg", "dpsvrg"):
            at = np.searchsorted(found[method][cost], end, side="right")
            record[f"{method}_{cost}"] = float(np.mean(found[method]["gap"][max(at - 20, 0) : at]))
    for method in ("dspg", "dpsvrg"):
        record[f"{method}_slope"] = slope(found[method]["gradients"], found[method]["gap"])
    return record
