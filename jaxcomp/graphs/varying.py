"""Graphs whose weights change from round to round, and graphs of which a part is silent."""

import dataclasses

import numpy as np

from jaxcomp import checks
from jaxcomp.base import Graph
from jaxcomp.graphs import mixing


@dataclasses.dataclass(frozen=True)
class OnePeer(Graph):
    """One-peer exponential graph: round `t` joins workers at a distance of `2^(t mod ⌈log₂ n⌉)`.

    One message a round, weights 1/2. With `n = 2^p` workers, `p` rounds are the exact mean.

    Example:
        >>> mixing.degree(OnePeer(), 16), round(mixing.spectral_gap(OnePeer(), 16), 4)
        (1.0, 1.0)

    References:
        Ying et al., `Exponential graph is provably efficient for decentralized deep training
        <https://arxiv.org/abs/2110.13363>`_, 2021.
    """

    def matrices(self, workers: int) -> tuple[np.ndarray, ...]:
        if workers == 1:
            return (np.eye(1),)
        return tuple(mixing.circulant(workers, (by,)) for by in mixing.powers(workers))


@dataclasses.dataclass(frozen=True)
class RandomPairs(Graph):
    """In each round all workers meet in pairs, and each takes the mean of its pair.

    The pairs are one of the `n − 1` rounds of a tournament in which all meet once, drawn with the
    step's key: any two workers meet with probability `1/(n − 1)`, as in a pairing drawn from all.
    With an odd number of workers, one stays alone.

    Example:
        >>> [row.tolist().index(0.5, 1) for row in RandomPairs().matrices(4)[0][:1]]
        [3]
        >>> round(mixing.spectral_gap(RandomPairs(), 16), 4)
        0.3169
    """

    drawn = True

    def matrices(self, workers: int) -> tuple[np.ndarray, ...]:
        if workers == 1:
            return (np.eye(1),)
        players = workers + workers % 2
        ring = players - 1
        found = []
        for turn in range(ring):
            matrix = np.eye(workers)
            pairs = [((turn + k) % ring, (turn - k) % ring) for k in range(1, players // 2)]
            for i, j in [*pairs, (turn, ring)]:
                if max(i, j) < workers:
                    matrix[np.ix_((i, j), (i, j))] = 0.5
            found.append(matrix)
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class Alternating(Graph):
    """Several graphs in turns, such as a ring and then random neighbours.

    Args:
        graphs: the graphs; the matrices of a graph that has several follow one another.

    Raises:
        ValueError: without a graph, or for one that draws its rounds.

    Example:
        >>> from jaxcomp.graphs import Ring
        >>> len(Alternating((Ring(), OnePeer())).matrices(8))
        4
    """

    graphs: tuple[Graph, ...]

    def __post_init__(self):
        checks.sequence("graphs", self.graphs)
        object.__setattr__(self, "graphs", tuple(self.graphs))
        for graph in self.graphs:
            checks.part("graphs", graph, Graph)
        if not self.graphs or any(graph.drawn for graph in self.graphs):
            raise ValueError(
                "`graphs` must be at least one graph, all of them with rounds in turns, got "
                f"{self.graphs!r}"
            )

    @property
    def silent(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The workers that are silent in all of the graphs."""
        return tuple(sorted(set.intersection(*(set(graph.silent) for graph in self.graphs))))

    def matrices(self, workers: int) -> tuple[np.ndarray, ...]:
        return tuple(matrix for graph in self.graphs for matrix in graph.matrices(workers))


@dataclasses.dataclass(frozen=True)
class Without(Graph):
    """A graph in which some workers are silent: nobody hears them, and they hear nobody.

    The weight of each missing message goes to the receiver's own message, so the matrix stays
    doubly stochastic among the others, and their mean is kept. The others must still be connected,
    over all rounds of a graph that changes: a ring of eight without two workers that are not
    neighbours is two groups, each of which would go to a mean of its own, and is refused.

    Args:
        graph: the graph of all workers, with two-way edges of equal weights.
        silent: the numbers of the silent workers.

    Raises:
        ValueError: for another kind of graph; on use, for numbers that are not workers, weights
            that differ between the two ways of an edge, or silent workers without whom the others
            are not connected.

    Example:
        >>> from jaxcomp.graphs import Ring
        >>> Without(Ring(), silent=(3,)).matrices(4)[0].round(2).tolist()[2]
        [0.0, 0.33, 0.67, 0.0]
    """

    graph: Graph
    silent: tuple[int, ...] = dataclasses.field()

    def __post_init__(self):
        checks.part("graph", self.graph, Graph)
        checks.sequence("silent", self.silent)
        for worker in self.silent:
            checks.integer("silent", worker, 0)
        silent = set(self.silent) | set(self.graph.silent)
        object.__setattr__(self, "silent", tuple(sorted(silent)))

    @property
    def drawn(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As the graph of all workers."""
        return self.graph.drawn

    def matrices(self, workers: int) -> tuple[np.ndarray, ...]:
        for worker in self.silent:
            checks.integer("silent", worker, 0, workers - 1)
        return tuple(self._of(matrix) for matrix in self.graph.matrices(workers))

    def _of(self, matrix: np.ndarray) -> np.ndarray:
        if not np.allclose(matrix, matrix.T, rtol=0, atol=1e-12):
            raise ValueError(
                "`graph` must have two-way edges of equal weights, so that the weights of missing "
                f"messages balance, got {self.graph!r}; use jaxcomp.graphs.Ring(), Torus or "
                "RandomPairs()"
            )
        kept = matrix.copy()
        kept[list(self.silent), :] = kept[:, list(self.silent)] = 0
        np.fill_diagonal(kept, 0)
        return kept + np.diag(1 - kept.sum(axis=1))
