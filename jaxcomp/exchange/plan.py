"""The plan of a reduction: everything that shapes, axes and the reducer decide, made once."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.backend import axes
from jaxcomp.base import Costs, Feedback, Reducer, ReducerFacts
from jaxcomp.exchange import dense as dense_, over_workers, trips
from jaxcomp.exchange.stages import Stage, check_route, stages_of
from jaxcomp.feedback import NoFeedback, Residual
from jaxcomp.layout import batches as batches_, policy as policy_, trees
from jaxcomp.types import Array, AxisName, Batches, PyTree, Stacks
from jaxcomp.wire import buffer, cost as wire_cost

_COLLECTIVES = 4
_WORTH_SEVERAL = 2**22
"""Elements from which on the payload is sent by several collectives, so that the first ones overlap
with the computation of the last gradients; shorter messages gain nothing."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static part of a reduction; `init`, the step, costs and resizing all read it.

    Attributes:
        given: the reducer.
        layout: the batches of compressed leaves, and the dense leaves.
        axis_name: the axes of the workers; None where only their sizes are known.
        sizes: the number of workers along each axis.

    Example:
        >>> import jaxcomp
        >>> like = {"w": jnp.zeros((64, 64)), "b": jnp.zeros(64)}
        >>> plan = Plan.of(jaxcomp.TwoShot(jaxcomp.qsgd_inf(bits=4)), like, sizes=(8,))
        >>> plan.workers, plan.part_like[0].shape, plan.payload_bytes
        (8, (1, 512), 2336)
    """

    given: Reducer
    layout: trees.Layout
    axis_name: AxisName
    sizes: tuple[int, ...]

    @classmethod
    def of(
        cls,
        reducer: Reducer,
        like: PyTree,
        axis_name: AxisName = None,
        sizes: tuple[int, ...] | None = None,
        *,
        runs: int | None = None,
    ) -> "Plan":
        """The plan of a reducer for a tree like this, the same for leaves of another dtype.

        Args:
            reducer: the reducer.
            like: the gradients or parameters, or their shapes and dtypes.
            axis_name: the axes of the workers.
            sizes: the number of workers along each axis; None for those of the mapped axes.
            runs: the number of runs of leaves that share no batch; None for that of the reducer's
                collectives.
        """
        sizes = axes.sizes(axis_name) if sizes is None else sizes
        return by_shapes(_made, reducer, like, axis_name, sizes, runs)

    @functools.cached_property
    def facts(self) -> ReducerFacts:
        """The facts of the given reducer."""
        return self.given.facts

    @functools.cached_property
    def reducer(self) -> Reducer:
        """The reducer of the links: the given one, or its slow tier."""
        return self.given if self.facts.tiers is None else self.facts.tiers[1]

    @functools.cached_property
    def fast(self) -> Any:
        """The dense reducer over the last axis, before and after that of the links; or None."""
        return None if self.facts.tiers is None else self.facts.tiers[0]

    @property
    def fast_axis(self) -> AxisName:
        """The axis of `fast`."""
        return None if self.axis_name is None else axes.names(self.axis_name)[-1]

    @property
    def axis(self) -> AxisName:
        """The axes that the links cross."""
        if self.fast is None or self.axis_name is None:
            return self.axis_name
        slow = axes.names(self.axis_name)[:-1]
        if not slow:
            raise ValueError(
                "`axis_name` must be a tuple of at least two axes for Hierarchical, the fast axis "
                f"last, as in ('dcn', 'ici'), got {self.axis_name!r}"
            )
        return slow[0] if len(slow) == 1 else slow

    @property
    def workers(self) -> int:
        """The number of workers over which the links reduce."""
        return math.prod(self.sizes if self.fast is None else self.sizes[:-1])

    @functools.cached_property
    def batches(self) -> Batches:
        """The batches that the links see: all rows, or this device's slice along the fast axis."""
        whole = self.layout.batches
        if self.fast is None:
            return whole
        return tuple(batches_.Rows(b, b.codec, self.sizes[-1], self.fast_axis) for b in whole)

    @functools.cached_property
    def slices(self) -> tuple[batches_.Rows, ...]:
        """Each worker's slice of the batches."""
        return tuple(batches_.Rows(b, b.codec, self.workers, self.axis) for b in self.batches)

    @property
    def likes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of each batch's message."""
        return tuple(batch.like for batch in self.batches)

    @functools.cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The legs of the reducer's route with the rows that pass them; `()` without a route."""
        route = self.reducer.route
        return stages_of(route, self.batches, self.axis, self.workers, self.collectives)

    @property
    def part_like(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of this device's part of each batch's mean."""
        return tuple(s.like for s in self.slices) if self.reducer.facts.splits else self.likes

    @functools.cached_property
    def phases(self) -> "tuple[Plan, ...]":
        """The plan of each phase: the last phase's batches with the codecs of this one."""
        if not self.reducer.facts.phases:
            return ()
        last, found = self.reducer.uplink.policy.codecs, []
        for _, reducer in self.reducer.facts.phases:
            codecs = dict(zip(last, reducer.uplink.policy.codecs, strict=True))
            batches = tuple(batch.with_codec(codecs[batch.picked]) for batch in self.layout.batches)
            layout = dataclasses.replace(self.layout, batches=batches)
            found.append(dataclasses.replace(self, given=reducer, layout=layout))
        return tuple(found)

    @functools.cached_property
    def feedback(self) -> Feedback:
        """The feedback of the compressed leaves."""
        return feedback_of(self.given)

    def dense_mean(self, leaves: Sequence[Array], weight: Array | None = None) -> Stacks:
        """The mean of dense leaves over all axes."""
        if self.given.uplink is not None:
            return tuple(dense_.fused_mean(leaves, self.axis_name, weight, self.delay))
        # Not joined here: where links have no delay, each is sent as soon as its gradient is known.
        sent = [leaf.astype(self.dense_dtype or leaf.dtype) for leaf in leaves]
        means = over_workers.mean(sent, self.axis_name, weight, self.delay)
        return tuple(mean.astype(leaf.dtype) for mean, leaf in zip(means, leaves, strict=True))

    @functools.cached_property
    def delay(self) -> float | None:
        """Seconds that a message takes one way; None for what is assumed."""
        return self.reducer.facts.delay

    @property
    def collectives(self) -> int:
        """The maximum number of collectives into which the payload is split each way."""
        wanted = self.reducer.facts.collectives
        if wanted is not None or self.fast is not None:
            return wanted or 1
        pieces = [piece for batch in self.layout.batches for piece in batch.pieces]
        large = sum(piece.stop - piece.start for piece in pieces) >= _WORTH_SEVERAL
        if not large:
            return 1
        most = min(_COLLECTIVES, len({piece.leaf for piece in pieces}))
        if not trips.wait(self.delay):
            return most
        size = sum(map(buffer.fused_bytes, wire_cost.payload_like(self.layout.batches)))
        return trips.collectives(size, self.workers, self.delay, most, self.facts.splits)

    @functools.cached_property
    def costs(self) -> Costs:
        """The costs of the links; with a fast tier, of this device's slice."""
        found = self._costs_of_links()
        if self.fast is None or found.efforts is None:
            return found
        shared = tuple((who, effort.shared(self.sizes[-1])) for who, effort in found.efforts)
        return found._replace(efforts=shared)

    def _costs_of_links(self) -> Costs:
        if self.phases:
            return self.phases[-1].costs
        if not self.stages:
            return self.reducer.costs(self)
        move = self.stages[0].leg.move
        # The payload for two workers, the fewest that communicate.
        encoded = wire_cost.payload_like(move.encodes(self.batches, 2))
        agreed = wire_cost.agreed_bytes(self.stages[0].batches, self.workers)
        return Costs(
            link_bytes=sum(stage.leg.move.link_bytes(stage) for stage in self.stages) + agreed,
            efforts=tuple((stage.leg.link, stage.effort) for stage in self.stages),
            payload_bytes=tuple(float(buffer.fused_bytes(part)) for part in encoded),
        )

    @property
    def fast_bytes(self) -> int:
        """The bytes that one device sends for the compressed leaves over its fast links."""
        if self.fast is None:
            return 0
        return (
            2
            * (self.sizes[-1] - 1)
            * sum(
                math.prod(batch.like.shape)
                * jnp.dtype(self.fast.facts.dtype or batch.dtype).itemsize
                for batch in self.batches
            )
        )

    @property
    def dense_likes(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the dense leaves, in the dtypes in which they are sent."""
        likes = [self.layout.likes[i] for i in self.layout.dense]
        return [jax.ShapeDtypeStruct(x.shape, self.dense_dtype or x.dtype) for x in likes]

    @property
    def dense_dtype(self) -> Any:
        """The dtype in which dense leaves are sent; None for their own."""
        dtype = self.facts.dtype
        return None if dtype is None else jnp.dtype(dtype)

    @property
    def link_bytes(self) -> int:
        """The bytes that one device sends over all its links for the whole reduction."""
        workers = math.prod(self.sizes)
        told = [jax.ShapeDtypeStruct((), jnp.float32)] if self.tells else []  # With dense leaves.
        dense = dense_.fused_link_bytes([*self.dense_likes, *told], workers, self.delay)
        return math.ceil(self.costs.link_bytes + self.fast_bytes + dense)

    @property
    def dense_messages(self) -> int:
        """The sequential messages for the dense leaves."""
        return dense_.fused_messages(self.dense_likes, math.prod(self.sizes), self.delay)

    @property
    def messages(self) -> float | None:
        """The sequential messages of a mean; None for a reducer that does not say them."""
        if self.costs.efforts is None:
            return None
        dense = self.dense_messages if self.given.uplink and self.layout.dense else 0
        return sum(effort.rounds for _, effort in self.costs.efforts) + dense

    @property
    def compressed_link_bytes(self) -> Fraction | int:
        """The part of `link_bytes` for the compressed leaves."""
        return self.costs.link_bytes + self.fast_bytes

    @functools.cached_property
    def dense_bytes(self) -> int:
        """The bytes of the compressed leaves as they are."""
        return sum(math.prod(batch.like.shape) * batch.dtype.itemsize for batch in self.batches)

    @property
    def tells(self) -> bool:
        """Whether workers must report a non-finite memory, since the mean may still be finite.

        A single worker cannot restore its memory alone: the mirror would no longer be the mean of
        all memories. Where workers get results of their own, no worker could tell all.
        """
        same = self.facts.same_on_all
        return bool(self.layout.batches) and same and not self.feedback.facts.bounded

    @functools.cached_property
    def batch_bytes(self) -> tuple[float, ...]:
        """The payload bytes of each batch of the whole tree."""
        own = None if self.fast is not None else self.costs.payload_bytes
        if own is not None:
            return own
        whole = wire_cost.payload_like(self.layout.batches)
        return tuple(float(buffer.fused_bytes(part)) for part in whole)

    @property
    def payload_bytes(self) -> int:
        """The bytes that one worker puts into the collectives."""
        return round(sum(self.batch_bytes)) + trees.dense_bytes(self.layout, self.dense_dtype)


def by_shapes(make: Callable[..., Any], source: Any, like: PyTree, *more: Any) -> Any:
    """`make(source, shapes, *more)`, once for equal arguments, for which every trace asks.

    Args:
        make: a function with `functools.lru_cache`.
        source: what is planned, such as a link or reducer.
        like: a tree, of which `make` gets the `Shapes`.
        more: hashable arguments.
    """
    leaves, treedef = jax.tree.flatten(like)
    arrays = [x if hasattr(x, "shape") and hasattr(x, "dtype") else np.asarray(x) for x in leaves]
    likes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
    # The dtypes of a layout depend on whether JAX has 64 bits.
    shapes = Shapes(treedef, likes, jax.config.read("jax_enable_x64"))
    return call_cached(make, source, shapes, *more)


def call_cached(make: Any, *arguments: Any) -> Any:
    """A function with `functools.lru_cache`, also of a tree with static leaves without a hash."""
    try:
        return make(*arguments)
    except TypeError:
        return make.__wrapped__(*arguments)


class Shapes(NamedTuple):
    """The shapes and dtypes of a tree.

    Attributes:
        treedef: its structure.
        leaves: shape and dtype of each leaf.
        wide: whether JAX has 64 bits.
    """

    treedef: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    wide: bool

    @property
    def tree(self) -> PyTree:
        return jax.tree.unflatten(self.treedef, self.leaves)


@functools.lru_cache(maxsize=512)
def _made(
    reducer: Reducer,
    shapes: Shapes,
    axis_name: AxisName,
    sizes: tuple[int, ...],
    runs: int | None,
) -> Plan:
    check_route(reducer.route)
    policy = policy_.NOTHING if reducer.uplink is None else reducer.uplink.policy
    slices, like = _slices(reducer, sizes), shapes.tree
    layout = trees.layout(policy, like, slices=slices, runs=runs or 1, mixed=True)
    plan = Plan(reducer, layout, axis_name, sizes)
    # A device's slice along a fast axis has no contiguous leaves.
    if runs is None and plan.fast is None and plan.collectives > 1:
        layout = trees.layout(policy, like, slices=slices, runs=plan.collectives, mixed=True)
        return Plan(reducer, layout, axis_name, sizes)
    return plan


def feedback_of(reducer: Reducer) -> Feedback:
    """The feedback of the workers' links."""
    return NoFeedback() if reducer.uplink is None else reducer.uplink.feedback


def dense_feedback_of(reducer: Reducer) -> Feedback:
    """The feedback of dense leaves under a gate.

    It is that of the compressed leaves, but without momentum, which dense leaves get after the
    mean.
    """
    feedback = feedback_of(reducer)
    return Residual() if feedback.facts.accelerates else feedback


def _slices(reducer: Reducer, sizes: tuple[int, ...]) -> int:
    """The number of buckets into which to cut a leaf whose codec has no bucket size."""
    if reducer.facts.tiers is not None:
        return sizes[-1] * _slices(reducer.facts.tiers[1], sizes[:-1])
    return math.prod(sizes) if reducer.facts.splits else 1
