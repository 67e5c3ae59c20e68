"""Forecasts of a step's time before training, for dense means and for codecs and reducers."""

import dataclasses
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import jax

from jaxcomp import checks, tables
from jaxcomp.base import Reducer
from jaxcomp.exchange import dense as dense_
from jaxcomp.exchange.plan import Plan
from jaxcomp.graphs import mixing
from jaxcomp.planning import kept, models, timing
from jaxcomp.planning.columns import shape, short
from jaxcomp.planning.compared import CODECS, DENSE, LOCAL, delayed, means
from jaxcomp.planning.description import describe
from jaxcomp.reducers import choose
from jaxcomp.reducers.dense import Dense
from jaxcomp.reducers.gossip import Gossip
from jaxcomp.reducers.hierarchical import Hierarchical
from jaxcomp.reducers.power import PowerIteration
from jaxcomp.tables import Column
from jaxcomp.theory import comparison, cost, units
from jaxcomp.theory.candidates import Way
from jaxcomp.theory.comparison import Comparison, Conditions
from jaxcomp.theory.cost import Network
from jaxcomp.types import PyTree
from jaxcomp.wire import cost as wire_cost

_DELAYED = 1e-3
"""Seconds of a message from which on ways are compared that send all messages at once."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The plan of one leaf.

    Attributes:
        path: the path in the tree.
        shape: the shape of the leaf.
        codec: the codec of the leaf; None for dense.
        saved: the seconds of a mean saved in comparison with sending the leaf in the baseline's
            dtype; 0.0 for leaves that stay dense.
    """

    path: str
    shape: tuple[int, ...]
    codec: Any
    saved: float


class Leaves(tuple):
    """The leaves of a forecast, printed as a table: leaves that differ in a number are one row."""

    def __str__(self) -> str:
        groups: dict[tuple[str, ...], list[Leaf]] = {}
        for leaf in self:
            kind = "" if leaf.codec is None else shape(leaf)  # Dense ones are of many shapes.
            name = re.sub(r"\d+", "*", leaf.path)
            groups.setdefault((name, kind, short(leaf.codec)), []).append(leaf)
        return tables.text(_COLUMNS, groups.values())


def _common_path(leaves: list[Leaf]) -> str:
    """`block*/up` for `block0/up` and `block1/up`: the path, with * for numbers that differ."""
    pieces = zip(*(re.split(r"(\d+)", leaf.path) for leaf in leaves), strict=True)
    return "".join(same[0] if len(set(same)) == 1 else "*" for same in pieces) or "(the array)"


def _common_shape(leaves: list[Leaf]) -> str:
    return shape(leaves[0]) if len({leaf.shape for leaf in leaves}) == 1 else "various"


def _saved(leaves: list[Leaf]) -> float | None:
    return None if leaves[0].codec is None else sum(leaf.saved for leaf in leaves)


_COLUMNS = (
    Column("leaf", _common_path),
    Column("leaves", len, right=True),
    Column("shape", _common_shape),
    Column("send it by", lambda leaves: short(leaves[0].codec)),
    Column("saves", _saved, units.duration),
)


