"""Graphs: doubly stochastic matrices, how fast they mix, and as permutations of the workers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp import graphs
from jaxcomp.graphs import mixing

PATH = graphs.metropolis([(0, 1), (1, 2), (2, 3), (3, 4)], workers=5)
STAR = graphs.metropolis([(0, k) for k in range(1, 8)], workers=8)
ONE_WAY = graphs.Mixing(((0.5, 0.5, 0.0), (0.0, 0.5, 0.5), (0.5, 0.0, 0.5)))
CASES = [
    *[(graphs.Ring(), n) for n in (1, 2, 3, 8)],
    (graphs.Torus(2, 4), 8),
    (graphs.Torus(3, 4), 12),
    (graphs.Torus(1, 2), 2),
    *[(graphs.Exponential(), n) for n in (1, 2, 6, 8)],
    *[(graphs.Complete(), n) for n in (1, 5)],
    *[(graphs.OnePeer(), n) for n in (1, 2, 6, 8)],
    *[(graphs.RandomPairs(), n) for n in (1, 2, 5, 8)],
    (graphs.Alternating((graphs.Ring(), graphs.Torus(2, 4), graphs.OnePeer())), 8),
    (graphs.Without(graphs.Torus(2, 4), silent=(2, 3)), 8),
    (graphs.Without(graphs.RandomPairs(), silent=(0,)), 6),
    (PATH, 5),
    (STAR, 8),
    (ONE_WAY, 3),
]


@pytest.mark.parametrize(("graph", "workers"), CASES, ids=repr)
def test_permutations_send_every_weight_once(graph, workers):
    found, matrices = mixing.rounds(graph, workers), graph.matrices(workers)
    assert len(found.sources) == len(matrices)
    for sources, weights, messages, matrix in zip(
        found.sources, found.weights, found.messages, matrices, strict=True
    ):
        np.testing.assert_allclose(matrix.sum(axis=0), 1, rtol=0, atol=4e-16)
        np.testing.assert_allclose(matrix.sum(axis=1), 1, rtol=0, atol=4e-16)
        sent, to = np.zeros((workers, workers)), np.arange(workers)
        two_way = np.array_equal(matrix > 0, matrix.T > 0)
        for own, weight in zip(sources, weights, strict=True):
            assert sorted(own) == list(range(workers))
            if two_way:  # Then a worker that nobody hears sends to itself.
                assert ((matrix[to, own] > 0) | (own == to)).all()
            sent[np.arange(workers), own] += weight
        np.testing.assert_array_equal(sent, matrix - np.diag(np.diag(matrix)))
        edges = (matrix > 0) & ~np.eye(workers, dtype=bool)
        assert messages == max(edges.sum(axis=0).max(), edges.sum(axis=1).max())


def test_spectral_gaps_are_those_of_the_formulas():
    ring = (2 - 2 * np.cos(2 * np.pi / 16)) / 3
    np.testing.assert_allclose(graphs.spectral_gap(graphs.Ring(), 16), ring, rtol=1e-12)
    assert abs(ring - 0.0507) < 1e-4
    assert graphs.spectral_gap(graphs.OnePeer(), 16) == 1  # Exact in four rounds.
    assert 0 < graphs.spectral_gap(graphs.OnePeer(), 6) < 1


def test_silent_workers_do_not_count_in_a_spectral_gap():
    path = graphs.Without(graphs.Ring(), silent=(4,))
    inside = np.delete(np.delete(path.matrices(5)[0], 4, 0), 4, 1)
    second = np.sort(np.abs(np.linalg.eigvalsh(inside)))[-2]
    np.testing.assert_allclose(graphs.spectral_gap(path, 5), 1 - second, rtol=1e-12)
    for silent in ((0,), (0, 1)):
        assert graphs.spectral_gap(graphs.Without(graphs.Ring(), silent), 2) == 1
    pairs = 1 - 16 / (2 * 15)  # A pair keeps the half of what is within it.
    np.testing.assert_allclose(graphs.spectral_gap(graphs.RandomPairs(), 16), 1 - pairs**0.5)


def test_one_peer_graphs_take_the_exact_mean_in_the_logarithm_of_the_workers():
    for power in range(1, 6):
        workers = 2**power
        matrices = graphs.OnePeer().matrices(workers)
        assert len(matrices) == power
        product = np.linalg.multi_dot(matrices) if power > 1 else matrices[0]
        np.testing.assert_allclose(product, 1 / workers, rtol=0, atol=1e-12)


def test_silent_workers_are_left_out_and_the_mean_of_the_others_is_kept():
    (matrix,) = graphs.Without(graphs.Torus(2, 4), silent=(2, 5)).matrices(8)
    rest = [0, 1, 3, 4, 6, 7]
    assert np.array_equal(matrix[2], np.eye(8)[2])
    assert np.array_equal(matrix[:, 5], np.eye(8)[5])
    np.testing.assert_allclose(matrix[np.ix_(rest, rest)].sum(axis=0), 1, rtol=0, atol=4e-16)
    assert graphs.spectral_gap(graphs.Mixing(_rows(matrix[np.ix_(rest, rest)])), 6) > 0.1


@pytest.mark.parametrize(
    ("graph", "groups"),
    [
        (graphs.Without(graphs.Ring(), silent=(0, 4)), "(1, 2, 3), (5, 6, 7)"),
        (graphs.Without(graphs.Ring(), silent=(0, 2)), "(1,), (3, 4, 5, 6, 7)"),
        (graphs.Without(graphs.Without(graphs.Ring(), (0,)), (4,)), "(1, 2, 3), (5, 6, 7)"),
        (graphs.Without(STAR, silent=(0,)), "(1,), (2,)"),
        (
            graphs.Alternating(
                (graphs.Without(graphs.Ring(), (0, 4)), graphs.Without(graphs.Ring(), (0, 4, 5)))
            ),
            "(1, 2, 3), (5, 6, 7)",
        ),
    ],
    ids=repr,
)
def test_silent_workers_without_whom_the_others_are_apart_are_refused(graph, groups):
    with pytest.raises(
        ValueError, match=rf"(?s)got .* never hear each other: \[{re.escape(groups)}"
    ):
        mixing.rounds(graph, 8)


def test_groups_of_one_round_may_be_joined_in_another():
    """Round by round a graph that changes may be in parts; over all rounds it must not."""
    halves = graphs.Without(graphs.Ring(), silent=(0, 4))
    joined = graphs.Alternating((halves, graphs.Without(graphs.Ring(), silent=(0,))))
    assert joined.silent == (0,)
    matrices = joined.matrices(8)
    assert len(mixing.rounds(joined, 8).sources) == 2
    rest = np.random.default_rng(0).standard_normal(8)
    mean, x = rest[1:].mean(), rest
    for turn in range(400):
        x = matrices[turn % 2] @ x
    np.testing.assert_allclose(x[1:], mean, rtol=0, atol=1e-6)
    assert x[0] == rest[0]
    around = graphs.metropolis([*((k, k + 1) for k in range(7)), (7, 0), (3, 5)], workers=8)
    assert mixing.rounds(graphs.Without(around, silent=(0, 4)), 8).messages == (2,)
    assert mixing.rounds(graphs.Without(graphs.Ring(), silent=(1, 2)), 8).messages == (2,)
    assert mixing.rounds(graphs.Without(graphs.Ring(), silent=(0, 1, 2)), 4).messages == (0,)


def _rows(matrix):
    return tuple(map(tuple, matrix.tolist()))


def test_a_graph_that_cannot_work_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"`matrix` must be square.*\[2, 1\]"):
        graphs.Mixing(((0.5, 0.5), (1.0,)))
    with pytest.raises(ValueError, match=r"doubly stochastic.*from 0.7 to 1.3"):
        graphs.Mixing(((0.7, 0.3), (0.0, 1.0)))
    with pytest.raises(ValueError, match="weights of at least 0"):
        graphs.Mixing(((1.5, -0.5), (-0.5, 1.5)))
    apart, shifted = np.kron(np.eye(2), np.full((2, 2), 0.5)), np.roll(np.eye(3), 1, axis=0)
    said = (r"never hear each other: \[\(0, 1\), \(2, 3\)\]", "spectral gap is zero")
    for matrix, reason in zip((apart, shifted), said, strict=True):  # Messages only go round.
        with pytest.raises(ValueError, match=reason):
            mixing.rounds(graphs.Mixing(_rows(matrix)), len(matrix))
    with pytest.raises(ValueError, match=r"for 6 workers, got Torus\(rows=2, columns=4\)"):
        graphs.Torus(2, 4).matrices(6)
    with pytest.raises(ValueError, match=r"for 6 workers, got .* of 5"):
        PATH.matrices(6)
    with pytest.raises(ValueError, match="two-way edges of equal weights"):
        graphs.Without(graphs.OnePeer(), silent=(1,)).matrices(8)
    with pytest.raises(ValueError, match="`silent` must be from 0 to 3"):
        graphs.Without(graphs.Ring(), silent=(4,)).matrices(4)
    with pytest.raises(ValueError, match=r"`edges` must be pairs .* got \(1, 1\)"):
        graphs.metropolis([(1, 1)], workers=3)
    with pytest.raises(ValueError, match="`graphs` must be at least one graph"):
        graphs.Alternating((graphs.RandomPairs(),))


def test_growing_lengths_partition_the_steps():
    import jaxcomp

    lengths = jaxcomp.gates.Growing(10, 1.5)
    position = np.asarray(lengths.position(np.arange(300)))
    starts = np.flatnonzero(position == 0)
    np.testing.assert_array_equal(starts[:5], np.cumsum([0, 10, 15, 23, 34]))
    np.testing.assert_array_equal(np.diff(position)[position[1:] != 0], 1)
    assert int(lengths.steps((), jnp.asarray(2**31 - 2))) > 0
    assert int(jax.jit(lengths.position)(2**31 - 2)) >= 0
    with pytest.raises(ValueError, match=r"`factor` .*jaxcomp.gates.Constant\(10\)"):
        jaxcomp.gates.Growing(10, 1.0)
