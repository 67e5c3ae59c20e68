"""Gradient accumulation before the mean: one exchange for several micro-batches."""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from jaxcomp import checks
from jaxcomp.backend import conditional, xla
from jaxcomp.exchange import guarding
from jaxcomp.mesh.per_worker import PerWorker
from jaxcomp.misuse import own_gradients, places
from jaxcomp.numerics import summing
from jaxcomp.types import Array, AxisName, PyTree


class AccumulatedState(NamedTuple):
    """State of `accumulate`.

    Attributes:
        waited: the number of gradients since the last round.
        total: each worker's sum of its finite gradients since then, at least in float32.
        spoilt: each worker's flag, above zero if one of those gradients was not finite.
        inner: the state of the wrapped transformation.
    """

    waited: Array
    total: PerWorker
    spoilt: PerWorker
    inner: Any


def accumulate(
    tx: optax.GradientTransformation, axis_name: AxisName, every: int
) -> optax.GradientTransformationExtraArgs:
    """Runs a transformation once for every `every` gradients, on their local mean.

    It replaces `optax.MultiSteps`, which must not wrap a mean over workers. Here each worker has
    its own sum. In the steps between, the wrapped transformation does not run and nothing is sent.
    Gradients are added in float32 (float64 for float64), and their mean is rounded once to the
    gradients' dtype. The wrapped transformation's state keeps the dtypes that `init` gave it.

    A non-finite gradient spoils its round: the wrapped transformation gets NaN at the end of the
    round, which all workers see, and the next round starts with empty sums. Inside or around
    `skip_nonfinite`, such a round is skipped and training continues.

    Args:
        tx: for instance `optax.chain(jaxcomp.compressed_mean(...), optax.adamw(3e-4))`.
        axis_name: the mapped axis. Until version 0.2 it came after `every`; that order warns.
        every: the number of gradients in a round.

    Raises:
        ValueError: if `every` is not positive.

    Example:
        >>> import jaxcomp
        >>> mean = jaxcomp.compressed_mean(jaxcomp.sign(), axis_name="data")
        >>> tx = accumulate(optax.chain(mean, optax.sgd(0.1)), "data", every=4)
    """
    if isinstance(axis_name, int) and isinstance(every, str | tuple):
        checks.warn_of_former(
            "accumulate(tx, every, axis_name)", "accumulate(tx, axis_name, every=every)"
        )
        axis_name, every = cast(AxisName, every), cast(int, axis_name)
    checks.integer("every", every, 1)
    checks.transformation("tx", tx)
    inner = optax.with_extra_args_support(tx)

    def wrapped(tree: PyTree) -> PerWorker:
        return PerWorker.wrap(tree, "accumulator", axis_name)

    def init_fn(params: PyTree) -> Any:
        zeros = jax.tree.map(summing.zeros, params)
        return AccumulatedState(
            jnp.zeros((), jnp.int32), wrapped(zeros), wrapped(jnp.zeros(())), inner.init(params)
        )

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        before = state.total.own()
        places.check_shapes(updates, before, "parameters")
        updates = own_gradients.check(updates, axis_name)
        total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), before, updates)
        # Workers communicate only at the end of the round; the sum must stay finite until then.
        sound = guarding.all_finite(total)
        total = guarding.where_finite(sound, total, before)
        spoilt = jnp.where(sound, state.spoilt.own(), 1)

        def talk(total: PyTree, state: Any, params: PyTree | None) -> tuple[PyTree, Any, PyTree]:
            mean = jax.tree.map(lambda t: xla.block_fma(t * jnp.asarray(1 / every, t.dtype)), total)
            mean = jax.tree.map(lambda m: jnp.where(spoilt > 0, jnp.nan, m), mean)
            mean = jax.tree.map(lambda m, g: summing.saturated(m, g.dtype), mean, updates)
            made, after = inner.update(mean, state, params, **extra)
            after = guarding.retyped(after, state)
            return made, after, jax.tree.map(jnp.zeros_like, total)

        def silent(total: PyTree, state: Any, params: PyTree | None) -> tuple[PyTree, Any, PyTree]:
            likes = jax.eval_shape(talk, total, state, params)[0]
            nothing = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), likes)
            return nothing, state, total

        go = conditional.uniform(state.waited == every - 1, axis_name)
        made, after, kept = conditional.either(go, talk, silent, total, state.inner, params)
        waited = jnp.where(go, 0, state.waited + 1)
        spoilt = jnp.where(go, 0, spoilt)
        return made, AccumulatedState(waited, wrapped(kept), wrapped(spoilt), after)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
