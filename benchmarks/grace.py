"""Replays sites of four speeds with stalls: fixed quorums, and a quorum with `grace`.

    python benchmarks/grace.py

No site trains here, and no second passes: times of answers are drawn beforehand, and all ways
decide on the same ones. A site takes its own time for a round, up to a twentieth more or less, and
one message in twenty takes five times as long. It is asked again when the next round begins. The
decision is that of `jaxcomp.adapters.flower.Quorum`. A message has the tokens of one round of a
site, counted in full if it comes in its own round, and with `(1 + age)^(-1/2)` if it is late.
"""

import statistics
from typing import Any, NamedTuple

import numpy as np
import reporting

from jaxcomp.adapters.flower.grace import Grace
from jaxcomp.federated import faults

SPEEDS = {
    "10, 11, 12.5, 14 s": (10.0, 11.0, 12.5, 14.0),
    "10, 12, 15, 30 s": (10.0, 12.0, 15.0, 30.0),
    "10, 10.5, 20, 21 s": (10.0, 10.5, 20.0, 21.0),
    "10, 15, 22, 33 s": (10.0, 15.0, 22.0, 33.0),
}
"""The seconds that the four sites take for a round."""
WAYS = {
    "2": (2, 0.0),
    "3": (3, 0.0),
    "4": (4, 0.0),
    "2, grace 1": (2, 1.0),
    "3, grace 1": (3, 1.0),
}
"""The messages of a quorum, and its grace."""
BETWEEN, JITTER, STALLED, STALL = 2.0, 0.05, 0.05, 5.0
SOONEST = 0.2
"""Seconds between two looks, as between two questions to Flower's SuperLink."""
OLDEST, STALENESS = 4, 0.5

COLUMNS = (
    "sites {speeds} | quorum {way} | in their round {fresh:.1f} | weighted by age {weighted:.1f} | "
    "all {all:.1f} | messages a round {per_round:.2f} | sites idle, % {idle:.0f}"
)


class Working(NamedTuple):
    """A site at work: when its answer comes, and the round in which it was asked."""

    due: float
    round: int


def replay(speeds: tuple[float, ...], way: tuple[int, float], seed: int, hours: float) -> Any:
    """Messages an hour, by age, of one run of so many hours."""
    (quorum, grace), draws = way, [np.random.default_rng([seed, n]) for n in range(len(speeds))]
    arrivals, works = Grace(grace), dict[int, Working]()
    now, number, idle, ages = 0.0, 0, 0.0, []
    while now < 3600 * hours:
        arrivals.begin(now)
        asked = [site for site in range(len(speeds)) if site not in works]
        for site in asked:
            took = speeds[site] * draws[site].uniform(1 - JITTER, 1 + JITTER)
            took *= STALL if draws[site].random() < STALLED else 1
            works[site] = Working(now + took, number)
            arrivals.ask(site, now)
        answered: list[float] = []
        while True:
            own = sum(site not in works for site in asked)
            if own == len(asked) or (own >= quorum and not arrivals.pays(now)):
                break
            now += SOONEST
            for site in [site for site, one in works.items() if one.due <= now]:
                arrivals.came(site, now, sent=True)
                one = works.pop(site)
                ages.append(number - one.round)
                answered.append(one.due)
        now, number = now + BETWEEN, number + 1
        idle += sum(now - due for due in answered)
    weights = np.where(np.array(ages) > OLDEST, 0, faults.stale(np.array(ages), STALENESS))
    each = 3600 / now
    return {
        "fresh": each * ages.count(0),
        "weighted": each * float(weights.sum()),
        "all": each * float((weights > 0).sum()),
        "per_round": len(ages) / number,
        "idle": 100 * idle / now / len(speeds),
    }


def main() -> None:
    options = reporting.options(
        __doc__,
        reporting.RESULTS / "sites",
        seeds=(5, "seeds"),
        hours=(2.0, "of a run"),
    )
    rows = []
    for speeds, seconds in SPEEDS.items():
        for way, given in WAYS.items():
            runs = [replay(seconds, given, seed, options.hours) for seed in range(options.seeds)]
            middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            rows.append({"speeds": speeds, "way": way, **middle, "runs": runs})
    title = "Messages an hour of four sites with stalls, medians of the seeds"
    table = reporting.Table(title, COLUMNS, rows)
    reporting.show(table, {"grace": rows}, options.out / "grace.md")


if __name__ == "__main__":
    main()
