"""Norms of whole trees, at any scale: in units of the largest element, whose square is in range."""

import functools

import jax
import jax.numpy as jnp

from jaxcomp.protocols import Array, PyTree


def largest(tree: PyTree) -> Array:
    """The largest magnitude in a tree, float32."""
    tops = [jnp.max(jnp.abs(leaf), initial=0).astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
    return functools.reduce(jnp.maximum, tops, jnp.zeros((), jnp.float32))


def unit(top: Array) -> Array:
    """What to multiply elements by before they are squared, where `top` is the largest."""
    return 1 / jnp.where(top > 0, jnp.clip(top, 2.0**-100, 2.0**100), 1)


def energy(tree: PyTree, unit: Array) -> Array:
    """`Σ (unit · x)²` over all elements of a tree, float32."""
    leaves = jax.tree.leaves(tree)
    return sum(
        (jnp.sum(jnp.square(leaf.astype(jnp.float32) * unit)) for leaf in leaves),
        start=jnp.zeros((), jnp.float32),
    )
