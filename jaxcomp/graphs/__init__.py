"""Graphs of workers for `jaxcomp.Gossip`: which workers hear each other, with which weights.

A graph is its mixing matrices `W`, which are doubly stochastic. Each message is a permutation of
the workers, so a round over a graph of degree `k` is `k` permutations.
"""

from jaxcomp import lazy

__getattr__, __dir__, __all__ = lazy.exports(__name__)
