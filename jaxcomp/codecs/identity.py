"""The identity codec, which sends elements unchanged."""

import dataclasses
from typing import NamedTuple

from jaxcomp import checks
from jaxcomp.base import Codec
from jaxcomp.numerics.segments import Segments
from jaxcomp.types import Array, ArrayLike, Key


class IdentityPayload(NamedTuple):
    """The unchanged elements."""

    values: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity(Codec):
    """Sends each element unchanged; it is lossless and linear.

    Args:
        bucket_size: elements in a bucket; None for one bucket per leaf.
    """

    bucket_size: int | None = None
    unbiased = True
    linear = True

    def __post_init__(self):
        checks.bucket_size(self.bucket_size)

    def variance_bound(self, size: int, peak: float | None = None) -> float:
        """Zero: the codec is lossless."""
        del size, peak
        return 0.0

    def segmented(self, segments: Segments) -> "Identity":
        """The same: where a leaf ends does not matter."""
        del segments
        return self

    def encode(
        self, key: Key, x: Array, count: Array, state: tuple
    ) -> tuple[IdentityPayload, tuple]:
        del key, count
        return IdentityPayload(x), state

    def decode(
        self, key: Key, payload: IdentityPayload, like: ArrayLike, side: None = None
    ) -> Array:
        del key, side
        return payload.values.astype(like.dtype)
