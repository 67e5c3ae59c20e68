"""The reducer of a link that was given without one, the plan of either, and its bytes."""

import contextlib
import functools
import math
import warnings
from typing import Any

import jax

from jaxcomp import feedback as feedback_
from jaxcomp.backend import axes
from jaxcomp.base import Codec, Feedback, Reducer
from jaxcomp.exchange import plan as plan_, state as state_
from jaxcomp.exchange.plan import Plan
from jaxcomp.exchange.stages import check_route
from jaxcomp.exchange.state import ReductionState
from jaxcomp.feedback import Link, NoFeedback, Shift
from jaxcomp.layout import trees
from jaxcomp.layout.policy import Policy
from jaxcomp.mesh import per_worker
from jaxcomp.reducers.gather import Gather
from jaxcomp.reducers.psum import Psum
from jaxcomp.reducers.two_shot import TwoShot
from jaxcomp.types import AxisName, PyTree
from jaxcomp.wire import buffer, cost as wire_cost

_NOTICED = 2**16
"""No warning below this number of bytes of compressed leaves."""


def link_or_reducer(codec: "Codec | Policy | Link | Reducer") -> "Link | Reducer":
    """The link or reducer of a user's argument; a link leaves the choice of a reducer to the plan.

    A codec or policy without feedback gets `Residual()` if it is contractive, and else none.
    """
    if isinstance(codec, type):
        raise ValueError(
            f"`codec` must be an instance, got the class {codec.__name__}: give its settings, as "
            f"in {codec.__name__}(...)"
        )
    if isinstance(codec, Reducer):
        check_route(codec.route)
    if isinstance(codec, Reducer | Link):
        return codec
    if isinstance(codec, Codec | Policy):
        return Link(codec, feedback_.default(codec))
    name = getattr(codec, "__name__", None) if callable(codec) else None
    got = f"the function {name}: call it, as in jaxcomp.{name}()" if name else repr(codec)
    raise ValueError(
        "`codec` must be a codec such as jaxcomp.qsgd_inf(bits=4), a Policy, a Link or a reducer "
        f"such as jaxcomp.Dense(), got {got}"
    )


def choose_reducer(
    codec: "Codec | Policy | Link | Reducer", like: PyTree, workers: int | tuple[int, ...]
) -> Reducer:
    """The reducer that `compressed_mean(codec, ...)` uses for a tree like this.

    Of `Gather`, `TwoShot` and `Psum`, it is the one with which a device sends the fewest bytes.

    Args:
        codec: a codec, a `Policy`, a `Link`, or a reducer, which is returned.
        like: the parameters, or their shapes and dtypes.
        workers: the number of workers, or one for each axis.

    Raises:
        ValueError: if `codec` is none of these, or `workers` is not positive.

    Example:
        >>> import jax.numpy as jnp, jaxcomp
        >>> like = {"w": jnp.zeros((1024, 1024))}
        >>> codec = jaxcomp.qsgd_inf(bits=4)
        >>> [type(choose_reducer(codec, like, workers=n)).__name__ for n in (2, 3, 8)]
        ['Gather', 'TwoShot', 'TwoShot']
    """
    source = link_or_reducer(codec)
    return plan(source, like, sizes=sizes_of(source, workers)).given


def uplink(source: "Link | Reducer") -> Link | None:
    """The link from the workers; None if every leaf is sent dense."""
    return source if isinstance(source, Link) else source.uplink


def feedback(source: "Link | Reducer") -> Feedback:
    """The feedback of the workers' links."""
    link = uplink(source)
    return NoFeedback() if link is None else link.feedback


