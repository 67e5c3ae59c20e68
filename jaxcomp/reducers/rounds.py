"""Rounds under a gate: what an open one multiplies by, and how a closed one sends nothing."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core

from jaxcomp import axes, checks, compiler, summing, trees, workers as workers_
from jaxcomp.base import Feedback, Gate, Reducer
from jaxcomp.reducers import reduction
from jaxcomp.reducers.reduction import Reduction, ReductionState
from jaxcomp.types import Array, AxisName, Batches, PyTree, Stacks


class Turn(NamedTuple):
    """Who sent in a step.

    Attributes:
        go: whether anyone did.
        taken: whether this worker did.
        senders: how many did.
    """

    go: Array
    taken: Array
    senders: Array


class _Memory(NamedTuple):
    """What an exchange goes on from, without the workers' axis."""

    feedback: PyTree
    aside: PyTree
    reducer: PyTree


class _Heard(NamedTuple):
    """What an exchange brings, or its absence."""

    means: Stacks
    dense: Stacks
    memory: _Memory
    sent: Stacks
    senders: Array


def check(gate: Gate, reducer: Reducer, *, whole: bool = True) -> None:
    """Raises a `ValueError` if a reducer, or a model that is not whole, does not go with a gate.

    A gate may warn of a feedback that forgets what it holds back.
    """
    checks.part("gate", gate, Gate)
    feedback = reduction.feedback_of(reducer)
    gate.check(feedback)
    if gate.measures and (reducer.hierarchical or not whole):
        raise ValueError(
            f"`gate` {gate!r} compares whole messages, of which devices have only shares under "
            "jaxcomp.Hierarchical or `param_specs`; use it with jaxcomp.Gather or jaxcomp.TwoShot, "
            "on parameters that are replicated"
        )
    if _forgets(feedback) and (reducer.splits or reducer.scheduled):
        raise ValueError(
            f"`feedback` {feedback!r} must be under jaxcomp.Gather, where every device has the "
            'whole mean; jaxcomp.Shift(step, absent="remembered") goes with every reducer'
        )
    if reducer.scheduled and any(phase.splits for _, phase in reducer.schedule):
        raise ValueError(
            f"`gate` {gate!r} needs phases that bring the whole mean to every device, such as "
            "jaxcomp.Gather, or else one reducer for all times"
        )
    if _hides(reducer) and _closes(gate, reducer):
        raise ValueError(
            f"`gate` {gate!r} closes, and then no one knows the other devices' shares of the "
            "uplink's mirror: use jaxcomp.Gather(link), or a downlink that is mirrored too, "
            "down=Link(codec, Shift())"
        )


def _hides(reducer: Reducer) -> bool:
    """Whether devices have shares of a mirror that the others know of by the downlink alone."""
    down = reducer.downlink
    if down is None or not reduction.feedback_of(reducer).mirrors:
        return False
    return not down.feedback.mirrors


def _closes(gate: Gate, reducer: Reducer) -> bool:
    """Whether rounds are left out: not those in which nobody happens to send, if all the same the
    downlink has something to say.
    """
    return gate.closes and not (_hides(reducer) and gate.idles)


def _forgets(feedback: Feedback) -> bool:
    """Whether memories of workers that do not take part are left out."""
    return feedback.absent == "left out"


