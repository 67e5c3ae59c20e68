"""The local steps of a round on a given link, with or without a delay that hides the exchange."""

import dataclasses
import math
import textwrap

from jaxcomp import checks, tables
from jaxcomp.tables import Column
from jaxcomp.theory.comparison import Comparison, Forecast
from jaxcomp.theory.units import duration


def seconds(every: int, step: float, exchange: float, delay: int = 0) -> float:
    """Seconds of a round: `H · step + max(0, exchange − τ · step)`.

    Args:
        every: `H`, the steps of a round.
        step: seconds of a step without communication.
        exchange: seconds of an exchange.
        delay: `τ`, the steps that an exchange may take.

    Raises:
        ValueError: for negative times, a round without steps, or a delay that is not below it.

    Example:
        >>> seconds(30, step=0.1, exchange=2.5, delay=20)
        3.5
    """
    checks.integer("every", every, 1)
    checks.integer("delay", delay, 0, every - 1)
    for name, value in (("step", step), ("exchange", exchange)):
        checks.number(name, value, 0.0)
    return every * step + max(0.0, exchange - delay * step)


@dataclasses.dataclass(frozen=True)
class Round:
    """The shortest round of one way to exchange that stalls training by at most the given share.

    Attributes:
        name: the way.
        bytes: the bytes that a device sends in a round.
        error: of one message, as in the comparison; 0.0 for dense ones.
        exchange: seconds of an exchange, its work included.
        alone: `H` without a delay: every exchange stops the steps.
        every: `H` with the delay.
        delay: `τ`, the steps that run beside an exchange; 0 if even a round of one step needs none.
        step: seconds of a step, with its share of the exchange that is not hidden.
        stall: that share, as a fraction of the steps.
        risky: whether its error is so large that `best` does not take it.
        program: what to write for it; empty for codecs of your own.
    """

    name: str
    bytes: float
    error: float
    exchange: float
    alone: int
    every: int
    delay: int
    step: float
    stall: float
    risky: bool = False
    program: str = ""


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Rounds for a link; `print` them, or take `best`.

    Attributes:
        rounds: one for each way, the one that sends most first.
        compute: seconds of a step without communication.
        stall: the share of the steps that exchanges may add.
        longest: the longest round to prefer.
        about: a line that describes the setup; empty if it is not known.
    """

    rounds: tuple[Round, ...]
    compute: float
    stall: float
    longest: int
    about: str = ""

    @property
    def best(self) -> Round:
        """The way of smallest error that fits rounds of at most `longest` steps, if not risky.

        Of several with the same error the one of the shortest round; so too where none fits.
        """
        safe = [one for one in self.rounds if not one.risky]
        fits = [one for one in safe if one.every <= self.longest]
        if not fits:
            return min(safe, key=lambda one: one.every)
        return min(fits, key=lambda one: (one.error, one.every))

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes below the table."""
        risky = [one.name for one in self.rounds if one.risky]
        if not risky:
            return ()
        return (f"!: not taken unasked, since its codec's error is large: {', '.join(risky)}.",)

    @property
    def verdict(self) -> str:
        """The answer in a sentence."""
        one = self.best
        hidden = f"delay={one.delay}" if one.delay else "no delay"
        told = (
            f"Take {one.name} with every={one.every} and {hidden}: a step of "
            f"{duration(one.step)}, {100 * one.stall:.1f} % above one without communication"
        )
        if one.every > self.longest:
            return f"{told}. Nothing fits rounds of {self.longest} steps: compress more, or wait."
        if one.delay:
            told += f"; without the delay every={one.alone}"
        return f"{told}. No safe way within {self.longest} steps a round has less error."

    def to_json(self) -> str:
        """All of it as JSON; `null` where a number is infinite."""
        return tables.to_json({**dataclasses.asdict(self), "best": self.best.name})

    def __str__(self) -> str:
        columns = (
            Column(
                "",
                lambda one: ("→ " if one is self.best else "! " if one.risky else "  ") + one.name,
            ),
            Column(
                "MB a round",
                lambda one: one.bytes / 1e6,
                lambda mb: f"{mb:,.4g}" if mb < 1e3 else f"{mb:,.0f}",
                right=True,
            ),
            Column("error", "error", ".2g", right=True),
            Column("exchange", "exchange", duration, right=True),
            Column("every, no delay", "alone", right=True),
            Column("every", "every", right=True),
            Column("delay", "delay", right=True),
            Column("step", "step", duration, right=True),
        )
        table = tables.text(columns, self.rounds)
        said = [textwrap.fill(text, 100) for text in (self.verdict, *self.notes)]
        about = [f"{self.about}, a step of {duration(self.compute)}", ""] if self.about else []
        code, indent = self.best.program, " " * 4
        code = textwrap.fill(code, 100, initial_indent=indent, subsequent_indent=2 * indent)
        written = ["", code, ""] if code else []
        return "\n".join([*about, table, "", said[0], *written, *said[1:]])


