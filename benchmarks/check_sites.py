"""Checks the committed results of training between sites, for `check.py`."""

import statistics
from collections.abc import Iterator

import reporting
from reporting import RESULTS


def between_sites() -> Iterator[tuple[str, bool]]:
    """Links, late and dead sites, and random kills; forecasts of a round."""
    folder = RESULTS / "sites"
    links = reporting.read(folder / "links.json")["links"]
    seconds = {
        name: statistics.median(one["seconds"] for one in runs) for name, runs in links.items()
    }
    ratio = seconds["50 ms, 10 Mbit/s"] / seconds["loopback"]
    yield f"50 ms and 10 Mbit/s take {ratio:.2f} of the loopback's time, at most 1.2", ratio <= 1.2
    events = reporting.read(folder / "events.json")["events"]
    rounds = [statistics.median(one["rounds"] for one in runs) for runs in events.values()]
    ratio = rounds[1] / rounds[0]
    yield f"dead and late sites take {ratio:.2f} of the rounds, at most 1.3", ratio <= 1.3
    replayed: dict[str, dict[str, float]] = {}
    for row in reporting.read(folder / "grace.json")["grace"]:
        replayed.setdefault(row["speeds"], {})[row["way"]] = row["fresh"]
    for speeds, ways in replayed.items():
        best = max(ways[fixed] for fixed in "234")
        ratio = ways["2, grace 1"] / best
        yield f"{speeds}: with grace {ratio:.2f} of the best fixed quorum, above 1", ratio > 1
    kills = reporting.read(folder / "kills.json")["kills"]
    number = sum(kills["killed"].values())
    yield f"{number} failures, at least 100", number >= 100
    yield "what sites gave is what the centre got and residuals hold", kills["difference"] == 0
    losses = reporting.read(folder / "losses.json")["losses"]
    low, high = min(losses["undisturbed"]), max(losses["undisturbed"])
    last = losses["quorum of 4, 90 s"]["last"]["score"]
    yield (
        f"with kills the loss is {last:.3f}, undisturbed {low:.3f} to {high:.3f}",
        (low <= last <= high),
    )
