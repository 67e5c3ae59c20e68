"""Compares the time of a step for several ways to average, and recommends one."""

import dataclasses
import math
import textwrap
from collections.abc import Mapping
from typing import Any

from jaxcomp import checks, tables
from jaxcomp.tables import Column
from jaxcomp.theory import cost
from jaxcomp.theory.candidates import BIASED_ERROR, HIGH_ERROR, Way
from jaxcomp.theory.units import duration, speed

_OF_WORK = ("of it work", "spread", "pays below")
"""Columns left out of a table without timed codecs."""
_OF_WAY = (
    "way.name", "way.dense", "way.price.bytes", "way.error", "way.risky", "way.spread",
    "step", "mean", "work", "speedup", "break_even",
)  # fmt: skip
"""A forecast as JSON has it."""
_COLUMNS = 100
_SCATTER = 0.2
"""A spread of times above which a note says that the machine was not idle."""


@dataclasses.dataclass(frozen=True)
class Conditions:
    """The step and the links around a mean, and when to recommend compression.

    Attributes:
        compute: seconds of a step without communication.
        backward: seconds of the backward pass within `compute`.
        overlap: the fraction of the backward pass that overlaps with the mean.
        every: the number of steps from one mean to the next.
        fast: the fast links, such as those between the devices of a host.
        margin: the smallest speedup for which compression is recommended.
        doubt: the relative error to expect of a forecast of a mean; compression must save more than
            this. Nine of ten forecasts over shaped links of known speed were within 0.2, and a
            difference involves two forecasts.
        elements: the number of elements of the mean, for the printed table.
        workers: the number of workers, for each kind of link, for the printed table.
        link_per: "host" or "device", the owner of the slow link, for the printed table.
        timed: whether the prices include encoding and decoding, for the printed table.
        machine: the machine whose times were scaled to this one, for the notes.
        bold: whether ways of a high error may be recommended.
        left_out: what was not compared, and why, for the notes.
        means: what to write for the mean of a way, by its name.
    """

    compute: float = 0.0
    backward: float = 0.0
    overlap: float = 0.0
    every: int = 1
    fast: cost.Network | None = None
    margin: float = 0.02
    doubt: float = 0.25
    elements: int | None = None
    workers: tuple[int, ...] = ()
    link_per: str = "host"
    timed: bool = True
    machine: str = ""
    bold: bool = False
    left_out: tuple[str, ...] = ()
    means: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        checks.number("margin", self.margin, 0.0)
        checks.number("doubt", self.doubt, 0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The time of a step by one way.

    Attributes:
        way: the way to take the mean.
        mean: seconds of the mean: `links` on the wire plus `work`.
        step: seconds of a training step.
        speedup: the baseline's step time divided by this one.
        break_even: the bandwidth of the slow link, in bytes per second, below which it is faster
            than the baseline.
    """

    way: Way
    links: float
    work: float
    step: float
    speedup: float
    break_even: float

    @property
    def mean(self) -> float:
        return self.links + self.work


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of `jaxcomp.plan`; `print` it, or take `best`.

    Attributes:
        forecasts: one for each way, the shortest step first.
        baseline: the name of the way to compare with.
        network: the slow link.
        conditions: the step, and when to recommend compression.
        best: the recommended forecast: dense, unless compression shortens the step by more than
            `margin` and the mean by more than `doubt`. `risky` ways are recommended only with
            `bold`; otherwise convergence is not part of this: see `caution` and `notes`.
        leaves: the choice for each leaf under `best`, as in `describe`, if a tree was given.
    """

    forecasts: tuple[Forecast, ...]
    baseline: str
    network: cost.Network
    conditions: Conditions
    leaves: Any = None

    @property
    def compute(self) -> float:
        """Seconds of a step without communication."""
        return self.conditions.compute

    @property
    def about(self) -> str:
        """A line that describes the planned setup; empty if it is not known."""
        elements, workers = self.conditions.elements, self.conditions.workers
        if elements is None:
            return ""
        link = speed(self.network.bandwidth)
        if len(workers) > 1:
            shared = self.conditions.link_per == "host"
            link += f" for each host of {workers[-1]} devices" if shared else " for each device"
        return (
            f"{elements:,} elements over {' x '.join(map(str, workers))} workers, {link}, "
            f"{duration(self.network.latency)} a message{'' if self.timed else ', links alone'}"
        )

    def on(self, network: cost.Network) -> "Comparison":
        """The same ways on another link; ways that send at once for this one's delay stay so."""
        ways = [line.way for line in self.forecasts]
        return compare(ways, network, self.conditions, baseline=self.baseline)

    @property
    def best(self) -> Forecast:
        bold = self.conditions.bold
        means = [found for found in self.forecasts if not found.way.local]
        taken = next(found for found in means if bold or not found.way.risky)
        dense = min((f for f in self.forecasts if f.way.dense), key=lambda f: f.step)
        hardly = dense.step <= (1 + self.conditions.margin) * taken.step
        return dense if hardly or taken.mean > (1 - self.conditions.doubt) * dense.mean else taken

    @property
    def compress(self) -> bool:
        """Whether to compress at all."""
        return not self.best.way.dense

    def __str__(self) -> str:
        columns = [
            Column("", lambda f: ("→ " if f is self.best else "  ") + f.way.name),
            Column("step", "step", duration, right=True),
            Column("mean", "mean", duration, right=True),
            Column("of it work", "work", duration, right=True),
            Column("spread", lambda f: f"{100 * f.way.spread:.0f} %", right=True),
            Column("MB sent", lambda f: f.way.price.bytes / 1e6, ".4g", right=True),
            Column("speed-up", lambda f: f"{f.speedup:.3g}x", right=True),
            Column(
                "pays below",
                lambda f: None if f.way.name == self.baseline else f.break_even,
                speed,
                right=True,
            ),
            Column("error", "way.error", ".2g", right=True),
            Column("", "way.mark", right=True),
        ]
        if not self.timed:
            columns = [each for each in columns if each.title not in _OF_WORK]
        text = [self.about, ""] if self.about else []
        text.append(tables.text(columns, self.forecasts))
        said = " ".join(filter(None, (self.verdict, self.caution)))
        text += ["", textwrap.fill(said, _COLUMNS), ""]
        text += [f"    {self.program}", ""] if self.program else []
        text += [
            textwrap.fill(f"* {note}", _COLUMNS, subsequent_indent="  ") for note in self.notes
        ]
        return "\n".join(text + ([] if self.leaves is None else ["", str(self.leaves)]))

    @property
    def timed(self) -> bool:
        """Whether the forecasts include the time of encoding and decoding."""
        return self.conditions.timed

    @property
    def verdict(self) -> str:
        """The answer in a sentence."""
        best = self.best
        if self.compress:
            which = "of" if best.break_even == math.inf else "below"
            told = f"; it pays on links {which} {speed(best.break_even)}"
            told = told if self.timed else ", counting the links alone"
            return (
                f"Take {best.way.name}: a step of {duration(best.step)}, {best.speedup:.3g} times "
                f"shorter than by {self.baseline}{told}."
            )
        return (
            f"Do not compress: {best.way.name} takes {duration(best.step)} a step, and nothing "
            f"that was looked at is more than {100 * self.conditions.margin:.0f} % faster with a "
            f"mean that is more than {100 * self.conditions.doubt:.0f} % shorter."
        )

    @property
    def program(self) -> str:
        """The line of the recommended way; empty for a dense one or codecs of your own."""
        mean = self.conditions.means.get(self.best.way.name)
        return f"jaxcomp.compressed_mean({mean}, axis_name)" if mean and self.compress else ""

    @property
    def caution(self) -> str:
        """Advice on a risky way that is the fastest; empty if there is none."""
        fastest, best = self.forecasts[0], self.best
        doubts = "training may need many more steps, or fail"
        if best.way.risky:
            return f"But its error is {best.way.error:.2g}: {doubts}."
        if not fastest.way.risky:
            return ""
        return (
            f"{fastest.way.name} would take {duration(fastest.step)}, but its error is "
            f"{fastest.way.error:.2g}: {doubts}. `max_error` (--max-error) allows it."
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Explanations of the table."""
        found = [
            "Ranked by the time of a step. How many steps training needs is not counted: it "
            "depends on the codec, and only a training run tells."
        ]
        if any(forecast.way.error is not None for forecast in self.forecasts):
            found.append(
                "error: what one message loses of a random vector (mean squared error over mean "
                "square), before error feedback sends it later. Gradients that are nearly sparse "
                f"lose less. ! marks {HIGH_ERROR} and more, and {BIASED_ERROR} and more of codecs "
                "with a residual, such as sign: they are not recommended, since training needs "
                f"more steps, and Adam a lower learning rate; ~ marks {HIGH_ERROR} and more of low "
                "rank, which random vectors lack and gradients have."
            )
        if not self.timed:
            found.append(
                "Links alone: no codec was timed; encoding and decoding are counted as no time."
            )
        elif max(forecast.way.spread for forecast in self.forecasts) > _SCATTER:
            found.append(
                "spread: how far the median of the timed repeats is above the fastest one, which "
                "counts here. This machine was busy: run it again when it is idle."
            )
        if self.conditions.machine:
            found.append(
                f"Work: by times of {self.conditions.machine}, scaled by the time of a copy on "
                "this machine. --exact, or clock=jaxcomp.planning.measure, times the codecs here."
            )
        if len(self.conditions.workers) > 1:
            own = "host" if self.conditions.link_per == "host" else "device"
            found.append(f"MB sent: over the slow link of one {own}.")
        left_out = self.conditions.left_out
        if left_out:
            found.append(f"Left out: {'; '.join(left_out)}.")
        return tuple(found)

    def to_json(self) -> str:
        """Everything, in seconds, bytes and bytes per second; `null` where a number is infinite."""
        return tables.to_json(
            {
                **tables.attributes(self, "conditions.elements", "conditions.workers"),
                "network": vars(self.network),
                **tables.attributes(self, "compute", "baseline", "conditions.link_per", "timed"),
                "best": self.best.way.name,
                **tables.attributes(self, "compress", "program"),
                "ranked_by": "step",
                "fastest": self.forecasts[0].way.name,
                **tables.attributes(self, "caution", "notes"),
                "ways": [tables.attributes(f, *_OF_WAY) for f in self.forecasts],
                "leaves": [vars(leaf) for leaf in self.leaves or ()],
            },
            default=repr,  # Of codecs.
        )


def compare(
    ways: list[Way],
    network: cost.Network,
    conditions: Conditions = Conditions(),
    *,
    baseline: str | None = None,
) -> Comparison:
    """Compares ways to take a mean on one link.

    `step = compute + max(0, mean − overlap · backward) / every`, by `theory.cost`.

    Args:
        ways: the ways to compare, at least one of them dense.
        network: the slow link.
        conditions: the step, and when to recommend compression.
        baseline: the name of the way to compare with; the first dense one by default.

    Raises:
        ValueError: without a dense way, for an unknown baseline or numbers out of range, or if a
            way crosses fast links and there are none.
    """
    reference = _reference(ways, baseline)

    def links(way: Way) -> float:
        seconds = way.price.seconds(network) - way.price.work
        return seconds + _seconds(way.fast, conditions.fast)

    def whole(way: Way) -> cost.Price:
        return way.price + cost.Price(work=_seconds(way.fast, conditions.fast))

    def step(way: Way) -> float:
        mean = links(way) + way.price.work
        backward, overlap, every = conditions.backward, conditions.overlap, conditions.every
        return cost.step(conditions.compute, mean, backward=backward, overlap=overlap, every=every)

    hidden, forecasts = conditions.overlap * conditions.backward, []
    for way in ways:
        edge = cost.break_even(whole(reference), whole(way), latency=network.latency, hidden=hidden)
        gain = step(reference) / step(way) if step(way) else 1.0
        forecasts.append(Forecast(way, links(way), way.price.work, step(way), gain, edge))
    ordered = tuple(sorted(forecasts, key=lambda found: found.step))
    return Comparison(ordered, reference.name, network, conditions)


def _reference(ways: list[Way], baseline: str | None) -> Way:
    """The way to compare with: the named one, or the first dense one."""
    known = {way.name: way for way in ways}
    dense = [way.name for way in ways if way.dense]
    if not dense:
        raise ValueError(f"`ways` must have a dense one to compare with, got {', '.join(known)}")
    baseline = dense[0] if baseline is None else baseline
    checks.choice("baseline", baseline, tuple(known))
    return known[baseline]


def _seconds(price: cost.Price, fast: cost.Network | None) -> float:
    """The time on the fast links, which need not be known where nothing crosses them."""
    if price == cost.Price():
        return 0.0
    if fast is None:
        raise ValueError(
            "`fast` must be the network between the devices of a host, for ways that cross it"
        )
    return price.seconds(fast)