def reduce(
    reducer: Reducer,
    key: Array,
    grads: PyTree,
    state: ReductionState,
    axis_name: AxisName,
    *,
    gate: Gate,
    gate_key: Array,
    gate_state: PyTree,
    params: PyTree | None = None,
    guard: bool = True,
    everywhere: tuple[str, ...] = (),
) -> tuple[Reduction, PyTree]:
    """`reduction.reduce` in the rounds that a gate opens, and the gate's state.

    In a closed round the reducer is left out: nothing was sent, and the mean is what every device
    knows already, the mirror of all shifts or else zero. The leaves that are sent as they are have
    a memory too, since what a closed round holds back would be lost with them.

    With `guard`, a step whose mean is not finite leaves the gate's state, too, as it was. A message
    that is not finite and was not sent shows in no mean; it leaves its own worker's memory alone.
    Where the memory of one worker would not be finite, a leaf of the mean is made NaN on all, as in
    `reduction.reduce`; in a round without messages, shifts stay as they are.
    """
    feedback, aside = reduction.feedback_of(reducer), reduction.aside_of(reducer)
    layout = reduction.plan_here(reducer, grads, axis_name)
    batches = layout.batches
    state = reduction.fitted(reducer, batches, state, axis_name)
    inner = reducer.within(batches, axis_name)
    links = reducer.link_axis(axis_name)
    xs, dense = trees.stacks(layout, grads)
    xs = reducer.enter(batches, xs, axis_name)
    before = workers_.held(state)
    message, memory = feedback.compensate(xs, before.feedback)
    dense, beside = aside.compensate(dense, before.dense)
    go, weight, opened = gate.open(gate_key, (message, dense), gate_state, links, params)
    closes, times = _closes(gate, reducer), factor(gate, reducer, inner, axes.size(links))
    go = uniform(go, axis_name) if closes else jnp.ones((), bool)
    counts = _counts(weight, times)

    def talk(key, message, dense, memory, weight, counts):
        part, sent, share, after = reducer.collect(
            key, batches, message, memory.reducer, axis_name, weight
        )
        part, share = scaled(part, times), share * times
        estimate, own = feedback.update(message, sent, part, share, counts, memory.feedback)
        if _forgets(feedback) and weight is not None:
            known = reducer.dense(memory.feedback.own, axis_name, weight)
            estimate = jax.tree.map(jnp.add, part, scaled(tuple(known), times))
        means, after = reducer.spread(key, batches, estimate, after, axis_name)
        part = scaled(tuple(reducer.dense(dense, axis_name, weight)), times)
        narrow = reduction.dense_dtype(reducer)
        arrived = tuple(x.astype(narrow or x.dtype).astype(x.dtype) for x in dense)
        known, beside = aside.update(dense, arrived, part, share, counts, memory.aside)
        if guard and reduction.tells(reducer, batches):
            flag = reduction.told(own, axis_name)
            means, known = reduction.spoilt((means, known), flag)
        return _Heard(means, known, _Memory(own, beside, after), sent, _senders(weight, links))

    def silent(key, message, dense, memory, weight, counts):
        del key, weight, counts
        nothing, none = jnp.zeros((), jnp.float32), zeros(message)
        part = zeros(reducer.part_like(batches, axis_name))
        estimate, own = feedback.update(message, none, part, 0.0, nothing, memory.feedback)
        if feedback.mirrors and not _forgets(feedback):
            means = reducer.unchanged(batches, estimate, memory.reducer, axis_name)
        else:
            means = zeros([batch.like for batch in inner])
        still, beside = aside.update(dense, zeros(dense), zeros(dense), 0.0, nothing, memory.aside)
        after = _Memory(own, beside, memory.reducer)
        return _Heard(means, still, after, none, jnp.zeros((), jnp.uint32))

    given = (key, message, dense, _Memory(memory, beside, state.reducer), weight, counts)
    heard = either(go, talk, silent, *given) if closes else talk(*given)
    means = reducer.leave(batches, heard.means, axis_name)
    taken = go if weight is None else go & (weight != 0)
    own, beside = heard.memory.feedback, heard.memory.aside
    if guard and not feedback.mirrors:  # With a mirror, who does not send keeps its memory.
        sound = taken | reduction.all_finite((message, dense))
        own, beside = _kept(sound, (own, beside), (before.feedback, before.dense))
    new = ReductionState(
        reduction.hold(reducer, own, axis_name),
        heard.memory.reducer,
        reduction.hold_aside(reducer, beside, axis_name),
    )
    if guard and jax.tree.leaves((new, opened)):
        finite = reduction.all_finite((means, heard.dense))
        if everywhere:
            finite = lax.pmin(finite.astype(jnp.int32), everywhere) == 1
        new, opened = _kept(finite, (new, opened), (state, gate_state))
    mean = trees.assemble(layout, means, heard.dense)
    turn = Turn(go, taken, heard.senders)
    return Reduction(mean, new, xs, message, heard.sent, turn), opened


def _kept(sound: Array, now: PyTree, before: PyTree) -> PyTree:
    return jax.tree.map(lambda new, old: jnp.where(sound, new, old), now, before)


