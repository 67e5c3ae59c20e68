"""`compressed_mean`: the mean of the workers' gradients, as an optax transformation."""

import functools
import warnings
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from jaxcomp import axes, feedback as feedback_, noise, trees, wire
from jaxcomp.feedback import Link
from jaxcomp.policy import Policy
from jaxcomp.protocols import Array, AxisName, Codec, PyTree, Reducer
from jaxcomp.reducers import reduction
from jaxcomp.reducers.gather import Gather
from jaxcomp.reducers.reduction import ReductionState


class Stats(NamedTuple):
    """What the last step cost and lost; the same on every worker.

    Attributes:
        relative_error: `Σ‖message − sent‖² / Σ‖message‖²` over all workers' compressed leaves.
        residual_ratio: root of `Σ‖residual‖² / Σ‖gradient‖²` likewise; zero without residual.
        payload_bytes: what one worker put into the collectives.
        link_bytes: what one device sent over its link.
    """

    relative_error: Array
    residual_ratio: Array
    payload_bytes: Array
    link_bytes: Array


class CompressedMeanState(NamedTuple):
    """State of `compressed_mean`.

    Attributes:
        key: the raw key that every step's noise is derived from.
        step: steps taken.
        memory: what the links and the reducer remember.
        stats: `Stats` of the last step, or `()`.
    """

    key: Array
    step: Array
    memory: ReductionState
    stats: Any


