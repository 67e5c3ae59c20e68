"""Mixing matrices: how to build them, how fast they mix, and as permutations of the workers."""

import functools
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from jaxcomp import checks
from jaxcomp.base import Graph

_SUM = 1e-9
_GAP = 1e-9


class Rounds(NamedTuple):
    """The permutations of a graph's rounds.

    Attributes:
        sources: `[rounds, messages, workers]`: whose message each worker receives.
        weights: of the same shape; zero for a message that completes a permutation.
    """

    sources: np.ndarray
    weights: np.ndarray

    @property
    def messages(self) -> tuple[int, ...]:
        """The number of permutations in each round: the messages of the busiest worker."""
        return tuple(int(m) for m in np.any(self.weights > 0, axis=2).sum(axis=1))

    @property
    def busiest(self) -> Fraction:
        """The messages of the busiest worker in a round, on average over the rounds."""
        return Fraction(sum(self.messages), len(self.messages))

    @property
    def degree(self) -> Fraction:
        """The messages of a worker to others in a round, on average over rounds and workers."""
        turns, _, workers = self.sources.shape
        return Fraction(int(np.sum(self.weights > 0)), turns * workers)


def circulant(workers: int, offsets: Sequence[int]) -> np.ndarray:
    """Equal weights for a worker and those at these distances from it."""
    edges = np.zeros((workers, workers))
    for by in offsets:
        edges[np.arange(workers), (np.arange(workers) + by) % workers] = 1
    return equal(edges)


def equal(edges: np.ndarray) -> np.ndarray:
    """Equal weights in a graph in which all workers have the same number of neighbours."""
    edges = edges * (1 - np.eye(len(edges)))
    neighbours = int(edges[0].sum())
    return edges / (neighbours + 1) + np.eye(len(edges)) * (1 - neighbours / (neighbours + 1))


def powers(workers: int) -> tuple[int, ...]:
    """1, 2, 4, …, below `workers`."""
    return tuple(2**k for k in range((workers - 1).bit_length()))


def check_matrix(matrix: np.ndarray, name: str = "graph") -> None:
    """Raises a `ValueError` unless the matrix is doubly stochastic."""
    sums = np.concatenate([matrix.sum(axis=0), matrix.sum(axis=1)])
    if not np.all(np.isfinite(matrix)) or np.any(matrix < 0):
        raise ValueError(f"`{name}` must have weights of at least 0, got {matrix.tolist()}")
    if np.any(np.abs(sums - 1) > _SUM):
        raise ValueError(
            f"`{name}` must be doubly stochastic, or rounds would not keep the mean: rows and "
            f"columns must sum to 1, got sums from {sums.min():.6g} to {sums.max():.6g}"
        )


def degree(graph: Graph, workers: int) -> float:
    """The number of messages that a worker sends in a round, on average over rounds and workers.

    In a graph whose workers have different numbers of neighbours, a round lasts as long as that of
    the busiest one: the centre of a star of eight sends seven messages, and the average is 1.75.

    Args:
        graph: the graph.
        workers: the number of workers.

    Example:
        >>> from jaxcomp.graphs import Ring
        >>> degree(Ring(), 8)
        2.0
    """
    _check(graph, workers)
    return float(rounds(graph, workers).degree)


def spectral_gap(graph: Graph, workers: int) -> float:
    """`1 − ρ`: in a round, the distance of the workers from their mean shrinks by the factor `ρ`.

    `ρ` is the second largest modulus of an eigenvalue of `W`; for matrices in turns, the geometric
    mean over all turns; for drawn ones, the root of that of `E[WᵀW]`. The silent workers of
    `Without` keep their distance and do not count.

    Args:
        graph: the graph.
        workers: the number of workers, silent ones included.

    Example:
        >>> from jaxcomp.graphs import Ring
        >>> round(spectral_gap(Ring(), 8), 4)
        0.1953
    """
    _check(graph, workers)
    return _gap_of_heard(graph, graph.matrices(workers))


def _gap_of_heard(graph: Graph, matrices: Sequence[np.ndarray]) -> float:
    rest = np.delete(np.arange(len(matrices[0])), list(graph.silent))
    if len(rest) < 2:
        return 1.0
    return _gap([matrix[np.ix_(rest, rest)] for matrix in matrices], drawn=graph.drawn)


def _gap(matrices: Sequence[np.ndarray], *, drawn: bool) -> float:
    mean = np.full(matrices[0].shape, 1 / len(matrices[0]))
    if drawn:
        square = sum(matrix.T @ matrix for matrix in matrices) / len(matrices) - mean
        return float(1 - np.sqrt(max(np.linalg.eigvalsh(square)[-1], 0.0)))
    product = functools.reduce(lambda done, matrix: matrix @ done, matrices) - mean
    radius = np.max(np.abs(np.linalg.eigvals(product)))
    # The rounding errors of an exact mean may have much larger eigenvalues.
    if radius < 1e-3:
        power = np.linalg.matrix_power(product, len(product))
        radius = 0.0 if np.max(np.abs(power)) < 1e-12 else radius
    return float(1 - radius ** (1 / len(matrices)))


