"""The contracts of a feedback and of a reducer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp import noise, trees, workers as workers_
from jaxcomp.protocols import Array, Feedback, PyTree, Reducer
from jaxcomp.reducers import reduction
from jaxcomp.testing.codec import SEED, assert_hashable, gaussian


def check_feedback(feedback: Feedback) -> None:
    """Runs the properties that a feedback must have.

    It is a hashable setting; its state keeps structure, shapes and dtypes from step to step, so
    that it can be carried through a loop; with a lossless codec the estimate is the mean of the
    inputs (for momentum, of velocities); the memory is finite and the steps are deterministic; a
    residual without decay loses nothing: what was sent and what is left is what came in.

    Raises:
        AssertionError: naming the first property that does not hold.

    Example:
        >>> import jaxcomp
        >>> check_feedback(jaxcomp.Residual())
    """
    assert_hashable(feedback)
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
            if feedback.kind != "momentum" and not np.allclose(
                np.asarray(want, np.float32), np.asarray(got, np.float32), rtol=1e-2
            ):
                raise AssertionError(
                    f"{feedback!r} over a lossless codec must return the mean of its inputs"
                )
        state = new
    _check_memory(feedback, tree)


def _check_memory(feedback: Feedback, tree: PyTree) -> None:
    """Over a codec that sends half of every message."""
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
    unsent = getattr(feedback, "unsent", None)
    if feedback.kind == "momentum" and unsent is not None:
        left = np.asarray(unsent(state)["a"], np.float64)
        rest = 0.5 * np.asarray(message["a"], np.float64)
        if not np.allclose(left, rest, rtol=2e-2, atol=2e-2):
            raise AssertionError(
                f"{feedback!r} must lose nothing: what of a message did not arrive must be kept, "
                f"and is off by {np.abs(left - rest).max():g}"
            )
    if feedback.kind == "residual" and getattr(feedback, "decay", 1.0) == 1.0:
        total = np.asarray(arrived, np.float64) + sum(leaves)
        if not np.allclose(total, 4 * np.asarray(tree["a"]), rtol=2e-2, atol=2e-2):
            raise AssertionError(
                f"{feedback!r} must lose nothing: sent and residual must add up to the inputs, "
                f"and are off by {np.abs(total - 4 * np.asarray(tree['a'])).max():g}"
            )


def check_reducer(
    reducer: Reducer, *, workers: int = 4, tolerance: float = 1e-5, downlink_tolerance: float = 1e-5
) -> None:
    """Runs the properties that a reducer must have, on workers simulated by `vmap`.

    `pmean(sent) == part`; the mean is the same on every worker and close to the mean of the
    messages as sent; a worker of weight zero adds nothing; `link_bytes` is zero for one worker.

    Args:
        reducer: the reducer.
        workers: how many to simulate.
        tolerance: relative error that the law may have; more for sums taken in narrow floats.
        downlink_tolerance: the same for the mean that arrives; more for a compressed downlink.

    Raises:
        AssertionError: naming the first property that does not hold.

    Example:
        >>> import jaxcomp
        >>> check_reducer(jaxcomp.Gather(jaxcomp.qsgd_inf(bits=4)))
    """
    assert_hashable(reducer)
    like = {"w": jnp.zeros((40, 64)), "b": jnp.zeros(7)}
    keys = jax.random.split(jax.random.key(SEED), workers)
    grads = jax.vmap(lambda k: jax.tree.map(lambda x: jax.random.normal(k, x.shape), like))(keys)

    plan = reduction.plan(reducer, like)

    def collect(tree, weight):
        key = noise.raw(SEED)
        message, dense = trees.stacks(plan, tree)
        state = reducer.init(plan.batches, "workers")
        got = reducer.collect(key, plan.batches, message, state, "workers", weight)
        expected = jax.lax.pmean(_scaled(got.sent, weight), "workers")
        mean, _ = reducer.spread(key, plan.batches, got.part, got.state, "workers")
        exact = jax.lax.pmean(_scaled(dense, weight), "workers")
        return (
            (got.part, tuple(reducer.dense(dense, "workers", weight))),
            (expected, exact),
            mean,
            got.share,
        )

    for weights in (None, jnp.arange(workers, dtype=jnp.float32)):
        run = jax.vmap(collect, in_axes=(0, None if weights is None else 0), axis_name="workers")
        part, expected, mean, share = jax.jit(run)(grads, weights)
        wanted = 1.0 if weights is None else float(jnp.mean(weights))
        if not np.allclose(np.asarray(share), wanted, rtol=1e-6):
            raise AssertionError(f"{reducer!r}: share must be {wanted}, got {share}")
        if jax.tree.map(_shape, part) == jax.tree.map(_shape, expected):
            for got, want in zip(jax.tree.leaves(part), jax.tree.leaves(expected), strict=True):
                bound = tolerance * float(jnp.abs(want).max())
                if not np.allclose(got, want, rtol=tolerance, atol=bound):
                    raise AssertionError(
                        f"{reducer!r} breaks the law pmean(sent) == part by "
                        f"{float(jnp.abs(got - want).max()):g}"
                    )
        for got, want in zip(jax.tree.leaves(mean), jax.tree.leaves(expected[0]), strict=True):
            bound = downlink_tolerance * float(jnp.abs(want).max())
            if not np.allclose(got, want, rtol=downlink_tolerance, atol=bound):
                raise AssertionError(
                    f"{reducer!r} spreads another mean than it collected: off by "
                    f"{float(jnp.abs(got - want).max()):g}"
                )
        for leaf in jax.tree.leaves(mean):
            if not (np.asarray(leaf) == np.asarray(leaf)[:1]).all():
                raise AssertionError(f"{reducer!r} must give every worker the same mean")
    if reducer.link_bytes(like, 1) != 0:
        raise AssertionError(f"{reducer!r}: one worker sends nothing, so its link_bytes must be 0")
    if reducer.uplink is not None and not isinstance(
        reduction.init(reducer, like, "workers").feedback, workers_.PerWorker
    ):
        raise AssertionError(f"{reducer!r}: memory of links must be kept per worker")


def _scaled(tree: PyTree, weight: Array | None) -> PyTree:
    if weight is None:
        return tree
    return jax.tree.map(lambda x: jnp.where(weight == 0, 0, weight * x), tree)


def _shape(x: Any) -> tuple:
    return x.shape, jnp.dtype(x.dtype).name
