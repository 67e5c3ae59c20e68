"""Encoding of a worker's message and decoding of all payloads, for every reducer of payloads."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.backend import xla
from jaxcomp.base import decode_sum
from jaxcomp.layout import batches as batches_
from jaxcomp.numerics import noise
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
    for number, (batch, x, state) in enumerate(zip(batches, message, states, strict=True)):
        own = batches_.batch_key(key, number, worker, worker * batch.buckets if first else 0)
        count = batch.counts()
        if weight is not None and batch.codec.agrees:
            x = jnp.where(weight == 0, 0, x)
        if not first or batch.codec.sided:
            state = batch.codec.agree(own, x, count, state, axis_name)
        payload, after = batch.codec.encode(own, x, count, state)
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

    def one(batch: Any, key: Key, payload: PyTree, side: Any) -> Array:
        def decode(key, payload, side):
            return batch.codec.decode(key, payload, batch.like, side)

        lanes = batches_.lanes(payload, batch.size)
        return batches_.real(batch, xla.compile_separately(decode, lanes)(key, payload, side))

    return tuple(
        one(
            batch,
            batches_.batch_key(key, number, worker, worker * batch.buckets if first else 0),
            payload,
            side,
        )
        for number, (batch, payload, side) in enumerate(zip(batches, payloads, sides, strict=True))
    )


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
    for number, (batch, payload, side) in enumerate(zip(batches, payloads, sides, strict=True)):
        keys = everyone(key, number, workers, 0 if first is None else first[number])

        def total(keys, payload, side, weights, batch=batch):
            if over == "senders":
                own = batch.codec.mean_of_senders(keys, payload, batch.like, weights)
                return own.astype(batch.dtype)
            return decode_sum.decode_mean(batch.codec, keys, payload, batch.like, weights, side)

        lanes = batches_.lanes(payload, batch.size, leading=2)
        whole = xla.compile_separately(total, lanes)(keys, payload, side, weights)
        found.append(batches_.real(batch, whole))
    return tuple(found)


def all_shares(
    key: Array,
    batches: Batches,
    payloads: tuple[PyTree, ...],
    sides: tuple[Any, ...],
    workers: int,
) -> Stacks:
    """The decoded rows of all workers, one after another, if each encoded its own slice."""
    found = []
    for number, (batch, payload, side) in enumerate(zip(batches, payloads, sides, strict=True)):
        keys = everyone(key, number, workers, 0)

        def decode(own, worker, payload, keys=keys, side=side, batch=batch):
            first = (worker * batch.buckets).astype(jnp.uint32)
            return batch.codec.decode(Key(keys.shared, own, first), payload, batch.like, side)

        lanes = batches_.lanes(payload, batch.size, leading=2)
        every = xla.compile_separately(jax.vmap(decode), lanes, batch.buckets * batch.size)
        rows = every(keys.own, jnp.arange(workers), payload)
        found.append(rows.reshape(-1, batch.size))
    return tuple(found)


def everyone(key: Array, number: int, workers: int, first: Array | int) -> Key:
    """The keys of all workers for batch `number`; `own` has a leading axis."""
    shared = noise.fold(key, number)
    numbers = jnp.arange(workers, dtype=jnp.uint32)
    own = jax.vmap(noise.fold, in_axes=(None, 0))(shared, numbers)
    return Key(shared, own, jnp.asarray(first).astype(jnp.uint32))
