"""Checks of a gate with a reducer, and the factor on the messages of an open round."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.backend import axes, xla
from jaxcomp.base import Feedback, Gate, Reducer
from jaxcomp.exchange.plan import feedback_of
from jaxcomp.layout.policy import Policy
from jaxcomp.numerics import addition
from jaxcomp.types import Array, AxisName, PyTree, Stacks


class Participation(NamedTuple):
    """The workers that sent in a step.

    Attributes:
        go: whether any worker sent.
        taken: whether this worker sent.
        senders: the number of workers that sent.
    """

    go: Array
    taken: Array
    senders: Array


def check(gate: Gate, reducer: Reducer, *, whole: bool = True) -> None:
    """Raises a `ValueError` if a reducer, or a sharded model, cannot be used with a gate."""
    feedback = feedback_of(reducer)
    if gate.measures and (reducer.facts.tiers is not None or not whole):
        raise ValueError(
            f"`gate={gate!r}` needs whole messages, but with jaxcomp.Hierarchical or `param_specs` "
            "a device has only slices of them; use it with jaxcomp.Gather or jaxcomp.TwoShot, "
            "on replicated parameters"
        )
    if forgets(feedback) and (reducer.facts.splits or reducer.facts.phases):
        raise ValueError(
            f"`feedback={feedback!r}` requires jaxcomp.Gather, with which every device has the "
            f"whole mean, got {reducer!r}; "
            'jaxcomp.Shift(step, absent="remembered") can be used with every reducer'
        )
    if any(phase.facts.splits for _, phase in reducer.facts.phases):
        raise ValueError(
            f"`gate={gate!r}` needs phases that give every device the whole mean, such as "
            f"jaxcomp.Gather, or one reducer without phases, got {reducer!r}"
        )
    if _hides(reducer) and closes(gate, reducer):
        raise ValueError(
            f"`gate={gate!r}` has closed rounds, in which devices do not know the other slices of "
            f"the uplink's mirror, got {reducer!r}: use jaxcomp.Gather(link), or a downlink with a "
            "mirror, down=Link(codec, Shift())"
        )


def _hides(reducer: Reducer) -> bool:
    """Whether a device's slice of a mirror reaches the others only through the downlink."""
    later = [leg.link.feedback.facts.mirrors for leg in reducer.route[1:]]
    return bool(later) and feedback_of(reducer).facts.mirrors and not all(later)


def closes(gate: Gate, reducer: Reducer) -> bool:
    """Whether closed rounds skip all communication.

    A round in which no worker happens to send is not skipped if the downlink has memory to send.
    """
    return gate.closes and not (_hides(reducer) and gate.idles)


def forgets(feedback: Feedback) -> bool:
    """Whether memories of non-participating workers are left out."""
    return feedback.facts.forgets_absent


def senders(weight: Array | None, axis_name: AxisName) -> Array:
    """The number of workers that send; `weight` is this worker's."""
    if weight is None:
        return jnp.asarray(axes.size(axis_name), jnp.uint32)
    return lax.psum((weight != 0).astype(jnp.int32), axis_name).astype(jnp.uint32)


def factor(gate: Gate, reducer: Reducer, workers: int) -> float:
    """The factor on the sum of the messages in the estimate, exact in 32 bits.

    Raises:
        ValueError: for a mean over senders.
    """
    wanted = float(np.float32(gate.factor(workers)))
    uplink = reducer.uplink
    if uplink is not None and counted_once(uplink.feedback, uplink.policy):
        return 1.0
    if wanted != 1 and reducer.facts.over == "senders":
        raise ValueError(
            f"`over` must be 'workers' with {gate!r}, which multiplies messages by {wanted:.4g}, "
            "got 'senders'; or use a feedback that sends unsent messages later, such as "
            "jaxcomp.Residual()"
        )
    return wanted


def counted_once(feedback: Feedback, policy: Policy) -> bool:
    """Whether the estimate takes messages as they are, however many workers participate.

    So it is with a feedback that sends unsent messages later, and with EF21, whose biased messages
    no factor corrects on average.
    """
    biased = any(codec.contractive for codec in policy.codecs)
    return feedback.facts.keeps_unsent or (feedback.facts.mirrors and biased)


def remember(
    feedback: Feedback,
    times: float,
    message: Stacks,
    sent: Stacks,
    part: Stacks,
    share: Array | float,
    weight: Array | None,
    state: PyTree,
) -> tuple[Stacks, PyTree]:
    """`feedback.update` where the estimate takes the sum of the messages `times`.

    The memories of a mirror move by the messages as they are: a shift that moved `times` as far
    would overshoot, and grow.
    """
    if not feedback.facts.mirrors:
        return feedback.update(message, sent, scale_sum(part, times), share * times, weight, state)
    estimate, after = feedback.update(message, sent, part, share, weight, state)
    if times != 1:
        estimate = jax.tree.map(jnp.add, estimate, scale_sum(part, times - 1))
    return estimate, after


def scale_sum(tree: PyTree, factor: float) -> PyTree:
    """Multiplies the sum of the sent messages by the factor."""
    if factor == 1:
        return tree

    def times(x: Array) -> Array:
        wide = addition.wide(x.dtype)
        # Block a fused multiply-add with a memory, which would round differently.
        return xla.block_fma(x.astype(wide) * jnp.asarray(factor, wide)).astype(x.dtype)

    return jax.tree.map(times, tree)
