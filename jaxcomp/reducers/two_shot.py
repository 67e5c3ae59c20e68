"""Two shots: each worker averages a slice of the vector, and sends the result to all others."""

import dataclasses
from typing import cast

from jaxcomp import checks
from jaxcomp.base import Codec, Leg, Reducer
from jaxcomp.codecs.identity import Identity
from jaxcomp.exchange import trips
from jaxcomp.exchange.combines import Average, Join
from jaxcomp.exchange.moves import AllGather, AllToAll
from jaxcomp.feedback import Link
from jaxcomp.layout import policy as policy_
from jaxcomp.layout.policy import Policy
from jaxcomp.numerics.segments import Segments


@dataclasses.dataclass(frozen=True)
class TwoShot(Reducer, public=("downlink",)):
    """A compressed reduce-scatter, then a compressed all-gather.

    Each worker sends to every other one a slice of its payload (an all-to-all), decodes and
    averages the slices that it receives, and sends the result to all (an all-gather). One device
    sends `(n − 1)/n` of the uplink's payload and of the downlink's, for any number of workers.

    The downlink is a separate link: its error adds to that of the uplink. With a biased codec it
    needs a separate feedback, whose memory has the size of a slice.

    Args:
        up: the link from each worker; a bare codec or policy means `Link(codec)`.
        down: the link to all workers, a codec or a `Link`; None sends the mean uncompressed. It
            sends the leaves that `up` compresses, regardless of its own policy, and needs buckets
            of the same size.
        collectives: the number of collectives that the payload is split into each way, in whole
            arrays, so that the first can start before the last gradient is computed; None for four
            if there are at least four million elements, else one.
        delay: seconds that a message takes one way. Where they are long against the bytes, every
            worker sends to all others at once, and waits once; else messages go one after another.
            None for what is assumed: 0.5 ms between CPUs of several processes, else nothing.

    Raises:
        ValueError: if `up` or `down` is not a link, the links do not match, `collectives` is not
            positive, or `delay` is negative.

    Example:
        >>> import jaxcomp
        >>> ef21 = jaxcomp.Link(jaxcomp.sign(), jaxcomp.Shift())
        >>> reducer = TwoShot(up=ef21, down=ef21)
        >>> import jax.numpy as jnp
        >>> like = {"w": jnp.zeros((1024, 1024))}
        >>> jaxcomp.wire_bytes(reducer, like, workers=8)
        243719
        >>> jaxcomp.wire_bytes(jaxcomp.Gather(ef21), like, workers=8)
        974855

    References:
        Tang et al., `1-bit Adam <https://arxiv.org/abs/2102.02888>`_, 2021, whose
        `compressed_allreduce` this is; Fatkhullin et al., `EF21 with bells & whistles
        <https://arxiv.org/abs/2110.03294>`_, 2021, for feedback in both directions.

    Note:
        Slices consist of whole buckets; empty buckets pad them to equal size. A codec without
        buckets (`bucket_size=None`) encodes each worker's slice of a leaf instead of the whole.
    """

    up: "Link | Codec | Policy"
    down: "Link | Codec | None" = None
    collectives: int | None = None
    delay: float | None = None

    def __post_init__(self):
        if not isinstance(self.up, Link):
            object.__setattr__(self, "up", Link(self.up))
        if self.down is not None and not isinstance(self.down, Link):
            object.__setattr__(self, "down", Link(self.down))
        if self.collectives is not None:
            checks.integer("collectives", self.collectives, 1)
        trips.check(self.delay)
        _check(self.uplink, self.downlink)

    @property
    def uplink(self) -> Link:
        return cast(Link, self.up)

    @property
    def downlink(self) -> Link:
        """The link to all workers."""
        return Link(Identity()) if self.down is None else cast(Link, self.down)

    @property
    def route(self) -> tuple[Leg, ...]:
        up = Leg(AllToAll(self.collectives, self.delay), self.uplink, Average())
        return up, Leg(AllGather(self.collectives, self.delay), self.downlink, Join())


def _check(up: Link, down: Link) -> None:
    shaped = [c for c in (*up.policy.codecs, *down.policy.codecs) if c.facts.shaped]
    if shaped:
        raise ValueError(
            f"`up` and `down` must have codecs of buckets, which can be split over workers, got "
            f"{shaped[0]!r}; for low-rank factors use jaxcomp.PowerIteration"
        )
    codecs = down.policy.codecs
    if isinstance(down.codec, Policy):
        if policy_.without_codecs(down.codec) != policy_.without_codecs(up.policy):
            raise ValueError(
                "`down` must be a codec for all leaves, or a Policy with the rules of `up` and "
                f"other codecs, got {down.codec!r} beside {up.policy!r}"
            )
    else:
        codecs = codecs * len(up.policy.codecs)
    for one, other in zip(up.policy.codecs, codecs, strict=True):
        longer = one.bucket_size and (other.bucket_size or 0) > one.bucket_size
        if longer:
            raise ValueError(
                "`down` must have buckets no longer than those of `up`, which are split over the "
                f"workers, got bucket_size={other.bucket_size} after {one.bucket_size}"
            )
        leaves = Segments((64, 32), 32)
        whole = one.bucket_size is None and other.bucket_size is None
        if whole and one.segmented(leaves) and not other.segmented(leaves):
            raise ValueError(
                f"`down` must have a bucket_size after {one!r}, which puts leaves of several sizes "
                f"into one bucket, or do the same, got {other!r}"
            )