@functools.lru_cache(maxsize=512)
def candidates(source: "Link | Reducer") -> tuple[Reducer, ...]:
    """The reducers of a link among which a plan chooses; a reducer is its only candidate.

    `Gather` sends `n − 1` payloads, `TwoShot` twice `(n − 1)/n` of a payload: with the same codec
    on the downlink, `TwoShot` moves fewer bytes from three workers on. `TwoShot` rounds twice, and
    requires a codec with buckets, since the encoding of a whole leaf would depend on the number of
    workers, and a feedback that a downlink can have. With a mirror, it is the only candidate. A
    linear codec uses `Psum` instead, which rounds once; a codec with integers on a shared grid may
    use it. Among reducers of equal bytes, the first one is chosen.

    The downlink has the default feedback of its codec: none if it is unbiased, a residual if it is
    contractive, or the downlink half of EF21 if the uplink is EF21.
    """
    if isinstance(source, Reducer):
        return (source,)
    found: list[Reducer] = [Gather(source)]
    codecs, both = source.policy.codecs, two_shot(source)
    if codecs:
        with contextlib.suppress(ValueError):  # Payloads of these codecs do not add up.
            found.append(Psum(source))
    if both is None or all(codec.linear for codec in codecs):
        return tuple(found)
    return (both,) if source.feedback.facts.mirrors else (*found, both)


def two_shot(link: Link, *, whole: bool = False) -> TwoShot | None:
    """`TwoShot` with this link, or None if the codec or feedback does not allow it.

    Args:
        link: the link.
        whole: allow codecs without a bucket size too.
    """
    codecs = link.policy.codecs
    if not whole and not all(codec.bucket_size for codec in codecs):
        return None
    shaped = any(codec.facts.shaped for codec in codecs)
    if shaped or len({codec.contractive for codec in codecs}) != 1:
        return None
    of_down = link.feedback
    if of_down != Shift() or not codecs[0].contractive:
        of_down = feedback_.default(link.codec)
    return TwoShot(link, Link(link.codec, of_down))


def plan(
    source: "Link | Reducer",
    like: PyTree,
    axis_name: AxisName = None,
    sizes: tuple[int, ...] | None = None,
) -> Plan:
    """The plan of a link or reducer for a tree like this: of a link, that of the fewest bytes."""
    sizes = axes.sizes(axis_name) if sizes is None else sizes
    return plan_.by_shapes(_chosen, source, like, axis_name, sizes)


@functools.lru_cache(maxsize=512)
def _chosen(
    source: "Link | Reducer", shapes: plan_.Shapes, axis_name: AxisName, sizes: tuple[int, ...]
) -> Plan:
    if isinstance(source, Reducer):
        return Plan.of(source, shapes.tree, axis_name, sizes)
    found = offers(source, shapes.tree, axis_name, sizes)
    return min(found, key=lambda plan: plan.compressed_link_bytes)


def offers(
    source: Link, like: PyTree, axis_name: AxisName = None, sizes: tuple[int, ...] | None = None
) -> list[Plan]:
    """The plan of each candidate; they have the same batches."""
    return [Plan.of(way, like, axis_name, sizes, runs=1) for way in candidates(source)]


def warn_of_bytes(source: "Link | Reducer", plan: Plan) -> None:
    """Warns if the chosen reducer sends more bytes than a dense mean would."""
    if isinstance(source, Reducer) or plan.dense_bytes < _NOTICED:  # Bytes may need a trace.
        return
    sent, ring = (
        math.ceil(plan.compressed_link_bytes),
        wire_cost.ring_bytes(plan.dense_bytes, plan.workers),
    )
    if sent > ring:
        warnings.warn(
            f"over {plan.workers} workers {source.codec!r} sends {sent:,} bytes a device, more "
            f"than a dense all-reduce ({ring:,}). Take fewer bits, "
            "or jaxcomp.TwoShot(link, link), whose bytes do not grow with the workers; see "
            "jaxcomp.describe(codec, params, workers).",
            stacklevel=2,
        )


