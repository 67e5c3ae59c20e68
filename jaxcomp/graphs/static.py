"""Graphs whose weights do not change from round to round."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxcomp import checks
from jaxcomp.base import Graph
from jaxcomp.graphs import mixing


@dataclasses.dataclass(frozen=True)
class Ring(Graph):
    """Every worker hears the workers before and after it: weights 1/3.

    Two workers have weights 1/2. The spectral gap is `(2 − 2 cos(2π/n))/3`, which is 0.05 for 16
    workers: information needs `n/2` rounds to go around.

    Example:
        >>> Ring().matrices(4)[0][0].round(2)
        array([0.33, 0.33, 0.  , 0.33])
        >>> round(mixing.spectral_gap(Ring(), 16), 4)
        0.0507
    """

    def matrices(self, workers: int) -> tuple[np.ndarray, ...]:
        return (mixing.circulant(workers, (1, -1)),)


@dataclasses.dataclass(frozen=True)
class Torus(Graph):
    """Workers in a grid whose edges wrap around: every worker hears four others, weights 1/5.

    Args:
        rows: the number of rows; worker `r * columns + c` is in row `r`.
        columns: the number of columns.

    Raises:
        ValueError: for sizes that are not positive; on use, for another number of workers than
            `rows * columns`.

    Example:
        >>> round(mixing.spectral_gap(Torus(4, 4), 16), 4)
        0.4
    """

    rows: int
    columns: int

    def __post_init__(self):
        checks.integer("rows", self.rows, 1)
        checks.integer("columns", self.columns, 1)

    def matrices(self, workers: int) -> tuple[np.ndarray, ...]:
        if workers != self.rows * self.columns:
            raise ValueError(
                f"`graph` must be for {workers} workers, got {self!r}, which has "
                f"{self.rows * self.columns}"
            )
        at = np.arange(workers).reshape(self.rows, self.columns)
        edges = np.zeros((workers, workers))
        for axis, by in ((0, 1), (0, -1), (1, 1), (1, -1)):
            edges[at, np.roll(at, by, axis)] = 1
        return (mixing.equal(edges),)


@dataclasses.dataclass(frozen=True)
class Exponential(Graph):
    """Every worker hears those 1, 2, 4, … places before it: equal weights, `⌈log₂ n⌉` messages.

    Its spectral gap is about `2/(1 + log₂ n)`. `OnePeer` takes these neighbours in turns.

    Example:
        >>> mixing.degree(Exponential(), 16)
        4.0

    References:
        Ying et al., `Exponential graph is provably efficient for decentralized deep training
        <https://arxiv.org/abs/2110.13363>`_, 2021.
    """

    def matrices(self, workers: int) -> tuple[np.ndarray, ...]:
        return (mixing.circulant(workers, mixing.powers(workers)),)


@dataclasses.dataclass(frozen=True)
class Complete(Graph):
    """Every worker hears all others: one round is the exact mean, for `n − 1` messages.

    Example:
        >>> mixing.spectral_gap(Complete(), 5)
        1.0
    """

    def matrices(self, workers: int) -> tuple[np.ndarray, ...]:
        return (np.full((workers, workers), 1 / workers),)


@dataclasses.dataclass(frozen=True)
class Mixing(Graph):
    """Any doubly stochastic matrix.

    Its edges are divided into permutations, as many as the largest number of neighbours of a
    worker, which is the least possible.

    Args:
        matrix: rows of weights: `matrix[i][j]` is that of worker `j`'s message at worker `i`.

    Raises:
        ValueError: for a matrix that is not square, has a negative weight, or rows or columns that
            do not sum to one within 1e-9; on use, if the workers never agree.

    Example:
        >>> path = Mixing(((0.5, 0.5, 0.0), (0.5, 0.0, 0.5), (0.0, 0.5, 0.5)))
        >>> round(mixing.degree(path, 3), 2), round(mixing.spectral_gap(path, 3), 4)
        (1.33, 0.5)
    """

    matrix: tuple[tuple[float, ...], ...]

    def __post_init__(self):
        try:
            rows = tuple(tuple(float(w) for w in row) for row in self.matrix)
        except (TypeError, ValueError):
            rows = ()
        object.__setattr__(self, "matrix", rows)
        if not rows or {len(row) for row in rows} != {len(rows)}:
            raise ValueError(
                "`matrix` must be square, a row of weights for each worker, got rows of lengths "
                f"{[len(row) for row in rows]}"
            )
        mixing.check_matrix(np.array(rows), "matrix")

    def matrices(self, workers: int) -> tuple[np.ndarray, ...]:
        if workers != len(self.matrix):
            raise ValueError(
                f"`graph` must be for {workers} workers, got jaxcomp.graphs.Mixing of "
                f"{len(self.matrix)}"
            )
        return (np.array(self.matrix),)


def metropolis(edges: Iterable[Sequence[int]], workers: int) -> Mixing:
    """Any connected graph of two-way edges, with the weights `1/(1 + max(dᵢ, dⱼ))`.

    Args:
        edges: pairs of workers, each once.
        workers: the number of workers.

    Raises:
        ValueError: for a pair of other numbers than those of two workers.

    Example:
        >>> star = metropolis([(0, 1), (0, 2), (0, 3)], workers=4)
        >>> star.matrix[1]
        (0.25, 0.75, 0.0, 0.0)

    References:
        Xiao, Boyd and Lall, Distributed average consensus with time-varying Metropolis weights,
        2006.
    """
    checks.integer("workers", workers, 1)
    if not isinstance(edges, Iterable):
        raise ValueError(f"`edges` must be pairs of workers, got {edges!r}")
    near = np.zeros((workers, workers), bool)
    for edge in edges:
        pair: Any = tuple(edge) if isinstance(edge, Iterable) else (edge,)
        if len(set(pair)) != 2 or not set(pair) <= set(range(workers)):
            raise ValueError(
                f"`edges` must be pairs of two of the workers 0 to {workers - 1}, got {pair!r}"
            )
        near[pair] = near[pair[::-1]] = True
    degrees = near.sum(axis=1)
    matrix = near / (1 + np.maximum(degrees[:, None], degrees[None]))
    matrix += np.diag(1 - matrix.sum(axis=1))
    return Mixing(tuple(map(tuple, matrix.tolist())))
