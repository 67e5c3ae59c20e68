"""Credibility: workers count by how often they agreed with the majority."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from jaxcomp import checks
from jaxcomp.backend import xla
from jaxcomp.base import Aggregate
from jaxcomp.numerics import summing
from jaxcomp.types import Array, PyTree

_ULPS = 1e-6
"""The mean of equal credibilities may be rounded up by some units in the last place."""


class CredibleState(NamedTuple):
    """The credibility of each worker, from 0 to 1."""

    credibility: Float32[Array, " workers"]


@dataclasses.dataclass(frozen=True)
class Credible(Aggregate):
    """The mean of messages, weighted by how well each worker's signs have agreed with the majority.

    `aᵢ` is the fraction of elements on which the sign of worker `i` is the sign `m` of most
    workers, and `cᵢ ← decay · cᵢ + (1 − decay) · aᵢ` its credibility, which starts at 1. The result
    is `Σ λᵢ·wᵢ·xᵢ / Σ λᵢ·wᵢ` with `λᵢ = cᵢ` if `cᵢ` is at least the mean of all credibilities,
    else 0. Workers that send `−m` in every round get no weight, as long as they are a third of the
    workers at most; nearly half of them turn the majority, and with it the credibility.

    It is for votes, whose values are `±1`, or `−1`, `0` and `1`: a hostile value of another size is
    not bounded.

    Args:
        decay: the fraction of the former credibility that is kept, in [0, 1).
        soft: True for `λᵢ = cᵢ` without a threshold, which gives every worker some weight.
        trusted: the numbers of the workers that make the majority; None for all. It is optimistic:
            a server usually does not know who is honest.

    Raises:
        ValueError: for a `decay` outside [0, 1), or `trusted` that is not a tuple of different
            numbers; on use, for numbers that no worker has.

    Example:
        >>> import jaxcomp
        >>> votes = jnp.array([[1.0, -1.0, 1.0], [1.0, -1.0, 1.0], [-1.0, 1.0, -1.0]])
        >>> rule = Credible()
        >>> found = jaxcomp.aggregates.combine(rule, votes, jnp.ones(3), rule.init(votes[0], 3))
        >>> found.value, found.state.credibility
        (Array([ 1., -1.,  1.], dtype=float32), Array([1. , 1. , 0.5], dtype=float32))

    References:
        Yue, Jin, Wong and Dai, `Federated learning via plurality vote
        <https://arxiv.org/abs/2110.02998>`_ (FedVote), 2021; the threshold is that of the authors'
        `code <https://github.com/KAI-YUE/fedvote>`_.

    Note:
        The authors' code takes the majority of the honest workers only, which `trusted` does. An
        element on which all workers sent zero is not counted, and in a tie no worker agrees, where
        the code takes `−1`. The majority is zero if more workers sent zero than either sign. An
        absent worker keeps its credibility.
    """

    decay: float = 0.5
    soft: bool = False
    trusted: tuple[int, ...] | None = None

    def __post_init__(self):
        checks.decay("decay", self.decay)
        checks.choice("soft", self.soft, (False, True))
        if self.trusted is None:
            return
        if not isinstance(self.trusted, tuple) or not self.trusted:
            raise ValueError(
                "`trusted` must be a tuple of workers' numbers, as in (0, 1), or None for all, got "
                f"{self.trusted!r}"
            )
        for number in self.trusted:
            checks.integer("trusted", number, 0)
        if len(set(self.trusted)) < len(self.trusted):
            raise ValueError(f"`trusted` must have different numbers, got {self.trusted!r}")

    def init(self, like: PyTree, workers: int) -> CredibleState:
        del like
        return CredibleState(jnp.ones(workers, jnp.float32))

    def combine(
        self, messages: PyTree, weights: Array, state: CredibleState
    ) -> tuple[PyTree, CredibleState]:
        present = weights > 0
        known = state.credibility
        # Block a fused multiply-add, which would round differently from one program to the next.
        before, now = (
            xla.block_fma(x * jnp.float32(share))
            for x, share in (
                (known, self.decay),
                (self._agreement(messages, present), 1 - self.decay),
            )
        )
        credibility = jnp.where(present, before + now, known)
        trust = jnp.where(present, credibility, 0)
        if not self.soft:
            mean = jnp.sum(trust) / jnp.maximum(jnp.sum(present, dtype=jnp.float32), 1)
            trust = jnp.where(credibility >= mean - _ULPS, trust, 0)
        trust = jnp.where(jnp.any(trust > 0), trust * weights, weights)
        combined = jax.tree.map(lambda rows: summing.weighted_mean(rows, trust), messages)
        return combined, CredibleState(credibility)

    def _agreement(self, messages: PyTree, present: Array) -> Array:
        """The fraction of elements on which each worker has the sign of the majority."""
        judges = present & self._trusted(present.shape[0])
        found = [_matches(rows, present, judges) for rows in jax.tree.leaves(messages)]
        same = sum((same for same, _ in found), jnp.zeros(present.shape, jnp.float32))
        cast = sum((cast for _, cast in found), jnp.zeros((), jnp.float32))
        return jnp.where(cast > 0, same / jnp.maximum(cast, 1), 1)

    def _trusted(self, workers: int) -> np.ndarray:
        if self.trusted is None:
            return np.ones(workers, bool)
        if max(self.trusted) >= workers:
            raise ValueError(
                f"`trusted` must have numbers of the {workers} workers, from 0 to {workers - 1}, "
                f"got {self.trusted!r}"
            )
        return np.isin(np.arange(workers), self.trusted)


def _matches(rows: Array, present: Array, judges: Array) -> tuple[Array, Array]:
    """How often each worker has the sign of the majority, and the number of elements with votes."""

    def of_workers(mask: Array) -> Array:
        return mask.reshape(-1, *[1] * (rows.ndim - 1))

    def count(chosen: Array) -> Array:
        return jnp.sum(chosen & of_workers(judges), axis=0, keepdims=True, dtype=jnp.int32)

    up, down, none = count(rows > 0), count(rows < 0), count(rows == 0)
    neither = none > jnp.maximum(up, down)
    same = jnp.where(
        neither, rows == 0, jnp.where(up > down, rows > 0, jnp.where(up < down, rows < 0, False))
    )
    cast = jnp.any((rows != 0) & of_workers(present), axis=0, keepdims=True)
    over = tuple(range(1, rows.ndim))
    agreed = jnp.sum(same & cast & of_workers(present), axis=over, dtype=jnp.int32)
    return agreed.astype(jnp.float32), jnp.sum(cast, dtype=jnp.int32).astype(jnp.float32)