def _check(graph: Graph, workers: int) -> None:
    checks.part("graph", graph, Graph)
    checks.integer("workers", workers, 1)


def _check_agreement(graph: Graph, matrices: Sequence[np.ndarray]) -> None:
    """Raises a `ValueError` unless all workers that are not silent agree in the end."""
    workers = len(matrices[0])
    wrong = f"`graph` must let all workers agree in the end, got {graph!r} for {workers} workers"
    split = [group for group in _groups(matrices) if not set(group) <= set(graph.silent)]
    if len(split) > 1:
        raise ValueError(
            f"{wrong}, in which these groups never hear each other: {split}. Join them, as "
            "jaxcomp.graphs.metropolis(edges, workers) with more edges does, also inside of "
            "jaxcomp.graphs.Without; workers that are to be silent are named there"
        )
    if _gap_of_heard(graph, matrices) < _GAP:
        raise ValueError(
            f"{wrong}, whose spectral gap is zero: give a worker's own message a weight"
        )


def _groups(matrices: Sequence[np.ndarray]) -> list[tuple[int, ...]]:
    """The workers that reach each other by the edges of all rounds."""
    reach = np.any(np.stack(matrices) > 0, axis=0)
    reach = reach | reach.T | np.eye(len(reach), dtype=bool)
    while not np.array_equal(further := reach @ reach, reach):
        reach = further
    return sorted({tuple(np.flatnonzero(row).tolist()) for row in reach})


@functools.lru_cache(maxsize=256)
def rounds(graph: Graph, workers: int) -> Rounds:
    """The permutations of a graph's rounds.

    Raises:
        ValueError: for matrices that are not doubly stochastic, or with which the workers that are
            not silent never agree.
    """
    matrices = graph.matrices(workers)
    for matrix in matrices:
        check_matrix(matrix)
    _check_agreement(graph, matrices)
    found = [_permutations(matrix) for matrix in matrices]
    most = max(len(sources) for sources in found)
    sources = np.tile(np.arange(workers), (len(found), most, 1))
    weights = np.zeros(sources.shape)
    for turn, (own, matrix) in enumerate(zip(found, matrices, strict=True)):
        sources[turn, : len(own)] = np.where(own < 0, -1 - own, own)
        to = np.arange(workers)
        for number, whose in enumerate(own):
            real = whose >= 0
            weights[turn, number, real] = matrix[to[real], whose[real]]
    return Rounds(sources, weights)


def _permutations(matrix: np.ndarray) -> np.ndarray:
    """`[messages, workers]` senders; `−1 − j` if `j` sends only to complete a permutation.

    A bipartite graph of senders and receivers has as many perfect matchings without common edges as
    its degree, once it is regular: König, Über Graphen und ihre Anwendung auf Determinantentheorie
    und Mengenlehre, 1916.
    """
    workers = len(matrix)
    edges = (matrix > 0) & ~np.eye(workers, dtype=bool)
    most = int(max(edges.sum(axis=0).max(), edges.sum(axis=1).max()))
    places = np.unique((np.argwhere(edges) @ [-1, 1]) % workers)
    to = np.arange(workers)
    if edges.sum() == len(places) * workers:  # Shifts, which suit rings of devices.
        return np.array([(to + place) % workers for place in places], int).reshape(-1, workers)
    from scipy import optimize  # Only for graphs that need it: the import takes long.

    real, filled = edges.astype(int), _filler(edges, most)
    found = np.zeros((most, workers), int)
    for number in range(most):
        gain = np.where(real + filled == 0, -float(workers**2), 1.0 + (real > 0))
        _, j = optimize.linear_sum_assignment(gain, maximize=True)
        taken = real[to, j] > 0
        found[number] = np.where(taken, j, -1 - j)
        real[to, j] -= taken
        filled[to, j] -= ~taken
    return found


def _filler(edges: np.ndarray, most: int) -> np.ndarray:
    """Further edges, by which all workers have one degree; from a worker to itself if possible."""
    free_in, free_out = most - edges.sum(axis=1), most - edges.sum(axis=0)
    filled = np.zeros(edges.shape, int)
    own = np.minimum(free_in, free_out)
    filled[np.diag_indices(len(edges))] = own
    receivers = np.repeat(np.arange(len(edges)), free_in - own)
    senders = np.repeat(np.arange(len(edges)), free_out - own)
    np.add.at(filled, (receivers, senders), 1)
    return filled
