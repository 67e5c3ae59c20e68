"""Two levels of links: a dense mean over fast links, a compressed mean over slow ones."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.backend import axes
from jaxcomp.base import Codec, Collected, Reducer
from jaxcomp.feedback import Link
from jaxcomp.layout import batches as batches_
from jaxcomp.layout.policy import Policy
from jaxcomp.mesh import per_worker
from jaxcomp.numerics import noise
from jaxcomp.reducers import accounting, dense as dense_, over_workers
from jaxcomp.reducers.dense import Dense
from jaxcomp.reducers.gather import Gather
from jaxcomp.theory import cost
from jaxcomp.types import Array, AxisName, Batches, PyTree, Stacks


class HierarchicalState(NamedTuple):
    """The state of the outer reducer; devices on the fast axis hold different rows."""

    outer: PyTree


@dataclasses.dataclass(frozen=True)
class Hierarchical(Reducer, public=("levels",)):
    """A dense reduce-scatter over the fast axis, a compressed mean over the slow axes, a gather.

    Each of the `n` devices on the fast axis averages `1/n` of the vector, reduces this slice over
    the slow axes with the outer reducer, and sends the result to the others on the fast axis. A
    device sends `1/n` of the outer reducer's bytes over its slow link, and stores `1/n` of its
    links' memory.

    Args:
        inner: `Dense()`, or `Dense("bfloat16")` to send bfloat16 over the fast links.
        outer: the reducer over the slow axes; a codec, policy or link means `Gather` of it.

    `axis_name` of `compressed_mean` is a tuple that ends with the fast axis, as in
    `("dcn", "ici")`, and `workers` has one number for each axis.

    Raises:
        ValueError: for another inner reducer, or an outer reducer without links; on use, for fewer
            than two axes.

    Example:
        >>> import jaxcomp
        >>> codec = jaxcomp.qsgd_inf(bits=4)
        >>> reducer = Hierarchical(jaxcomp.Dense(), jaxcomp.TwoShot(codec, codec))
        >>> like = {"w": jnp.zeros((1024, 1024))}
        >>> jaxcomp.wire_bytes(reducer, like, workers=(2, 4))  # Of which slow: 133,120.
        6424576

    Note:
        Leaves that the policy leaves dense are averaged by one all-reduce over all axes. Make the
        state by `jaxcomp.init_state`, or by `tx.init` inside the mapped function.
    """

    inner: Dense = Dense()
    outer: "Reducer | Link | Codec | Policy | None" = None
    splits = True
    hierarchical = True

    def __post_init__(self):
        if not isinstance(self.inner, Dense):
            raise ValueError(
                "`inner` must be jaxcomp.Dense(), or jaxcomp.Dense('bfloat16'), for the fast axis, "
                f"got {self.inner!r}; the compressed reducer is `outer`"
            )
        if isinstance(self.outer, Link | Policy | Codec):
            object.__setattr__(self, "outer", Gather(self.outer))
        outer: Any = self.outer
        if not isinstance(outer, Reducer) or outer.uplink is None:
            raise ValueError(
                "`outer` must be a reducer with links, such as jaxcomp.TwoShot(codec, codec), or a "
                f"codec, got {outer!r}"
            )
        if outer.scheduled or outer.hierarchical or not outer.composes:
            raise ValueError(
                "`outer` must be a reducer of payloads, such as jaxcomp.Gather, jaxcomp.TwoShot or "
                f"jaxcomp.Psum, got {outer!r}"
            )

        for link in (outer.uplink, outer.downlink or outer.uplink):
            if link.feedback.mirrors:
                raise ValueError(
                    "`outer` must not use a feedback with a mirror, because devices on the fast "
                    f"axis would hold different mirrors, got {link.feedback!r}. Use "
                    "jaxcomp.Residual(), or for shifts compressed_mean(reducer, 'slow', "
                    "param_specs=PartitionSpec())"
                )

    @property
    def uplink(self) -> Link:
        """The uplink over the slow axes."""
        return self._outer.uplink

    @property
    def downlink(self) -> Link | None:
        """The downlink over the slow axes."""
        return self._outer.downlink

    @property
    def for_small_leaves(self) -> str:
        """The advice of the outer reducer."""
        return self._outer.for_small_leaves

    @property
    def _outer(self) -> Any:
        return cast(Any, self.outer)

    def link_axis(self, axis_name: AxisName) -> AxisName:
        """The slow axes, which the links cross."""
        return self._axes(axis_name)[0]

    def shares(self, workers: tuple[int, ...]) -> int:
        """The outer reducer's number of buckets for each device on the fast axis."""
        *outer, inner = workers
        return inner * self._outer.shares((math.prod(outer),))

    def within(self, batches: Batches, axis_name: AxisName) -> Batches:
        """The batches of this device's slice along the fast axis."""
        return batches_.shards(batches, self._axes(axis_name)[1])

    def resolve(self, batches: Batches, workers: tuple[int, ...]) -> Reducer:
        """This reducer with the outer reducer resolved for a device's slice."""
        *outer, inner = workers
        shards = tuple(batches_.Shard(batch, inner, None) for batch in batches)
        return dataclasses.replace(self, outer=self._outer.resolve(shards, tuple(outer)))

    def resolved_state(self, resolved: Reducer, state: HierarchicalState) -> HierarchicalState:
        inner = cast(Hierarchical, resolved)._outer
        return HierarchicalState(self._outer.resolved_state(inner, state.outer))

    def unresolved_state(
        self, resolved: Reducer, after: HierarchicalState, state: HierarchicalState
    ) -> HierarchicalState:
        inner = cast(Hierarchical, resolved)._outer
        return HierarchicalState(self._outer.unresolved_state(inner, after.outer, state.outer))

    def init(self, batches: Batches, axis_name: AxisName) -> HierarchicalState:
        outer, _ = self._axes(axis_name)
        state = self._outer.init(self.within(batches, axis_name), outer)
        return HierarchicalState(self._varying(state, axis_name))

    def fitted(
        self, batches: Batches, state: HierarchicalState, axis_name: AxisName
    ) -> HierarchicalState:
        """As the outer reducer has it."""
        shards = self.within(batches, axis_name)
        return HierarchicalState(self._outer.fitted(shards, state.outer, self.link_axis(axis_name)))

    def part_like(self, batches: Batches, axis_name: AxisName) -> PyTree:
        return self._outer.part_like(self.within(batches, axis_name), self.link_axis(axis_name))

    def pre_reduce(self, batches: Batches, message: Stacks, axis_name: AxisName) -> Stacks:
        """Averages this device's slice over the fast axis."""
        _, axis = self._axes(axis_name)
        shards = batches_.shards(batches, axis)
        n = axes.size(axis)
        rows = [shard.rows(x) for shard, x in zip(shards, message, strict=True)]
        found = _by_dtype(
            self.inner.dtype,
            [x.reshape(n, -1) for x in rows],
            functools.partial(over_workers.mean_of_rows, axis_name=axis),
        )
        return tuple(
            x.astype(shard.dtype).reshape(shard.like.shape)
            for x, shard in zip(found, shards, strict=True)
        )

    def post_reduce(self, batches: Batches, mean: Stacks, axis_name: AxisName) -> Stacks:
        """Gathers the slices of all devices on the fast axis."""
        _, axis = self._axes(axis_name)
        found = _by_dtype(
            self.inner.dtype,
            [x.reshape(1, -1) for x in mean],
            lambda flat: over_workers.gathered(flat.reshape(-1), axis),
        )
        return tuple(
            x.reshape(-1, batch.size)[: batch.buckets].astype(batch.dtype)
            for x, batch in zip(found, batches, strict=True)
        )

    def collect(
        self,
        key: Array,
        batches: Batches,
        message: Stacks,
        state: HierarchicalState,
        axis_name: AxisName,
        weight: Array | None = None,
    ) -> Collected:
        outer, _ = self._axes(axis_name)
        shards = self.within(batches, axis_name)
        own = self._key(key, axis_name)
        got = self._outer.collect(own, shards, message, state.outer, outer, weight)
        return got._replace(state=HierarchicalState(got.state))

    def spread(
        self,
        key: Array,
        batches: Batches,
        part: Stacks,
        state: HierarchicalState,
        axis_name: AxisName,
    ) -> tuple[Stacks, HierarchicalState]:
        outer, _ = self._axes(axis_name)
        shards = self.within(batches, axis_name)
        own = self._key(key, axis_name)
        mean, after = self._outer.spread(own, shards, part, state.outer, outer)
        return mean, HierarchicalState(after)

    def unchanged(
        self, batches: Batches, part: Stacks, state: HierarchicalState, axis_name: AxisName
    ) -> Stacks:
        """As the outer reducer has it."""
        shards = self.within(batches, axis_name)
        return self._outer.unchanged(shards, part, state.outer, self.link_axis(axis_name))

    def dense(
        self, leaves: Sequence[Array], axis_name: AxisName, weight: Array | None = None
    ) -> Sequence[Array]:
        return dense_.fused_mean(leaves, axis_name, weight)

    def link_bytes(self, like: PyTree, workers: int | tuple[int, ...]) -> int:
        """Bytes over fast and slow links together."""
        if not isinstance(workers, tuple) or len(workers) < 2:
            raise ValueError(
                "`workers` must be a tuple that ends with the number of devices on the fast axis, "
                f"as in (2, 4), got {workers!r}"
            )
        return accounting.link_bytes(self, like, workers)

    def batches_link_bytes(self, batches: Batches, workers: tuple[int, ...]) -> Fraction | int:
        """The part of `link_bytes` for the compressed leaves."""
        slow, fast = self.levels(batches, workers)
        return slow + fast

    def efforts(
        self, batches: Batches, workers: tuple[int, ...]
    ) -> tuple[tuple[Any, cost.Effort], ...]:
        """The efforts of the outer reducer, for a device's slice of the elements."""
        *outer, inner = workers
        shards = tuple(batches_.Shard(batch, inner, None) for batch in batches)
        found = self._outer.efforts(shards, math.prod(outer))
        return tuple((link, effort.shared(inner)) for link, effort in found)

    def levels(self, batches: Batches, workers: tuple[int, ...]) -> tuple[Fraction | int, int]:
        """Bytes that a device sends for these batches over its slow link, and over its fast one."""
        *outer, inner = workers
        shards = tuple(batches_.Shard(batch, inner, None) for batch in batches)
        slow = self._outer.batches_link_bytes(shards, math.prod(outer))
        share = sum(
            math.prod(shard.like.shape) * jnp.dtype(self.inner.dtype or shard.dtype).itemsize
            for shard in shards
        )
        return slow, 2 * (inner - 1) * share

    def _key(self, key: Array, axis_name: AxisName) -> Array:
        """The key of this device's slice; devices on the fast axis must draw different noise."""
        _, axis = self._axes(axis_name)
        return noise.fold(key, lax.axis_index(axis))

    def _axes(self, axis_name: AxisName) -> tuple[AxisName, AxisName]:
        *outer, inner = axes.names(axis_name)
        if not outer:
            raise ValueError(
                "`axis_name` must be a tuple of at least two axes for Hierarchical, the fast axis "
                f"last, as in ('dcn', 'ici'), got {axis_name!r}"
            )
        return outer[0] if len(outer) == 1 else tuple(outer), inner

    def _varying(self, state: PyTree, axis_name: AxisName) -> PyTree:
        """Types the memory as different between devices on the fast axis too."""
        if not axes.bound(axis_name):
            return state
        return jax.tree.map(
            lambda node: axes.vary(node, axis_name) if per_worker.is_per_worker(node) else node,
            state,
            is_leaf=per_worker.is_per_worker,
        )


def _by_dtype(dtype: Any, arrays: Sequence[Array], move: Any) -> list[Array]:
    """Applies `move` to arrays `[k, …]`, with those of one dtype side by side in one array."""
    found: dict[int, Array] = {}
    sent = [x.astype(dtype or x.dtype) for x in arrays]
    for kind in dict.fromkeys(x.dtype for x in sent):
        numbers = [i for i, x in enumerate(sent) if x.dtype == kind]
        got = move(jnp.concatenate([sent[i] for i in numbers], axis=1))
        got = got.reshape(-1, sum(sent[i].shape[1] for i in numbers))
        begin = 0
        for i in numbers:
            found[i] = got[:, begin : begin + sent[i].shape[1]]
            begin += sent[i].shape[1]
    return [found[i] for i in range(len(sent))]