LONGEST_DELAY = 2 / 3
"""Of a round: 40 of 60 steps, the longest delay with which training was measured."""


def rounds(
    plan: Comparison, *, stall: float = 0.05, longest: int = 100, delayed: float = LONGEST_DELAY
) -> Rounds:
    """The steps of a round, the bits and the delay for a link: `H`, bits and `τ`.

    An exchange of `T` seconds stalls a round of `H` steps of `t` seconds by `max(0, T − τ t)`. For
    every way of the plan, this is the least `H` at which that is at most `stall · H t`: without a
    delay `H = T / (stall · t)`; with one, about `H = T / ((delayed + stall) t)` and
    `τ = min(T / t, delayed · H)`.

    Args:
        plan: from `jaxcomp.plan(..., compute=...)`, with a link as measured.
        stall: the share of the steps that exchanges may add to their time.
        longest: the longest round to prefer: of the ways that fit, the one of smallest error is
            `best`.
        delayed: the longest delay, as a share of the round, from 0 to 1: two thirds is that of
            the longest that was measured, 40 of 60 steps; 0 for none.

    Raises:
        ValueError: for a plan without the time of a step, or numbers out of range.

    Example:
        >>> import jaxcomp
        >>> link = jaxcomp.planning.Network(bandwidth=1.25e6, latency=1e-4)  # 10 Mbit/s.
        >>> planned = jaxcomp.plan(5_000_000, 4, link, compute=0.1, link_only=True)
        >>> found = rounds(planned)
        >>> found.best.name, found.best.every, found.best.delay
        ('qsgd_inf 8-bit, TwoShot', 86, 57)

    Note:
        `jaxcomp.plan(..., rounds=True)` compares SparseLoCo's messages too. This counts time
        alone. Published runs lose little up to a few hundred steps per round, more
        with fewer bits, and with a delay that is a large part of the round; that is to be tried.
    """
    checks.instance("plan", plan, Comparison, "plan of jaxcomp.plan(..., compute=0.1)")
    checks.positive("compute", plan.compute)
    checks.positive("stall", stall)
    checks.integer("longest", longest, 1)
    checks.number("delayed", delayed, 0.0, 1.0)
    found = [_round(line, plan, stall, delayed) for line in plan.forecasts]
    found.sort(key=lambda one: -one.bytes)
    return Rounds(tuple(found), plan.compute, stall, longest, plan.about)


def _round(line: Forecast, comparison: Comparison, stall: float, delayed: float) -> Round:
    step, exchange = comparison.compute, line.mean
    delayed = 0.0 if line.way.local else delayed  # Such methods were measured without a delay.
    alone = max(1, math.ceil(exchange / (stall * step) - 1e-9))

    def delay(every: int) -> int:
        most = min(every - 1, math.floor(delayed * every + 1e-9))
        return min(most, math.ceil(exchange / step - 1e-9))

    def hides(every: int) -> bool:
        whole = seconds(every, step, exchange, delay(every))
        return whole <= (1 + stall) * every * step * (1 + 1e-9)

    every = max(1, math.ceil(exchange / ((delayed + stall) * step) - 1e-9))
    every = next(h for h in range(every, alone + 1) if h == alone or hides(h))
    hidden = 0 if every == alone else delay(every)
    whole = seconds(every, step, exchange, hidden)
    return Round(
        name=line.way.name,
        bytes=line.way.price.bytes,
        error=line.way.error or 0.0,
        exchange=exchange,
        alone=alone,
        every=every,
        delay=hidden,
        step=whole / every,
        stall=whole / (every * step) - 1,
        risky=line.way.risky,
        program=_written(comparison.conditions.means.get(line.way.name), line, every, hidden),
    )


def _written(mean: str | None, line: Forecast, every: int, delay: int) -> str:
    if mean is None:
        return ""
    name, how = "sparseloco" if line.way.local else "diloco", ""
    if delay:
        name, how = "streaming_diloco", f", fragments=1, delay={delay}"
    return f"jaxcomp.algorithms.{name}({mean}, axis_name, every={every}{how})"
