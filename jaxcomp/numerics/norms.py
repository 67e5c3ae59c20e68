"""Norms of whole trees without overflow or underflow: in units of the largest element."""

import functools

import jax
import jax.numpy as jnp

from jaxcomp.numerics import addition
from jaxcomp.types import Array, PyTree


def largest(tree: PyTree) -> Array:
    """The largest magnitude in a tree, float32, or float64 if a leaf is float64."""
    tops = [
        jnp.max(jnp.abs(leaf), initial=0).astype(addition.wide(leaf.dtype))
        for leaf in jax.tree.leaves(tree)
    ]
    return functools.reduce(jnp.maximum, tops, jnp.zeros((), jnp.float32))


def unit(top: Array) -> Array:
    """The factor that scales elements before they are squared, if `top` is the largest."""
    most = 2.0**1000 if top.dtype == jnp.float64 else 2.0**100
    return 1 / jnp.where(top > 0, jnp.clip(top, 1 / most, most), 1)


def energy(tree: PyTree, unit: Array) -> Array:
    """`Σ (unit · x)²` over all elements of a tree, float32, or float64 if a leaf is float64."""
    return sum(
        (
            jnp.sum(jnp.square(leaf.astype(addition.wide(leaf.dtype)) * unit))
            for leaf in jax.tree.leaves(tree)
        ),
        start=jnp.zeros((), jnp.float32),
    )
