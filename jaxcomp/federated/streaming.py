"""A client's work where fragments take turns: it goes on from its own parameters."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.backend import xla
from jaxcomp.federated.method import Method
from jaxcomp.transforms import fragments as fragments_, worker_round
from jaxcomp.types import Array, PyTree


class Streamed(NamedTuple):
    """A client's memory of its work.

    Attributes:
        inner: the state of its optimizer.
        offset: its parameters minus the centre, at least in float32.
        waits: `int32`, the fragment that it has sent last, of which the next centre has the mean;
            -1 before its first message.
        due: `int32`, the steps of the client before those of the delay, while these are not taken
            yet; else -1.
        before: the centre of its last round, for a delay or a mix; else `()`.
    """

    inner: PyTree
    offset: PyTree
    waits: Array
    due: Array
    before: PyTree


def init(method: Method, params: PyTree) -> PyTree:
    """A client's memory of its work before its first round."""
    inner = method.work.init(params)
    if not method.streams:
        return inner
    none = jnp.full((), -1, jnp.int32)
    before = jax.tree.map(jnp.asarray, params) if keeps_centre(method) else ()
    return Streamed(inner, worker_round.start(params), none, none, before)


def keeps_centre(method: Method) -> bool:
    """Whether a client keeps the centre of its last round."""
    return bool(method.delay or method.mix)


def update(
    method: Method, turn: int, centre: PyTree, kept: Streamed, batches: Any, steps: Array | int
) -> tuple[PyTree, Streamed, Array]:
    """The message of this fragment, the client's memory, and the loss before each step.

    The last `delay` of its batches are left for `rest`.

    Args:
        method: the method.
        turn: the fragment.
        centre: the parameters of this round.
        kept: what it kept.
        batches: arrays with a leading axis of steps.
        steps: how many of the batches are used.
    """
    count = jax.tree.leaves(batches)[0].shape[0]
    if method.delay >= count:
        raise ValueError(
            f"`batches` must have more steps than the delay, {method.delay}, got {count}"
        )
    own = _returned(method, centre, kept)
    main = jax.tree.map(lambda x: x[: count - method.delay], batches)
    offset, inner, losses = method.work.train(
        centre, own, kept.inner, main, jnp.maximum(steps - method.delay, 0), guard=True
    )
    moved, part = (
        fragments_.split(method.fragments, centre, tree)[turn] for tree in (offset, centre)
    )
    sent = worker_round.delta(moved, part)
    before = centre if keeps_centre(method) else ()
    none = jnp.full((), -1, jnp.int32)
    return sent, Streamed(inner, offset, jnp.full((), turn, jnp.int32), none, before), losses


def rest(method: Method, kept: Streamed, batches: Any, steps: Array | int) -> Streamed:
    """A client's memory after the steps of the delay, at the parameters of its last round.

    Args:
        method: the method.
        kept: what `update` returned.
        batches: arrays with a leading axis of `delay` steps.
        steps: how many of the batches of the round are used.
    """
    count = jnp.minimum(steps, method.delay)
    offset, inner, _ = method.work.train(
        kept.before, kept.offset, kept.inner, batches, count, guard=True
    )
    return kept._replace(inner=inner, offset=offset, due=jnp.full((), -1, jnp.int32))


def last(method: Method, batches: Any, steps: Array | int) -> Any:
    """The batches of the delay: the last ones of those that are used."""
    start = jnp.maximum(steps - method.delay, 0)
    return jax.tree.map(
        lambda x: lax.dynamic_slice_in_dim(x, start, method.delay),
        jax.tree.map(jnp.asarray, batches),
    )


def _returned(method: Method, centre: PyTree, kept: Streamed) -> PyTree:
    """The offset from this centre, which has the mean of what the client has sent last.

    `θ ← α θ + (1 − α) φ` for the leaves of that fragment; all others move with the centre.
    """
    met = jax.tree.map(jnp.zeros_like, kept.offset)
    if method.mix:
        met = xla.compile_separately(functools.partial(_met, method.mix))(
            kept.offset, centre, kept.before
        )
    return jax.tree.map(
        lambda number, new, old: jnp.where(kept.waits == number, new, old),
        fragments_.numbers(method.fragments, centre),
        met,
        kept.offset,
    )


def _met(mix: float, offset: PyTree, centre: PyTree, before: PyTree) -> PyTree:
    """`α (θ − φ)`, where θ is an offset from the centre before."""
    moved = jax.tree.map(
        lambda by, now, was: now.astype(by.dtype) - was.astype(by.dtype), offset, centre, before
    )
    return worker_round.resume(mix, offset, moved)
