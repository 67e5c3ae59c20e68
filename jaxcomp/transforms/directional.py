"""A mean of directions and lengths, which does not shrink where workers disagree."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomp.backend import axes
from jaxcomp.base import Codec, Reducer
from jaxcomp.exchange import over_workers
from jaxcomp.feedback import Link
from jaxcomp.layout import trees
from jaxcomp.layout.policy import Policy
from jaxcomp.transforms import weights
from jaxcomp.transforms.mean import compressed_mean
from jaxcomp.types import Array, AxisName, PyTree


def directional_mean(
    codec: "Codec | Policy | Link | Reducer",
    axis_name: AxisName,
    *,
    plain: Callable[[str], bool] | None = None,
    key: Any = 0,
) -> optax.GradientTransformationExtraArgs:
    """The mean length times the mean direction of each leaf (radial-directional averaging).

    `(Σ wᵢ ‖vᵢ‖ / Σ wᵢ) · unit(Σ wᵢ unit(vᵢ))`. The plain mean of `n` orthogonal vectors of one
    length is `1/√n` times as long as they are; this one is as long.

    Args:
        codec: the codec of the directions, as for `compressed_mean`.
        axis_name: the mapped axis of the workers.
        plain: from a leaf's path, such as "embedding/w", to whether it is averaged plainly; None
            for no leaf.
        key: a seed or key, the same on all workers.

    Returns:
        An optax transformation; `tx.update(updates, state, params, weight=w)` takes this worker's
        weight, at least 0, and 1 without it.

    Raises:
        ValueError: for the same reasons as `compressed_mean`.

    Example:
        >>> import jaxcomp
        >>> mean = directional_mean(jaxcomp.Dense(), "data", plain=lambda path: "embed" in path)
        >>> outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
        >>> inner = optax.adamw(4e-4)
        >>> tx = jaxcomp.local_updates(inner, outer, "data", every=30, reducer=mean)

    References:
        `Decoupled DiLoCo <https://arxiv.org/abs/2604.21428>`_, 2026, which merges what arrived from
        a quorum with weights of tokens² over steps.

    Note:
        A leaf of zeros has no direction and adds none. We have read the abstract only.
    """
    inner: Any = compressed_mean(codec, axis_name, key=key)

    def is_plain(path: Any) -> bool:
        return plain is not None and plain(trees.path_name(path))

    def update_fn(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        weight: Array | float | None = None,
        **extra: Any,
    ) -> tuple[PyTree, Any]:
        axes.require(axis_name)
        own = jnp.ones((), jnp.float32) if weight is None else weights.share(weight, axis_name)
        flat, treedef = jax.tree_util.tree_flatten_with_path(updates)
        lengths = [_length(leaf) for _, leaf in flat]
        sent = [
            leaf * own.astype(leaf.dtype) if is_plain(path) else _scaled(leaf, length, own)
            for (path, leaf), length in zip(flat, lengths, strict=True)
        ]
        mean, state = inner.update(jax.tree.unflatten(treedef, sent), state, params, **extra)
        told = axes.vary(tuple(length * own for length in lengths), axis_name)
        wanted = over_workers.mean(told, axis_name)
        found = [
            leaf if is_plain(path) else _scaled(leaf, _length(leaf), length)
            for (path, _), leaf, length in zip(flat, jax.tree.leaves(mean), wanted, strict=True)
        ]
        return jax.tree.unflatten(treedef, found), state

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def _length(leaf: Array) -> Array:
    """The norm of a leaf, of which no square leaves the range."""
    wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    top = jnp.max(jnp.abs(wide), initial=0)
    unit = jnp.where(top > 0, wide / jnp.where(top > 0, top, 1), 0)
    return (top * jnp.sqrt(jnp.sum(unit * unit))).astype(jnp.float32)


def _scaled(leaf: Array, length: Array, wanted: Array) -> Array:
    """The leaf at another length; zero if it has none."""
    factor = jnp.where(length > 0, wanted / jnp.where(length > 0, length, 1), 0)
    return (leaf.astype(factor.dtype) * factor).astype(leaf.dtype)
