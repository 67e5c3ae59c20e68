"""Reads checkpoints of the version before, whose states have another tree."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.mesh import per_worker, processes
from jaxcomp.types import PyTree

_Name = tuple[str, ...]

_NEW = "excess"
"""The field of `AccumulatedState` that states of version 0.2 lack: it begins with zeros."""


def restore_former(found: PyTree, target: PyTree) -> PyTree:
    """The arrays of a checkpoint of version 0.2, in the tree of this version.

    Arrays are the same, bit for bit; some nodes without arrays are gone, and the state of `Gather`
    and `Psum` no longer has the fields of `TwoShot` where a link chose them by default. Checkpoints
    of this version need no conversion: restore them with a target.

    Args:
        found: a checkpoint restored without a target, as dicts and lists, such as
            `flax.serialization.msgpack_restore(data)` or
            `orbax.checkpoint.StandardCheckpointer().restore(path)`.
        target: a tree like the one that was saved, with states of the same transformations, such
            as `(params, jaxcomp.init_state(tx, params, mesh, axis_name))`.

    Returns:
        A tree like `target`, placed like its arrays.

    Raises:
        ValueError: if the checkpoint lacks an array of `target`, has one of another shape or dtype,
            or has one for which `target` has no place.

    Example:
        >>> from flax import serialization
        >>> saved = serialization.to_bytes({"w": jnp.ones(2)})
        >>> restore_former(serialization.msgpack_restore(saved), {"w": jnp.zeros(2)})
        {'w': Array([1., 1.], dtype=float32)}
    """
    if not all(hasattr(x, "dtype") for x in jax.tree.leaves(target)):
        raise ValueError("`target` must be a tree of arrays, like the one that was saved")
    given = {_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(found)}
    left = {name for name, x in given.items() if np.size(x)}

    def taken(path: tuple, like: Any) -> Any:
        name = _name(path)
        names = (name, _former(name), tuple(map(per_worker.without_order, name)))
        name = next((one for one in names if one in given), name)
        x = given.get(name, like if _NEW in name else None)
        if x is None or (np.shape(x), jnp.result_type(x)) != (np.shape(like), like.dtype):
            has = "no such array" if x is None else f"{jnp.result_type(x)}{list(np.shape(x))}"
            raise ValueError(
                f"`found` must have the arrays of `target`, got {has} at {'/'.join(name)!r}, where "
                f"`target` has {like.dtype}{list(np.shape(like))}"
            )
        left.discard(name)
        return processes.put(x, like.sharding) if hasattr(like, "sharding") else x

    made = jax.tree_util.tree_map_with_path(taken, target)
    unused = sorted("/".join(name) for name in left if not _without_place(name))
    if unused:
        raise ValueError(
            f"`found` must have the arrays of `target` and no others, got {unused[0]!r} too: "
            "make the target with the transformation of the checkpoint"
        )
    return made


def _name(path: tuple) -> _Name:
    """The keys of a path; flax and orbax name our nodes differently."""
    keys = (jax.tree_util.keystr((key,), simple=True) for key in path)
    return tuple(per_worker.plain_name(key) for key in keys)


def _former(name: _Name) -> _Name:
    """The name that the state of a reducer's uplink had beside that of a downlink."""
    for at, part in enumerate(name[:-1]):
        if part == "reducer" and per_worker.stored_as_memory(name[at + 1]):
            return (*name[: at + 1], "up", *name[at + 1 :])
    return name


def _without_place(name: _Name) -> bool:
    """Whether this is the state of a downlink's codec, which had no use without a downlink."""
    return ("reducer", "down") in itertools.pairwise(name)
