"""The sender of every link: remember what was not sent, encode, and decode as receivers do."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.backend import xla
from jaxcomp.base import Feedback
from jaxcomp.feedback import NoFeedback
from jaxcomp.layout import batches as batches_
from jaxcomp.types import Array, AxisName, Batches, Key, PyTree, Stacks


class Memory(NamedTuple):
    """The memory of a sender: that of its feedback, and the state of the codec of every batch."""

    feedback: PyTree
    codecs: tuple[PyTree, ...]


class Sent(NamedTuple):
    """A message on its way.

    Attributes:
        payloads: the payload of every batch.
        sides: what the decoders need beside it, where the workers have agreed on it.
        message: what was encoded.
        sent: the message as every receiver decodes it.
        memory: the sender's memory, whose feedback `update` completes when the mean is known.
    """

    payloads: tuple[PyTree, ...]
    sides: tuple[Any, ...]
    message: Stacks
    sent: Stacks
    memory: Memory


def init(batches: Batches) -> tuple[PyTree, ...]:
    """The state of the codec of every batch."""
    return tuple(batch.codec.init(batch.like) for batch in batches)


def send(
    key: Array,
    batches: Batches,
    x: Stacks,
    memory: Memory,
    who: Array,
    axis_name: AxisName = None,
    *,
    feedback: Feedback = NoFeedback(),
    weight: Array | None = None,
    first: bool = False,
) -> Sent:
    """Compensates, encodes and decodes: everything that a sender does before the collective.

    Args:
        key: the key of the step.
        batches: the batches of a plan.
        x: an array for each batch.
        memory: this sender's memory.
        who: the number of this sender.
        axis_name: the axes of the workers that agree.
        feedback: the feedback of the link; none where the message is compensated already.
        weight: this worker's weight; with weight zero it influences neither an agreement nor a
            sum of payloads.
        first: whether each worker encodes different buckets, numbered one worker after another;
            then only the decoders' levels need agreement.
    """
    message, held = feedback.compensate(x, memory.feedback)
    found, keys = [], batches_.batch_keys(key, batches, who, numbered=first)
    for own, batch, given, state in zip(keys, batches, message, memory.codecs, strict=True):
        count = batch.counts()
        if weight is not None and (batch.codec.facts.agrees or batch.codec.linear):
            given = jnp.where(weight == 0, 0, given)
        if not first or batch.codec.facts.sided:
            state = _agreement(batch.codec, axis_name)(own, given, count, state)
        payload, after = _encoder(batch.codec)(own, given, count, state)
        found.append((payload, after, batch.codec.side(state)))
    payloads, states, sides = zip(*found, strict=True) if found else ((), (), ())
    sent = decode(key, batches, payloads, sides, who, first=first)
    return Sent(payloads, sides, message, sent, Memory(held, states))


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
    keys = batches_.batch_keys(key, batches, worker, numbered=first)
    return tuple(
        real(batch, decoder(batch, payload)(own, payload, side))
        for own, batch, payload, side in zip(keys, batches, payloads, sides, strict=True)
    )


def real(batch: Any, x: Array) -> Array:
    """A decoded payload with zeros in the padding."""
    return x if batch.codec.facts.keeps_zeros else batches_.real(batch, x)


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
    if not codec.facts.agrees:
        return lambda key, x, count, state: state
    return jax.jit(functools.partial(codec.agree, axis_name=axis_name))


@functools.lru_cache(maxsize=1024)
def _decoder(codec: Any, like: Any, lanes: int) -> Callable[..., Array]:
    def decode(key: Key, payload: PyTree, side: Any) -> Array:
        return codec.decode(key, payload, like, side)

    return xla.compile_separately(decode, lanes)
