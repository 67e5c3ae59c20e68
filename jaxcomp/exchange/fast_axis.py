"""The fast tier of a reduction: a dense reduce-scatter before the links, an all-gather after."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxcomp.exchange import over_workers
from jaxcomp.exchange.plan import Plan
from jaxcomp.numerics import noise
from jaxcomp.types import Array, Stacks


def scatter(plan: Plan, stacks: Stacks) -> Stacks:
    """Averages this device's slice of the batches over the fast axis, if there is one."""
    if plan.fast is None:
        return stacks
    mean = functools.partial(over_workers.mean_of_rows, axis_name=plan.fast_axis)
    rows = [
        batch.rows(x).reshape(plan.sizes[-1], -1)
        for batch, x in zip(plan.batches, stacks, strict=True)
    ]
    found = _by_dtype(plan.fast.facts.dtype, rows, mean)
    return tuple(
        x.astype(batch.dtype).reshape(batch.like.shape)
        for x, batch in zip(found, plan.batches, strict=True)
    )


def gather(plan: Plan, mean: Stacks) -> Stacks:
    """The whole batches from the slices of all devices on the fast axis."""
    if plan.fast is None:
        return mean
    found = _by_dtype(
        plan.fast.facts.dtype,
        [x.reshape(1, -1) for x in mean],
        lambda flat: over_workers.gathered(flat.reshape(-1), plan.fast_axis),
    )
    return tuple(
        x.reshape(-1, batch.size)[: batch.buckets].astype(batch.dtype)
        for x, batch in zip(found, plan.layout.batches, strict=True)
    )


def fold_key(plan: Plan, key: Array) -> Array:
    """The key of this device's slice: devices on the fast axis must draw different noise."""
    return key if plan.fast is None else noise.fold(key, lax.axis_index(plan.fast_axis))


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
