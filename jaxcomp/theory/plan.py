"""Will it pay? What a step takes by each of several ways to average, and the best of them."""

import dataclasses
import json
import math
from typing import Any

from jaxcomp import checks, tables
from jaxcomp.theory import cost


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to take the mean.

    Args:
        name: what it is called.
        price: what it asks of a device and its slow link.
        dense: whether it sends every element, at full or half precision.
        error: mean squared error over mean square of one message, or None if it is not known.
        fast: the same over the fast links that lie before the slow ones, if there are any.
    """

    name: str
    price: cost.Price
    dense: bool = False
    error: float | None = None
    fast: cost.Price = cost.Price()


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What a step takes by one way.

    Attributes:
        way: which.
        mean: seconds of the mean: `links` on the wire and `work` beside it.
        step: seconds of a training step.
        speedup: how many times shorter than the baseline's step this is.
        break_even: bytes a second of the slow link below which it beats the baseline.
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
    """What `plan` found; `print` it, or take `best`.

    Attributes:
        forecasts: one for each way, the shortest step first.
        baseline: the name of the way that they are compared with.
        network: the slow link.
        conditions: the other arguments of `forecast`, such as `compute`.
        best: the forecast to go by: dense, unless compressing shortens the step by more than
            `margin` and the mean by more than `doubt`.
        leaves: the choice for each leaf under `best`, as `describe` has it, if a tree was given.
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
        """How much faster compressing must be to be advised."""
        return self.conditions["margin"]

    @property
    def doubt(self) -> float:
        """By what part a forecast of a mean may be off."""
        return self.conditions["doubt"]

    @property
    def about(self) -> str:
        """A line of what was planned for; empty if that was not said."""
        elements, workers = self.conditions["elements"], self.conditions["workers"]
        if elements is None:
            return ""
        return (
            f"{elements:,} elements over {' x '.join(map(str, workers))} workers, "
            f"{speed(self.network.bandwidth)}, {duration(self.network.latency)} a message"
        )

    def on(self, network: cost.Network) -> "Plan":
        """The same on another link."""
        ways = [line.way for line in self.forecasts]
        return forecast(ways, network, baseline=self.baseline, **self.conditions)

    @property
    def best(self) -> Forecast:
        first = self.forecasts[0]
        dense = min((f for f in self.forecasts if f.way.dense), key=lambda f: f.step)
        hardly = dense.step <= (1 + self.margin) * first.step
        return dense if hardly or first.mean > (1 - self.doubt) * dense.mean else first

    @property
    def compress(self) -> bool:
        """Whether to compress at all."""
        return not self.best.way.dense

    def __str__(self) -> str:
        rows = [("", "step", "mean", "of it work", "MB sent", "speed-up", "pays below", "error")]
        for forecast in self.forecasts:
            way = forecast.way
            rows.append(
                (
                    ("→ " if forecast is self.best else "  ") + way.name,
                    duration(forecast.step),
                    duration(forecast.mean),
                    duration(forecast.work),
                    f"{way.price.bytes / 1e6:.4g}",
                    f"{forecast.speedup:.3g}x",
                    "" if way.name == self.baseline else speed(forecast.break_even),
                    "" if way.error is None else f"{way.error:.2g}",
                )
            )
        lines = tables.text(rows, right=[False] + [True] * 7)
        text = [*([self.about, ""] if self.about else []), *lines, "", self.verdict]
        return "\n".join(text + ([] if self.leaves is None else ["", str(self.leaves)]))

    @property
    def verdict(self) -> str:
        """The answer in a sentence."""
        best = self.best
        if self.compress:
            which = "of" if best.break_even == math.inf else "below"
            return (
                f"Take {best.way.name}: a step of {duration(best.step)}, {best.speedup:.3g} times "
                f"shorter than by {self.baseline}; it pays on links {which} "
                f"{speed(best.break_even)}."
            )
        return (
            f"Do not compress: {best.way.name} takes {duration(best.step)} a step, and nothing "
            f"that was looked at is more than {100 * self.margin:.0f} % faster with a mean that is "
            f"more than {100 * self.doubt:.0f} % shorter."
        )

    def to_json(self) -> str:
        """Everything, in seconds, bytes and bytes a second; `null` where a number is infinite."""

        def plain(number: float) -> float | None:
            return number if math.isfinite(number) else None

        return json.dumps(
            {
                "elements": self.conditions["elements"],
                "workers": self.conditions["workers"],
                "network": dataclasses.asdict(self.network),
                "compute": self.compute,
                "baseline": self.baseline,
                "best": self.best.way.name,
                "compress": self.compress,
                "ways": [
                    {
                        "name": f.way.name,
                        "dense": f.way.dense,
                        "bytes": f.way.price.bytes,
                        "error": f.way.error,
                        "step": f.step,
                        "mean": f.mean,
                        "work": f.work,
                        "speedup": f.speedup,
                        "break_even": plain(f.break_even),
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
            },
            indent=1,
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
) -> Plan:
    """Compares ways to take a mean on one link.

    `step = compute + max(0, mean − overlap · backward) / every`, by `theory.cost`.

    Args:
        ways: what to compare, of which at least one is dense.
        network: the slow link.
        compute: seconds of a step without communication.
        backward: what of it is the backward pass.
        overlap: the fraction of the backward pass that the mean runs beside.
        every: steps from one mean to the next.
        fast: the links that lie before the slow ones, as between the devices of a host.
        baseline: the name of the way to compare with; the first dense one by default.
        margin: how much faster compressing must be to be worth it.
        doubt: by what part a forecast of a mean may be off: compressing must save more of it. Nine
            of ten over shaped links of known speed were within 0.2, and a difference is of two.
        elements: how many the mean is of, to be printed and written with the rest.
        workers: how many there are on each level, likewise.

    Raises:
        ValueError: without a dense way, for an unknown baseline or numbers out of range, or if a
            way crosses fast links and there are none.
    """
    checks.number("margin", margin, 0.0)
    checks.number("doubt", doubt, 0.0, 1.0)
    known = {way.name: way for way in ways}
    dense = [way.name for way in ways if way.dense]
    if not dense:
        raise ValueError(f"`ways` must have a dense one to compare with, got {', '.join(known)}")
    baseline = dense[0] if baseline is None else baseline
    checks.choice("baseline", baseline, tuple(known))
    found = {way.name: _cost(way, network, fast) for way in ways}

    def step(name: str) -> float:
        mean = sum(found[name])
        return cost.step(compute, mean, backward=backward, overlap=overlap, every=every)

    def entire(way: Way) -> cost.Price:
        return way.price + cost.Price(work=_on(way.fast, fast))

    base = step(baseline)
    forecasts = []
    for way in ways:
        seconds = step(way.name)
        edge = cost.break_even(
            entire(known[baseline]),
            entire(way),
            latency=network.latency,
            hidden=overlap * backward,
        )
        gain = base / seconds if seconds else 1.0
        forecasts.append(Forecast(way, *found[way.name], seconds, gain, edge))
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
    }
    return Plan(ordered, baseline, network, conditions)


def _cost(way: Way, network: cost.Network, fast: cost.Network | None) -> tuple[float, float]:
    """Seconds on all links, and of work."""
    links = way.price.seconds(network) - way.price.work + _on(way.fast, fast)
    return links, way.price.work


def _on(price: cost.Price, fast: cost.Network | None) -> float:
    if price == cost.Price():
        return 0.0
    if fast is None:
        raise ValueError(
            "`fast` must be the network between the devices of a host, for ways that cross it"
        )
    return price.seconds(fast)


def duration(seconds: float) -> str:
    """As people say it: 1.23 s, 45.6 ms, 7.89 µs."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"


def speed(bandwidth: float) -> str:
    """A bandwidth in bits a second, from one in bytes: 9.6 Gbit/s."""
    if bandwidth == math.inf:
        return "any speed"
    if bandwidth <= 0:
        return "never"
    for unit, scale in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if 8 * bandwidth >= scale:
            return f"{8 * bandwidth / scale:.3g} {unit}"
    return f"{8 * bandwidth / 1e3:.3g} kbit/s"
