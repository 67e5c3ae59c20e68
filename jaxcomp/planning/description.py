"""The payload of each leaf, and the reason: the table behind `describe`."""

import dataclasses
import math
from typing import Any, overload

import jax.numpy as jnp

from jaxcomp import checks, tables
from jaxcomp.base import Reducer
from jaxcomp.codecs import low_rank
from jaxcomp.collectives.fully_sharded import FullySharded
from jaxcomp.exchange.plan import Plan
from jaxcomp.feedback import Link
from jaxcomp.planning import fsdp_description
from jaxcomp.planning.columns import PATH, SHAPE, short
from jaxcomp.planning.fsdp_description import ShardedDescription
from jaxcomp.reducers import choose
from jaxcomp.reducers.gather import Gather
from jaxcomp.reducers.two_shot import TwoShot
from jaxcomp.tables import Column
from jaxcomp.transforms.sharded_optimizer import ShardedOptimizer
from jaxcomp.types import PyTree
from jaxcomp.wire import cost as wire_cost


@dataclasses.dataclass(frozen=True)
class Line:
    """One leaf with its codec, the reason for the codec, and its bytes."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    codec: str
    bits_per_element: float
    payload_bytes: float
    reason: str


_COLUMNS = (
    PATH,
    SHAPE,
    Column("codec", "codec"),
    Column("bits/elem", "bits_per_element", ".2f"),
    Column("bytes", lambda line: math.ceil(line.payload_bytes), ","),
    Column("why", "reason"),
)


@dataclasses.dataclass(frozen=True)
class Description:
    """The table that `describe` returns; `print` it.

    Attributes:
        lines: one for each leaf.
        elements: the number of elements of the tree.
        payload_bytes: the bytes that one worker puts into the collectives.
        dense_bytes: the same without compression.
        picked: the default choices, and the reasons.
        link_bytes: the bytes that one device sends, or None without a number of workers.
        messages: the messages of a mean that wait for each other, each of which takes the link's
            latency; None without a number of workers, or for a reducer that does not say them.
        dense_link_bytes: the same for an uncompressed all-reduce.
        offers: the bytes that a device would send with each candidate reducer, by name.
    """

    lines: tuple[Line, ...]
    elements: int
    payload_bytes: int
    dense_bytes: int
    picked: str
    workers: int | tuple[int, ...] | None = None
    link_bytes: int | None = None
    messages: float | None = None
    dense_link_bytes: int | None = None
    offers: tuple[tuple[str, int], ...] = ()

    @property
    def bits_per_element(self) -> float:
        """Payload bits per element over the whole tree."""
        return 8 * self.payload_bytes / max(self.elements, 1)

    def __str__(self) -> str:
        return "\n".join([tables.text(_COLUMNS, self.lines), "", self.picked, self._totals()])

    @property
    def ratio(self) -> float | None:
        """The bytes of a dense all-reduce divided by this one's; None without workers."""
        if self.link_bytes is None or self.dense_link_bytes is None:
            return None
        return self.dense_link_bytes / max(self.link_bytes, 1)

    def _totals(self) -> str:
        said = (
            f"payload {self.payload_bytes:,} bytes for {self.elements:,} elements: "
            f"{self.bits_per_element:.3f} bits an element, "
            f"{self.dense_bytes / max(self.payload_bytes, 1):.2f}x less than dense"
        )
        if self.ratio is None:
            return said
        verdict = f"{self.ratio:.2f}x less than"
        if self.ratio < 1:
            verdict = f"{1 / max(self.ratio, 1e-9):.2f}x MORE than"
        said = (
            f"{said}\nlink {self.link_bytes:,} bytes a device over {self.workers} workers: "
            f"{verdict} a dense all-reduce ({self.dense_link_bytes:,})"
        )
        if self.messages is not None:
            said += f"\n{self.messages:,.4g} messages one after another"
        if len(self.offers) < 2:
            return said
        ways = ", ".join(f"{name} {size:,}" for name, size in self.offers)
        return (
            f"{said}\nof which for the compressed leaves, by each reducer: {ways} (Gather brings "
            "n - 1 payloads to each device, TwoShot a share of n - 1 payloads up and of one mean "
            "down, Psum goes round twice with a share)"
        )


@overload
def describe(
    codec_or_reducer: FullySharded, params: PyTree, workers: None = None
) -> ShardedDescription: ...


@overload
def describe(
    codec_or_reducer: Any, params: PyTree, workers: int | tuple[int, ...] | None = None
) -> Description: ...


