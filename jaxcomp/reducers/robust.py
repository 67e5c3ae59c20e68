"""Robust: every worker gathers all payloads, and combines them by a rule other than the mean."""

import dataclasses
import functools
import warnings
from typing import Any, cast

from jaxcomp import checks
from jaxcomp.base import Aggregate, Codec, Leg, Reducer
from jaxcomp.codecs.identity import Identity
from jaxcomp.exchange.aggregated import Aggregation
from jaxcomp.exchange.moves import AllGather
from jaxcomp.feedback import Link
from jaxcomp.layout.policy import Policy


@dataclasses.dataclass(frozen=True)
class Robust(Reducer):
    """Gathers all payloads, decodes each, and combines them by an aggregate instead of the mean.

    Every worker computes the same from the same payloads. It sends the bytes of `Gather`. Leaves
    that the policy leaves dense are gathered too, uncompressed, and are part of the messages: an
    all-reduce would let one worker set them to anything.

    A message with an element that is not finite is excluded, and its worker keeps its memory as it
    was. If at least half of the messages are excluded the result is NaN on all workers, and the
    guard of `compressed_mean` undoes the step. `Stats.excluded` and the state count them.

    Under a gate, the result is the combination of the participants' messages times their share, so
    that the gate's factor applies as to a mean. A weight says whether a worker takes part: positive
    ones count as 1, since a hostile worker chooses its own.

    Args:
        link: the link from each worker; a bare codec or policy means `Link(codec)`.
        aggregate: how messages are combined: `CoordinateMedian()`, `TrimmedMean(trim)`,
            `ClippedMean(norm)`, `Credible()` or `Mean()` of `jaxcomp.aggregates`.
        collectives: the number of all-gathers, as in `Gather`.

    Raises:
        ValueError: for a link or aggregate of another kind; for a codec whose workers agree on
            scales, which one worker could set; for a feedback with a mirror, and for any feedback
            with memory around an aggregate that is not linear.

    Example:
        >>> import jaxcomp
        >>> import jax, jax.numpy as jnp
        >>> median = jaxcomp.aggregates.CoordinateMedian()
        >>> tx = jaxcomp.compressed_mean(Robust(jaxcomp.qsgd_inf(bits=8), median), "data")
        >>> grads = jnp.array([[[1.0, -2.0]], [[2.0, -2.0]], [[3e38, jnp.nan]]])
        >>> robust = lambda g: tx.update(g, tx.init(g))[0]
        >>> jax.vmap(robust, axis_name="data")(grads)[2]
        Array([[ 1.5, -2. ]], dtype=float32)

    Note:
        `sent` is a worker's own decoded message, and the law `pmean(sent) == part` of reducers
        holds for linear aggregates only. With `param_specs` every device combines its own shard:
        norms, exclusion and credibility are those of shards.
    """

    link: "Link | Codec | Policy"
    aggregate: Aggregate
    collectives: int | None = None

    def __post_init__(self):
        checks.part("aggregate", self.aggregate, Aggregate)
        if self.collectives is not None:
            checks.integer("collectives", self.collectives, 1)
        if not isinstance(self.link, Link):
            object.__setattr__(self, "link", self._linked(self.link))
        Aggregation(self.aggregate).check(self._given)

    def _linked(self, codec: Any) -> Link:
        """A link without feedback; a biased codec loses something, and a residual is no advice."""
        if self.aggregate.linear:
            return Link(codec)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            link = Link(codec)
        lossy = [codec for codec in link.policy.codecs if codec.contractive]
        if lossy:
            warnings.warn(
                f"{lossy[0]!r} is biased, and what it drops is lost for good: a residual cannot "
                f"send it later with {self.aggregate!r}, which is not linear. Use an unbiased "
                "codec, such as jaxcomp.qsgd(bits=4).",
                stacklevel=4,
            )
        return link

    @property
    def _given(self) -> Link:
        return cast(Link, self.link)

    @functools.cached_property
    def uplink(self) -> Link:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The link of all leaves, those that the policy leaves dense included."""
        given = self._given
        policy = dataclasses.replace(given.policy, rest=given.policy.rest or Identity())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # `link` has warned already.
            return Link(policy, given.feedback)

    @property
    def route(self) -> tuple[Leg, ...]:
        return (Leg(AllGather(self.collectives), self.uplink, Aggregation(self.aggregate)),)
