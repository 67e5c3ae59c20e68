"""The plan of a reduction, and its bytes."""

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
    """The plan of the reducer over axes of these sizes: its compressed leaves and their batches.

    It is the same for parameters and for gradients of other dtypes.
    """
    policy = policy_.NOTHING if reducer.uplink is None else reducer.uplink.policy
    shares = reducer.shares(workers)
    whole = trees.layout(policy, like, shares=shares, mixed=True)
    runs = collectives(reducer, whole.batches)
    return whole if runs == 1 else trees.layout(policy, like, shares=shares, runs=runs, mixed=True)


def collectives(reducer: Any, batches: Batches) -> int:
    """The maximum number of collectives into which these batches' payload is split each way."""
    if reducer.collectives is not None:
        return reducer.collectives
    # Batches of a hierarchy are not split: their leaves are not contiguous.
    pieces = [piece for batch in batches for piece in getattr(batch, "pieces", ())]
    large = sum(piece.stop - piece.start for piece in pieces) >= _WORTH_PARTS
    return min(_PARTS, len({piece.leaf for piece in pieces})) if large else 1


def rounds(reducer: Any, batches: Batches, payload: PyTree, workers: int) -> int:
    """The number of sequential messages each way: `n − 1` for each collective.

    Messages of one step are independent and may overlap on the wire, but plans do not assume it.
    """
    return buffer.collectives(payload, collectives(reducer, batches)) * (workers - 1)


def plan_here(reducer: Reducer, like: PyTree, axis_name: AxisName) -> trees.Layout:
    """The `plan` over the workers of this axis."""
    return plan(reducer, like, axes.sizes(axis_name))


def link_bytes(reducer: Any, like: PyTree, workers: Any) -> int:
    """The bytes that one device sends over `workers` workers, for batches and dense leaves."""
    sizes = workers if isinstance(workers, tuple) else (workers,)
    layout = plan(reducer, like, sizes)
    dense = dense_.fused_link_bytes([layout.likes[i] for i in layout.dense], math.prod(sizes))
    told = told_bytes(reducer, layout.batches, math.prod(sizes))
    return math.ceil(reducer.batches_link_bytes(layout.batches, workers) + dense + told)


def told_bytes(reducer: Any, batches: Batches, workers: int) -> Fraction | int:
    """The bytes of the flag by which workers report that their memories are finite."""
    return wire_cost.ring(4, workers) if tells(reducer, batches) else 0


def tells(reducer: Reducer, batches: Batches) -> bool:
    """Whether workers must report a non-finite memory, because the mean may still be finite.

    A single worker cannot restore its memory alone: the mirror would no longer be the mean of all
    memories. Where workers get results of their own, nobody could tell all.
    """
    return bool(batches) and reducer.alike and not feedback_of(reducer).bounded


def payload_bytes(reducer: Reducer, layout: trees.Layout) -> int:
    """The bytes that one worker puts into the collectives for a tree of this layout."""
    return round(sum(batch_bytes(reducer, layout))) + trees.dense_bytes(
        layout, dense_dtype(reducer)
    )


def batch_bytes(reducer: Reducer, layout: trees.Layout) -> tuple[float, ...]:
    """The payload bytes of each batch, as the reducer defines them, or else as the codec does."""
    own = final_phase(reducer).payload_bytes(layout.batches)
    if own is not None:
        return own
    return tuple(float(buffer.fused_bytes(part)) for part in wire_cost.payload_like(layout.batches))


def dense_dtype(reducer: Reducer) -> Any:
    """The dtype that a reducer sends dense leaves in; None for their own."""
    dtype = final_phase(reducer).dtype
    return None if dtype is None else jnp.dtype(dtype)


def final_phase(reducer: Reducer) -> Reducer:
    """The last reducer of a schedule; any other reducer unchanged."""
    return reducer.schedule[-1][1]


def feedback_of(reducer: Reducer) -> Feedback:
    """The feedback of the workers' links."""
    return NoFeedback() if reducer.uplink is None else reducer.uplink.feedback


def dense_feedback_of(reducer: Reducer) -> Feedback:
    """The feedback of dense leaves under a gate.

    It is that of the compressed leaves, but without momentum, which dense leaves get after the
    mean.
    """
    feedback = feedback_of(reducer)
    return Residual() if feedback.kind == "momentum" else feedback