def _counts(weight: Array | None, times: float) -> Array | None:
    """How much a feedback takes this worker's message for; the reducer sees the mask alone."""
    if times == 1:
        return weight
    return jnp.float32(times) if weight is None else weight * jnp.float32(times)


def _senders(weight: Array | None, axis_name: AxisName) -> Array:
    if weight is None:
        return jnp.asarray(axes.size(axis_name), jnp.uint32)
    return lax.psum((weight != 0).astype(jnp.int32), axis_name).astype(jnp.uint32)


def factor(gate: Gate, reducer: Reducer, batches: Batches, workers: int) -> float:
    """What the sum of the messages is multiplied by, exact in 32 bits.

    One under a feedback that sends later what it could not send now, and under EF21, whose biased
    messages no factor makes right on average.

    Raises:
        ValueError: if shifts would move too far by it, or for a mean over senders.
    """
    feedback = reduction.feedback_of(reducer)
    wanted = float(np.float32(gate.factor(workers)))
    codecs = () if reducer.uplink is None else reducer.uplink.policy.codecs
    biased = any(codec.contractive for codec in codecs)
    if feedback.keeps_unsent or (feedback.mirrors and biased):
        return 1.0
    if wanted != 1 and reducer.over == "senders":
        raise ValueError(
            f"`over` must be 'workers' under {gate!r}, whose messages count {wanted:.4g} times to "
            "stand for all, or take a feedback that sends later what it could not send, such as "
            "jaxcomp.Residual(), got 'senders'"
        )
    step = feedback.step
    if wanted > 1 and feedback.mirrors and step is not None:
        bounds = [batch.codec.variance_bound(batch.size) or 0.0 for batch in batches]
        most = 2 / (1 + max(bounds, default=0.0)) / wanted
        if step >= most:
            raise ValueError(
                f"`step` must be below {most:.4g}, and best at half of that, for a shift whose "
                f"messages count {wanted:.4g} times under {gate!r}, got {step}"
            )
    return wanted


def scaled(tree: PyTree, factor: float) -> PyTree:
    """The sum of what was sent, where it stands for all."""
    if factor == 1:
        return tree

    def times(x: Array) -> Array:
        wide = summing.wide(x.dtype)
        # Settled, or the sum with a memory might round differently here and there.
        return compiler.settled(x.astype(wide) * jnp.asarray(factor, wide)).astype(x.dtype)

    return jax.tree.map(times, tree)


def uniform(go: Array, axis_name: AxisName) -> Array:
    """`go`, typed as the same on all workers, which it is."""
    kind = getattr(jax.typeof(go), "manual_axis_type", None)
    differs = () if kind is None else tuple(n for n in axes.names(axis_name) if n in kind.varying)
    # Only where a replicated state was passed as if it differed between workers.
    return lax.pmax(go.astype(jnp.int32), differs) > 0 if differs else go


def either(go: Array, talk: Callable[..., Any], silent: Callable[..., Any], *args: Any) -> Any:
    """`talk(*args)` if `go`, else `silent(*args)`, whose results may differ in type of replication.

    Both are typed as varying where one of them is.
    """
    leaves, _ = jax.tree.flatten(args)
    traced = [jax.make_jaxpr(branch, return_shape=True)(*args) for branch in (talk, silent)]
    (_, shapes), _ = traced
    pairs = list(zip(*(jaxpr.out_avals for jaxpr, _ in traced), strict=True))

    def branch(number: int) -> Callable[..., list[Array]]:
        run = jex_core.jaxpr_as_fun(traced[number][0])
        missing = [_varying(pair[1 - number]) - _varying(pair[number]) for pair in pairs]
        return lambda *flat: [
            lax.pcast(x, tuple(sorted(names, key=str)), to="varying") if names else x
            for x, names in zip(run(*flat), missing, strict=True)
        ]

    return jax.tree.unflatten(
        jax.tree.structure(shapes), lax.cond(go, branch(0), branch(1), *leaves)
    )


def _varying(aval: Any) -> frozenset:
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


def zeros(likes: Sequence[Any]) -> Stacks:
    """Nothing, in these shapes."""
    return tuple(jnp.zeros(like.shape, like.dtype) for like in likes)
