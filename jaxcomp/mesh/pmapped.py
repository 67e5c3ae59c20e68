"""States of `jax.pmap`, whose arrays all have an axis of workers, where a mesh is meant."""

import jax
import jax.numpy as jnp

from jaxcomp.backend import axes
from jaxcomp.mesh import arguments, kinds, per_worker
from jaxcomp.types import AxisName, PyTree

ADVICE = (
    "in which every array has a leading axis of workers. Take x[:, 0] of the arrays of each "
    "jaxcomp.PerWorker and x[0] of all others, and put the result on a mesh with jaxcomp.place "
    "(docs/frameworks.md, 'Loops of jax.pmap')"
)

_SLICE = (
    "`state` must hold the memory of all workers, or be one that tx.init made, got one worker's "
    "slice of the memory of several: x[0] of a state of jax.pmap loses the memory of all other "
    "workers. Save the whole state of jax.pmap; for a mesh, take x[:, 0] of the arrays of each "
    "jaxcomp.PerWorker and x[0] of all others (docs/frameworks.md, 'Loops of jax.pmap')"
)


def check(tree: PyTree, axis_name: AxisName) -> None:
    """Refuses the state of a mean that `jax.pmap` returned.

    Without memory, it is recognised by its sharding only: an ensemble has such counters too.

    Args:
        tree: may hold one.
        axis_name: the axes of the workers.

    Raises:
        ValueError: if the tree holds one.
    """
    for node in jax.tree.leaves(tree, is_leaf=kinds.MEANS.has):
        count = (
            getattr(node, "step", getattr(node, "taken", None)) if kinds.MEANS.has(node) else None
        )
        if count is None or jnp.ndim(count) != 1:
            continue
        flat = jax.tree_util.tree_leaves_with_path(node)
        memory = [jnp.shape(x) for path, x in flat if per_worker.marked(path)]
        split = arguments.split_over(count) & set(axes.names(axis_name))
        if split or any(shape[:2] == (count.shape[0], 1) for shape in memory):
            raise ValueError(f"`state` must not be one of jax.pmap, {ADVICE}")


def check_rows(tree: PyTree) -> None:
    """Refuses one worker's slice of the memory of several workers.

    Raises:
        ValueError: if the tree holds one that can be recognised.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if per_worker.shared_out(path) and jnp.shape(leaf)[:1] == (1,):
            raise ValueError(_SLICE)


def reason(shape: tuple[int, ...], want: tuple[int, ...]) -> str:
    """Why an array does not have the shape of one worker's, or an empty string if it is unclear."""
    if len(shape) == len(want) + 1 and shape[1:] == want:
        return f"This is a state of jax.pmap, {ADVICE}"
    if len(shape) == len(want) > 1 and shape[0] == 1 and shape[1] < want[1]:
        return _SLICE
    return ""
