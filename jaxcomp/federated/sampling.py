"""Sampling: which clients take part in a round, drawn on the server."""

import abc
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp import checks
from jaxcomp.base.interface import Interface
from jaxcomp.numerics import noise
from jaxcomp.types import Array

_SAMPLE = 0x73616D70
"""Folded into a round's key, so that who takes part has nothing to do with the codecs' noise."""


class Sampling(Interface, abstract=True):
    """Draws the clients of a round from the round's key, the same on every machine."""

    @abc.abstractmethod
    def cohort(self, key: Array, clients: int) -> np.ndarray:
        """The numbers of the clients that take part, in ascending order."""

    @abc.abstractmethod
    def expected(self, clients: int) -> float:
        """The expected number of clients that take part."""

    def among(self, key: Array, clients: int, present: np.ndarray) -> np.ndarray:
        """The numbers of the clients that take part if only some of them can be reached.

        The draw of `cohort` if all can; the default draws positions in `present`.

        Args:
            key: the round's key.
            clients: how many clients there are.
            present: the numbers of those that can be reached, in ascending order.
        """
        del clients
        return present[self.cohort(key, len(present))]


@dataclasses.dataclass(frozen=True)
class Everyone(Sampling):
    """Every client takes part in every round.

    Example:
        >>> Everyone().expected(10)
        10.0
    """

    def cohort(self, key: Array, clients: int) -> np.ndarray:
        del key
        return np.arange(clients)

    def expected(self, clients: int) -> float:
        return float(clients)


@dataclasses.dataclass(frozen=True)
class Exactly(Sampling):
    """Exactly `r` of the `n` clients take part, every such set equally likely.

    They are the clients with the smallest words of a hash of the round's key.

    Args:
        r: the number of participants.

    Raises:
        ValueError: if `r` is not positive; on use, if there are fewer clients.

    Example:
        >>> len(Exactly(3).cohort(noise.raw(0), clients=10))
        3

    References:
        Reisizadeh et al., `FedPAQ <https://arxiv.org/abs/1909.13014>`_, 2020.
    """

    r: int

    def __post_init__(self):
        checks.integer("r", self.r, 1)

    def cohort(self, key: Array, clients: int) -> np.ndarray:
        self.expected(clients)  # Raises if there are too few clients.
        ranked = np.argsort(_words(key, clients), kind="stable")  # Ties go to the lower number.
        return np.sort(ranked[: self.r])

    def among(self, key: Array, clients: int, present: np.ndarray) -> np.ndarray:
        """The `r` with the smallest words of those that can be reached; all of fewer."""
        ranked = np.argsort(_words(key, clients)[present], kind="stable")
        return np.sort(present[ranked[: self.r]])

    def expected(self, clients: int) -> float:
        if self.r > clients:
            raise ValueError(f"`r` must be at most the number of clients, {clients}, got {self.r}")
        return float(self.r)


@dataclasses.dataclass(frozen=True)
class Independently(Sampling):
    """Each client takes part with probability `p`, independently of the others.

    With a method whose `mean` is "all", the sum of the messages is divided by `p·n`, so that its
    expectation is the mean over all clients.

    Args:
        p: the probability, in (0, 1].

    Raises:
        ValueError: for another `p`.

    Example:
        >>> Independently(0.5).expected(10)
        5.0

    References:
        Philippenko and Dieuleveut, `Artemis <https://arxiv.org/abs/2006.14591>`_, 2020.
    """

    p: float

    def __post_init__(self):
        checks.share("p", self.p)

    def cohort(self, key: Array, clients: int) -> np.ndarray:
        if self.p == 1:
            return np.arange(clients)
        # A probability below 2^-32 still happens.
        return np.flatnonzero(_words(key, clients) < max(round(self.p * 2**32), 1))

    def among(self, key: Array, clients: int, present: np.ndarray) -> np.ndarray:
        """Those of `cohort` that can be reached: who else is there changes no client's draw."""
        return np.intersect1d(self.cohort(key, clients), present)

    def expected(self, clients: int) -> float:
        return self.p * clients


def participants_of(number: int | None) -> Sampling:
    """The sampling of so many clients in each round; None for all."""
    return Everyone() if number is None else Exactly(number)


def _words(key: Array, clients: int) -> np.ndarray:
    """A word for each client."""
    return np.asarray(_hashed(key, clients))


@functools.partial(jax.jit, static_argnums=1)
def _hashed(key: Array, clients: int) -> Array:
    own = noise.fold(key, _SAMPLE)
    numbers = jnp.arange(clients, dtype=jnp.uint32)
    return jax.vmap(lambda number: noise.fold(own, number)[0])(numbers)
