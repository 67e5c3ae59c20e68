"""Gates that are drawn, from a key that all workers share, so that each knows who sends."""

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
"""Folded into a step's key, so that who sends has nothing to do with the noise of the codecs."""


@dataclasses.dataclass(frozen=True)
class Bernoulli(Gate):
    """Each worker takes part with probability `p`, drawn anew in every step.

    The sum of what is sent counts `1/p` times, `Σ_S c_i / (p·n)`, so that its expectation is the
    mean of all; not under a memory that sends later what it could not send now (`Residual`,
    `MomentumCorrection`), which would then count more than once, nor under EF21, which moves each
    shift by the whole of a biased message. All workers know who takes part from the shared key.

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
        second way of partial participation (PP2: one memory on the server) this is over `Shift`.

    Note:
        Those who stay away compute their gradient all the same, and their place in the collective
        is filled: this samples who counts, it saves bytes only in steps where nobody is drawn.
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
        self, key: Array, tree: Any, state: tuple, axis_name: AxisName, params: PyTree | None = None
    ) -> Opened:
        drawn = _happens(_words(key, axes.size(axis_name)), self.p)
        return Opened(jnp.any(drawn), _mask(drawn, axis_name), state)


@dataclasses.dataclass(frozen=True)
class SampledWorkers(Gate):
    """Exactly `r` of the `n` workers take part, drawn anew in every step.

    They are those with the smallest words of a hash of the shared key. The sum of what is sent
    counts `n/r` times, `Σ_S c_i / r`, with the same exceptions as under `Bernoulli`.

    Args:
        r: how many take part.

    Raises:
        ValueError: if `r` is not positive; on use, if there are fewer workers.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.compressed_mean(jaxcomp.qsgd(bits=4), "data", gate=SampledWorkers(3))

    References:
        Reisizadeh et al., `FedPAQ <https://arxiv.org/abs/1909.13014>`_, 2020.

    Note:
        As under `Bernoulli`, those who stay away save no bytes.
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
        self, key: Array, tree: Any, state: tuple, axis_name: AxisName, params: PyTree | None = None
    ) -> Opened:
        workers = axes.size(axis_name)
        self.factor(workers)  # Which says if there are too few.
        ranked = jnp.argsort(_words(key, workers), stable=True)  # Ties go to the lower number.
        drawn = jnp.zeros(workers, bool).at[ranked[: self.r]].set(True)
        return Opened(jnp.asarray(np.True_), _mask(drawn, axis_name), state)


@dataclasses.dataclass(frozen=True)
class Coin(Gate):
    """All workers send with probability `p`, else none does.

    Args:
        p: the probability, in (0, 1].
        rescaled: count what is sent `1/p` times, so that its expectation over the coin is the mean;
            with the exceptions that `Bernoulli` has. MARINA's coin, which chooses between two kinds
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
        self, key: Array, tree: Any, state: tuple, axis_name: AxisName, params: PyTree | None = None
    ) -> Opened:
        return Opened(_happens(_words(key, 1)[0], self.p), None, state)


def _check_probability(p: Any) -> None:
    checks.number("p", p, 0.0, 1.0)
    checks.positive("p", p)


def _words(key: Array, count: int) -> Array:
    """A word for each worker, which all of them know."""
    own = noise.fold(key, _GATE)
    return jax.vmap(lambda number: noise.fold(own, number)[0])(jnp.arange(count))


def _happens(words: Array, p: float) -> Array:
    """Whether events of probability `p` happen."""
    if p == 1:
        return jnp.ones(words.shape, bool)
    return words < np.uint32(min(max(round(p * 2**32), 1), 2**32 - 1))


def _mask(drawn: Array, axis_name: AxisName) -> Array:
    return drawn[lax.axis_index(axis_name)].astype(jnp.float32)
