"""Gates that draw participants at random from a shared key, so that every worker knows them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp import checks
from jaxcomp.backend import axes
from jaxcomp.base import Gate, Opened
from jaxcomp.numerics import noise
from jaxcomp.types import Array, AxisName, PyTree

_GATE = 0x67617465
"""Folded into a step's key, so that participation is independent of the codecs' noise."""


@dataclasses.dataclass(frozen=True)
class Bernoulli(Gate):
    """Each worker participates with probability `p`, drawn independently in every step.

    The sum of the sent messages is multiplied by `1/p`, `Σ_S c_i / (p·n)`, so that its expectation
    is the mean of all messages. It is not multiplied with a memory that sends unsent messages later
    (`Residual`, `MomentumCorrection`), which would count them more than once, nor with EF21, whose
    biased messages no factor corrects. A participant's `Shift` moves by its step, whatever `p` is.
    All workers know the participants from the shared key.

    Args:
        p: the probability, in (0, 1].

    Raises:
        ValueError: for another `p`.

    Example:
        >>> import jaxcomp
        >>> artemis = jaxcomp.Gather(jaxcomp.Link(jaxcomp.qsgd(bits=4), jaxcomp.Shift(0.1)))
        >>> tx = jaxcomp.compressed_mean(artemis, "data", gate=Bernoulli(0.5))

    References:
        Philippenko and Dieuleveut, `Artemis <https://arxiv.org/abs/2006.14591>`_, 2020, whose
        second variant of partial participation (PP2: one memory on the server) this is with
        `Shift`.

    Note:
        Non-participants still compute gradients and occupy their slot in the collective (static
        shapes). Bytes are saved only in steps in which no worker is drawn.
    """

    p: float
    idles = True

    def __post_init__(self):
        _check_probability(self.p)

    @property
    def closes(self) -> bool:
        return self.p < 1

    def factor(self, workers: int) -> float:
        return 1 / self.p

    def init(self, like: PyTree) -> tuple:
        return ()

    def open(
        self, key: Array, tree: Any, state: tuple, axis_name: AxisName, params: PyTree = None
    ) -> Opened:
        drawn = _happens(_words(key, axes.size(axis_name)), self.p)
        return Opened(jnp.any(drawn), _mask(drawn, axis_name), state)


@dataclasses.dataclass(frozen=True)
class SampledWorkers(Gate):
    """Exactly `r` of the `n` workers participate, drawn independently in every step.

    The participants are the workers with the smallest words of a hash of the shared key. The sum of
    the sent messages is multiplied by `n/r`, `Σ_S c_i / r`, with the same exceptions as for
    `Bernoulli`.

    Args:
        r: the number of participants.

    Raises:
        ValueError: if `r` is not positive; on use, if there are fewer workers.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.compressed_mean(jaxcomp.qsgd(bits=4), "data", gate=SampledWorkers(3))

    References:
        Reisizadeh et al., `FedPAQ <https://arxiv.org/abs/1909.13014>`_, 2020.

    Note:
        As with `Bernoulli`, non-participants save no bytes.
    """

    r: int
    closes = False

    def __post_init__(self):
        checks.integer("r", self.r, 1)

    def factor(self, workers: int) -> float:
        if self.r > workers:
            raise ValueError(f"`r` must be at most the number of workers, {workers}, got {self.r}")
        return workers / self.r

    def init(self, like: PyTree) -> tuple:
        return ()

    def open(
        self, key: Array, tree: Any, state: tuple, axis_name: AxisName, params: PyTree = None
    ) -> Opened:
        workers = axes.size(axis_name)
        self.factor(workers)  # Raises if there are too few workers.
        ranked = jnp.argsort(_words(key, workers), stable=True)  # Ties go to the lower number.
        drawn = jnp.zeros(workers, bool).at[ranked[: self.r]].set(True)
        return Opened(jnp.asarray(np.True_), _mask(drawn, axis_name), state)


@dataclasses.dataclass(frozen=True)
class Coin(Gate):
    """All workers send with probability `p`, otherwise none.

    Args:
        p: the probability, in (0, 1].
        rescaled: multiply the sum by `1/p`, so that its expectation over the coin is the mean, with
            the same exceptions as for `Bernoulli`. MARINA's coin, which chooses between two kinds
            of message, is not rescaled.

    Raises:
        ValueError: for another `p`.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.compressed_mean(jaxcomp.sign(), "data", gate=Coin(0.1))

    References:
        Gorbunov et al., `MARINA <https://arxiv.org/abs/2102.07845>`_, 2021.
    """

    p: float
    rescaled: bool = False

    def __post_init__(self):
        _check_probability(self.p)
        checks.choice("rescaled", self.rescaled, (False, True))

    @property
    def closes(self) -> bool:
        return self.p < 1

    def factor(self, workers: int) -> float:
        return 1 / self.p if self.rescaled else 1.0

    def init(self, like: PyTree) -> tuple:
        return ()

    def open(
        self, key: Array, tree: Any, state: tuple, axis_name: AxisName, params: PyTree = None
    ) -> Opened:
        return Opened(_happens(_words(key, 1)[0], self.p), None, state)


def _check_probability(p: Any) -> None:
    checks.number("p", p, 0.0, 1.0)
    checks.positive("p", p)


def _words(key: Array, count: int) -> Array:
    """One word for each worker, the same array on all workers."""
    own = noise.fold(key, _GATE)
    return jax.vmap(lambda number: noise.fold(own, number)[0])(jnp.arange(count))


def _happens(words: Array, p: float) -> Array:
    """Whether events of probability `p` happen."""
    if p == 1:
        return jnp.ones(words.shape, bool)
    return words < np.uint32(min(max(round(p * 2**32), 1), 2**32 - 1))


def _mask(drawn: Array, axis_name: AxisName) -> Array:
    return drawn[lax.axis_index(axis_name)].astype(jnp.float32)
