"""Collectives of payloads: what lies between `send` and `receive`.

A payload is a tree of arrays of any shapes and dtypes. It travels as one dense buffer of 32-bit
words, or as a few of them.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxcomp.backend import axes
from jaxcomp.exchange import trips
from jaxcomp.types import Array, AxisName, PyTree
from jaxcomp.wire import buffer


def all_gather(
    payload: PyTree, axis_name: AxisName, collectives: int = 1, delay: float | None = None
) -> PyTree:
    """The payloads of all workers, with a leading axis of workers.

    Args:
        payload: this worker's payload.
        axis_name: the axes of the workers.
        collectives: the number of collectives, each of whole arrays.
        delay: seconds one way, by which messages are sent at once or one after another; None for
            what is assumed.
    """
    leaves, treedef = jax.tree.flatten(payload)
    waits, found = trips.wait(delay) > 0, []
    for part in buffer.runs(leaves, collectives):
        words = buffer.fuse(part)
        at_once = waits and trips.at_once(words.nbytes, axes.size(axis_name), delay)
        found += buffer.split(axes.gather(words, axis_name, at_once=at_once), part)
    return jax.tree.unflatten(treedef, found)


def all_to_all(
    rows: PyTree, axis_name: AxisName, collectives: int = 1, delay: float | None = None
) -> PyTree:
    """Sends row `j` of arrays with a leading axis of workers to worker `j`.

    Args:
        rows: arrays `[workers, …]`.
        axis_name: the axes of the workers.
        collectives: the number of collectives, each of whole arrays.
        delay: as of `all_gather`.

    Returns:
        The rows that this worker receives, `[workers, …]`, in the order of their senders.
    """
    leaves, treedef = jax.tree.flatten(rows)
    n, found = axes.size(axis_name), []
    for part in buffer.runs(leaves, collectives):
        likes = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in part]
        sent = jax.vmap(buffer.fuse, axis_size=n)(part)
        at_once = trips.at_once(sent.nbytes / n, n, delay)
        found += buffer.split(axes.exchange(sent, axis_name, at_once=at_once), likes)
    return jax.tree.unflatten(treedef, found)


def permute(words: Array, sources: Sequence[Sequence[int]], axis_name: AxisName) -> Array:
    """The buffers of other workers, one permutation of all workers after another.

    Args:
        words: this worker's payload as one buffer, from `jaxcomp.wire.buffer.fuse`.
        sources: for each permutation, the worker from which worker `i` receives.
        axis_name: the axes of the workers.

    Returns:
        `[permutations, words]`.
    """
    words = axes.vary(words, axis_name)
    found = [axes.permute(words, list(own), axis_name) for own in sources]
    return jnp.stack(found) if found else words[None][:0]
