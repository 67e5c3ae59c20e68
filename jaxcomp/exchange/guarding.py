"""Guards that keep a non-finite step out of all memory, alike on all workers."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.backend import axes, xla
from jaxcomp.base import Mirrored
from jaxcomp.numerics import addition
from jaxcomp.types import Array, AxisName, PyTree

_LARGE = 2**16


def where_finite(sound: Array, now: PyTree, before: PyTree) -> PyTree:
    """`now` if the step is sound, else `before`."""
    return jax.tree.map(lambda new, old: jnp.where(sound, new, old), now, before)


def cast_like(now: PyTree, before: PyTree) -> PyTree:
    """`now` in the dtypes of `before`: a step never changes those of a state.

    Gradients may have another dtype than the parameters from which the state was made. Finite
    values stay finite.
    """

    def one(new: Array, old: Array) -> Array:
        if new.dtype == old.dtype:
            return new
        floating = jnp.issubdtype(old.dtype, jnp.floating)
        return addition.saturate(new, old.dtype) if floating else new.astype(old.dtype)

    return jax.tree.map(one, now, before)


def all_finite(tree: PyTree) -> Array:
    """Whether every element of every leaf is finite."""
    leaves = [leaf.reshape(-1) for leaf in jax.tree.leaves(tree)]
    large = [leaf for leaf in leaves if leaf.size >= _LARGE]
    small = [leaf for leaf in leaves if leaf.size < _LARGE]

    def check(large, small):
        # Join small leaves to one vector: fewer reductions to compile.
        finite = [jnp.all(jnp.isfinite(leaf)) for leaf in large]
        if small:
            finite.append(jnp.all(jnp.concatenate([jnp.isfinite(leaf) for leaf in small])))
        return functools.reduce(jnp.logical_and, finite, jnp.asarray(np.True_))

    return xla.compile_separately(check)(large, small)


def none_lost(after: PyTree, before: PyTree) -> Array:
    """Whether no floating element of a state has become non-finite.

    An element that was non-finite before may be intended: a best loss starts at infinity.
    """
    pairs = zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True)
    floating = [pair for pair in pairs if jnp.issubdtype(pair[0].dtype, jnp.floating)]

    def check(pairs):
        fine = [jnp.all(jnp.isfinite(new) | ~jnp.isfinite(old)) for new, old in pairs]
        return functools.reduce(jnp.logical_and, fine, jnp.asarray(np.True_))

    return xla.compile_separately(check)(floating)


def flag_unsound(memory: PyTree) -> Array:
    """NaN if a worker's memory has a non-finite element, else zero."""
    own = memory.own if isinstance(memory, Mirrored) else memory
    floating = [x for x in jax.tree.leaves(own) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.where(all_finite(floating), jnp.float32(0), jnp.float32(jnp.nan))


def flag_any_unsound(memory: PyTree, axis_name: AxisName) -> Array:
    """NaN if any worker's memory has a non-finite element, else zero."""
    return jax.lax.psum(axes.vary(flag_unsound(memory), axis_name), axis_name)


def poison(tree: PyTree, flag: Array) -> PyTree:
    """The tree, with NaN in its smallest leaf if the flag is NaN; one leaf saves a full pass."""
    leaves, treedef = jax.tree.flatten(tree)
    sizes = [leaf.size or math.inf for leaf in leaves]
    number = sizes.index(min(sizes))
    leaves[number] = jnp.where(jnp.isnan(flag), jnp.nan, leaves[number])
    return jax.tree.unflatten(treedef, leaves)
