"""Faults that a simulation injects: lost messages and old parameters."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp import checks
from jaxcomp.federated.method import Method
from jaxcomp.numerics import noise
from jaxcomp.types import Array

_LOST, _OLD = 0x6C6F7374, 0x6F6C6421
"""Folded into a round's key for the two draws."""


@dataclasses.dataclass(frozen=True)
class Faults:
    """Which clients' messages are lost, and which clients begin from old parameters.

    Both are drawn for each client and round from the round's key. A client whose message is lost
    has done its work, and keeps its whole message in its residual, if it has one.

    Args:
        lost: the probability that a message is lost, in [0, 1].
        old: the probability that a client begins from old parameters, in [0, 1].
        longest: how many rounds old they are at most; each age from 1 on is equally likely. Also
            the longest of a simulation's `delays`.

    Raises:
        ValueError: for a probability outside [0, 1], or `old` without `longest`.

    Example:
        >>> Faults(lost=0.2)
        Faults(lost=0.2, old=0.0, longest=0)
    """

    lost: float = 0.0
    old: float = 0.0
    longest: int = 0

    def __post_init__(self):
        checks.number("lost", self.lost, 0.0, 1.0)
        checks.number("old", self.old, 0.0, 1.0)
        checks.integer("longest", self.longest, 0)
        if self.old and not self.longest:
            raise ValueError("`longest` must be positive for old parameters, got 0")

    def draw(self, key: Array, numbers: np.ndarray, known: int) -> tuple[np.ndarray, np.ndarray]:
        """Whether each client's message arrives, and how many rounds old its parameters are.

        Args:
            key: the round's key.
            numbers: the clients.
            known: how many past parameters there are.
        """
        lost, old = np.asarray(_words(key, jnp.asarray(numbers, jnp.uint32)))
        arrives = lost >= self.lost * 2.0**32
        oldest = min(self.longest, known - 1)
        if not oldest:
            return arrives, np.zeros(len(numbers), np.int32)
        # The upper bits say whether it is old, the lower how old.
        is_old = old < self.old * 2.0**32
        return arrives, np.where(is_old, 1 + old % oldest, 0).astype(np.int32)

    def times(self, arrives: np.ndarray, ages: np.ndarray, power: float) -> np.ndarray:
        """The factors on the clients' weights."""
        return np.where(arrives, stale(ages, power), 0.0)


def late_refusal(method: Method) -> str | None:
    """The part of a method that late messages would break, whose clients do not know their age."""
    if method.uplink.feedback.facts.mirrors and method.staleness:
        return "a Shift, whose client has moved by the whole message, unless staleness=0"
    if method.work.control and method.staleness:
        return "control variates, whose client has moved by the whole message, unless staleness=0"
    if method.uplink.guessed and method.uplink.side.of_round:
        return f"{method.uplink.side!r}, which knows the guesses of the latest round only"
    if not method.aggregate.streams:
        return f"{method.aggregate!r}, which combines messages of one round"
    return None


def stale(ages: np.ndarray, power: float) -> np.ndarray:
    """The factors on the weights of clients that began from parameters of these ages."""
    return (1.0 + ages) ** -power


@functools.partial(jax.jit)
def _words(key: Array, numbers: Array) -> Any:
    """Two words for each client."""

    def of(number: Array) -> Array:
        return jnp.stack([noise.fold(key, word, number)[0] for word in (_LOST, _OLD)])

    return jax.vmap(of, out_axes=1)(numbers)
