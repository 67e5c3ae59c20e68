"""Compares the time of a step for several ways to average, and recommends one."""

import dataclasses
import math
import textwrap
import types
from collections.abc import Mapping
from typing import Any

from jaxcomp import checks
from jaxcomp.theory import cost, tables
from jaxcomp.theory.candidates import BIASED_ERROR, HIGH_ERROR, Way
from jaxcomp.theory.units import duration, speed

_OF_WORK = ("of it work", "spread", "pays below")
"""Columns left out of a table without timed codecs."""
_COLUMNS = 100
_SCATTER = 0.2
"""A spread of times above which a plan says that the machine was not idle."""


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
class Plan:
    """The result of `plan`; `print` it, or take `best`.

    Attributes:
        forecasts: one for each way, the shortest step first.
        baseline: the name of the way to compare with.
        network: the slow link.
        conditions: the other arguments of `forecast`, such as `compute`.
        best: the recommended forecast: dense, unless compression shortens the step by more than
            `margin` and the mean by more than `doubt`. `risky` ways are recommended only with
            `bold`; otherwise convergence is not part of this: see `caution` and `notes`.
        leaves: the choice for each leaf under `best`, as in `describe`, if a tree was given.
    """

    forecasts: tuple[Forecast, ...]
    baseline: str
    network: cost.Network
    conditions: dict[str, Any]
    leaves: Any = None

    @property
    def compute(self) -> float:
        """Seconds of a step without communication."""
        return self.conditions["compute"]

    @property
    def margin(self) -> float:
        """The speedup above which compression is recommended."""
        return self.conditions["margin"]

    @property
    def doubt(self) -> float:
        """The relative error to expect of a forecast of a mean."""
        return self.conditions["doubt"]

    @property
    def about(self) -> str:
        """A line that describes the planned setup; empty if it is not known."""
        elements, workers = self.conditions["elements"], self.conditions["workers"]
        if elements is None:
            return ""
        link = speed(self.network.bandwidth)
        if len(workers) > 1:
            shared = self.conditions["link_per"] == "host"
            link += f" for each host of {workers[-1]} devices" if shared else " for each device"
        return (
            f"{elements:,} elements over {' x '.join(map(str, workers))} workers, {link}, "
            f"{duration(self.network.latency)} a message{'' if self.timed else ', links alone'}"
        )

    def on(self, network: cost.Network) -> "Plan":
        """The same plan on another link."""
        ways = [line.way for line in self.forecasts]
        return forecast(ways, network, baseline=self.baseline, **self.conditions)

    @property
    def best(self) -> Forecast:
        bold = self.conditions["bold"]
        means = [found for found in self.forecasts if not found.way.local]
        first = next(found for found in means if bold or not found.way.risky)
        dense = min((f for f in self.forecasts if f.way.dense), key=lambda f: f.step)
        hardly = dense.step <= (1 + self.margin) * first.step
        return dense if hardly or first.mean > (1 - self.doubt) * dense.mean else first

    @property
    def compress(self) -> bool:
        """Whether to compress at all."""
        return not self.best.way.dense

    def __str__(self) -> str:
        columns = [
            ("", lambda f: ("→ " if f is self.best else "  ") + f.way.name),
            ("step", lambda f: duration(f.step)),
            ("mean", lambda f: duration(f.mean)),
            ("of it work", lambda f: duration(f.work)),
            ("spread", lambda f: f"{100 * f.way.spread:.0f} %"),
            ("MB sent", lambda f: f"{f.way.price.bytes / 1e6:.4g}"),
            ("speed-up", lambda f: f"{f.speedup:.3g}x"),
            ("pays below", lambda f: "" if f.way.name == self.baseline else speed(f.break_even)),
            ("error", lambda f: "" if f.way.error is None else f"{f.way.error:.2g}"),
            ("", lambda f: f.way.mark),
        ]
        if not self.timed:
            columns = [each for each in columns if each[0] not in _OF_WORK]
        rows = [[head for head, _ in columns]]
        rows += [[cell(forecast) for _, cell in columns] for forecast in self.forecasts]
        text = [self.about, ""] if self.about else []
        text += tables.text(rows, right=[False] + [True] * (len(columns) - 1))
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
        return self.conditions["timed"]

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
            f"that was looked at is more than {100 * self.margin:.0f} % faster with a mean that is "
            f"more than {100 * self.doubt:.0f} % shorter."
        )

    @property
    def program(self) -> str:
        """What to write for the recommended way; empty for a dense one or codecs of your own."""
        mean = self.conditions["means"].get(self.best.way.name)
        return f"jaxcomp.compressed_mean({mean}, axis_name)" if mean and self.compress else ""

    @property
    def caution(self) -> str:
        """Advice on a risky way that is the fastest; empty if there is none."""
        first, best = self.forecasts[0], self.best
        doubts = "training may need many more steps, or fail"
        if best.way.risky:
            return f"But its error is {best.way.error:.2g}: {doubts}."
        if not first.way.risky:
            return ""
        return (
            f"{first.way.name} would take {duration(first.step)}, but its error is "
            f"{first.way.error:.2g}: {doubts}. `max_error` (--max-error) allows it."
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
        if len(self.conditions["workers"]) > 1:
            own = "host" if self.conditions["link_per"] == "host" else "device"
            found.append(f"MB sent: over the slow link of one {own}.")
        left_out = self.conditions["left_out"]
        if left_out:
            found.append(f"Left out: {'; '.join(left_out)}.")
        return tuple(found)

    def to_json(self) -> str:
        """Everything, in seconds, bytes and bytes per second; `null` where a number is infinite."""
        return tables.to_json(
            {
                "elements": self.conditions["elements"],
                "workers": self.conditions["workers"],
                "network": dataclasses.asdict(self.network),
                "compute": self.compute,
                "baseline": self.baseline,
                "link_per": self.conditions["link_per"],
                "timed": self.timed,
                "best": self.best.way.name,
                "compress": self.compress,
                "program": self.program,
                "ranked_by": "step",
                "fastest": self.forecasts[0].way.name,
                "caution": self.caution,
                "notes": self.notes,
                "ways": [
                    {
                        "name": f.way.name,
                        "dense": f.way.dense,
                        "bytes": f.way.price.bytes,
                        "error": f.way.error,
                        "risky": f.way.risky,
                        "spread": f.way.spread,
                        "step": f.step,
                        "mean": f.mean,
                        "work": f.work,
                        "speedup": f.speedup,
                        "break_even": f.break_even,
                    }
                    for f in self.forecasts
                ],
                "leaves": [
                    {
                        "path": leaf.path,
                        "shape": leaf.shape,
                        "codec": None if leaf.codec is None else repr(leaf.codec),
                        "saved": leaf.saved,
                    }
                    for leaf in self.leaves or ()
                ],
            }
        )


def forecast(
    ways: list[Way],
    network: cost.Network,
    *,
    compute: float = 0.0,
    backward: float = 0.0,
    overlap: float = 0.0,
    every: int = 1,
    fast: cost.Network | None = None,
    baseline: str | None = None,
    margin: float = 0.02,
    doubt: float = 0.25,
    elements: int | None = None,
    workers: tuple[int, ...] = (),
    link_per: str = "host",
    timed: bool = True,
    bold: bool = False,
    left_out: tuple[str, ...] = (),
    means: Mapping[str, str] = types.MappingProxyType({}),
) -> Plan:
    """Compares ways to take a mean on one link.

    `step = compute + max(0, mean − overlap · backward) / every`, by `theory.cost`.

    Args:
        ways: the ways to compare, at least one of them dense.
        network: the slow link.
        compute: seconds of a step without communication.
        backward: seconds of the backward pass within `compute`.
        overlap: the fraction of the backward pass that overlaps with the mean.
        every: the number of steps from one mean to the next.
        fast: the fast links, such as those between the devices of a host.
        baseline: the name of the way to compare with; the first dense one by default.
        margin: the smallest speedup for which compression is recommended.
        doubt: the relative error to expect of a forecast of a mean; compression must save more than
            this. Nine of ten forecasts over shaped links of known speed were within 0.2, and a
            difference involves two forecasts.
        elements: the number of elements of the mean, for the printed table.
        workers: the number of workers on each level, for the printed table.
        link_per: "host" or "device", the owner of the slow link, for the printed table.
        timed: whether the prices include encoding and decoding, for the printed table.
        bold: whether ways of a high error may be recommended.
        left_out: what was not compared, and why, for the notes.
        means: what to write for the mean of a way, by its name.

    Raises:
        ValueError: without a dense way, for an unknown baseline or numbers out of range, or if a
            way crosses fast links and there are none.
    """
    checks.number("margin", margin, 0.0)
    checks.number("doubt", doubt, 0.0, 1.0)
    reference = _reference(ways, baseline)
    within = {way.name: _seconds(way.fast, fast) for way in ways}
    links, steps, whole = {}, {}, {}
    for way in ways:
        name, work = way.name, way.price.work
        links[name] = way.price.seconds(network) - work + within[name]
        steps[name] = cost.step(
            compute, links[name] + work, backward=backward, overlap=overlap, every=every
        )
        whole[name] = way.price + cost.Price(work=within[name])
    forecasts = []
    for way in ways:
        name, hidden = way.name, overlap * backward
        edge = cost.break_even(
            whole[reference.name], whole[name], latency=network.latency, hidden=hidden
        )
        gain = steps[reference.name] / steps[name] if steps[name] else 1.0
        forecasts.append(Forecast(way, links[name], way.price.work, steps[name], gain, edge))
    ordered = tuple(sorted(forecasts, key=lambda found: found.step))
    conditions = {
        "compute": compute,
        "backward": backward,
        "overlap": overlap,
        "every": every,
        "fast": fast,
        "margin": margin,
        "doubt": doubt,
        "elements": elements,
        "workers": workers,
        "link_per": link_per,
        "timed": timed,
        "bold": bold,
        "left_out": left_out,
        "means": means,
    }
    return Plan(ordered, reference.name, network, conditions)


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
