"""The fast tier of a reduction: a dense reduce-scatter before the links, an all-gather after."""

import functools

from jax import lax

from jaxcomp.exchange import over_workers, packing
from jaxcomp.exchange.plan import Plan
from jaxcomp.numerics import noise
from jaxcomp.types import Array, Stacks


def scatter(plan: Plan, stacks: Stacks) -> Stacks:
    """Averages this device's slice of the batches over the fast axis, if there is one."""
    if plan.fast is None:
        return stacks
    mean = functools.partial(over_workers.mean_of_rows, axis_name=plan.fast_axis)
    rows = [
        batch.rows(x).reshape(plan.sizes[-1], -1).astype(plan.fast.facts.dtype or x.dtype)
        for batch, x in zip(plan.batches, stacks, strict=True)
    ]
    return tuple(
        x.astype(batch.dtype).reshape(batch.like.shape)
        for x, batch in zip(packing.by_dtype(rows, mean), plan.batches, strict=True)
    )


def gather(plan: Plan, mean: Stacks) -> Stacks:
    """The whole batches from the slices of all devices on the fast axis."""
    if plan.fast is None:
        return mean
    slices = [x.reshape(-1).astype(plan.fast.facts.dtype or x.dtype) for x in mean]
    move = functools.partial(over_workers.gather, axis_name=plan.fast_axis)
    return tuple(
        x.reshape(-1, batch.size)[: batch.buckets].astype(batch.dtype)
        for x, batch in zip(packing.by_dtype(slices, move), plan.layout.batches, strict=True)
    )


def fold_key(plan: Plan, key: Array) -> Array:
    """The key of this device's slice: devices on the fast axis must draw different noise."""
    return key if plan.fast is None else noise.fold(key, lax.axis_index(plan.fast_axis))
