"""`jaxcomp watch`: a training between sites while it runs, as a page or as text."""

import argparse
import sys
import time
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from jaxcomp.cli import output
from jaxcomp.cli.page import Page
from jaxcomp.tables import Column
from jaxcomp.telemetry.rounds import Rounds
from jaxcomp.theory import units

_Told = Mapping[str, Any]


def _bytes(count: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def _time(seconds: float) -> str:
    """A readable time from a millisecond to weeks."""
    for unit, scale in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.1f} {unit}"
    return units.duration(seconds)


def _clock(now: float) -> str:
    return time.strftime("%d %b %H:%M", time.localtime(now))


def _some(form: str) -> Any:
    return lambda value: "" if value is None else format(value, form)


def _state(site: _Told) -> str:
    return f"{site['state']}: {site['note']}" if site["note"] else site["state"]


def _reasons(site: _Told) -> str | None:
    """The causes of refused answers, and the last one in words."""
    found = ", ".join(f"{count:,} {kind}" for kind, count in site["reasons"].items())
    return f"{found} ({site['why']})" if ":" in site["why"] else found or None


_COLUMNS = (
    Column("site", itemgetter("site"), ",d", right=True),
    Column("state", _state),
    Column("node", itemgetter("node")),
    Column("seen", itemgetter("seen"), _some(",d"), right=True),
    Column("accepted", itemgetter("accepted"), ",d", right=True),
    Column("late", itemgetter("late"), ",d", right=True),
    Column("refused", itemgetter("refused"), ",d", right=True),
    Column("up", itemgetter("up"), _bytes, right=True),
    Column("down", itemgetter("down"), _bytes, right=True),
    Column("mean age", itemgetter("age"), _some(".2f"), right=True),
    Column("loss", itemgetter("loss"), _some(".4g"), right=True),
    Column("steps/s", itemgetter("steps"), _some(".3g"), right=True),
    Column("tokens/s", itemgetter("tokens"), _some(",.0f"), right=True),
    Column("reasons", _reasons, str),
)


def watch(args: argparse.Namespace) -> None:
    """Serves the page until Ctrl-C; `--once` and `--json` print what it would show now.

    Raises:
        ValueError: for a folder without rounds, or a port that is taken.
    """
    rounds = Rounds(args.folder)
    rounds.read()
    if args.once or args.json:
        status, sites = rounds.status(time.time()), rounds.sites()
        output.show(args, {"status": status, "sites": sites}, _COLUMNS, sites, about(status))
        return
    with Page(rounds, args.port) as page:
        print(f"{page.address} shows {args.folder}; Ctrl-C ends it", flush=True)
        try:
            page.serve_forever()
        except KeyboardInterrupt:
            print(file=sys.stderr)


def about(status: _Told) -> str:
    """The line of numbers, and what needs attention."""
    of = "" if status["until"] is None else f" of {status['until']:,}"
    loss = "none" if status["loss"] is None else f"{status['loss']:.5g}"
    said = [f"{status['state']}; {status['done']:,}{of} rounds; loss {loss}"]
    if status["pace"]:
        said.append(f"{60 / status['pace']:.3g} rounds a minute")
    said.append(f"{_bytes(status['up'])} up, {_bytes(status['down'])} down")
    said.append(f"last line {_time(status['age'])} ago")
    if status["forecast"] is not None:
        left = max(0.0, status["forecast"] - status["now"])
        said.append(f"ends at {_clock(status['forecast'])}, in {_time(left)}")
    found = ["; ".join(said) + "."]
    if status["state"] == "silent":
        found.append(
            f"The server has written nothing for {_time(status['age'])}; twice the longest of its "
            f"last rounds is {_time(status['allowed'])}."
        )
    if status["error"] is not None:
        found.append(f"The server's app has ended: {status['error']}")
    if status["strangers"]:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in status["strangers"].items())
        found.append(f"Refused answers of nodes that were not asked: {kinds}.")
    if status["unread"]:
        found.append(f"{status['unread']:,} lines of the file cannot be read.")
    return "\n".join(found)
