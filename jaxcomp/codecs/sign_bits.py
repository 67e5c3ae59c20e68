"""The ballot: the sign of each element, and nothing of its size."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, UInt32

from jaxcomp import bits, checks
from jaxcomp.base import Codec
from jaxcomp.numerics import noise
from jaxcomp.quantize import sums
from jaxcomp.types import Array, ArrayLike, Key


class BallotPayload(NamedTuple):
    """One bit an element, and whether all elements of a bucket are finite."""

    words: UInt32[Array, "n words"]
    finite: Bool[Array, " n"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ballot(Codec):
    """One bit an element: `+1` or `−1`, whatever its size; a zero is either, at random.

    What `jaxcomp.Vote` is made of. It is neither unbiased nor a contraction: no residual and no
    shift goes with it.

    Args:
        bucket_size: elements that share the mark of what is not finite, which spoils them all; None
            for one bucket a leaf.

    Raises:
        ValueError: for a bucket size that is not positive.

    Example:
        >>> import jaxcomp
        >>> jaxcomp.roundtrip(Ballot(), 0, jnp.array([0.5, -3.0, 1e-3]))
        Array([ 1., -1.,  1.], dtype=float32)

    References:
        Bernstein et al., `signSGD with majority vote <https://arxiv.org/abs/1810.05291>`_, 2019.

    Note:
        A byte for each bucket says whether it is finite; the paper has no such mark.
    """

    bucket_size: int | None = 512
    unbiased = False
    contractive = False
    homogeneous = False

    def __post_init__(self):
        checks.bucket_size(self.bucket_size)

    def encode(self, key: Key, x: Array, count: Array, state: tuple) -> tuple[BallotPayload, tuple]:
        del count
        high, low = (part[:, None] for part in noise.seeds(key.own, key.first, x.shape[0]))
        position = jnp.arange(x.shape[1], dtype=jnp.uint32)[None]
        drawn = noise.below(1, high, low, position) == 1
        negative = jnp.where(x == 0, drawn, x < 0).astype(jnp.uint32)
        finite = sums.is_finite(sums.max_abs(x))[:, 0]
        return BallotPayload(bits.pack(negative, bits=1), finite), state

    def decode(self, key: Key, payload: BallotPayload, like: ArrayLike, side: None = None) -> Array:
        del key, side
        negative = bits.unpack(payload.words, bits=1, size=like.shape[1]).astype(jnp.int32)
        values = jnp.where(payload.finite[:, None], (1 - 2 * negative).astype(jnp.float32), jnp.nan)
        return values.astype(like.dtype)
