"""The ballot codec of `Vote`: the sign of each element, without its magnitude."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, UInt32

from jaxcomp import bits, checks
from jaxcomp.base import Codec, Facts
from jaxcomp.numerics import noise
from jaxcomp.quantize import totals
from jaxcomp.types import Array, ArrayLike, Key


class BallotPayload(NamedTuple):
    """One bit per element, and a flag for each bucket whose elements are all finite."""

    words: UInt32[Array, "n words"]
    finite: Bool[Array, " n"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ballot(Codec):
    """One bit per element: its sign, `+1` or `−1`; the sign of zero is random.

    `jaxcomp.Vote` uses it. It is neither unbiased nor contractive, so it cannot be combined with a
    residual or a shift.

    Args:
        bucket_size: elements that share a flag for non-finite values; one such value makes the
            whole bucket non-finite. None for one bucket per leaf.

    Raises:
        ValueError: for a bucket size that is not positive.

    Example:
        >>> import jaxcomp
        >>> jaxcomp.roundtrip(Ballot(), 0, jnp.array([0.5, -3.0, 1e-3]))
        Array([ 1., -1.,  1.], dtype=float32)

    References:
        Bernstein et al., `signSGD with majority vote <https://arxiv.org/abs/1810.05291>`_, 2019.

    Note:
        A byte for each bucket says whether it is finite; the paper has no such flag.
    """

    bucket_size: int | None = 512
    unbiased = False
    contractive = False
    facts = Facts(homogeneous=False)

    def __post_init__(self):
        checks.bucket_size(self.bucket_size)

    def encode(self, key: Key, x: Array, count: Array, state: tuple) -> tuple[BallotPayload, tuple]:
        del count
        drawn = noise.below(1, *noise.rows(key.own, key.first, x.shape)) == 1
        negative = jnp.where(x == 0, drawn, x < 0).astype(jnp.uint32)
        finite = totals.is_finite(totals.max_abs(x))[:, 0]
        return BallotPayload(bits.pack(negative, bits=1), finite), state

    def decode(self, key: Key, payload: BallotPayload, like: ArrayLike, side: None = None) -> Array:
        del key, side
        negative = bits.unpack(payload.words, bits=1, size=like.shape[1]).astype(jnp.int32)
        values = jnp.where(payload.finite[:, None], (1 - 2 * negative).astype(jnp.float32), jnp.nan)
        return values.astype(like.dtype)
