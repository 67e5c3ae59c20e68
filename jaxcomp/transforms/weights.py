"""The weight of a worker in a mean: the argument `weight` of an update."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.backend import axes
from jaxcomp.base import Reducer
from jaxcomp.exchange import over_workers
from jaxcomp.feedback import Link
from jaxcomp.numerics import addition
from jaxcomp.reducers import choose
from jaxcomp.types import Array, AxisName, PyTree


def number(weight: Any) -> Array:
    """This worker's weight.

    Raises:
        ValueError: if it is not one number.
    """
    if jnp.shape(weight) != ():
        raise ValueError(
            f"`weight` must be one number, this worker's, got shape {jnp.shape(weight)}"
        )
    return jnp.asarray(weight, jnp.float32)


def share(weight: Any, axis_name: AxisName) -> Array:
    """This worker's weight over the mean weight; zero if no worker has any."""
    own = axes.vary((number(weight),), axis_name)
    (mean,) = over_workers.mean(own, axis_name)
    return jnp.where(mean == 0, 0, own[0] / jnp.where(mean == 0, 1, mean))


def weigh(source: Link | Reducer, updates: PyTree, weight: Any, axis_name: AxisName) -> PyTree:
    """The gradient times its `share`, so that the plain mean is `Σ wᵢ·gᵢ / Σ wᵢ`.

    It is scaled before the feedback, whose memory then is of what was to be sent: a residual of a
    step with a large weight counts as much in the next step, whatever the weight is there.

    Raises:
        ValueError: if `weight` is not one number, or the reducer computes no weighted mean.
    """
    for reducer in choose.candidates(source):
        _check(reducer)
    times = share(weight, axis_name)

    def scaled(leaf: Array) -> Array:
        wide = leaf.astype(addition.wide(leaf.dtype))
        return addition.weigh(wide, times).astype(leaf.dtype)

    return jax.tree.map(scaled, updates)


def refuse(name: str, given: dict[str, Any], why: str) -> None:
    """Raises a `ValueError` if an argument of the update is given that would have no effect."""
    if given.get(name) is not None:
        raise ValueError(f"`{name}` must be None here, got another value: {why}")


def _check(reducer: Reducer) -> None:
    """Raises a `ValueError` unless the mean of scaled messages is the weighted mean."""
    facts, link = reducer.facts, reducer.uplink
    for part in [*(phase for _, phase in facts.phases), *(facts.tiers or ())]:
        _check(part)
    codecs = () if link is None else link.policy.codecs
    signs = [c for c in codecs if not (c.facts.homogeneous or c.unbiased or c.contractive)]
    if facts.excludes or facts.over != "workers" or signs:
        raise ValueError(
            f"`weight` must be None with {reducer!r}, which computes no weighted mean: use "
            "jaxcomp.Gather(link), jaxcomp.TwoShot(link) or jaxcomp.Dense()"
        )
