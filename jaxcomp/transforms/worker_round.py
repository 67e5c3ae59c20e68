"""A worker's round: its own steps from the centre, and how far they have moved it.

`local_updates`, `gossip` and a federated client's `LocalSteps` take their steps here. A worker's
parameters are the centre plus its offset, at least in float32, in which parameters in bfloat16 lose
no small steps.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomp.backend import xla
from jaxcomp.exchange import guarding
from jaxcomp.numerics import addition
from jaxcomp.types import Array, PyTree


def start(params: PyTree) -> PyTree:
    """The offset of a worker at the centre."""
    return jax.tree.map(addition.zeros, params)


def exact(center: PyTree, offset: PyTree) -> PyTree:
    """The worker's parameters in the offset's dtype."""
    return jax.tree.map(lambda p, by: jnp.asarray(p, by.dtype) + by, center, offset)


def here(center: PyTree, offset: PyTree, like: PyTree | None = None) -> PyTree:
    """The worker's parameters, in the dtypes of the centre or of `like`."""
    like = center if like is None else like
    return jax.tree.map(lambda x, p: x.astype(p.dtype), exact(center, offset), like)


def step(
    optimizer: optax.GradientTransformation,
    grads: PyTree,
    inner: PyTree,
    own: PyTree,
    offset: PyTree,
    *,
    takes: Array | None = None,
    guard: bool = True,
    whole: bool = False,
    extra: dict[str, Any] | None = None,
) -> tuple[PyTree, PyTree, Array]:
    """One step: the next offset, the optimizer's next state, and whether the step was taken.

    Args:
        optimizer: the worker's optimizer.
        grads: its gradients.
        inner: the optimizer's state.
        own: the worker's parameters.
        offset: these minus the centre.
        takes: whether the worker takes this step; None if it does.
        guard: leave out a step that is not finite.
        whole: `offset` is the parameters themselves, which optax steps in their own dtype.
        extra: further arguments for the optimizer.
    """

    def move(grads: PyTree, inner: PyTree, own: PyTree, offset: PyTree) -> tuple[PyTree, PyTree]:
        updates, after = optimizer.update(grads, inner, own, **(extra or {}))
        if whole:
            return optax.apply_updates(offset, updates), after
        return jax.tree.map(lambda by, u: by + u.astype(by.dtype), offset, updates), after

    # Separately, so that all programs that contain the step round alike.
    move = move if whole else xla.compile_separately(move)
    moved, after = move(grads, inner, own, offset)
    if guard:
        sound = guarding.all_finite(moved) & guarding.none_lost(after, inner)
        takes = sound if takes is None else takes & sound
    if takes is None:
        return moved, after, jnp.ones((), bool)
    return *guarding.where_finite(takes, (moved, after), (offset, inner)), takes


def delta(offset: PyTree, like: PyTree, center: PyTree | None = None) -> PyTree:
    """The pseudo-gradient: the centre minus the worker's parameters, in the dtypes of `like`.

    Args:
        offset: the worker's parameters minus a base.
        like: the centre.
        center: the centre minus that base; None where the centre is the base.
    """
    center = jax.tree.map(jnp.zeros_like, offset) if center is None else center
    return jax.tree.map(
        lambda by, at, p: (at.astype(by.dtype) - by).astype(p.dtype), offset, center, like
    )


def resume(mix: float, offset: PyTree, moved: PyTree) -> PyTree:
    """The offset with which a worker goes on from a centre that has moved: `mix · (θ − φ)`."""
    if mix == 0:
        return jax.tree.map(jnp.zeros_like, offset)

    def mixed(by: Array, u: Array) -> Array:
        return jnp.asarray(mix, by.dtype) * (by - u.astype(by.dtype))

    return jax.tree.map(mixed, offset, moved)
