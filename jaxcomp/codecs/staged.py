"""Several stages of one unbiased codec, unbiased in total."""

import dataclasses
import functools
from typing import Any

from jaxcomp import checks
from jaxcomp.base import Codec, Facts, Hints, WrappedCodec
from jaxcomp.codecs.combinators import Chained, Contractive, times
from jaxcomp.types import Array, ArrayLike, AxisName, Key


@dataclasses.dataclass(frozen=True, kw_only=True)
class Staged(WrappedCodec):
    """Encodes the remaining error in several stages, and stays unbiased.

    Each of `R` stages sends `Q(e) / (1 + ω)` of the error `e` of the stages before it. The
    remaining error is `q^R · x` in expectation, with `q = ω/(1 + ω)`, so the sum of the stages is
    divided by `1 − q^R`. The relative variance is at most `q^R / (1 − q^R)`.

    Args:
        codec: an unbiased codec `Q`.
        stages: `R`, at least 1.
        omega: its relative variance; None for the codec's own bound for the bucket size.

    Raises:
        ValueError: for the same reasons as `Contractive`, or for fewer than one stage.

    References:
        Huang et al., `Lower bounds and nearly optimal algorithms in distributed learning with
        communication compression <https://arxiv.org/abs/2206.03665>`_, 2022.
    """

    codec: Codec
    stages: int
    omega: float | None = None
    unbiased = True
    contractive = False
    hints = Hints(alone=1 / 2)

    def __post_init__(self):
        checks.integer("stages", self.stages, 1)
        self._chain()

    def _chain(self) -> Chained:
        return Chained(codecs=(Contractive(codec=self.codec, omega=self.omega),) * self.stages)

    def _remainder(self, size: int) -> float | None:
        """`q^R`."""
        own = self.codec.variance_bound(size)
        omega = own if self.omega is None else self.omega
        return None if omega is None else (omega / (1 + omega)) ** self.stages

    @functools.cached_property
    def facts(self) -> Facts:
        """`R` times the codec's own bits."""
        bits = self._chain().facts.bits_per_element
        return dataclasses.replace(super().facts, bits_per_element=bits, reorders=False)

    def variance_bound(self, size: int, peak: float | None = None) -> float | None:
        """`q^R / (1 − q^R)`."""
        del peak
        left = self._remainder(size)
        return None if left is None else left / (1 - left)

    def init(self, like: ArrayLike) -> tuple:
        return self._chain().init(like)

    def agree(self, key: Key, x: Array, count: Array, state: tuple, axis_name: AxisName) -> tuple:
        return self._chain().agree(key, x, count, state, axis_name)

    def encode(self, key: Key, x: Array, count: Array, state: tuple) -> tuple[tuple, tuple]:
        return self._chain().encode(key, x, count, state)

    def decode(self, key: Key, payload: tuple, like: ArrayLike, side: Any = None) -> Array:
        del side
        left = self._remainder(like.shape[1])
        assert left is not None  # Otherwise `Contractive` would have raised.
        return times(self._chain(), key, payload, like, 1 / (1 - left))
