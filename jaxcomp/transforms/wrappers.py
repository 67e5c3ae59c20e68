"""Wrappers that make other optax transformations safe beside a compressed mean."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp import checks
from jaxcomp.exchange.guarding import all_finite, cast_like, none_lost
from jaxcomp.exchange.state import ReductionState
from jaxcomp.mesh import per_worker as per_worker_
from jaxcomp.mesh.per_worker import PerWorker
from jaxcomp.numerics import addition
from jaxcomp.transforms.accumulated import AccumulatedState
from jaxcomp.transforms.mean import TELL
from jaxcomp.types import Array, PyTree


def per_worker(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Keeps one state a worker for a transformation that runs before the mean.

    Local momentum, clipping statistics and the accumulator of `optax.MultiSteps` see gradients
    that are not averaged yet. If their state were declared as replicated, it would silently differ
    between devices; with this wrapper, each worker has its own.

    A worker with a non-finite gradient passes on NaN, which all workers see in the mean, and keeps
    the floating part of its own state unchanged. It does the same if an element of that state
    would become non-finite. The other workers cannot know, so their states include the step. To
    undo the step on all workers, wrap the chain:
    `skip_nonfinite(chain(per_worker(...), mean, ...))`.

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
    checks.transformation("tx", tx)
    inner = optax.with_extra_args_support(tx)

    def init_fn(params: PyTree) -> Any:
        return PerWorker.wrap(inner.init(params), "local")

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        before = state.own()
        made, after = inner.update(updates, before, params, **extra)
        sound = all_finite(updates) & none_lost(after, before)

        def kept(new: Array, old: Array) -> Array:
            # Counters still advance, so that they stay the same on all workers.
            floating = jnp.issubdtype(new.dtype, jnp.floating)
            return jnp.where(sound, new, old) if floating else new

        made = jax.tree.map(lambda u: jnp.where(sound, u, jnp.nan), made)
        return made, PerWorker.wrap(jax.tree.map(kept, after, before), "local")

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def widened(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Keeps a transformation's state in float32 (float64 for float64) for any gradients.

    Optax makes the moments of narrow parameters narrow, in which small changes are lost, and
    gradients of another dtype would change the dtype of the state. Updates have that of the
    gradients.
    """
    inner = optax.with_extra_args_support(tx)

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        made, after = inner.update(updates, state, params, **extra)
        return cast_like(made, updates), cast_like(after, state)

    return optax.GradientTransformationExtraArgs(
        lambda params: inner.init(jax.tree.map(_wide, params)), update_fn
    )


def _wide(leaf: Any) -> Any:
    """A narrow array in the dtype of arithmetic; anything else unchanged."""
    dtype = jnp.result_type(leaf)
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype != addition.wide(dtype)
    return leaf.astype(addition.wide(dtype)) if narrow else leaf


class SkipNonfiniteState(NamedTuple):
    """State of `skip_nonfinite`: the wrapped state, and how many steps were skipped."""

    inner: Any
    skipped: Array


def skip_nonfinite(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Skips a step whose updates are not finite: no update, and the state stays unchanged.

    It also skips a step in which an element of the state would become non-finite. For example, a
    second moment in float16 that overflows would make all later updates zero. Unlike
    `optax.apply_if_finite` it works inside `shard_map` with `check_vma=True`, and it may wrap a
    chain with `compressed_mean`: it decides from the updates and the replicated part of the state,
    which are the same on every worker. With `jaxcomp.accumulate` it skips the whole round.

    A transformation that is chained before this one still takes the skipped step. To continue as
    if the step had never happened, wrap the whole chain, `per_worker` included.

    Args:
        tx: any optax transformation whose updates are the same on all workers.

    Example:
        >>> tx = skip_nonfinite(optax.sgd(0.1))
        >>> updates, state = tx.update({"w": jnp.array([jnp.nan])}, tx.init({"w": jnp.ones(1)}))
        >>> updates["w"], int(state.skipped)
        (Array([0.], dtype=float32), 1)
    """
    checks.transformation("tx", tx)
    inner = optax.with_extra_args_support(tx)

    def init_fn(params: PyTree) -> Any:
        return SkipNonfiniteState(inner.init(params), jnp.zeros((), jnp.int32))

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        made, new = inner.update(updates, state.inner, params, **{**extra, TELL: True})
        old = state.inner
        finite = all_finite(made) & none_lost(_unguarded(new), _unguarded(old))

        def kept(new: Any, old: Any) -> Any:
            if isinstance(new, AccumulatedState):
                # The sums of `accumulate` are finite; restoring them would repeat the failed round.
                return new._replace(inner=undone(new.inner, old.inner))
            return jnp.where(finite, new, old)

        def undone(new: PyTree, old: PyTree) -> PyTree:
            return jax.tree.map(kept, new, old, is_leaf=lambda x: isinstance(x, AccumulatedState))

        made = jax.tree.map(lambda x: jnp.where(finite, x, 0), made)
        return made, SkipNonfiniteState(undone(new, old), state.skipped + jnp.where(finite, 0, 1))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _unguarded(state: PyTree) -> PyTree:
    """The replicated state, without the memory that a mean guards itself."""

    def is_guarded(node: Any) -> bool:
        return isinstance(node, ReductionState)

    rest = jax.tree.map(lambda x: None if is_guarded(x) else x, state, is_leaf=is_guarded)
    return per_worker_.replicated_part(rest)
