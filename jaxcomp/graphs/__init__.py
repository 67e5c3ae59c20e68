"""Graphs of workers for `jaxcomp.Gossip`: which workers hear each other, with which weights.

A graph is its mixing matrices `W`, which are doubly stochastic. Each message is a permutation of
the workers, so a round over a graph of degree `k` is `k` permutations.
"""

from jaxcomp.graphs.mixing import degree as degree, spectral_gap as spectral_gap
from jaxcomp.graphs.static import (
    Complete as Complete,
    Exponential as Exponential,
    Mixing as Mixing,
    Ring as Ring,
    Torus as Torus,
    metropolis as metropolis,
)
from jaxcomp.graphs.varying import (
    Alternating as Alternating,
    OnePeer as OnePeer,
    RandomPairs as RandomPairs,
    Without as Without,
)