def compressed_mean(
    codec: "Codec | Policy | Link | Reducer",
    axis_name: AxisName,
    *,
    key: Any = 0,
    guard: bool = True,
    stats: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Replaces local gradients by the compressed mean over the workers of a mapped axis.

    Chain it before the optimizer, inside `jax.shard_map`, `jax.pmap`, `jax.vmap(axis_name=...)`
    or a step wrapped by `jaxcomp.data_parallel`. The gradients must be local: differentiate the
    loss at `jaxcomp.local(params, axis_name)`, and do not average the loss before you do.

    What is picked where you do not say it (`jaxcomp.describe` shows it):

    * a codec or policy without feedback gets `Residual()` if the codec is contractive (biased,
      with an error smaller than its input), and none otherwise;
    * a link without a reducer is reduced by `Gather`;
    * a codec without a policy leaves one-dimensional leaves and leaves of fewer than 1,024
      elements dense, in their own dtype.

    Args:
        codec: a codec, a `Policy`, a `Link` or a reducer such as `Dense()`.
        axis_name: the mapped axis, or a tuple of them.
        key: a seed, a raw `uint32[2]` key or a `jax.random.key`; the same on all workers.
        guard: leave every memory as it was in a step whose mean is not finite.
        stats: keep `Stats` of the last step in the state.

    Returns:
        An optax transformation. Its state holds the memory of each worker in `PerWorker`.

    Raises:
        ValueError: on construction for arguments of the wrong kind; on use outside of a mapped
            axis, for gradients that are already summed over it, or for leaves that are not
            floating.

    Example:
        >>> import jaxcomp
        >>> tx = optax.chain(
        ...     jaxcomp.compressed_mean(jaxcomp.qsgd_inf(bits=4), axis_name="data"),
        ...     optax.adamw(3e-4),
        ... )
    """
    reducer = as_reducer(codec)
    seed = noise.words(key)
    names = axes.names(axis_name)
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"`axis_name` must be the name of a mapped axis, or a tuple of them, got {axis_name!r}"
        )

    def init_fn(params: PyTree) -> Any:
        _warn_if_idle(reducer, params)
        return CompressedMeanState(
            key=jnp.array(seed),  # A copy: this one may be donated.
            step=jnp.zeros((), jnp.int32),
            memory=reduction.init(reducer, params, axis_name),
            stats=_no_stats() if stats else (),
        )

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        del params, extra
        axes.require(axis_name)
        _check_local(updates, axis_name)
        step_key = noise.fold(state.key, state.step)
        result = reduction.reduce(reducer, step_key, updates, state.memory, axis_name, guard=guard)
        measured = _measure(reducer, updates, result, axis_name) if stats else ()
        return result.mean, CompressedMeanState(state.key, state.step + 1, result.state, measured)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def as_reducer(codec: "Codec | Policy | Link | Reducer") -> Reducer:
    """The reducer that stands for what a user gave: a reducer, link, policy or codec."""
    if isinstance(codec, type):
        raise ValueError(
            f"`codec` must be an instance, and {codec.__name__} is a class: give its settings, as "
            f"in {codec.__name__}(...)"
        )
    if hasattr(codec, "collect"):
        return cast(Reducer, codec)
    if isinstance(codec, Codec | Policy):
        codec = Link(codec, feedback_.default(codec))
    if isinstance(codec, Link):
        return Gather(codec)
    raise ValueError(
        "`codec` must be a codec such as jaxcomp.qsgd_inf(bits=4), a Policy, a Link or a reducer "
        f"such as jaxcomp.Dense(), got {codec!r}"
    )


def _warn_if_idle(reducer: Reducer, params: PyTree) -> None:
    if reducer.uplink is None or not jax.tree.leaves(params):
        return
    plan = reduction.plan(reducer, params)
    if plan.unused:
        warnings.warn(
            f"no leaf is decided by the policy's rules {plan.unused}: the leaves are {plan.paths}",
            stacklevel=3,
        )
    if not plan.batches:
        warnings.warn(
            "compressed_mean compresses no leaf of these parameters: all are one-dimensional or "
            "smaller than the policy's min_size, and are sent dense. jaxcomp.describe shows why; "
            "jaxcomp.Policy(codec, min_size=0, min_ndim=0) compresses everything.",
            stacklevel=3,
        )


def _check_local(updates: PyTree, axis_name: AxisName) -> None:
    if not axes.typed(axis_name):
        return
    flat, _ = jax.tree_util.tree_flatten_with_path(updates)
    for path, leaf in flat:
        if not axes.varies(leaf, axis_name):
            raise ValueError(
                f"`updates` must be this worker's own gradients, and '{trees.path_name(path)}' is "
                f"already the same on all workers of {axis_name!r}: JAX has summed it. Take the "
                f"gradient at jaxcomp.local(params, {axis_name!r})."
            )


def _no_stats() -> Stats:
    dtypes = (jnp.float32, jnp.float32, jnp.uint32, jnp.uint32)
    return Stats(*(jnp.zeros((), dtype) for dtype in dtypes))


def _measure(
    reducer: Reducer, grads: PyTree, result: reduction.Reduction, axis_name: AxisName
) -> Stats:
    plan = reduction.plan(reducer, grads)
    memory = result.state.feedback
    residual = memory.own() if memory.kind == "residual" else ()
    xs, _ = trees.stacks(plan, grads)
    # Squares of large and small values leave the range of float32: measure in units of the largest.
    top = axes.maximum(_largest((result.message, residual, xs)), axis_name)
    unit = 1 / jnp.where(top > 0, jnp.clip(top, 2.0**-100, 2.0**100), 1)
    lost = [p - c for p, c in zip(result.message, result.sent, strict=True)]
    norms = [_energy(tree, unit) for tree in (lost, result.message, residual, xs)]
    lost, message, residual, energy = jax.lax.pmean(jnp.stack(norms), axis_name)
    return Stats(
        relative_error=lost / jnp.where(message == 0, 1, message),
        residual_ratio=jnp.sqrt(residual / jnp.where(energy == 0, 1, energy)),
        payload_bytes=_count(reduction.payload_bytes(reducer, plan)),
        link_bytes=_count(wire.wire_bytes(reducer, grads, workers=axes.size(axis_name))),
    )


def _largest(tree: PyTree) -> Array:
    tops = [jnp.max(jnp.abs(leaf)).astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
    return functools.reduce(jnp.maximum, tops, jnp.zeros((), jnp.float32))


def _energy(tree: PyTree, unit: Array) -> Array:
    leaves = jax.tree.leaves(tree)
    return sum(
        (jnp.sum(jnp.square(leaf.astype(jnp.float32) * unit)) for leaf in leaves),
        start=jnp.zeros((), jnp.float32),
    )


def _count(size: int) -> Array:
    return jnp.asarray(min(size, 2**32 - 1), jnp.uint32)
