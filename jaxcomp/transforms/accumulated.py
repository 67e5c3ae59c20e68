"""Gradient accumulation before the mean: one exchange for several micro-batches."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp import checks, compiler
from jaxcomp.protocols import Array, AxisName, PyTree
from jaxcomp.reducers import rounds
from jaxcomp.transforms import branches
from jaxcomp.workers import PerWorker


class AccumulatedState(NamedTuple):
    """State of `accumulate`.

    Attributes:
        waited: gradients since the last round.
        total: of each worker, their sum.
        inner: the state of what is wrapped.
    """

    waited: Array
    total: PerWorker
    inner: Any


def accumulate(
    tx: optax.GradientTransformation, every: int, axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
    """Hands a transformation the mean of every `every` local gradients, and nothing in between.

    As `optax.MultiSteps`, which must not wrap a mean over workers: here each worker has a sum of
    its own, and in the steps between nothing is sent, for what is wrapped is not run.

    Args:
        tx: for instance `optax.chain(jaxcomp.compressed_mean(...), optax.adamw(3e-4))`.
        every: gradients to a round.
        axis_name: the mapped axis.

    Raises:
        ValueError: if `every` is not positive.

    Example:
        >>> import jaxcomp
        >>> mean = jaxcomp.compressed_mean(jaxcomp.sign(), axis_name="data")
        >>> tx = accumulate(optax.chain(mean, optax.sgd(0.1)), 4, "data")
    """
    checks.integer("every", every, 1)
    inner = optax.with_extra_args_support(tx)

    def init_fn(params: PyTree) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, params)
        held = PerWorker.wrap(zeros, "accumulator", axis_name)
        return AccumulatedState(jnp.zeros((), jnp.int32), held, inner.init(params))

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), state.total.own(), updates)

        def talk(total: PyTree, state: Any, params: PyTree | None) -> tuple[PyTree, Any, PyTree]:
            mean = jax.tree.map(
                lambda t: compiler.settled(t * jnp.asarray(1 / every, t.dtype)), total
            )
            made, after = inner.update(mean, state, params, **extra)
            return made, after, jax.tree.map(jnp.zeros_like, total)

        def silent(total: PyTree, state: Any, params: PyTree | None) -> tuple[PyTree, Any, PyTree]:
            likes = jax.eval_shape(talk, total, state, params)[0]
            nothing = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), likes)
            return nothing, state, total

        go = rounds.uniform(state.waited == every - 1, axis_name)
        fitted = branches.fitted(inner, state.inner, updates)
        made, after, kept = rounds.either(go, talk, silent, total, fitted, params)
        waited = jnp.where(go, 0, state.waited + 1)
        held = PerWorker.wrap(kept, "accumulator", axis_name)
        return made, AccumulatedState(waited, held, after)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
