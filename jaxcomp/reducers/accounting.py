"""The plan of a reduction: which leaves travel how, and how many bytes that is."""

import math
from fractions import Fraction
from typing import Any

import jax.numpy as jnp

from jaxcomp.backend import axes
from jaxcomp.base import Feedback, Reducer
from jaxcomp.feedback import NoFeedback, Residual
from jaxcomp.layout import policy as policy_, trees
from jaxcomp.reducers import dense as dense_
from jaxcomp.types import AxisName, Batches, PyTree
from jaxcomp.wire import buffer, cost as wire_cost

_PARTS = 4
_WORTH_PARTS = 2**22
"""From so many elements on, the first parts are on their way while the last gradients are computed;
below, messages are too short for the wire to tell.
"""


def plan(reducer: Reducer, like: PyTree, workers: tuple[int, ...] = (1,)) -> trees.Layout:
    """Which leaves the reducer compresses, in which batches, over axes of these sizes."""
    policy = policy_.NOTHING if reducer.uplink is None else reducer.uplink.policy
    shares = reducer.shares(workers)
    whole = trees.layout(policy, like, shares=shares)
    runs = collectives(reducer, whole.batches)
    return whole if runs == 1 else trees.layout(policy, like, shares=shares, runs=runs)


def collectives(reducer: Any, batches: Batches) -> int:
    """Into how many collectives the payload of these batches is split each way, at most."""
    if reducer.collectives is not None:
        return reducer.collectives
    # Shares of a hierarchy have none: their leaves are not in runs.
    pieces = [piece for batch in batches for piece in getattr(batch, "pieces", ())]
    large = sum(piece.stop - piece.start for piece in pieces) >= _WORTH_PARTS
    return min(_PARTS, len({piece.leaf for piece in pieces})) if large else 1


def rounds(reducer: Any, batches: Batches, payload: PyTree, workers: int) -> int:
    """Messages one after another, where this is sent one way: `n − 1` for each collective.

    Those of one step do not depend on each other and may share the wire, but no plan counts on it.
    """
    return buffer.collectives(payload, collectives(reducer, batches)) * (workers - 1)


def plan_here(reducer: Reducer, like: PyTree, axis_name: AxisName) -> trees.Layout:
    """The `plan` over the workers of this axis."""
    return plan(reducer, like, axes.sizes(axis_name))


def link_bytes(reducer: Any, like: PyTree, workers: Any) -> int:
    """What one device sends over so many workers, for batches and for leaves left dense."""
    sizes = workers if isinstance(workers, tuple) else (workers,)
    layout = plan(reducer, like, sizes)
    dense = dense_.fused_link_bytes([layout.likes[i] for i in layout.dense], math.prod(sizes))
    told = told_bytes(reducer, layout.batches, math.prod(sizes))
    return math.ceil(reducer.batches_link_bytes(layout.batches, workers) + dense + told)


def told_bytes(reducer: Any, batches: Batches, workers: int) -> Fraction | int:
    """Bytes of the number by which workers say that their memories are finite."""
    return wire_cost.ring(4, workers) if tells(reducer, batches) else 0


def tells(reducer: Reducer, batches: Batches) -> bool:
    """Whether a worker's memory may be lost in a step whose mean is finite, so that it must say so.

    One worker alone cannot keep what it had: a mirror would no longer be the mean of what it
    mirrors.
    """
    return bool(batches) and not feedback_of(reducer).bounded


def payload_bytes(reducer: Reducer, layout: trees.Layout) -> int:
    """What one worker puts into the collectives for a tree of this layout."""
    return round(sum(batch_bytes(reducer, layout))) + trees.dense_bytes(
        layout, dense_dtype(reducer)
    )


def batch_bytes(reducer: Reducer, layout: trees.Layout) -> tuple[float, ...]:
    """What each batch accounts for of it: its payload, unless the reducer knows better."""
    own = final_phase(reducer).payload_bytes(layout.batches)
    if own is not None:
        return own
    return tuple(float(buffer.fused_bytes(part)) for part in wire_cost.payload_like(layout.batches))


def dense_dtype(reducer: Reducer) -> Any:
    """The dtype that a reducer sends dense leaves in; None for their own."""
    dtype = final_phase(reducer).dtype
    return None if dtype is None else jnp.dtype(dtype)


def final_phase(reducer: Reducer) -> Reducer:
    """The last reducer of one that changes with time; else itself."""
    return reducer.schedule[-1][1]


def feedback_of(reducer: Reducer) -> Feedback:
    """The feedback of the workers' links."""
    return NoFeedback() if reducer.uplink is None else reducer.uplink.feedback


def aside_of(reducer: Reducer) -> Feedback:
    """Under a gate, the feedback of the leaves that are sent as they are.

    That of the others, but without momentum, which those leaves get after the mean.
    """
    feedback = feedback_of(reducer)
    return Residual() if feedback.kind == "momentum" else feedback
