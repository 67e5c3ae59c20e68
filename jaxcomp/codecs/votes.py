"""The codec of stochastic votes: a weight between −1 and 1 as one of the values −1, 0 and 1."""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, UInt32

from jaxcomp import bits as bits_, checks
from jaxcomp.base import Codec, Facts
from jaxcomp.numerics import noise
from jaxcomp.quantize import totals
from jaxcomp.quantize.levels import FRACTION, TRIT
from jaxcomp.types import Array, ArrayLike, Key


class VotesPayload(NamedTuple):
    """The votes as packed codes, and a flag for each bucket whose elements are all finite."""

    words: UInt32[Array, "n words"]
    finite: Bool[Array, " n"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Votes(Codec, public=("bits",)):
    """Each element as a random vote, whose expectation is the element clipped to `[−1, 1]`.

    Of two values, `+1` with probability `(1 + x)/2`, else `−1`; of three values, the sign of `x`
    with probability `|x|`, else 0. There is no scale: a vote decodes to exactly −1, 0 or 1.

    Args:
        values: 2 for `±1`, one bit per element; 3 for `−1`, `0` and `1`, 1.6 bits.
        bucket_size: elements that share a flag for non-finite values; one such value makes the
            whole bucket non-finite. None for one bucket per leaf.

    Raises:
        ValueError: for another number of values, or a bucket size that is not positive.

    Example:
        >>> import jaxcomp
        >>> jaxcomp.roundtrip(Votes(), 0, jnp.array([1.0, -1.0, 2.0]))
        Array([ 1., -1.,  1.], dtype=float32)

    References:
        Yue, Jin, Wong and Dai, `Federated learning via plurality vote
        <https://arxiv.org/abs/2110.02998>`_ (FedVote), 2021.

    Note:
        It is unbiased only for elements in `[−1, 1]`, up to 2⁻²⁰, so it does not claim to be
        unbiased, and it cannot be combined with a residual or a shift. A byte for each bucket says
        whether it is finite; the paper has no such flag. The published code for three values is
        broken; these probabilities are a reconstruction.
    """

    values: int = 2
    bucket_size: int | None = 512
    unbiased = False
    contractive = False

    def __post_init__(self):
        checks.choice("values", self.values, (2, 3))
        checks.bucket_size(self.bucket_size)

    @functools.cached_property
    def facts(self) -> Facts:
        """Zeros stay zeros if there is a vote for zero."""
        return Facts(homogeneous=False, keeps_zeros=self.values == 3)

    @property
    def bits(self) -> int | float:
        """Width of a vote."""
        return 1 if self.values == 2 else TRIT

    def encode(self, key: Key, x: Array, count: Array, state: tuple) -> tuple[VotesPayload, tuple]:
        del count
        finite = totals.is_finite(totals.max_abs(x))
        drawn = noise.below(FRACTION, *noise.rows(key.own, key.first, x.shape))
        # In fixed point, so that every program draws the same votes.
        one = jnp.int32(1 << FRACTION)
        inside = jnp.clip(jnp.where(finite, x.astype(jnp.float32), 0), -1, 1)
        point = (inside * jnp.float32(1 << FRACTION)).astype(jnp.int32)
        if self.values == 2:
            codes = point + one > 2 * drawn
        else:
            codes = 1 + jnp.sign(point) * (jnp.abs(point) > drawn)
        words = bits_.pack(codes.astype(jnp.uint32), bits=self.bits)
        return VotesPayload(words, finite[:, 0]), state

    def decode(self, key: Key, payload: VotesPayload, like: ArrayLike, side: None = None) -> Array:
        del key, side
        codes = bits_.unpack(payload.words, bits=self.bits, size=like.shape[1]).astype(jnp.int32)
        votes = 2 * codes - 1 if self.values == 2 else codes - 1
        values = jnp.where(payload.finite[:, None], votes.astype(jnp.float32), jnp.nan)
        return values.astype(like.dtype)