def memory(
    source: "Link | Reducer", like: PyTree, axis_name: AxisName, *, gated: bool = False
) -> ReductionState:
    """The memory before the first step, in the shapes that it will have in every step.

    Raises:
        ValueError: if the shapes depend on the number of workers, which is known inside a mapped
            function only.
    """
    if axes.known(axis_name):
        return state_.init(plan(source, like, axis_name), gated=gated)
    names = axes.names(axis_name)
    one, *others = [
        Plan.of(way, like, axis_name, (number,) * len(names))
        for number in (1, 2)
        for way in candidates(source)
    ]
    first = jax.eval_shape(lambda: state_.init(one, gated=gated))
    flat = jax.tree_util.tree_leaves_with_path(first)
    if any(per_worker.shared_out(path) for path, _ in flat) or not all(
        state_.same_shapes(first, jax.eval_shape(lambda p=p: state_.init(p, gated=gated)))
        for p in others
    ):
        raise ValueError(
            f"`tx.init` must know the number of workers of {axis_name!r}, on which the memory of "
            f"{source!r} depends: use jaxcomp.init_state(tx, params, mesh, {axis_name!r}), give a "
            f"framework that calls `tx.init` itself jaxcomp.on_mesh(tx, mesh, {axis_name!r}), or "
            "call `tx.init` inside jax.pmap or jax.vmap"
        )
    return state_.init(one, gated=gated)


def wire_bytes(
    codec_or_reducer: Any, like: PyTree, workers: "int | tuple[int, ...] | None" = None
) -> int:
    """Bytes that one worker sends for a tree like this.

    For a codec or a policy: **payload bytes**, which one worker puts into the collective, once.
    For a reducer: **link bytes**, which one device sends over its link for the whole reduction. For
    a link: those of the reducer that `compressed_mean` would choose.

    Here a bare codec encodes every leaf, but `compressed_mean` and its siblings leave small leaves
    dense and choose a reducer: `describe(codec, like, workers=n).link_bytes` are the bytes that a
    device sends in a training step, or in a round of `local_updates`. It takes reducers too.

    Args:
        codec_or_reducer: a codec, for all leaves, a `Policy`, a `Link` or a reducer.
        like: the tree, or its shapes and dtypes.
        workers: the number of workers, or one for each axis; needed for a link or reducer, ignored
            for a codec.

    Raises:
        ValueError: if a link or reducer comes without `workers`, or the first argument is neither.

    Example:
        >>> import jax.numpy as jnp, jaxcomp
        >>> like = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
        >>> wire_bytes(jaxcomp.qsgd_inf(bits=4, bucket_size=512), like)
        532480
        >>> wire_bytes(jaxcomp.Dense(), like, workers=8)
        7340032
    """
    if isinstance(codec_or_reducer, Link | Reducer):
        return plan(codec_or_reducer, like, sizes=sizes_of(codec_or_reducer, workers)).link_bytes
    if not isinstance(codec_or_reducer, Codec | Policy):
        raise ValueError(
            "`codec_or_reducer` must be a codec, a Policy, a Link or a reducer, got "
            f"{codec_or_reducer!r}"
        )
    layout = trees.layout(codec_or_reducer, like)
    payload = wire_cost.payload_like(layout.batches)
    return buffer.fused_bytes(payload) + trees.dense_bytes(layout)


def sizes_of(source: "Link | Reducer", workers: Any) -> tuple[int, ...]:
    """The sizes of the axes, from a user's number of workers or numbers along each axis."""
    if workers is None:
        raise ValueError(
            "`workers` must be a positive integer for a reducer, whose link bytes depend on it, "
            "got None. For payload bytes, pass the codec."
        )
    sizes = workers if isinstance(workers, tuple) else (workers,)
    for number in sizes:
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(
                "`workers` must be a positive integer, or a tuple of one for each axis, got "
                f"{workers!r}"
            )
    tiers = isinstance(source, Reducer) and source.facts.tiers is not None
    if tiers and len(sizes) < 2:
        raise ValueError(
            "`workers` must be a tuple that ends with the number of devices on the fast axis, as "
            f"in (2, 4), got {workers!r}"
        )
    return sizes if tiers else (math.prod(sizes),)
