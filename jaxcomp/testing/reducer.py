"""The contract of a reducer."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.base import Mirrored, Reducer
from jaxcomp.exchange import fast_axis, legs, state as state_
from jaxcomp.exchange.plan import Plan
from jaxcomp.layout import trees
from jaxcomp.mesh import per_worker
from jaxcomp.numerics import noise
from jaxcomp.testing import traffic
from jaxcomp.testing.programs import SEED
from jaxcomp.testing.settings import assert_hashable
from jaxcomp.types import Array, AxisName, PyTree


def check_reducer(
    reducer: Reducer,
    *,
    workers: int | tuple[int, ...] = 4,
    tolerance: float = 1e-5,
    downlink_tolerance: float = 1e-5,
    weighted: bool = True,
) -> None:
    """Checks all properties of a reducer, on workers simulated by `vmap`.

    `pmean(sent) == part`; the mean is the same on every worker and close to the mean of the sent
    messages; a worker of weight zero adds nothing; the collectives send the bytes of `costs`, and
    none for one worker; a message that is not finite is seen in the mean, unless the reducer
    declares that it leaves such messages out.

    Of a reducer whose results differ between workers, such as `jaxcomp.Gossip`, the mean over all
    workers is checked, `pmean(sent) == pmean(part)`, without weights.

    Args:
        reducer: the reducer.
        workers: the number of simulated workers; one number for each axis.
        tolerance: the allowed relative error of `pmean(sent) == part`; larger for sums in narrow
            floats.
        downlink_tolerance: the allowed relative error of the final mean; larger for a compressed
            downlink.
        weighted: True to test weights 0, 1, 2, … too; False for only 0 and 1.

    Raises:
        AssertionError: with the first property that does not hold.

    Example:
        >>> import jaxcomp
        >>> check_reducer(jaxcomp.Gather(jaxcomp.qsgd_inf(bits=4)))
    """
    assert_hashable(reducer)
    if not isinstance(reducer, Reducer):
        raise AssertionError(f"a reducer must derive from jaxcomp.Reducer, got {reducer!r}")
    sizes: tuple[int, ...] = workers if isinstance(workers, tuple) else (workers,)
    check_law(reducer, sizes, tolerance, downlink_tolerance)
    if reducer.facts.same_on_all:
        top = jnp.arange(sizes[0], dtype=jnp.float32)
        top = top if weighted else jnp.minimum(top, 1)
        spread = jnp.broadcast_to(top.reshape(-1, *[1] * (len(sizes) - 1)), sizes)
        check_law(reducer, sizes, tolerance, downlink_tolerance, spread)
    names = _names(sizes)
    alone = Plan.of(reducer, _LIKE, names, (1,) * len(sizes))
    if alone.link_bytes != 0:
        raise AssertionError(f"{reducer!r}: one worker sends nothing, so its link_bytes must be 0")
    traffic.assert_costs(reducer, _LIKE, sizes)
    held = state_.init(alone).feedback
    held = held.own if isinstance(held, Mirrored) else held
    if reducer.uplink is not None and not isinstance(held, per_worker.PerWorker):
        raise AssertionError(f"{reducer!r}: memory of links must be wrapped in PerWorker")
    if reducer.uplink is not None and not reducer.facts.phases and reducer.facts.same_on_all:
        _check_nonfinite(reducer, sizes)


def check_law(
    reducer: Reducer,
    sizes: tuple[int, ...] = (4,),
    tolerance: float = 1e-5,
    downlink_tolerance: float = 1e-5,
    weights: Array | None = None,
) -> None:
    """Checks `pmean(sent) == part`, and the mean on every worker, for these weights.

    Raises:
        AssertionError: with the first property that does not hold.
    """
    collect = functools.partial(_collected, reducer, _LIKE, sizes, _names(sizes))
    given = (_gradients(sizes),) if weights is None else (_gradients(sizes), weights)
    run = collect if weights is not None else functools.partial(collect, weight=None)
    part, expected, (mean, wanted_mean), share = jax.jit(_over(run, sizes, len(given)))(*given)
    wanted = 1.0 if weights is None else float(jnp.mean(weights))
    if not np.allclose(np.asarray(share), wanted, rtol=1e-6):
        raise AssertionError(f"{reducer!r}: share must be {wanted}, got {share}")
    if not reducer.facts.same_on_all:
        over = tuple(range(len(sizes)))  # The mean over all workers, on each of them.
        part, mean = jax.tree.map(
            lambda x: jnp.broadcast_to(x.mean(over, keepdims=True), x.shape), (part, mean)
        )
    _check_sums(reducer, part, expected, tolerance)
    _check_means(reducer, mean, wanted_mean, downlink_tolerance, axes=len(sizes))


def _check_nonfinite(reducer: Reducer, sizes: tuple[int, ...]) -> None:
    """Checks that a message that is not finite is seen in the mean, or left out if so declared."""
    collect = functools.partial(_collected, reducer, _LIKE, sizes, _names(sizes), weight=None)
    grads = _gradients(sizes)
    bad = grads | {"w": grads["w"].at[(0,) * len(sizes)].set(jnp.nan)}
    _, _, (mean, _), _ = jax.jit(_over(collect, sizes, 1))(bad)
    finite = all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(mean))
    if finite != reducer.facts.excludes:
        raise AssertionError(
            f"{reducer!r}: facts must have excludes={finite}, since a mean with one message of NaN "
            f"is {'finite' if finite else 'not finite'}"
        )


_LIKE = {
    "w": jax.ShapeDtypeStruct((40, 64), jnp.float32),
    "b": jax.ShapeDtypeStruct((7,), jnp.float32),
}


def _names(sizes: tuple[int, ...]) -> AxisName:
    names = tuple(f"workers{i}" for i in range(len(sizes)))
    return names if len(names) > 1 else "workers0"


def _gradients(sizes: tuple[int, ...]) -> PyTree:
    """The gradients of all workers."""
    keys = jax.random.split(jax.random.key(SEED), sizes)

    def one(key: Array) -> PyTree:
        return jax.tree.map(lambda x: jax.random.normal(key, x.shape), _LIKE)

    return _over(one, sizes, 1)(keys)


def _collected(
    reducer: Reducer,
    like: PyTree,
    sizes: tuple[int, ...],
    axis_name: AxisName,
    tree: PyTree,
    weight: Array | None,
) -> tuple[PyTree, PyTree, tuple[PyTree, PyTree], Array | float]:
    """One worker's reduction: part, `pmean(sent)`, the mean with its expected value, and share."""
    plan = Plan.of(reducer, like, axis_name, sizes)
    message, dense = trees.stacks(plan.layout, tree)
    state, key = legs.init(plan), fast_axis.fold_key(plan, noise.raw(SEED))
    got = legs.collect(plan, key, fast_axis.scatter(plan, message), state, weight)
    shapes, wanted = ([x.shape for x in stacks] for stacks in (got.value, plan.part_like))
    if shapes != wanted:
        raise AssertionError(
            f"{reducer!r}: with splits={plan.reducer.facts.splits} the part of a device must have "
            f"the shapes {wanted}, got {shapes}"
        )
    expected = jax.lax.pmean(_scaled(got.sent, weight), plan.axis)
    mean, _ = legs.spread(plan, key, got.value, got.state)
    part = got.value
    if plan.reducer.facts.splits:  # All slices of it, one after another.
        part = tuple(
            jax.lax.all_gather(x, plan.axis, tiled=True)[: len(y)]
            for x, y in zip(part, expected, strict=True)
        )
    mean, all_of_it = fast_axis.gather(plan, mean), fast_axis.gather(plan, expected)
    exact = jax.lax.pmean(_scaled(dense, weight), axis_name)
    sent = (part, plan.dense_mean(dense, weight))
    return sent, (expected, exact), (mean, all_of_it), got.share


