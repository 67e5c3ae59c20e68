"""Psum: payloads are summed by an all-reduce."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.backend import xla
from jaxcomp.base import Codec, Collected, Costs, Reducer
from jaxcomp.exchange import dense as dense_, over_workers, send
from jaxcomp.exchange.plan import Plan
from jaxcomp.feedback import Link
from jaxcomp.layout import batches as batches_
from jaxcomp.layout.policy import Policy
from jaxcomp.mesh.per_worker import PerWorker
from jaxcomp.numerics import summing
from jaxcomp.theory import cost
from jaxcomp.types import Array, AxisName, Batches, PyTree, Stacks
from jaxcomp.wire import buffer, cost as wire_cost


@dataclasses.dataclass(frozen=True)
class Psum(Reducer):
    """Decodes the sum of all payloads, with one all-reduce for each dtype of the payload.

    `mean = decode(Σ payloadᵢ) / n`: one device sends `2(n − 1)/n` of a payload and decodes one
    payload, for any number of workers. The codec must be linear, such as `random_k` and `Identity`,
    or have integers that can be added: a quantizer with `shared=True`, for which all workers first
    agree on the largest scale. Integers are sent in fields that hold the sum over all workers, so
    payloads widen with the logarithm of the number of workers, and no sum overflows.

    Sums of integers are exact. Between the CPUs of one process, floats are summed in the order of
    the workers, for every mapping; between several processes and on accelerators the all-reduce
    chooses the order, and results may differ by `n · ε · Σ|xᵢ|`. Floats of 16 bits are sent as
    such, and are added in float32 in the same cases as with `Dense`.

    Args:
        link: the link from each worker; a bare codec or policy means `Link(codec)`.

    Weights from gates multiply floats; for integers every weight must be 0 or 1. A worker of weight
    zero sends zeros, and does not influence the agreed scales.

    Raises:
        ValueError: if `link` is of another kind, or the payloads of a codec cannot be added; on
            use, if there are more workers than the fields of its integers can hold.

    Example:
        >>> import jaxcomp
        >>> like = {"w": jnp.zeros((1024, 1024))}
        >>> for workers in (2, 8, 64):
        ...     added = jaxcomp.wire_bytes(Psum(jaxcomp.thc()), like, workers)
        ...     print(added, jaxcomp.wire_bytes(jaxcomp.Gather(jaxcomp.thc()), like, workers))
        700416 526336
        1836800 3678976
        2755872 33096672

    Note:
        The payload bytes that `describe` shows are those for two workers, the fewest that
        communicate.
    """

    link: "Link | Codec | Policy"

    def __post_init__(self):
        if not isinstance(self.link, Link):
            object.__setattr__(self, "link", Link(self.link))
        for codec in self.uplink.policy.codecs:
            codec.summable(1)

    @property
    def uplink(self) -> Link:
        return cast(Link, self.link)

    def init(self, plan: Plan) -> PerWorker:
        return PerWorker.wrap(send.init(plan.batches), "codec", plan.axis_name)

    def collect(
        self,
        plan: Plan,
        key: Array,
        message: Stacks,
        state: PerWorker,
        weight: Array | None = None,
    ) -> Collected:
        worker, n = lax.axis_index(plan.axis), plan.workers
        sums = _summable(plan.batches, n)
        if weight is not None:  # Before the agreement, which a NaN would spoil for all.
            message = tuple(jnp.where(weight == 0, 0, x) for x in message)
        memory = send.Memory((), state.own())
        own = send.send(key, sums, message, memory, worker, plan.axis)
        factors = tuple(map(functools.partial(_factors, n), sums, own.payloads))
        total = _all_reduce(own.payloads, factors, plan.axis, weight)
        return Collected(
            part=_mean(key, sums, total, own.sides, factors),
            sent=own.sent,
            share=1.0 if weight is None else lax.pmean(weight, plan.axis),
            state=PerWorker.wrap(own.memory.codecs, "codec", plan.axis_name),
        )

    def costs(self, plan: Plan) -> Costs:
        """An all-reduce of the payload and the agreement; the payload bytes for two workers."""
        n, sums = plan.workers, _summable(plan.batches, plan.workers)
        sent = dense_.fused_link_bytes(jax.tree.leaves(wire_cost.payload_like(sums)), n)
        pairs = wire_cost.payload_like(_summable(plan.batches, 2))
        effort = cost.Effort(2 * (n - 1), encodes=1, decodes=1)
        return Costs(
            link_bytes=sent + wire_cost.agreed_bytes(sums, n),
            efforts=((self.uplink, effort),),
            payload_bytes=tuple(float(buffer.fused_bytes(part)) for part in pairs),
        )


def _summable(batches: Batches, workers: int) -> Batches:
    """The batches with codecs whose payloads can be summed over `workers` workers."""
    found = []
    for batch in batches:
        codec = batch.codec.summable(workers)
        found.append(batch if codec is batch.codec else batches_.Recut(batch, codec))
    return tuple(found)


def _factors(workers: int, batch: Any, payload: PyTree) -> tuple[float, float]:
    """The factors on each term, or on its decoder, and on the decoded sum, that give the mean.

    Terms that might overflow are divided before the sum, as far as this does not round; floats of
    16 bits are averaged in the collective.
    """
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(payload)}
    before, after = summing.mean_factors(workers)
    if any(jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes):
        return (before, after) if batch.codec.facts.scales_sums else (1.0, 1 / workers)
    return (before * after, 1.0) if any(map(over_workers.is_narrow, dtypes)) else (before, after)


def _all_reduce(
    payloads: tuple[PyTree, ...],
    factors: tuple[tuple[float, float], ...],
    axis_name: AxisName,
    weight: Array | None,
) -> PyTree:
    """The payloads' sums over the workers, with one collective for each dtype."""
    leaves, treedef = jax.tree.flatten(payloads)
    before = [
        factor
        for payload, (factor, _) in zip(payloads, factors, strict=True)
        for _ in jax.tree.leaves(payload)
    ]
    groups: dict[Any, list[int]] = {}
    for number, leaf in enumerate(leaves):
        if not jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4:
            raise ValueError(
                "`link` must have codecs whose payloads are floats or integers of 32 bits, since "
                f"a sum of narrower integers wraps around, got {leaf.dtype.name}"
            )
        if leaf.size:
            groups.setdefault(leaf.dtype, []).append(number)
    for dtype, numbers in groups.items():
        if over_workers.is_narrow(dtype):
            flat = xla.joined([leaves[i] for i in numbers])
            (total,) = over_workers.mean([flat], axis_name, weight)
        else:
            flat = xla.joined([_weighted(leaves[i], weight, before[i]) for i in numbers])
            (total,) = over_workers.total([flat], axis_name)
        sizes = [leaves[i].size for i in numbers]
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        for i, part in zip(numbers, xla.cut(total, begins, sizes), strict=True):
            leaves[i] = part.reshape(leaves[i].shape)
    return jax.tree.unflatten(treedef, leaves)