def plan(
    params: PyTree | int,
    workers: int | tuple[int, ...],
    network: Network,
    *,
    codecs: Mapping[str, Any] | None = None,
    compute: float = 0.0,
    backward: float = 0.0,
    overlap: float = 0.0,
    every: int = 1,
    fast: Network | None = None,
    link_per: str = "host",
    link_only: bool = False,
    margin: float = 0.02,
    doubt: float = 0.25,
    max_error: float | None = None,
    rounds: bool = False,
    clock: kept.Clock | None = None,
) -> Comparison:
    """Forecasts whether compression makes a step faster, for several ways to average gradients.

    Bytes are those of the programs, and times of encoding and decoding those of `clock`. The link
    adds `rounds · α + bytes / β`, with the rounds of every collective. The baseline is a mean in
    bfloat16.

    Args:
        params: the parameters, or their shapes and dtypes; or the number of parameters, for a
            transformer like GPT-2 (`jaxcomp.planning.models.transformer`).
        workers: the number of workers; a tuple such as `(hosts, devices)` if the devices of a host
            have `fast` links: each way then uses `Hierarchical`.
        network: the link of a worker; if `workers` is a tuple, the link of a host or device, as
            `link_per` says.
        codecs: codecs or reducers to compare, by name; a codec is tried with each suitable reducer.
            None for a usual selection.
        compute: seconds of a training step without communication.
        backward: seconds of its backward pass.
        overlap: the fraction of the backward pass that overlaps with the mean; 0 for a mean after
            the gradients.
        every: the number of steps from one mean to the next.
        fast: the link between the devices of a host.
        link_per: "host" if all devices of a host share one `network` link, such as a network card;
            "device" if each device has its own.
        link_only: True counts only the links: nothing is timed, and encoding and decoding take no
            time.
        margin: the speedup of a step above which compression is recommended.
        doubt: the relative error to expect of forecasts; compression must shorten the mean by more
            than this to be recommended.
        max_error: leave out codecs whose error on one message is larger than this, as mean squared
            error over mean square of normally distributed elements, and recommend any other. None
            compares all, and recommends no error of 0.9 and more, nor of 0.2 and more with a
            residual, except that of low rank.
        rounds: True compares what methods of local steps send too, for `jaxcomp.planning.rounds`.
        clock: a function that times a link or reducer, such as `jaxcomp.planning.measure`, which
            measures on this device. By default it is asked once for each codec on a machine, and
            not at all for usual codecs on a CPU: their times come with the package, and are scaled
            by the time of a copy here.

    Raises:
        ValueError: for numbers out of range, fewer than two workers, several numbers of them
            without `fast`, or a `link_per` that is neither.

    Example:
        >>> import jaxcomp
        >>> slow = Network(bandwidth=12.5e6, latency=1e-4)  # 100 Mbit/s.
        >>> found = plan(100_000, 8, slow, codecs={"sign": jaxcomp.sign()})
        >>> found.best.way.name, round(found.best.way.price.bytes / 1e3)
        ('sign, TwoShot', 31)

    Note:
        Ways are ranked only by the time of a step. The model does not include convergence: a codec
        with a larger error may need more steps. `error` is the relative error of one message on a
        normal vector, without feedback; `caution` names the fastest way if it loses nearly all.
    """
    sizes = sizes_of(workers, network, link_per)
    _check(workers, sizes, codecs, fast)
    if isinstance(params, int):
        params = models.transformer(params)
    clock, machines = kept.noting(clock, link_only)
    # The link of a host carries the bytes of all of its devices.
    sharing = sizes[-1] if len(sizes) > 1 and link_per == "host" else 1
    given = CODECS if codecs is None else codecs
    delay = network.latency if network.latency >= _DELAYED else None
    named = ways({**given, **LOCAL} if rounds else given, sizes, delay)
    found = [_way(name, reducer, params, sizes, clock, sharing) for name, reducer in named.items()]
    if codecs is not None:  # Who names a codec knows what it needs.
        found = [dataclasses.replace(way, biased=False) for way in found]
    if rounds:
        found = [dataclasses.replace(way, local=way.name in LOCAL) for way in found]
    within = [way for way in found if max_error is None or (way.error or 0.0) <= max_error]
    large = [way.name for way in found if way not in within]
    conditions = Conditions(
        compute=compute,
        backward=backward,
        overlap=overlap,
        every=every,
        fast=fast,
        margin=margin,
        doubt=doubt,
        elements=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
        workers=sizes,
        link_per=link_per,
        timed=not link_only,
        machine=", ".join(sorted(machines)),
        bold=max_error is not None,
        left_out=_left_out(given, sizes, large, max_error),
        means={} if codecs is not None else means(named, sizes, delay),
    )
    compared = comparison.compare(within, network, conditions, baseline="dense bfloat16")
    taken = named[compared.best.way.name]
    leaves = _leaves(taken, params, sizes, network, clock, sharing)
    return dataclasses.replace(compared, leaves=leaves)


