"""Moves a downlink's residual to workers without a downlink."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.base import feedback as feedback_
from jaxcomp.feedback import memory as memory_
from jaxcomp.mesh import per_worker
from jaxcomp.quantize.blocks import Blocks8
from jaxcomp.types import Array, PyTree


def carry(
    feedback: PyTree, reducer: PyTree, like: PyTree, workers: int, *, sharded: bool
) -> tuple[PyTree, PyTree]:
    """The uplink's memory and a reducer's state in the tree of another number of workers.

    By default, some numbers of workers have a downlink and others have none. If the new workers
    have none, its residual is added to the residual of every worker: the mean residual of the
    uplink grows by it, so no unsent part is lost.

    Args:
        feedback: all workers' uplink memories.
        reducer: the state of the reducer.
        like: the state of the new workers' reducer before its first step.
        workers: the new number of workers.
        sharded: whether the arrays have an axis of shards, after that of the workers.

    Raises:
        ValueError: if the uplink has no memory to which the residual can be added.
    """
    if jax.tree.structure(reducer) == jax.tree.structure(like) or type(like) is not tuple:
        return feedback, reducer
    # One leg, or two; the legs of a route without arrays are not stored.
    for leg in reducer[len(like) or 1 :]:
        if jax.tree.leaves(leg.memory):
            feedback = _joined(feedback, leg.memory.tree, workers, sharded)
    return feedback, (*reducer[: len(like)], *like[len(reducer) :])


def _joined(feedback: Any, unsent: Any, workers: int, sharded: bool) -> Any:
    held: Any = feedback.tree if per_worker.is_per_worker(feedback) else None
    field, of_down = feedback_.sent_later_of(held) or "", feedback_.sent_later_of(unsent)
    own: Any = getattr(held, field) if field else ()
    more: Any = () if of_down is None else getattr(unsent, of_down)
    codes = [x.codes if isinstance(x, Blocks8) else x for x in own]
    rows = [x.shape[2 if sharded else 1 :] for x in codes]
    fits = len(own) == len(more) and all(
        shape[1:] == r.shape[3 if sharded else 2 :] for shape, r in zip(rows, more, strict=False)
    )
    if not own or not fits:
        raise ValueError(
            f"`state` must not have a downlink's residual to be moved to {workers} workers, which "
            "have no downlink: the uplink's feedback has no memory to which it can be added. Give "
            "the uplink jaxcomp.Residual(), or use jaxcomp.TwoShot(up, down), which has a "
            "downlink for any number of workers"
        )

    def joined(x: Any, r: Array) -> Any:
        """`[n, rows, size]` plus the shares of as many rows."""
        whole = r.reshape(-1, r.shape[-1])

        def one(x: Any) -> Any:
            held = memory_.load(x)
            wide = jnp.promote_types(jnp.promote_types(held.dtype, whole.dtype), jnp.float32)
            total = held.astype(wide) + whole[: held.shape[0]].astype(wide)
            return memory_.store(total, "int8" if isinstance(x, Blocks8) else held.dtype)

        return jax.vmap(one)(x)

    # Compile it as a whole: run one by one, the operations of eight-bit memories take seconds.
    change = jax.jit(jax.vmap(joined, in_axes=1, out_axes=1) if sharded else joined)
    found = tuple(change(x, r) for x, r in zip(own, more, strict=True))
    return per_worker.PerWorker(held._replace(**{field: found}), feedback.kind, feedback.order)