def _check_sums(reducer: Reducer, part: PyTree, expected: PyTree, tolerance: float) -> None:
    """Checks `pmean(sent) == part`, of the messages and of the dense leaves."""
    for got, want in zip(jax.tree.leaves(part), jax.tree.leaves(expected), strict=True):
        bound = tolerance * float(jnp.abs(want).max())
        if got.shape != want.shape or not np.allclose(got, want, rtol=tolerance, atol=bound):
            raise AssertionError(
                f"{reducer!r} breaks the law pmean(sent) == part: {got.shape} for "
                f"{want.shape}, off by {float(jnp.abs(got - want).max()):g}"
            )


def _check_means(
    reducer: Reducer, mean: PyTree, expected: PyTree, tolerance: float, axes: int
) -> None:
    """Checks that the final mean is the collected one, and the same on every worker."""
    for got, want in zip(jax.tree.leaves(mean), jax.tree.leaves(expected), strict=True):
        bound = tolerance * float(jnp.abs(want).max())
        if not np.allclose(got, want, rtol=tolerance, atol=bound):
            raise AssertionError(
                f"{reducer!r} returns another mean than it reduced: off by "
                f"{float(jnp.abs(got - want).max()):g}"
            )
    for leaf in jax.tree.leaves(mean):
        flat = np.asarray(leaf).reshape(-1, *leaf.shape[axes:])
        if not (flat == flat[:1]).all():
            raise AssertionError(f"{reducer!r} must give every worker the same mean")


def _over(f: Any, sizes: tuple[int, ...], arguments: int) -> Any:
    """`f` over a leading axis of every argument for each axis of workers."""
    for number in reversed(range(len(sizes))):
        f = jax.vmap(f, in_axes=(0,) * arguments, axis_name=f"workers{number}")
    return f


def _scaled(tree: PyTree, weight: Array | None) -> PyTree:
    if weight is None:
        return tree
    return jax.tree.map(lambda x: jnp.where(weight == 0, 0, weight * x), tree)
