"""The legs of a plan with the rows that pass them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
from jax import lax

from jaxcomp.base import Codec, Leg
from jaxcomp.exchange import trips
from jaxcomp.feedback import Link
from jaxcomp.layout import batches as batches_
from jaxcomp.layout.policy import Policy
from jaxcomp.theory import cost
from jaxcomp.types import Array, AxisName, Batches, PyTree, Stacks
from jaxcomp.wire import buffer


@dataclasses.dataclass(frozen=True)
class Stage:
    """A leg of a plan.

    Attributes:
        leg: the leg.
        batches: the rows that a worker encodes.
        axis: the axes that the leg crosses.
        workers: the number of workers along them.
        collectives: the maximum number of collectives that the payload is split into.
        later: whether it is not the first leg, so that each worker encodes its own slice of the
            rows, numbered one worker after another.
    """

    leg: Leg
    batches: Batches
    axis: AxisName
    workers: int
    collectives: int = 1
    later: bool = False

    @functools.cached_property
    def arrives(self) -> Batches:
        """The rows of one sender that a device receives."""
        return self.leg.move.arrives(self.batches, self.workers, self.axis)

    @property
    def first(self) -> tuple[Array, ...] | None:
        """The number of the first bucket of each batch that arrives; None for zero."""
        if not self.leg.move.splits:
            return None
        worker = lax.axis_index(self.axis)
        return tuple(worker * own.buckets for own in self.arrives)

    def enter(self, part: Stacks) -> Stacks:
        """The part of the leg before as the rows of this later one."""
        pairs = zip(self.batches, part, strict=True)
        return tuple(batches_.real(cut, cut.cut(x)) for cut, x in pairs)

    def leave(self, whole: Stacks) -> Stacks:
        """The rows of all workers of a later leg, one after another, as the rows of each batch."""
        return tuple(
            cut.joined(x)[: cut.whole.whole.buckets].astype(cut.dtype)
            for cut, x in zip(self.batches, whole, strict=True)
        )

    @property
    def likes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes of the rows that a worker encodes."""
        return tuple(batch.like for batch in self.batches)

    @property
    def whole_likes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes of those of all workers, one after another."""
        return tuple(
            jax.ShapeDtypeStruct((self.workers * x.shape[0], *x.shape[1:]), x.dtype)
            for x in self.likes
        )

    def rounds(self, payload: PyTree) -> int:
        """The number of sequential messages: for each collective `n − 1`, or one if all are sent
        at once.
        """
        number = buffer.collectives(payload, self.collectives)
        size = buffer.fused_bytes(payload) / max(number, 1)
        return number * trips.messages(size, self.workers, self.leg.move.delay)

    @property
    def effort(self) -> cost.Effort:
        """The arithmetic of a device, as a multiple of that for the whole model."""
        decodes, adds = self.leg.combine.effort(self)
        slices = self.workers if self.later or self.leg.move.splits else 1
        encodes = 1 / self.workers if self.later else 1
        messages = self.leg.move.messages(self)
        return cost.Effort(messages, encodes, decodes / slices, adds / slices)

    def codecs_kind(self) -> str:
        """The kind of the codecs' states, which says whether they are of single buckets."""

        def rows(batch: Any, buckets: int) -> list[tuple[int, ...]]:
            like = jax.ShapeDtypeStruct((buckets, batch.size), batch.dtype)
            return [
                x.shape for x in jax.tree.leaves(jax.eval_shape(lambda: batch.codec.init(like)))
            ]

        sliced = self.later and all(rows(batch, 1) != rows(batch, 2) for batch in self.batches)
        return "codec slice" if sliced else "codec"


def check_route(route: Sequence[Leg]) -> None:
    """Raises a `ValueError` unless the legs of a reducer fit together."""
    for number, leg in enumerate(route):
        given = f"{type(leg.move).__name__}() and {type(leg.combine).__name__}()"
        if not isinstance(leg.link, Link):
            raise ValueError(
                f"`link` must be a Link, got {leg.link!r} with {given}: write jaxcomp.Link(codec)"
            )
        further = number > 0
        form = "slices" if further and not leg.move.splits else leg.move.gives
        if form != leg.combine.takes or (leg.move.splits and not leg.combine.slices):
            raise ValueError(
                f"`route` must have moves whose payloads their combinations take, got {given}"
                f"{' on a further leg' if further else ''}: Average() and Aggregation(rule) follow "
                "AllGather(), Average() AllToAll(), Sum() AllReduce(), Mix() Permute(graph), and "
                "Join() the AllGather() of a second leg"
            )
        if leg.combine.over in ("one", "each"):
            raise ValueError(f"`combine` must make a mean in a reducer, got {leg.combine!r}")
        if not further:
            leg.combine.check(leg.link)
    if route and len(route) != 1 + route[0].move.splits:
        raise ValueError(
            "`route` must have a second leg, AllGather() and Join(), after a move that splits the "
            f"rows, and only then, got {len(route)} legs that begin with {route[0].move!r}"
        )


def stages_of(
    route: Sequence[Leg], batches: Batches, axis: AxisName, workers: int, collectives: int = 1
) -> tuple[Stage, ...]:
    """The legs of a route with the rows of these batches."""
    found: list[Stage] = []
    for leg in route:
        if found:
            rows = _cut(found[-1].arrives, cast(Link, leg.link), cast(Link, route[0].link))
        else:
            rows = leg.move.encodes(batches, workers)
        most = leg.move.collectives if found and leg.move.collectives else collectives
        found.append(Stage(leg, rows, axis, workers, most, later=bool(found)))
    return tuple(found)


def _cut(slices: Batches, link: Link, first: Link) -> tuple[batches_.Rows, ...]:
    """Slices in the buckets of a later link's codecs, or with their leaves as segments."""
    found = []
    for own in slices:
        codec: Any = link.codec
        if isinstance(codec, Policy):
            codec = dict(zip(first.policy.codecs, codec.codecs, strict=True))[own.picked]
        if own.segments is not None and codec.bucket_size is None:
            codec = cast(Codec, codec.segmented(own.segments))
        found.append(batches_.Rows(own, codec))
    return tuple(found)