def _weighted(x: Array, weight: Array | None, factor: float) -> Array:
    """Floats times the weight and the factor, integers unchanged; zeros for weight zero."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x if weight is None else jnp.where(weight == 0, 0, x)
    return summing.weighted(x * summing.kept(factor, x.dtype), weight)


def _mean(
    key: Array,
    batches: Batches,
    total: PyTree,
    sides: tuple[Any, ...],
    factors: tuple[tuple[float, float], ...],
) -> Stacks:
    """The decoded sums, times the factor that makes them means."""

    def mean(batch: Any, before: float, factor: float) -> Callable[..., Array]:
        like = summing.accumulator(batch.like)

        def decode(key, payload, side):
            if batch.codec.facts.scales_sums:
                side = jax.tree.map(lambda part: part * jnp.float32(before), side)
            whole = batch.codec.decode(key, payload, like, side)
            # The reciprocal: compiled code divides by a constant so, eager code does not.
            return (whole * jnp.asarray(factor, whole.dtype)).astype(batch.dtype)

        def real(key, payload, side):
            lanes = batches_.lanes(payload, batch.size)
            return batches_.real(batch, xla.compile_separately(decode, lanes)(key, payload, side))

        return real

    # Any worker's key will do: a linear codec uses no private noise in decoding.
    return tuple(
        mean(batch, *pair)(own, payload, side)
        for own, batch, payload, side, pair in zip(
            batches_.batch_keys(key, batches, 0), batches, total, sides, factors, strict=True
        )
    )
