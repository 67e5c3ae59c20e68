"""Combining messages on a server, or in a collective: non-finite messages are excluded first."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32, UInt32

from jaxcomp.base import Aggregate
from jaxcomp.numerics import addition
from jaxcomp.types import Array, PyTree


class Combined(NamedTuple):
    """The result of a round.

    Attributes:
        value: the combined message; zero if no worker was present, and NaN if at least half of the
            messages were excluded.
        state: the aggregate's state for the next round; unchanged where the value is NaN.
        excluded: the number of messages that were excluded because they were not finite.
    """

    value: PyTree
    state: PyTree
    excluded: UInt32[Array, ""]


def combine(aggregate: Aggregate, messages: PyTree, weights: Array, state: PyTree) -> Combined:
    """Combines the messages of all workers, without those that are not finite.

    If at least half of the messages are excluded, the value is NaN: the others may be a minority
    that Byzantine workers lead, and an honest step that overflows should be seen and skipped.

    Args:
        aggregate: the rule.
        messages: the decoded messages: a tree of arrays with a leading axis of workers.
        weights: `float32[workers]`, at least zero; zero for an absent worker.
        state: the aggregate's state, made by `aggregate.init(like, workers)`.

    Raises:
        ValueError: for messages and weights of different numbers of workers.

    Example:
        >>> import jaxcomp
        >>> messages = jnp.array([[1.0], [3.0], [jnp.inf], [1e30]])
        >>> rule = jaxcomp.aggregates.CoordinateMedian()
        >>> combine(rule, messages, jnp.ones(4), ())
        Combined(value=Array([3.], dtype=float32), state=(), excluded=Array(1, dtype=uint32))
    """
    workers = {leaf.shape[0] for leaf in jax.tree.leaves(messages)}
    if weights.ndim != 1 or workers - {weights.shape[0]}:
        raise ValueError(
            "`weights` must be one number for each message, got shape "
            f"{weights.shape} for messages of {sorted(workers)} workers"
        )
    usable, excluded = exclude(finite(messages), weights)
    value, after = aggregate.combine(messages, usable, state)
    sound = has_quorum(jnp.sum(usable > 0, dtype=jnp.uint32), excluded)
    return Combined(
        nan_unless(sound, value),
        jax.tree.map(lambda new, old: jnp.where(sound, new, old), after, state),
        excluded,
    )


class Total(NamedTuple):
    """A sum of messages as they arrive.

    Attributes:
        total: `Σ wᵢ · prepare(messageᵢ)`, float32, or float64 for float64.
        weight: `Σ wᵢ`.
        present: the number of messages in the sum.
        excluded: the number of messages that were excluded because they were not finite.
    """

    total: PyTree
    weight: Float32[Array, ""]
    present: UInt32[Array, ""]
    excluded: UInt32[Array, ""]


def zero_total(like: PyTree) -> Total:
    """The sum before the first message, for messages like these."""
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, addition.wide(leaf.dtype)), like)
    none = jnp.zeros((), jnp.uint32)
    return Total(zeros, jnp.zeros((), jnp.float32), none, none)


def add(aggregate: Aggregate, total: Total, message: PyTree, weight: Array | float) -> Total:
    """Adds one worker's message to the sum.

    A server with many clients holds the sum and one message, whatever their number.

    Args:
        aggregate: a rule that `streams`.
        total: the sum of the messages so far.
        message: a tree of arrays.
        weight: the weight of the message; zero for an absent worker.

    Raises:
        ValueError: for a rule that needs all messages at once.

    Example:
        >>> import jaxcomp
        >>> rule = jaxcomp.aggregates.ClippedMean(norm=2.0)
        >>> total = zero_total(jnp.zeros(2))
        >>> for message in ([0.0, 4.0], [1.0, 0.0]):
        ...     total = add(rule, total, jnp.array(message), 1.0)
        >>> mean_of(total, jnp.zeros(2)).value
        Array([0.5, 1. ], dtype=float32)
    """
    if not aggregate.streams:
        raise ValueError(
            "`aggregate` must be a mean of messages that are prepared one by one, such as "
            f"jaxcomp.aggregates.ClippedMean(norm), got {aggregate!r}, which needs all messages at "
            "once: use jaxcomp.aggregates.combine"
        )
    sound = finite(jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], message))
    usable, excluded = exclude(sound, jnp.asarray(weight, jnp.float32)[None])
    own = usable[0]
    return Total(
        jax.tree.map(
            lambda added, x: added + addition.weigh(addition.widen(x), own),
            total.total,
            aggregate.prepare(message),
        ),
        total.weight + own,
        total.present + (own > 0).astype(jnp.uint32),
        total.excluded + excluded,
    )


def mean_of(total: Total, like: PyTree) -> Combined:
    """The mean of the messages in a sum, in the dtypes of `like`; its state is `()`."""
    factor = jnp.where(total.weight > 0, 1 / jnp.where(total.weight > 0, total.weight, 1), 0)
    value = jax.tree.map(
        lambda added, leaf: addition.saturate(added * factor.astype(added.dtype), leaf.dtype),
        total.total,
        like,
    )
    sound = has_quorum(total.present, total.excluded)
    return Combined(nan_unless(sound, value), (), total.excluded)


def finite(messages: PyTree) -> Bool[Array, " workers"]:
    """Whether each worker's message is finite in all elements."""
    each = [
        jnp.all(jnp.isfinite(leaf), axis=tuple(range(1, leaf.ndim)))
        for leaf in jax.tree.leaves(messages)
    ]
    return jnp.all(jnp.stack(each), axis=0)


def exclude(sound: Array, weights: Array) -> tuple[Array, UInt32[Array, ""]]:
    """The weights, with zeros for messages that are not `sound`, and the number of those.

    A weight that is negative or not finite counts as zero.
    """
    present = (weights > 0) & jnp.isfinite(weights)
    excluded = jnp.sum(present & ~sound, dtype=jnp.uint32)
    return jnp.where(present & sound, weights, 0).astype(jnp.float32), excluded


def has_quorum(present: Array, excluded: Array) -> Bool[Array, ""]:
    """Whether most messages were finite, or none was sent."""
    return (present > excluded) | (excluded == 0)


def nan_unless(sound: Array, value: PyTree) -> PyTree:
    """The value, or NaN everywhere unless it is sound."""
    return jax.tree.map(lambda x: jnp.where(sound, x, jnp.nan), value)
