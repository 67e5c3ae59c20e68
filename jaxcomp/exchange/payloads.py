"""Encoding of a worker's message and decoding of all payloads, for every reducer of payloads."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.backend import xla
from jaxcomp.base import decode_sum
from jaxcomp.layout import batches as batches_
from jaxcomp.types import Array, AxisName, Batches, Key, PyTree, Stacks


class Encoded(NamedTuple):
    """The payload of every batch, the state of its codec, and the decoders' side information."""

    payloads: tuple[PyTree, ...]
    states: tuple[PyTree, ...]
    sides: tuple[Any, ...]


def init(batches: Batches) -> tuple[PyTree, ...]:
    """The state of the codec of every batch."""
    return tuple(batch.codec.init(batch.like) for batch in batches)


def encode(
    key: Array,
    batches: Batches,
    message: Stacks,
    states: tuple[PyTree, ...],
    worker: Array,
    axis_name: AxisName,
    *,
    weight: Array | None = None,
    first: bool = False,
) -> Encoded:
    """This worker's payloads.

    Args:
        key: the key of the step.
        batches: the plan.
        message: an array for each batch.
        states: the states of the codecs.
        worker: the number of this worker.
        axis_name: the axes of the workers that agree.
        weight: this worker's weight; with weight zero it does not influence the agreement.
        first: whether each worker encodes different buckets, numbered one worker after another;
            then only the decoders' levels need agreement.
    """
    found = []
    keys = _keys(key, batches, worker, first)
    for own, batch, x, state in zip(keys, batches, message, states, strict=True):
        count = batch.counts()
        if weight is not None and batch.codec.agrees:
            x = jnp.where(weight == 0, 0, x)
        if not first or batch.codec.sided:
            state = _agreement(batch.codec, axis_name)(own, x, count, state)
        payload, after = _encoder(batch.codec)(own, x, count, state)
        found.append((payload, after, batch.codec.side(state)))
    return Encoded(*(tuple(column) for column in zip(*found, strict=True))) if found else _NOTHING


_NOTHING = Encoded((), (), ())


def decode(
    key: Array,
    batches: Batches,
    payloads: tuple[PyTree, ...],
    sides: tuple[Any, ...],
    worker: Array,
    *,
    first: bool = False,
) -> Stacks:
    """This worker's payloads as the others decode them; padding is zero."""
    keys = _keys(key, batches, worker, first)
    return tuple(
        _real(batch, decoder(batch, payload)(own, payload, side))
        for own, batch, payload, side in zip(keys, batches, payloads, sides, strict=True)
    )


def _real(batch: Any, x: Array) -> Array:
    """What a payload decoded to, with zeros in the padding."""
    return x if batch.codec.keeps_zeros else batches_.real(batch, x)


def decoder(batch: Any, payload: PyTree) -> Callable[..., Array]:
    """Decodes `(key, payload, side)`, as one function for equal batches of a program."""
    return _decoder(batch.codec, batch.like, batches_.lanes(payload, batch.size))


@functools.lru_cache(maxsize=1024)
def _encoder(codec: Any) -> Callable[..., Any]:
    """`codec.encode` as one function for equal batches of a program."""
    return jax.jit(codec.encode)


@functools.lru_cache(maxsize=1024)
def _agreement(codec: Any, axis_name: AxisName) -> Callable[..., Any]:
    """`codec.agree` as one function for equal batches of a program."""
    if not codec.agrees:
        return lambda key, x, count, state: state
    return jax.jit(functools.partial(codec.agree, axis_name=axis_name))


@functools.lru_cache(maxsize=1024)
def _decoder(codec: Any, like: Any, lanes: int) -> Callable[..., Array]:
    def decode(key: Key, payload: PyTree, side: Any) -> Array:
        return codec.decode(key, payload, like, side)

    return xla.compile_separately(decode, lanes)


def _keys(key: Array, batches: Batches, worker: Array, first: bool) -> list[Key]:
    """The keys of the batches, whose buckets may be numbered one worker after another."""
    keys = batches_.batch_keys(key, batches, worker)
    if not first:
        return keys
    return [
        own._replace(first=(worker * batch.buckets).astype(jnp.uint32))
        for own, batch in zip(keys, batches, strict=True)
    ]


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
        over: "workers", or "senders" to divide each element by the weights of its senders.
    """
    found = []
    everyones = everyone(key, batches, workers)
    for number, (batch, payload, side) in enumerate(zip(batches, payloads, sides, strict=True)):
        keys = everyones[number]
        if first is not None:
            keys = keys._replace(first=jnp.asarray(first[number]).astype(jnp.uint32))
        lanes = batches_.lanes(payload, batch.size, leading=2)
        whole = _mean(batch.codec, batch.like, lanes, over)(keys, payload, side, weights)
        found.append(_real(batch, whole))
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _mean(codec: Any, like: Any, lanes: int, over: str) -> Callable[..., Array]:
    def total(keys: Key, payload: PyTree, side: Any, weights: Array | None) -> Array:
        if over == "senders":
            return codec.mean_of_senders(keys, payload, like, weights).astype(like.dtype)
        return decode_sum.decode_mean(codec, keys, payload, like, weights, side)

    return xla.compile_separately(total, lanes)


def all_shares(
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
) -> Stacks:
    """The decoded messages of all workers, with a leading axis of them; padding is zero."""
    found = _decoded(key, batches, payloads, sides, workers, sliced=False)
    return tuple(
        jax.vmap(functools.partial(_real, batch))(x)
        for x, batch in zip(found, batches, strict=True)
    )


def _decoded(
    key: Array,
    batches: Batches,
    payloads: tuple[PyTree, ...],
    sides: tuple[Any, ...],
    workers: int,
    *,
    sliced: bool,
) -> list[Array]:
    """What every worker's payloads decode to: `[workers, buckets, size]` for each batch."""
    found = []
    everyones = everyone(key, batches, workers)
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
        if codec.decodes_in_passes:  # One after another, by the decoder of this worker's payloads.
            return jax.lax.map(lambda one: decode(*one), everything)
        return jax.vmap(decode)(*everything)

    return xla.compile_separately(whole, lanes, math.prod(like.shape))


def everyone(key: Array, batches: Batches, workers: int) -> list[Key]:
    """The keys of all workers for every batch; `own` has a leading axis."""
    numbers = jnp.arange(workers, dtype=jnp.uint32)
    own = jax.vmap(lambda worker: [k.own for k in batches_.batch_keys(key, batches, worker)])
    shared = batches_.batch_keys(key, batches, 0)
    return [one._replace(own=all_) for one, all_ in zip(shared, own(numbers), strict=True)]
