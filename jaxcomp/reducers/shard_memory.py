"""Slices this worker's rows from feedback state initialised for one worker.

Outside of a mapped function, `tx.init` does not know the workers, and makes memory for one worker
with all rows. The first step inside the mapped function takes each worker's slice of it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.backend import axes
from jaxcomp.feedback import memory as memory_
from jaxcomp.quantize.blocks import Blocks8
from jaxcomp.types import Array, AxisName, PyTree


def own(memory: PyTree, wanted: PyTree, axis_name: AxisName, whole: PyTree) -> PyTree:
    """This worker's rows of each array.

    Args:
        memory: the memory of all rows, of this worker's rows, or of no rows, which means zeros.
        wanted: shapes and dtypes of this worker's rows.
        axis_name: the axes of the workers over which the rows are split.
        whole: shapes and dtypes of all rows.

    Raises:
        ValueError: for another number of rows.
    """
    n = axes.size(axis_name)

    def cut(x: Array, each: int, total: int) -> Array:
        if x.shape[0] == 0:
            return axes.match_vma(jnp.zeros((each, *x.shape[1:]), x.dtype), x)[0]
        if x.shape[0] != total:
            raise ValueError(
                f"`state` must be one for these {n} workers, with {each} rows a worker, got "
                f"{x.shape[0]} rows. Make it with jaxcomp.init_state, or with tx.init inside the "
                "mapped function, or convert it from another number of workers with "
                "jaxcomp.resize_workers"
            )
        x = jnp.pad(x, [(0, n * each - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
        return lax.dynamic_slice_in_dim(x, lax.axis_index(axis_name) * each, each)

    return _changed(memory, wanted, cut, whole)


def padded(memory: PyTree, wanted: PyTree) -> PyTree:
    """All rows of each array, padded to equal slices."""

    def pad(x: Array, rows: int, _: int) -> Array:
        missing = max(rows - x.shape[0], 0)
        return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))[:rows]

    return _changed(memory, wanted, pad, wanted)


def _changed(memory: PyTree, wanted: PyTree, change: Any, whole: PyTree) -> PyTree:
    def one(x: Any, like: Any, every: Any) -> Any:
        if jax.tree.map(jnp.shape, x) == jax.tree.map(jnp.shape, like):
            return x
        if isinstance(x, Blocks8):
            rows = change(memory_.load(x), like.codes.shape[0], every.codes.shape[0])
            return memory_.store(rows, "int8")
        return change(x, like.shape[0], every.shape[0])

    return jax.tree.map(one, memory, wanted, whole, is_leaf=lambda node: isinstance(node, Blocks8))
