"""The receiver of every link: decodes the payloads of all workers, or of one after another."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.backend import xla
from jaxcomp.base import decode_sum
from jaxcomp.exchange.send import real
from jaxcomp.layout import batches as batches_
from jaxcomp.types import Array, Batches, Key, PyTree, Stacks


def mean(
    key: Array,
    batches: Batches,
    payloads: tuple[PyTree, ...],
    sides: tuple[Any, ...],
    weights: Array | None,
    workers: int,
    first: tuple[Array | int, ...] | None = None,
    *,
    over: str = "workers",
) -> Stacks:
    """`Σ wᵢ·decode(payloadᵢ) / n` of every batch; padding is zero.

    Args:
        key: the key of the step.
        batches: the plan.
        payloads: all workers' payloads, with a leading axis of workers.
        sides: the decoders' side information.
        weights: one for each worker, or None for all ones.
        workers: the number of workers.
        first: the number of the first bucket of each batch; None for zero.
        over: "workers"; "senders" to divide each element by the weights of its senders; "one" for
            the sum.
    """
    found = []
    everyones = _numbered(everyone(key, batches, workers), first)
    for keys, batch, payload, side in zip(everyones, batches, payloads, sides, strict=True):
        lanes = batches_.lanes(payload, batch.size, leading=2)
        whole = _mean(batch.codec, batch.like, lanes, over)(keys, payload, side, weights)
        found.append(real(batch, whole))
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _mean(codec: Any, like: Any, lanes: int, over: str) -> Callable[..., Array]:
    def total(keys: Key, payload: PyTree, side: Any, weights: Array | None) -> Array:
        if over == "senders":
            return codec.mean_of_senders(keys, payload, like, weights).astype(like.dtype)
        if over == "one":
            found = decode_sum.decode_sum(codec, keys, payload, like, weights, side)
            return found.astype(like.dtype)
        return decode_sum.decode_mean(codec, keys, payload, like, weights, side)

    return xla.compile_separately(total, lanes)


def slices(
    key: Array,
    batches: Batches,
    payloads: tuple[PyTree, ...],
    sides: tuple[Any, ...],
    workers: int,
) -> Stacks:
    """The decoded rows of all workers, one after another, if each encoded its own slice."""
    found = _decoded(key, batches, payloads, sides, workers, sliced=True)
    return tuple(x.reshape(-1, batch.size) for x, batch in zip(found, batches, strict=True))


def each(
    key: Array,
    batches: Batches,
    payloads: tuple[PyTree, ...],
    sides: tuple[Any, ...],
    workers: int,
    first: tuple[Array | int, ...] | None = None,
) -> Stacks:
    """The decoded messages of all workers, with a leading axis of them; padding is zero.

    Args:
        key: the key of the step; all arguments are those of `mean`.
        batches: the plan.
        payloads: the payloads.
        sides: the decoders' side information.
        workers: the number of workers.
        first: the number of the first bucket of each batch; None for zero.
    """
    found = _decoded(key, batches, payloads, sides, workers, first, sliced=False)
    return tuple(
        jax.vmap(functools.partial(real, batch))(x) for x, batch in zip(found, batches, strict=True)
    )


def _decoded(
    key: Array,
    batches: Batches,
    payloads: tuple[PyTree, ...],
    sides: tuple[Any, ...],
    workers: int,
    first: tuple[Array | int, ...] | None = None,
    *,
    sliced: bool,
) -> list[Array]:
    """Every worker's decoded payloads: `[workers, buckets, size]` for each batch."""
    found = []
    everyones = _numbered(everyone(key, batches, workers), first)
    for keys, batch, payload, side in zip(everyones, batches, payloads, sides, strict=True):
        lanes = batches_.lanes(payload, batch.size, leading=2)
        found.append(_each(batch.codec, batch.like, lanes, sliced)(keys, payload, side))
    return found


@functools.lru_cache(maxsize=1024)
def _each(codec: Any, like: Any, lanes: int, sliced: bool) -> Callable[..., Array]:
    def whole(keys: Key, payloads: PyTree, side: Any) -> Array:
        def decode(own: Array, worker: Array, payload: PyTree) -> Array:
            first = (worker * like.shape[0]).astype(jnp.uint32) if sliced else keys.first
            return codec.decode(Key(keys.shared, own, first), payload, like, side)

        everything = keys.own, jnp.arange(len(keys.own)), payloads
        # In passes: one after another, by the decoder of this worker's payloads.
        if codec.hints.decodes_in_passes:
            return jax.lax.map(lambda one: decode(*one), everything)
        return jax.vmap(decode)(*everything)

    return xla.compile_separately(whole, lanes, math.prod(like.shape))


def everyone(key: Array, batches: Batches, workers: int) -> list[Key]:
    """The keys of all workers for every batch; `own` has a leading axis."""
    numbers = jnp.arange(workers, dtype=jnp.uint32)
    own = jax.vmap(lambda worker: [k.own for k in batches_.batch_keys(key, batches, worker)])
    shared = batches_.batch_keys(key, batches, 0)
    return [one._replace(own=all_) for one, all_ in zip(shared, own(numbers), strict=True)]


def _numbered(keys: list[Key], first: tuple[Array | int, ...] | None) -> list[Key]:
    """The keys of batches whose buckets are numbered from `first` on."""
    if first is None:
        return keys
    return [
        one._replace(first=jnp.asarray(number).astype(jnp.uint32))
        for one, number in zip(keys, first, strict=True)
    ]