def _left_out(
    codecs: Mapping[str, Any], sizes: tuple[int, ...], large: list[str], max_error: float | None
) -> tuple[str, ...]:
    """The ways that are not compared, and why."""
    found = []
    low_rank = [name for name, given in codecs.items() if isinstance(given, PowerIteration)]
    if len(sizes) > 1 and low_rank:
        found.append(
            f"{', '.join(low_rank)}, which Hierarchical does not take (over the slow axis of a "
            "model that is sharded over the fast ones it can be used: plan that axis alone)"
        )
    if large:
        found.append(f"{', '.join(large)}, with an error above {max_error:g}")
    return tuple(found)


def sizes_of(workers: Any, network: Any, link_per: str) -> tuple[int, ...]:
    """The number of workers on each axis; raises a `ValueError` for wrong types."""
    sizes = workers if isinstance(workers, tuple) else (workers,)
    for size in sizes:
        checks.integer("workers", size, 1)
    checks.choice("link_per", link_per, ("host", "device"))
    call = "jaxcomp.planning.Network(bandwidth=1.25e9, latency=50e-6)"
    checks.instance("network", network, Network, call)
    return sizes


def _check(workers: Any, sizes: tuple[int, ...], codecs: Any, fast: Network | None) -> None:
    """Raises a `ValueError` for arguments that do not fit together."""
    if codecs is not None and not isinstance(codecs, Mapping):
        raise ValueError(
            "`codecs` must be codecs or reducers by name, such as {'sign': jaxcomp.sign()}, got "
            f"{codecs!r}"
        )
    if math.prod(sizes) < 2:
        raise ValueError(f"`workers` must be at least 2 in all, got {workers!r}")
    if (len(sizes) > 1) != (fast is not None):
        raise ValueError(
            "`fast` must be the network of the last workers if `workers` has several numbers, and "
            f"only then, got workers={workers!r} and fast={fast!r}"
        )


def ways(
    codecs: Mapping[str, Any], sizes: tuple[int, ...], delay: float | None = None
) -> dict[str, Any]:
    """By name, dense means and the given codecs by each reducer that can take them."""
    found: dict[str, Any] = {
        name: delayed(mean, delay if len(sizes) == 1 else None) for name, mean in DENSE.items()
    }
    for name, given in codecs.items():
        source = choose.link_or_reducer(given)
        if isinstance(source, Reducer):
            found[name] = source
            continue
        for way in choose.candidates(source):
            found[f"{name}, {type(way).__name__}"] = delayed(way, delay)
    if len(sizes) == 1:
        return found
    return {
        name: reducer
        if isinstance(reducer, Dense | Hierarchical)
        else Hierarchical(Dense(), reducer)
        for name, reducer in found.items()
        if not isinstance(reducer, PowerIteration)  # Hierarchical does not take it.
    }


