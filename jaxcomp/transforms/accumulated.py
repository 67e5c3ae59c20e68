"""Gradient accumulation before the mean: one exchange for several micro-batches."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp import checks
from jaxcomp.backend import conditional, xla
from jaxcomp.exchange import guarding
from jaxcomp.mesh.per_worker import PerWorker
from jaxcomp.misuse import own_gradients, places
from jaxcomp.numerics import addition
from jaxcomp.transforms import weights
from jaxcomp.types import Array, AxisName, PyTree


class AccumulatedState(NamedTuple):
    """State of `accumulate`.

    Attributes:
        waited: the number of gradients since the last round.
        total: each worker's sum of its finite gradients since then, at least in float32.
        spoilt: each worker's flag, above zero if one of those gradients was not finite.
        inner: the state of the wrapped transformation.
        excess: each worker's sum of the weights of those gradients, less one for each.
    """

    waited: Array
    total: PerWorker
    spoilt: PerWorker
    inner: Any
    excess: PerWorker


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

    `tx.update(..., weight=w)` gives a gradient a weight, such as its number of tokens: the mean is
    `Σ w·g / Σ w` over all gradients of all workers in the round. Give one in each step of a round,
    or in none; a round that ends without one is spoilt if its other weights do not add up to
    `every`.

    Args:
        tx: for instance `optax.chain(jaxcomp.compressed_mean(...), optax.adamw(3e-4))`.
        axis_name: the mapped axis.
        every: the number of gradients in a round.

    Raises:
        ValueError: if `every` is not positive.

    Example:
        >>> import jaxcomp
        >>> mean = jaxcomp.compressed_mean(jaxcomp.sign(), axis_name="data")
        >>> tx = accumulate(optax.chain(mean, optax.sgd(0.1)), "data", every=4)
    """
    checks.integer("every", every, 1)
    checks.transformation("tx", tx)
    inner = optax.with_extra_args_support(tx)

    def init_fn(params: PyTree) -> Any:
        sums = (jax.tree.map(addition.zeros, params), jnp.zeros(()), jnp.zeros(()))
        return _state(axis_name, jnp.zeros((), jnp.int32), *sums, inner.init(params))

    def update_fn(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        weight: Array | float | None = None,
        **extra: Any,
    ) -> tuple[PyTree, Any]:
        before = (state.total.own(), state.excess.own())
        places.check_shapes(updates, before[0], "parameters")
        updates = own_gradients.check(updates, axis_name)
        times = None if weight is None else weights.number(weight)
        total, excess = _added(*before, updates, times)
        # Workers communicate only at the end of the round; the sum must stay finite until then.
        sound = guarding.all_finite((total, excess))
        total, excess = guarding.where_finite(sound, (total, excess), before)
        spoilt = jnp.where(sound, state.spoilt.own(), 1)

        def talk(total: PyTree, state: Any, params: PyTree | None) -> tuple[PyTree, Any, PyTree]:
            mean, given = _mean(every, total, excess, spoilt, weighs=times is not None)
            mean = jax.tree.map(lambda m, g: addition.saturate(m, g.dtype), mean, updates)
            made, after = inner.update(mean, state, params, **extra, **given)
            after = guarding.cast_like(after, state)
            return made, after, jax.tree.map(jnp.zeros_like, total)

        def silent(total: PyTree, state: Any, params: PyTree | None) -> tuple[PyTree, Any, PyTree]:
            likes = jax.eval_shape(talk, total, state, params)[0]
            nothing = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), likes)
            return nothing, state, total

        go = conditional.uniform(state.waited == every - 1, axis_name)
        made, after, kept = conditional.either(go, talk, silent, total, state.inner, params)
        waited = jnp.where(go, 0, state.waited + 1)
        excess = jnp.where(go, 0, excess)
        spoilt = jnp.where(go, 0, spoilt)
        return made, _state(axis_name, waited, kept, spoilt, excess, after)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _state(
    axis_name: AxisName, waited: Array, total: PyTree, spoilt: Array, excess: Array, inner: Any
) -> AccumulatedState:
    def held(tree: PyTree) -> PerWorker:
        return PerWorker.wrap(tree, "accumulator", axis_name)

    return AccumulatedState(waited, held(total), held(spoilt), inner, held(excess))


def _added(
    total: PyTree, excess: Array, updates: PyTree, times: Array | None
) -> tuple[PyTree, Array]:
    """The sums with another gradient, of this weight."""

    def one(t: Array, g: Array) -> Array:
        g = addition.weigh(g.astype(t.dtype), times)
        return t + (g if times is None else xla.block_fma(g))

    return jax.tree.map(one, total, updates), excess if times is None else excess + (times - 1)


def _mean(
    every: int, total: PyTree, excess: Array, spoilt: Array, *, weighs: bool
) -> tuple[PyTree, dict[str, Array]]:
    """The mean of this worker's gradients, and its weight; NaN for a spoilt round."""
    weight = every + excess
    factor: Any = jnp.where(weight > 0, 1 / jnp.where(weight > 0, weight, 1), 0)
    lost = spoilt > 0
    if not weighs:
        factor, lost = 1 / every, lost | (excess != 0)

    def scaled(t: Array) -> Array:
        mean = xla.block_fma(t * jnp.asarray(factor, t.dtype))
        return jnp.where(lost, jnp.nan, mean)

    return jax.tree.map(scaled, total), {"weight": weight} if weighs else {}
