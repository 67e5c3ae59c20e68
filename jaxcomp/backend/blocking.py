"""Processes rows in blocks that fit into the cache of a CPU."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import core, lax

from jaxcomp.backend import axes, platforms, xla
from jaxcomp.types import Array

_CHUNK = 2**19
"""Elements that a CPU processes at a time: they fit its cache and occupy its threads."""

_PART = 2**20
"""Elements of a part that is read several times: they fit the cache that cores share."""

_MOST_PARTS = 24
"""The most parts; each takes some twenty milliseconds to compile."""


def over_rows(f: Callable[..., Any], first: Any, *arrays: Any, common: tuple = ()) -> Any:
    """`f(first, *arrays, *common)` for a function of each row by itself, as suits the platform.

    On a CPU, several passes over an array cost memory traffic, above all the first touch of the
    pages of intermediate results. So some rows go through all passes before the next ones.

    Args:
        f: `f(first, *parts, *common)` of some rows and the number of the first of them; every array
            that it returns has a row for each. Keep it: a program has it once for equal arguments.
        first: the number of the first row.
        *arrays: trees of arrays with a leading axis of rows.
        common: trees of arrays that all rows share.
    """
    leaves, treedef = jax.tree.flatten((first, arrays, common))
    if not any(isinstance(leaf, core.Tracer) for leaf in leaves):
        return f(first, *arrays, *common)
    leaves = axes.match_vma(*map(jnp.asarray, leaves))
    first, arrays, common = jax.tree.unflatten(treedef, leaves)
    like = jax.eval_shape(f, first, *arrays, *common)
    every = [*jax.tree.leaves(arrays), *jax.tree.leaves(like)]
    rows = every[0].shape[0]
    chunk = max(_CHUNK // max(math.prod(leaf.shape[1:]) for leaf in every), 1)
    if rows <= chunk:
        return _separate(f)(first, *arrays, *common)
    some = _separate(f)

    def whole(first: Any, arrays: Any, common: Any) -> Any:
        return f(first, *arrays, *common)

    def in_chunks(first: Any, arrays: Any, common: Any) -> Any:
        def step(number: Any, found: Any) -> Any:
            # The last block overlaps the one before it: the same rows give the same results.
            begin = jnp.minimum(number * chunk, rows - chunk)
            return jax.tree.map(
                lambda whole, part: lax.dynamic_update_slice_in_dim(
                    whole, part, begin, 0, allow_negative_indices=False
                ),
                found,
                some(
                    first + begin.astype(first.dtype),
                    *jax.tree.map(lambda leaf: _rows(leaf, begin, chunk), arrays),
                    *common,
                ),
            )

        empty = jax.tree.map(
            lambda leaf: axes.match_vma(jnp.zeros(leaf.shape, leaf.dtype), first)[0], like
        )
        return lax.fori_loop(0, -(-rows // chunk), step, empty)

    return lax.platform_dependent(first, arrays, common, cpu=in_chunks, default=whole)


# Kept, so that a program has a function once, however often it is called.
_separate = functools.lru_cache(maxsize=1024)(xla.compile_separately)


def in_turn(f: Callable[..., Array], *arrays: Array) -> Array:
    """`f(*arrays)` for a function of each row by itself that reads its rows more than once.

    As `over_rows`, but for results that are small, and without a loop. What a loop works on must be
    in memory before it begins; here the slice of a leaf, or the sum with a residual, is fused with
    each pass over the rows that it makes.

    Args:
        f: gives an array with a row for each row of `arrays`.
        *arrays: with a leading axis of rows.
    """
    rows = arrays[0].shape[0]
    parts = min(arrays[0].size // _PART, _MOST_PARTS, rows)
    if parts < 2 or not any(isinstance(x, core.Tracer) for x in arrays):
        return f(*arrays)
    each = -(-rows // parts)
    parts = -(-rows // each)

    def one_by_one(*arrays: Array) -> Array:
        found, traced_once = [], jax.jit(f)
        # The last part overlaps the one before it.
        begins = [min(number * each, rows - each) for number in range(parts)]
        for begin in xla.hide(begins, xla.zero_after(arrays[0])):
            begin = begin + xla.zero_after(found[-1]) if found else begin
            some = (_rows(x, begin, each) for x in arrays)
            found.append(traced_once(*some))
        found[-1] = found[-1][parts * each - rows :]
        return jnp.concatenate(found)

    arrays = axes.match_vma(*arrays)
    return platforms.by_platform(platforms.program(f, *arrays), {"cpu": one_by_one}, *arrays)


def _rows(x: Array, begin: Array, count: int) -> Array:
    """`count` rows from `begin` on, which is not negative: five operations less for each part."""
    return lax.dynamic_slice_in_dim(x, begin, count, allow_negative_indices=False)
