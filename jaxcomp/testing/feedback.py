"""The contract of a feedback."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.base import Feedback, Mirrored
from jaxcomp.testing.bias import gaussian
from jaxcomp.testing.settings import assert_hashable
from jaxcomp.types import PyTree

_TWICE = 2.02
"""Two gradients as one message, without momentum, up to the rounding of eight-bit memory."""

_LONG = 300
"""Steps after which a memory that grows by a third in each is not finite."""


def check_feedback(feedback: Feedback) -> None:
    """Checks all properties of a feedback.

    The feedback is a hashable setting; its state keeps structure, shapes and dtypes from step to
    step, so that a loop can carry it; with a lossless codec the estimate is the mean of the inputs
    (for momentum, of the velocities); the memory is finite and the steps are deterministic; a
    residual without decay loses nothing: the sent and the unsent parts add up to the input; of a
    message of weight zero nothing has arrived; every fact that it declares holds.

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
    if feedback.facts.bounded:
        _check_bounded(feedback)
    _check_declared(feedback, tree)
    _check_absence(feedback, tree)
    _check_part(feedback, tree)


def _check_declared(feedback: Feedback, tree: PyTree) -> None:
    """Checks the facts that the state and the messages show."""
    facts, start = feedback.facts, feedback.init(tree, tree)
    for fact, holds, why in (
        ("memory", bool(jax.tree.leaves(start)), "its state has arrays, or has none"),
        ("mirrors", isinstance(start, Mirrored), "its state is a Mirrored, or is none"),
        ("keeps_unsent", bool(jax.tree.leaves(feedback.unsent(start))), "`unsent` tells so"),
    ):
        if getattr(facts, fact) != holds:
            raise AssertionError(f"{feedback!r}: facts must have {fact}={holds}, since {why}")
    for fact, needed in (("conserves", "keeps_unsent"), ("forgets_absent", "mirrors")):
        if getattr(facts, fact) and not getattr(facts, needed):
            raise AssertionError(f"{feedback!r}: facts with {fact}=True must have {needed}=True")
    message, held = feedback.compensate(tree, start)
    nothing = jax.tree.map(jnp.zeros_like, message)
    held = feedback.update(message, nothing, nothing, 1.0, None, held)[1]
    second = feedback.compensate(tree, held)[0]["a"]
    ratio = float(jnp.linalg.norm(second) / jnp.linalg.norm(tree["a"]))
    accelerates = ratio > _TWICE
    if facts.accelerates != accelerates:
        raise AssertionError(
            f"{feedback!r}: facts must have accelerates={accelerates}, since after a gradient of "
            f"which nothing was sent, the same one is a message {ratio:.3g} times as large"
        )
    if not facts.accelerates:
        message, held = feedback.compensate(tree, start)
        state = feedback.update(message, message, message, 1.0, None, held)[1]
        known = feedback.known(feedback.compensate(tree, state)[0], state)
        for got, want in zip(jax.tree.leaves(known), jax.tree.leaves(tree), strict=True):
            if not np.allclose(np.asarray(got), np.asarray(want), rtol=1e-2):
                raise AssertionError(
                    f"{feedback!r}: after a lossless message, `known` must be the input"
                )


def _check_absence(feedback: Feedback, tree: PyTree) -> None:
    """Checks that nothing of a message of weight zero has arrived, whatever it holds."""
    start = feedback.init(tree, tree)
    message, held = feedback.compensate(tree, start)
    _, begun = feedback.update(message, message, message, 1.0, jnp.float32(1), held)
    message, held = feedback.compensate(jax.tree.map(jnp.negative, tree), begun)
    nothing = jax.tree.map(jnp.zeros_like, message)
    spoilt = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), message)
    _, want = feedback.update(message, nothing, nothing, 0.0, jnp.float32(1), held)
    for sent in (message, spoilt):
        _, got = feedback.update(message, sent, nothing, 0.0, jnp.float32(0), held)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            if not np.allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=1e-2):
                raise AssertionError(
                    f"{feedback!r} must not ignore `weight`: with weight zero nothing of `sent` "
                    "has arrived, so the memory must be as after a message of zeros"
                )


def _check_part(feedback: Feedback, tree: PyTree) -> None:
    """Checks that a device may hold a slice of the mean, unless the whole mean is needed."""
    if feedback.facts.needs_mean:
        return
    tree = {"a": tree["a"]}
    slices = jax.tree.map(lambda x: x[2:5], tree)
    whole, split = feedback.init(tree, tree), feedback.init(tree, slices)
    message, held = feedback.compensate(tree, whole)
    _, of_slice = feedback.compensate(tree, split)
    want, after = feedback.update(message, message, message, 1.0, None, held)
    part = jax.tree.map(lambda x: x[2:5], message)
    advice = "declare needs_mean=True, or compute element by element"
    try:
        got, left = feedback.update(message, message, part, 1.0, None, of_slice)
    except (TypeError, ValueError) as error:
        raise AssertionError(
            f"{feedback!r} must work where a device has a slice of the mean ({error}): {advice}"
        ) from error
    own, others = (x.own if isinstance(x, Mirrored) else x for x in (left, after))
    pairs = [(got["a"], want["a"][2:5])]
    pairs += zip(jax.tree.leaves(own), jax.tree.leaves(others), strict=True)
    if not all(np.shape(x) == np.shape(y) and np.allclose(x, y, rtol=1e-2) for x, y in pairs):
        raise AssertionError(
            f"{feedback!r} must give a slice of the mean the same estimate and memory as all of "
            f"it: {advice}"
        )


def _check_bounded(feedback: Feedback) -> None:
    """Checks that memory stays finite as long as the mean is, with a codec that sends half."""
    like = {"a": jax.ShapeDtypeStruct((8,), jnp.float32)}

    @jax.jit
    def run(x):
        def step(state, _):
            message, state = feedback.compensate(x, state)
            sent = jax.tree.map(lambda leaf: 0.5 * leaf, message)
            return feedback.update(message, sent, sent, 1.0, None, state)[1], None

        return jax.lax.scan(step, feedback.init(like, like), length=_LONG)[0]

    for size in (1.0, 1e38):
        state = run({"a": size * gaussian(8)})
        if not all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(state)):
            raise AssertionError(
                f"{feedback!r}: facts must have bounded=False, since after {_LONG} steps with "
                f"gradients of size {size:g} its memory is not finite, although the mean is"
            )


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


def _shape(x: Any) -> tuple:
    return x.shape, jnp.dtype(x.dtype).name
