"""The contracts of a feedback and of a reducer."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.base import Feedback, Mirrored, Reducer
from jaxcomp.exchange import levels, state as state_
from jaxcomp.exchange.plan import Plan
from jaxcomp.layout import trees
from jaxcomp.mesh import per_worker
from jaxcomp.numerics import noise
from jaxcomp.testing.bias import gaussian
from jaxcomp.testing.codec import assert_hashable
from jaxcomp.testing.programs import SEED
from jaxcomp.types import Array, AxisName, PyTree


def check_feedback(feedback: Feedback) -> None:
    """Checks all properties of a feedback.

    The feedback is a hashable setting; its state keeps structure, shapes and dtypes from step to
    step, so that a loop can carry it; with a lossless codec the estimate is the mean of the inputs
    (for momentum, of the velocities); the memory is finite and the steps are deterministic; a
    residual without decay loses nothing: the sent and the unsent parts add up to the input.

    Raises:
        AssertionError: with the first property that does not hold.

    Example:
        >>> import jaxcomp
        >>> check_feedback(jaxcomp.Residual())
    """
    assert_hashable(feedback)
    if not isinstance(feedback, Feedback):
        raise AssertionError(f"a feedback must derive from jaxcomp.Feedback, got {feedback!r}")
    tree = {"a": gaussian(40).reshape(8, 5), "b": gaussian(3).astype(jnp.bfloat16)}
    state = feedback.init(tree, tree)

    def step(x, state):
        message, state = feedback.compensate(x, state)
        return feedback.update(message, message, message, 1.0, None, state)

    for number in range(3):
        x = jax.tree.map(lambda leaf, k=number: leaf * (k + 1), tree)
        estimate, new = step(x, state)
        again, _ = step(x, state)
        if jax.tree.map(_shape, new) != jax.tree.map(_shape, state):
            raise AssertionError(
                f"{feedback!r} must keep its state's shapes and dtypes: from "
                f"{jax.tree.map(_shape, state)} to {jax.tree.map(_shape, new)}"
            )
        for want, got, same in zip(*map(jax.tree.leaves, (x, estimate, again)), strict=True):
            if not np.array_equal(np.asarray(got), np.asarray(same), equal_nan=True):
                raise AssertionError(f"{feedback!r} must be deterministic")
            if not feedback.facts.accelerates and not np.allclose(
                np.asarray(want, np.float32), np.asarray(got, np.float32), rtol=1e-2
            ):
                raise AssertionError(
                    f"{feedback!r} over a lossless codec must return the mean of its inputs"
                )
        state = new
    _check_memory(feedback, tree)


def _check_memory(feedback: Feedback, tree: PyTree) -> None:
    """Checks the memory with a codec that sends half of every message."""
    tree = {"a": tree["a"]}
    state, arrived, message = feedback.init(tree, tree), jnp.zeros_like(tree["a"]), tree
    for _ in range(4):
        message, state = feedback.compensate(tree, state)
        sent = jax.tree.map(lambda leaf: 0.5 * leaf, message)
        _, state = feedback.update(message, sent, sent, 1.0, None, state)
        arrived = arrived + sent["a"]
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(state)]
    if not all(np.isfinite(leaf).all() for leaf in leaves):
        raise AssertionError(f"{feedback!r} must keep its memory finite, got {leaves}")
    unsent = feedback.unsent if feedback.facts.keeps_unsent else None
    if feedback.facts.accelerates and unsent is not None:
        left = np.asarray(unsent(state)["a"], np.float64)
        rest = 0.5 * np.asarray(message["a"], np.float64)
        if not np.allclose(left, rest, rtol=2e-2, atol=2e-2):
            raise AssertionError(
                f"{feedback!r} must lose nothing: it must keep the unsent part of a message, "
                f"and its memory is off by {np.abs(left - rest).max():g}"
            )
    if feedback.facts.conserves and unsent is not None:
        total = np.asarray(arrived, np.float64) + np.asarray(unsent(state)["a"], np.float64)
        if not np.allclose(total, 4 * np.asarray(tree["a"]), rtol=2e-2, atol=2e-2):
            raise AssertionError(
                f"{feedback!r} must lose nothing: sent plus residual must equal the sum of the "
                f"inputs, got a difference of {np.abs(total - 4 * np.asarray(tree['a'])).max():g}"
            )


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
    messages; a worker of weight zero adds nothing; `link_bytes` is zero for one worker.

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
    names = tuple(f"workers{i}" for i in range(len(sizes)))
    axis_name = names if len(sizes) > 1 else names[0]
    like = {"w": jnp.zeros((40, 64)), "b": jnp.zeros(7)}
    keys = jax.random.split(jax.random.key(SEED), sizes)
    grads = _over(lambda k: jax.tree.map(lambda x: jax.random.normal(k, x.shape), like), names, 1)(
        keys
    )

    collect = functools.partial(_collected, reducer, like, sizes, axis_name)
    top = jnp.arange(max(sizes[:1]), dtype=jnp.float32)
    top = top if weighted else jnp.minimum(top, 1)
    spread = jnp.broadcast_to(top.reshape(-1, *[1] * (len(sizes) - 1)), sizes)
    for weights in (None, spread) if reducer.facts.same_on_all else (None,):
        run = (
            _over(collect, names, 2)
            if weights is not None
            else _over(lambda tree: collect(tree, None), names, 1)
        )
        given = (grads,) if weights is None else (grads, weights)
        part, expected, (mean, wanted_mean), share = jax.jit(run)(*given)
        wanted = 1.0 if weights is None else float(jnp.mean(weights))
        if not np.allclose(np.asarray(share), wanted, rtol=1e-6):
            raise AssertionError(f"{reducer!r}: share must be {wanted}, got {share}")
        if not reducer.facts.same_on_all:
            over = tuple(range(len(sizes)))  # The mean over all workers, on each of them.
            part, mean = jax.tree.map(
                lambda x, over=over: jnp.broadcast_to(x.mean(over, keepdims=True), x.shape),
                (part, mean),
            )
        _check_sums(reducer, part, expected, tolerance)
        _check_means(reducer, mean, wanted_mean, downlink_tolerance, axes=len(sizes))
    alone = Plan.of(reducer, like, axis_name, (1,) * len(sizes))
    if alone.link_bytes != 0:
        raise AssertionError(f"{reducer!r}: one worker sends nothing, so its link_bytes must be 0")
    held = state_.init(alone).feedback
    held = held.own if isinstance(held, Mirrored) else held
    if reducer.uplink is not None and not isinstance(held, per_worker.PerWorker):
        raise AssertionError(f"{reducer!r}: memory of links must be wrapped in PerWorker")


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
    state, key = plan.reducer.init(plan), levels.key_of(plan, noise.raw(SEED))
    got = plan.reducer.collect(plan, key, levels.scattered(plan, message), state, weight)
    expected = jax.lax.pmean(_scaled(got.sent, weight), plan.axis)
    mean, _ = plan.reducer.spread(plan, key, got.part, got.state)
    part = got.part
    if plan.reducer.facts.splits:  # All slices of it, one after another.
        part = tuple(
            jax.lax.all_gather(x, plan.axis, tiled=True)[: len(y)]
            for x, y in zip(part, expected, strict=True)
        )
    mean, wanted = levels.gathered(plan, mean), levels.gathered(plan, expected)
    exact = jax.lax.pmean(_scaled(dense, weight), axis_name)
    sent = (part, plan.dense_mean(dense, weight))
    return sent, (expected, exact), (mean, wanted), got.share


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


def _over(f: Any, names: tuple[str, ...], arguments: int) -> Any:
    """`f` over a leading axis for each name, of every argument."""
    for name in reversed(names):
        f = jax.vmap(f, in_axes=(0,) * arguments, axis_name=name)
    return f


def _scaled(tree: PyTree, weight: Array | None) -> PyTree:
    if weight is None:
        return tree
    return jax.tree.map(lambda x: jnp.where(weight == 0, 0, weight * x), tree)


def _shape(x: Any) -> tuple:
    return x.shape, jnp.dtype(x.dtype).name
