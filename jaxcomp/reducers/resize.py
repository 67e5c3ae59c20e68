"""Moves a downlink's residual to workers without a downlink."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.feedback import MomentumState, ResidualState, memory as memory_
from jaxcomp.mesh import per_worker
from jaxcomp.quantize.blocks import Blocks8
from jaxcomp.types import Array, PyTree

_UNSENT = {ResidualState: "residual", MomentumState: "velocity"}
"""Which array of a memory is sent later, whatever is added to it."""


def up(
    feedback: PyTree, reducer: PyTree, like: PyTree, workers: int, *, sharded: bool
) -> tuple[PyTree, PyTree]:
    """Prepares the uplink's memory and a reducer's state for another number of workers.

    If the new workers have no downlink, its residual is added to the residual of every worker: the
    mean residual of the uplink grows by it, so no unsent part is lost.

    Args:
        feedback: all workers' uplink memories.
        reducer: the state of the reducer.
        like: shapes and dtypes of the state of the new workers' reducer.
        workers: the new number of workers.
        sharded: whether the arrays have an axis of shards, after that of the workers.

    Raises:
        ValueError: if the uplink has no memory to which the residual can be added.
    """
    nodes, treedef = jax.tree.flatten(reducer, is_leaf=per_worker.is_per_worker)
    likes = treedef.flatten_up_to(like)
    left = [_left_behind(*pair, sharded) for pair in zip(nodes, likes, strict=True)]
    if not any(left):
        return feedback, reducer
    (unsent,) = [node.tree for node, gone in zip(nodes, left, strict=True) if gone] or [None]
    kept = [
        _emptied(node, sharded) if gone else node for node, gone in zip(nodes, left, strict=True)
    ]
    return _joined(feedback, unsent, workers, sharded), jax.tree.unflatten(treedef, kept)


def _left_behind(node: Any, like: Any, sharded: bool) -> bool:
    """Whether this is the memory of a downlink that the new workers do not have."""
    if not per_worker.is_per_worker(node) or node.kind != "share":
        return False
    at = 2 if sharded else 1
    pairs = zip(*map(jax.tree.leaves, (node.tree, like.tree)), strict=True)
    return any(x.shape[at] and not wanted.shape[at] for x, wanted in pairs)


def _emptied(node: Any, sharded: bool) -> Any:
    return jax.tree.map(lambda x: x[:, :, :0] if sharded else x[:, :0], node)


def _joined(feedback: Any, unsent: Any, workers: int, sharded: bool) -> Any:
    held: Any = feedback.tree if per_worker.is_per_worker(feedback) else None
    field = _UNSENT.get(type(held), "")
    own, more = getattr(held, field, ()), getattr(unsent, "residual", ())
    rows = [x.shape[2 if sharded else 1 :] for x in map(_codes, own)]
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
    return per_worker.PerWorker(held._replace(**{field: found}), feedback.kind)


def _codes(x: Any) -> Array:
    return x.codes if isinstance(x, Blocks8) else x
