"""Credibility: workers count by how often they agreed with the majority."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from jaxcomp import checks
from jaxcomp.backend import xla
from jaxcomp.base import Aggregate
from jaxcomp.numerics import addition
from jaxcomp.types import Array, PyTree

RULES = ("bounded", "soft", "hard")
"""Valid values of `Credible(rule=)`."""

_ULPS = 1e-6
"""Tolerance for a mean of equal credibilities that is rounded up."""

_LEAST = 0.25
"""Credibility below which a worker has no weight under the rule "bounded"."""

_ERRORS = 1.5
"""Three standard errors of the mean of coin tosses, in units of `1/√tosses`."""


class CredibleState(NamedTuple):
    """The credibility of each worker, from 0 to 1."""

    credibility: Float32[Array, " workers"]


@dataclasses.dataclass(frozen=True)
class Credible(Aggregate):
    """The mean of votes without, or with less of, the workers that contradict the majority.

    `aᵢ` is the fraction of elements on which worker `i` has the majority's sign, and
    `cᵢ ← decay · cᵢ + (1 − decay) · aᵢ` its credibility, which starts at 1. The result is
    `Σ λᵢ·wᵢ·xᵢ / Σ λᵢ·wᵢ`, with `λᵢ` by the rule:

    * "bounded": `aᵢ` counts only the elements on which at least two thirds of the workers agree, of
      which a third cannot change the majority; few elements are given the benefit of the doubt,
      `1.5/√elements`. `λᵢ = 0` if `cᵢ < 1/4`, else 1. If more than a third would have no weight,
      all have. Agreement earns no weight, so a worker gains nothing by voting with the majority. It
      leaves out workers that contradict nearly every clear majority, and is the plain mean under
      other attacks. Whatever `b ≤ n/3` Byzantine workers do, they have at most `3b/2n` of the
      weight, against `b/n` in the mean.
    * "soft": `λᵢ = cᵢ` of all elements, FedVote's paper.
    * "hard": `λᵢ = cᵢ` of all elements if it is at least the mean of all credibilities, else 0, the
      authors' code.

    The published rules withstand workers that send the opposite of a clear majority, random votes,
    or copies. They fail if Byzantine workers agree with the majority more often than honest ones,
    whose votes are random: five of 31 that vote with the majority and flip the tenth of the
    elements on which it is weakest have all the weight under "hard", and more than in the plain
    mean under "soft". Where honest votes are nearly coin tosses, those who agree with one another
    are the majority. `docs/reducers.md` has the measurements.

    It is for votes, whose values are `±1`, or `−1`, `0` and `1`: a Byzantine value of another size
    is not bounded. Beside arrays of votes, arrays that most workers fill with other values do not
    enter the credibility; without any votes, the signs of all arrays do.

    Args:
        decay: the fraction of the former credibility that is kept, in [0, 1).
        rule: "bounded", "soft" or "hard".
        trusted: the numbers of the workers that make the majority; None for all. It is optimistic:
            a server usually does not know who is honest.

    Raises:
        ValueError: for a `decay` outside [0, 1), another rule, or `trusted` that is not a tuple of
            different numbers; on use, for numbers that no worker has.

    Example:
        >>> import jaxcomp
        >>> votes = jnp.array([[1.0, -1.0, 1.0], [1.0, -1.0, 1.0], [-1.0, 1.0, -1.0]])
        >>> rule = Credible(rule="hard")
        >>> found = jaxcomp.aggregates.combine(rule, votes, jnp.ones(3), rule.init(votes[0], 3))
        >>> found.value, found.state.credibility
        (Array([ 1., -1.,  1.], dtype=float32), Array([1. , 1. , 0.5], dtype=float32))

    References:
        Yue, Jin, Wong and Dai, `Federated learning via plurality vote
        <https://arxiv.org/abs/2110.02998>`_ (FedVote), 2021; the hard threshold is that of the
        authors' `code <https://github.com/KAI-YUE/fedvote>`_. The rule "bounded" is ours.

    Note:
        The authors' code takes the majority of the honest workers only, which `trusted` does. An
        element on which all workers sent zero is not counted, and in a tie no worker agrees, where
        the code takes `−1`. The majority is zero if more workers sent zero than either sign. An
        absent worker keeps its credibility.
    """

    decay: float = 0.5
    rule: str = "bounded"
    trusted: tuple[int, ...] | None = None

    def __post_init__(self):
        checks.decay("decay", self.decay)
        checks.choice("rule", self.rule, RULES)
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
        agreed = self._agreement(messages, present)
        before = xla.block_fma(known * jnp.float32(self.decay))
        now = xla.block_fma(agreed * jnp.float32(1 - self.decay))
        credibility = jnp.where(present, before + now, known)
        trust = self._trust(credibility, present)
        trust = jnp.where(jnp.any(trust > 0), trust * weights, weights)
        combined = jax.tree.map(lambda rows: addition.weighted_mean(rows, trust), messages)
        return combined, CredibleState(credibility)

    def _trust(self, credibility: Array, present: Array) -> Array:
        """`λ`, zero for absent workers."""
        count = jnp.sum(present, dtype=jnp.int32)
        trust = jnp.where(present, credibility, 0)
        if self.rule == "hard":
            mean = jnp.sum(trust) / jnp.maximum(count, 1).astype(jnp.float32)
            return jnp.where(credibility >= mean - _ULPS, trust, 0)
        if self.rule == "soft":
            return trust
        out = present & (credibility < _LEAST)
        few = 3 * jnp.sum(out, dtype=jnp.int32) <= count
        return (present & ~(out & few)).astype(jnp.float32)

    def _agreement(self, messages: PyTree, present: Array) -> Array:
        """The fraction of elements on which each worker has the sign of the majority."""
        judges = present & self._judges(present.shape[0])
        clear = self.rule == "bounded"
        found = [_matches(rows, present, judges, clear) for rows in jax.tree.leaves(messages)]
        some = functools.reduce(jnp.logical_or, [votes for *_, votes in found], jnp.asarray(False))
        same, cast = jnp.zeros(present.shape, jnp.float32), jnp.zeros((), jnp.float32)
        for agreed, number, votes in found:
            counts = votes | ~some
            same += jnp.where(counts, agreed, 0)
            cast += jnp.where(counts, number, 0)
        most = jnp.maximum(cast, 1)
        fraction = same / most
        if clear:
            fraction = jnp.minimum(fraction + _ERRORS / jnp.sqrt(most), 1)
        return jnp.where(cast > 0, fraction, 1)

    def _judges(self, workers: int) -> np.ndarray:
        if self.trusted is None:
            return np.ones(workers, bool)
        if max(self.trusted) >= workers:
            raise ValueError(
                f"`trusted` must have numbers of the {workers} workers, from 0 to {workers - 1}, "
                f"got {self.trusted!r}"
            )
        return np.isin(np.arange(workers), self.trusted)


def _matches(rows: Array, present: Array, judges: Array, clear: bool) -> tuple[Array, Array, Array]:
    """The elements on which each worker has the majority's sign, the number that count, and
    whether most workers sent votes.

    Args:
        rows: an array of all workers' messages.
        present: which workers sent.
        judges: which workers make the majority.
        clear: whether only elements count on which at least two thirds of the judges agree.
    """
    over = tuple(range(1, rows.ndim))

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
    if clear:
        most = jnp.maximum(jnp.maximum(up, down), none)
        cast &= 3 * most >= 2 * jnp.sum(judges, dtype=jnp.int32)
    votes = jnp.all((rows == 0) | (jnp.abs(rows) == 1), axis=over) & present
    voted = 2 * jnp.sum(votes, dtype=jnp.int32) > jnp.sum(present, dtype=jnp.int32)
    agreed = jnp.sum(same & cast & of_workers(present), axis=over, dtype=jnp.int32)
    number = jnp.sum(cast, dtype=jnp.int32)
    return agreed.astype(jnp.float32), number.astype(jnp.float32), voted
