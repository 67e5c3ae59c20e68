"""The demands of a gate on a reducer, and the factor of the messages of an open round."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp import checks
from jaxcomp.backend import axes, xla
from jaxcomp.base import Feedback, Gate, Reducer
from jaxcomp.numerics import summing
from jaxcomp.reducers import accounting
from jaxcomp.types import Array, AxisName, Batches, PyTree


class Participation(NamedTuple):
    """The workers that sent in a step.

    Attributes:
        go: whether anyone did.
        taken: whether this worker did.
        senders: how many did.
    """

    go: Array
    taken: Array
    senders: Array


def check(gate: Gate, reducer: Reducer, *, whole: bool = True) -> None:
    """Raises a `ValueError` if a reducer, or a model that is not whole, does not go with a gate.

    A gate may warn of a feedback that forgets what it holds back.
    """
    checks.part("gate", gate, Gate)
    feedback = accounting.feedback_of(reducer)
    gate.check(feedback)
    if gate.measures and (reducer.hierarchical or not whole):
        raise ValueError(
            f"`gate` {gate!r} compares whole messages, of which devices have only shares under "
            "jaxcomp.Hierarchical or `param_specs`; use it with jaxcomp.Gather or jaxcomp.TwoShot, "
            "on parameters that are replicated"
        )
    if forgets(feedback) and (reducer.splits or reducer.scheduled):
        raise ValueError(
            f"`feedback` {feedback!r} must be under jaxcomp.Gather, where every device has the "
            'whole mean; jaxcomp.Shift(step, absent="remembered") goes with every reducer'
        )
    if reducer.scheduled and any(phase.splits for _, phase in reducer.schedule):
        raise ValueError(
            f"`gate` {gate!r} needs phases that bring the whole mean to every device, such as "
            "jaxcomp.Gather, or else one reducer for all times"
        )
    if _hides(reducer) and closes(gate, reducer):
        raise ValueError(
            f"`gate` {gate!r} closes, and then no one knows the other devices' shares of the "
            "uplink's mirror: use jaxcomp.Gather(link), or a downlink that is mirrored too, "
            "down=Link(codec, Shift())"
        )


def _hides(reducer: Reducer) -> bool:
    """Whether devices have shares of a mirror that the others know of by the downlink alone."""
    down = reducer.downlink
    if down is None or not accounting.feedback_of(reducer).mirrors:
        return False
    return not down.feedback.mirrors


def closes(gate: Gate, reducer: Reducer) -> bool:
    """Whether rounds are left out: not those in which nobody happens to send, if all the same the
    downlink has something to say.
    """
    return gate.closes and not (_hides(reducer) and gate.idles)


def forgets(feedback: Feedback) -> bool:
    """Whether memories of workers that do not take part are left out."""
    return feedback.absent == "left out"


def counts(weight: Array | None, times: float) -> Array | None:
    """How much a feedback takes this worker's message for; the reducer sees the mask alone."""
    if times == 1:
        return weight
    return jnp.float32(times) if weight is None else weight * jnp.float32(times)


def senders(weight: Array | None, axis_name: AxisName) -> Array:
    """How many workers send, of whom this one has the weight."""
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
    feedback = accounting.feedback_of(reducer)
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
        return xla.block_fma(x.astype(wide) * jnp.asarray(factor, wide)).astype(x.dtype)

    return jax.tree.map(times, tree)