def describe(
    codec_or_reducer: Any, params: PyTree, workers: int | tuple[int, ...] | None = None
) -> Description | ShardedDescription:
    """Describes the payload of a tree, leaf by leaf, and the chosen reducer with the reason.

    Args:
        codec_or_reducer: the first argument of `compressed_mean`; or what `sharded_optimizer` or
            `fully_sharded` returned, of which the latter knows its workers.
        params: the parameters, or their shapes and dtypes.
        workers: the number of workers, which adds the bytes that one device sends over its link,
            with the chosen reducer and with the alternatives; one number for each axis of
            `Hierarchical`.

    Returns:
        A `Description`, or a `ShardedDescription` of a fully sharded model; print it.

    Raises:
        ValueError: if the first argument is not a codec, `Policy`, `Link` or reducer.

    Example:
        >>> import jaxcomp
        >>> like = {"w": jnp.zeros((64, 64)), "b": jnp.zeros(64)}
        >>> for line in describe(jaxcomp.sign(), like).lines:
        ...     print(line.path, line.codec, line.bits_per_element, line.reason)
        b dense float32 32.0 1-D, below min_ndim=2
        w Quantizer(Sign, MeanAbs, Nearest, bucket_size=512) 1.0625 default
    """
    if isinstance(codec_or_reducer, FullySharded):
        return fsdp_description.of(codec_or_reducer, params)
    if isinstance(codec_or_reducer, ShardedOptimizer):
        codec_or_reducer = codec_or_reducer.reducer
    source = choose.link_or_reducer(codec_or_reducer)
    axes = workers if isinstance(workers, tuple) else (1 if workers is None else workers,)
    for number in axes:
        checks.integer("workers", number, 1)
    plan = choose.plan(source, params, sizes=axes)
    layout, dtype = plan.layout, plan.dense_dtype
    spent = [0.0] * len(layout.likes)
    for batch, size in zip(layout.batches, plan.batch_bytes, strict=True):
        for leaf, part in batch.bytes_of(size):
            spent[leaf] += part
    lines = []
    for number, like in enumerate(layout.likes):
        codec = layout.codecs[number]
        dense = dtype or like.dtype
        bytes_ = spent[number] if codec is not None else float(like.size * dense.itemsize)
        bits = 8 * bytes_ / like.size if like.size else 8.0 * dense.itemsize
        lines.append(
            Line(
                path=layout.paths[number],
                shape=like.shape,
                dtype=like.dtype.name,
                codec=f"dense {dense.name}" if codec is None else short(codec),
                bits_per_element=bits,
                payload_bytes=bytes_,
                reason="dense reducer" if plan.given.uplink is None else layout.reasons[number],
            )
        )
    return Description(
        lines=tuple(lines),
        elements=sum(like.size for like in layout.likes),
        payload_bytes=plan.payload_bytes,
        dense_bytes=sum(like.size * jnp.dtype(like.dtype).itemsize for like in layout.likes),
        picked=_picked(codec_or_reducer, source, plan, workers)
        + _phases(plan, params)
        + "".join(f"\nrule {path!r} decides no leaf" for path in layout.unused)
        + "".join(f"\n{hint}" for hint in low_rank.merged_layers(layout)),
        workers=workers,
        link_bytes=None if workers is None else choose.wire_bytes(source, params, workers),
        messages=None
        if workers is None
        else Plan.of(plan.given, params, sizes=choose.sizes_of(plan.given, axes)).messages,
        dense_link_bytes=None
        if workers is None
        else sum(
            wire_cost.ring_bytes(like.size * like.dtype.itemsize, math.prod(axes))
            for like in layout.likes
        ),
        offers=_offers(source, params, workers),
    )


def _offers(source: Any, params: PyTree, workers: Any) -> tuple[tuple[str, int], ...]:
    """The link bytes of the compressed leaves under each reducer of payloads."""
    if workers is None or not isinstance(source, Link | Gather | TwoShot):
        return ()
    link: Any = choose.uplink(source)
    ways = {Gather: Gather(link), TwoShot: choose.two_shot(link, whole=True)}
    ways |= {type(way): way for way in (*choose.candidates(link), *choose.candidates(source))}
    sizes = (math.prod(workers) if isinstance(workers, tuple) else workers,)
    plans = {kind.__name__: Plan.of(way, params, sizes=sizes) for kind, way in ways.items() if way}
    return tuple((name, math.ceil(p.compressed_link_bytes)) for name, p in plans.items())


def _phases(plan: Plan, params: PyTree) -> str:
    """The payload of each phase of a schedule; the table is of its last phase."""
    lines = []
    for start, phase in plan.given.facts.phases:
        size = Plan.of(phase, params, sizes=(1,)).payload_bytes
        lines.append(f"\nfrom step {start:,}: {short(phase.uplink.codec)}, payload {size:,} bytes")
    return "".join(lines)


def _picked(given: Any, source: Any, plan: Plan, workers: Any) -> str:
    uplink = choose.uplink(source)
    if uplink is None:
        return f"reducer {source!r}, as given"
    if not plan.layout.batches:
        return "no leaf is compressed: the policy leaves every one of them dense"
    feedback = type(uplink.feedback).__name__
    if isinstance(source, Reducer):
        return f"reducer {type(source).__name__} with {feedback}, as given"
    taken = f"reducer {_taken(source, plan, workers)}"
    if isinstance(given, Link):
        return f"{taken}, feedback {feedback} as given"
    if feedback == "Residual":
        why = "the codec is contractive: what it drops is sent later"
    elif all(codec.unbiased for codec in uplink.policy.codecs):
        why = "the codec is unbiased"
    else:
        why = "the codec's error can exceed its input, so a residual would grow"
    return f"{taken}, feedback {feedback} ({why})"


def _taken(link: Link, plan: Plan, workers: Any) -> str:
    """The reducer that is chosen for this number of workers, and the reason."""
    names = [type(way).__name__ for way in choose.candidates(link)]
    if len(names) == 1:
        why = (
            "both halves of a shift"
            if names == ["TwoShot"]
            else "a codec takes its leaves whole, or has no feedback for the way down"
        )
        return f"{names[0]} (the default: {why})"
    if workers is None:
        return f"{' or '.join(names)} (the default: what moves fewer bytes for the workers)"
    number = math.prod(plan.sizes)
    return f"{type(plan.given).__name__} (the default: it moves fewest bytes for {number})"
