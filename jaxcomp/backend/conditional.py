"""Conditionals that all workers decide alike: one of two programs runs on all of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex_core

from jaxcomp.backend import axes
from jaxcomp.types import Array, AxisName

AGREED = "jaxcomp.agreed"
"""The name of values that are the same on all workers, whatever their types and origin say."""


def name_agreed(go: Array) -> Array:
    """Names a condition that depends on memory of each worker, but is the same on all of them.

    It sends nothing, unlike `uniform`. `misuse.uniform` takes conditions with this name.
    """
    return checkpoint_name(go, AGREED)


def uniform(go: Array, axis_name: AxisName) -> Array:
    """Types `go` as replicated; its values are the same on all workers."""
    return as_replicated(go.astype(jnp.int32), axis_name) > 0 if axes.varying_axes(go) else go


def as_replicated(number: Array, axis_name: AxisName) -> Array:
    """Types an integer as replicated; its values are the same on all workers."""
    differs = tuple(n for n in axes.names(axis_name) if n in axes.varying_axes(number))
    # Only where a replicated state was passed as if it differed between workers.
    return lax.pmax(number, differs) if differs else number


def either(go: Array, talk: Callable[..., Any], silent: Callable[..., Any], *args: Any) -> Any:
    """`talk(*args)` if `go`, else `silent(*args)`; the results may differ in type of replication.

    Both are typed as varying where one of them is.
    """
    leaves, _ = jax.tree.flatten(args)
    traced = [jax.make_jaxpr(branch, return_shape=True)(*args) for branch in (talk, silent)]
    (_, shapes), _ = traced
    pairs = list(zip(*(jaxpr.out_avals for jaxpr, _ in traced), strict=True))

    def branch(number: int) -> Callable[..., list[Array]]:
        run = jex_core.jaxpr_as_fun(traced[number][0])
        missing = [axes.varying_axes(p[1 - number]) - axes.varying_axes(p[number]) for p in pairs]
        return lambda *flat: [
            lax.pcast(x, tuple(sorted(names, key=str)), to="varying") if names else x
            for x, names in zip(run(*flat), missing, strict=True)
        ]

    return jax.tree.unflatten(
        jax.tree.structure(shapes), lax.cond(go, branch(0), branch(1), *leaves)
    )