def price(
    reducer: Any, like: PyTree, workers: tuple[int, ...], clock: kept.Clock = timing.measure
) -> tuple[cost.Price, cost.Price]:
    """The cost of a mean to a device: its slow link and its work, and the fast links before it.

    Raises:
        ValueError: if the reducer does not say what efforts it makes.
    """
    if isinstance(reducer, Dense) and len(workers) > 1:
        return _dense(reducer, like, workers, clock)
    plan = Plan.of(reducer, like, sizes=choose.sizes_of(reducer, workers))
    layout, efforts = plan.layout, plan.costs.efforts
    if efforts is None:
        raise ValueError(
            "`reducer` must define efforts in its costs(plan), from which its time is computed, "
            f"got {reducer!r}"
        )
    compressed = sum(like.size for like in layout.likes) - sum(
        layout.likes[i].size for i in layout.dense
    )
    elements = compressed if reducer.uplink else sum(like.size for like in layout.likes)
    size: Fraction | int = plan.link_bytes
    fast = cost.Price()
    if isinstance(reducer, Gossip) and size:  # A round lasts until its busiest worker has sent.
        rounds = mixing.rounds(reducer.graph, plan.workers)
        size *= rounds.busiest / rounds.degree
    if plan.fast is not None:
        size -= plan.fast_bytes
        fast = cost.Price(plan.fast_bytes, cost.ring(0, plan.sizes[-1]).rounds)
    total = cost.Price(float(size))
    for who, effort in efforts:
        work = effort.seconds(clock(who).work, elements)
        total += cost.Price(rounds=effort.rounds, work=work)
    if reducer.uplink and layout.dense:
        total += cost.Price(rounds=plan.dense_messages)
    return total, fast


def _dense(
    reducer: Dense, like: PyTree, workers: tuple[int, ...], clock: kept.Clock
) -> tuple[cost.Price, cost.Price]:
    """A dense mean over two axes: each device brings a share over its slow link."""
    *outer, inner = workers
    plan = Plan.of(reducer, like, sizes=(1,))
    elements, size = sum(leaf.size for leaf in plan.layout.likes), plan.payload_bytes
    slow = cost.ring(size / inner, math.prod(outer))
    work = elements * clock(reducer).work.encode
    return slow + cost.Price(work=work), cost.ring(size, inner)


def _way(
    name: str, reducer: Any, like: PyTree, workers: tuple[int, ...], clock: kept.Clock, sharing: int
) -> Way:
    timed: list[timing.Measured] = []

    def noted(way: Any) -> timing.Measured:
        timed.append(clock(way))
        return timed[-1]

    spent, fast = price(reducer, like, workers, noted)
    spent = dataclasses.replace(spent, bytes=sharing * spent.bytes)
    dense = isinstance(reducer, Dense)
    link = reducer.uplink
    low_rank = isinstance(reducer, PowerIteration)
    error = None if dense else noted(reducer if low_rank else link).error
    spread = max((found.spread for found in timed), default=0.0)
    biased = link is not None and link.feedback.facts.keeps_unsent
    return Way(
        name,
        spent,
        dense=dense,
        error=error,
        low_rank=low_rank,
        fast=fast,
        spread=spread,
        biased=biased,
    )


def _leaves(
    reducer: Any,
    like: PyTree,
    workers: tuple[int, ...],
    network: Network,
    clock: kept.Clock,
    sharing: int,
) -> Leaves:
    """The codec of each leaf by the best way, and the seconds that it saves.

    A leaf travels with the others: it has a share of their bytes and work, and no messages.
    """
    layout = Plan.of(reducer, like, sizes=choose.sizes_of(reducer, workers)).layout
    devices = math.prod(workers)
    spent, _ = price(reducer, like, workers, clock)
    dense = dense_.fused_link_bytes([layout.likes[i] for i in layout.dense], devices)
    lines = describe(reducer, like).lines
    compressed = [i for i, codec in enumerate(layout.codecs) if codec and layout.likes[i].size]
    payload = sum(lines[i].payload_bytes for i in compressed)
    elements = sum(layout.likes[i].size for i in compressed)
    found = []
    for number, (path, leaf) in enumerate(zip(layout.paths, layout.likes, strict=True)):
        saved = 0.0
        if number in compressed:
            sent = (spent.bytes - float(dense)) * lines[number].payload_bytes / payload
            other = float(wire_cost.ring(2 * leaf.size, devices)) / workers[-1] ** (
                len(workers) > 1
            )
            saved = sharing * (other - sent) / network.bandwidth - spent.work * leaf.size / elements
        codec = layout.codecs[number] if saved > 0 else None
        found.append(Leaf(path, leaf.shape, codec, max(saved, 0.0)))
    return Leaves(found)
