"""Wrappers that make other optax transformations safe beside a compressed mean."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp.protocols import Array, PyTree
from jaxcomp.reducers.reduction import all_finite
from jaxcomp.workers import PerWorker


def per_worker(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """A transformation whose state differs between workers, for use before the mean.

    Local momentum, clipping statistics and the accumulator of `optax.MultiSteps` see gradients
    that are not averaged yet. Declared as replicated, their state would silently differ between
    devices; wrapped, it is kept once a worker.

    Args:
        tx: any optax transformation.

    Example:
        >>> import jaxcomp
        >>> tx = optax.chain(
        ...     per_worker(optax.trace(decay=0.9)),
        ...     jaxcomp.compressed_mean(jaxcomp.top_k(fraction=0.01), axis_name="data"),
        ...     optax.sgd(0.1),
        ... )
    """
    inner = optax.with_extra_args_support(tx)

    def init_fn(params: PyTree) -> Any:
        return PerWorker.wrap(inner.init(params), "local")

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        updates, own = inner.update(updates, state.own(), params, **extra)
        return updates, PerWorker.wrap(own, "local")

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class SkipNonfiniteState(NamedTuple):
    """State of `skip_nonfinite`: the wrapped state, and how many steps were skipped."""

    inner: Any
    skipped: Array


def skip_nonfinite(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Skips a step whose updates come out non-finite: no update, and the state stays.

    Unlike `optax.apply_if_finite` it works inside `shard_map` with `check_vma=True`, and it may
    wrap a chain that holds `compressed_mean`: the decision is taken from the outcome, which is
    the same on every worker.

    Args:
        tx: any optax transformation whose updates are the same on all workers.

    Example:
        >>> tx = skip_nonfinite(optax.sgd(0.1))
        >>> updates, state = tx.update({"w": jnp.array([jnp.nan])}, tx.init({"w": jnp.ones(1)}))
        >>> updates["w"], int(state.skipped)
        (Array([0.], dtype=float32), 1)
    """
    inner = optax.with_extra_args_support(tx)

    def init_fn(params: PyTree) -> Any:
        return SkipNonfiniteState(inner.init(params), jnp.zeros((), jnp.int32))

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        updates, new = inner.update(updates, state.inner, params, **extra)
        finite = all_finite(updates)
        updates = jax.tree.map(lambda x: jnp.where(finite, x, 0), updates)
        kept = jax.tree.map(lambda now, old: jnp.where(finite, now, old), new, state.inner)
        return updates, SkipNonfiniteState(kept, state.skipped + jnp.where(finite, 0, 1))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
