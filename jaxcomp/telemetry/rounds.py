"""The rounds of a training between sites, from the file that its server appends to.

Sites choose numbers and words in it, so lines are checked, and texts are made harmless to print. A
line that cannot be read is counted and left out. When a server goes on from an older round, the
lines of later rounds before it no longer count.
"""

import collections
import math
import os
import pathlib
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxcomp import checks
from jaxcomp.federated.checkpoint import ROUNDS
from jaxcomp.telemetry import round_lines
from jaxcomp.telemetry.round_lines import Row, finite, plain
from jaxcomp_files import lines

RECENT = 50
"""Rounds whose seconds give the pace, the forecast, and how long a server may be silent."""

_BATCH = 50
_SUMS = ("accepted", "late", "refused", "up", "down", "ages")
_LAST = ("seen", "answered", "event", "age", "loss", "steps", "seconds", "tokens")
_EVENTS = ("accepted", "late", "refused")


class Rounds:
    """The rounds of a training so far, from the file in its server's folder; `read` reads on.

    Args:
        folder: the folder of the server's checkpoints.

    Attributes:
        folder: the folder.
        rows: the rounds, in ascending order.
        epoch: rises when rows before the last one have changed.
        unread: how many lines could not be read.

    Raises:
        ValueError: if there is no such file.
    """

    def __init__(self, folder: str | os.PathLike):
        checks.path("folder", folder)
        self.folder = pathlib.Path(folder)
        self._path = self.folder / ROUNDS
        if not self._path.is_file():
            raise ValueError(
                f"`folder` must be that of a server's checkpoints, CompressedFedAvg(checkpoint="
                f"folder), in which it has begun {ROUNDS}, got {folder}"
            )
        self.epoch = 0
        self._clear()

    def _clear(self) -> None:
        self.epoch += 1
        self.rows: list[Row] = []
        self.unread = self._offset = 0
        self._file = -1
        self._start: dict[str, Any] = {}
        self._end: dict[str, Any] = {}
        self._now: dict[str, Any] = {}  # The line of the last round.
        self._sums = {name: np.zeros(0) for name in _SUMS}
        self._last = {name: np.zeros(0) for name in _LAST}
        self._nodes: dict[int, tuple[int, str]] = {}
        self._why: dict[tuple[int, str], tuple[int, str]] = {}
        self._kind: dict[int, tuple[int, str]] = {}
        self._kinds: dict[int | None, collections.Counter[str]] = {}

    def read(self) -> None:
        """Reads the lines that are new.

        Raises:
            ValueError: if the file is gone.
        """
        try:
            found = self._path.stat()
            if found.st_ino != self._file or found.st_size < self._offset:
                self._load()
                return
            new, self._offset = lines.read(self._path, self._offset)
        except OSError as error:
            raise ValueError(f"cannot read {self._path}: {error.strerror}") from None
        if not self._go_on([line for text in new if (line := self._parse(text))]):
            self._load()  # The server went back to an older round.

    def _load(self) -> None:
        """Reads the whole file, from its end: the last line of a round counts."""
        self._clear()
        self._file = self._path.stat().st_ino
        texts, self._offset = lines.read(self._path)
        batch: list[dict[str, Any]] = []
        rows: list[Row] = []
        below, starts, ends = math.inf, [], []
        for text in reversed(texts):
            line = self._parse(text)
            if line is None:
                continue
            if line["kind"] == "end":
                ends += [] if starts or batch or rows else [line]
                continue
            if line["kind"] == "start":
                starts.append(line)
            elif line["round"] < below:
                batch.append(line)
            below = min(below, line["round"])
            if len(batch) == _BATCH:
                rows += self._add(batch[::-1])[::-1]
                batch = []
        rows += self._add(batch[::-1])[::-1]
        self.rows = rows[::-1]
        self._start, self._end = starts[0] if starts else {}, ends[0] if ends else {}

    def _go_on(self, new: list[dict[str, Any]]) -> bool:
        """Adds lines at the end; False if one of them takes the place of an older one."""
        last = self.rows[-1].round if self.rows else -1
        batch = []
        for line in new:
            if line["kind"] == "end":
                self._end = line
                continue
            if line["round"] <= last:
                return False
            self._end = {}
            if line["kind"] == "start":
                self._start = line
            else:
                last = line["round"]
                batch.append(line)
        self.rows += self._add(batch)
        return True

    def _parse(self, text: bytes) -> dict[str, Any] | None:
        """A line; None for one that cannot be read, which is counted."""
        line = round_lines.parse(text)
        self.unread += line is None
        return line

    def _add(self, batch: list[dict[str, Any]]) -> list[Row]:
        """Adds lines of rounds in ascending order, and returns their rows."""
        if not batch:
            return []
        try:
            found = round_lines.tables(batch)
        except round_lines.WRONG:
            if len(batch) == 1:
                self.unread += 1
                return []
            return [row for line in batch for row in self._add([line])]
        asked, accepted = found.asked, found.accepted
        self._grow(found.highest)
        self._count(asked, accepted)
        for refusal in found.refused:
            self._refuse(*refusal)
        for number, client, node in found.nodes:
            _keep(self._nodes, client, number, node)
        if found.current["round"] >= self._now.get("round", -1):
            self._now = found.current
        return found.rows

    def _grow(self, client: int) -> None:
        """Makes room for the site of the highest number."""
        more = client + 1 - len(self._sums["up"])
        if more > 0:
            for table, value in ((self._sums, 0.0), (self._last, np.nan)):
                for name in table:
                    table[name] = np.append(table[name], np.full(more, value))

    def _count(self, asked: Mapping[str, np.ndarray], accepted: Mapping[str, np.ndarray]) -> None:
        sums, last, size = self._sums, self._last, len(self._sums["up"])
        who, late = accepted["client"].astype(int), accepted["age"] > 0

        def count(name: str, clients: np.ndarray, values: Any = None) -> None:
            sums[name] += np.bincount(clients, values, minlength=size)

        count("down", asked["client"].astype(int), asked["down"])
        count("up", who, accepted["up"])
        count("accepted", who, ~late)
        count("late", who, late)
        count("ages", who, accepted["age"])
        newer = ~(accepted["round"] < last["answered"][who])  # Also where there was none.
        who = who[newer]  # Of several in a batch, the last one is kept.
        for name in ("loss", "steps", "seconds", "tokens", "age"):
            last[name][who] = accepted[name][newer]
        last["event"][who] = late[newer]
        for name in ("answered", "seen"):
            last[name][who] = accepted["round"][newer]

    def _refuse(
        self, number: int, client: int | None, kind: str, why: str | None, up: float
    ) -> None:
        self._kinds.setdefault(client, collections.Counter())[kind] += 1
        if client is None:
            return
        self._sums["refused"][client] += 1
        self._sums["up"][client] += up
        _keep(self._kind, client, number, kind)
        if why is not None:
            _keep(self._why, (client, kind), number, why)
        last = self._last
        if not number < last["answered"][client]:
            last["answered"][client], last["event"][client] = number, _EVENTS.index("refused")
        if kind != "unavailable" and not number < last["seen"][client]:
            last["seen"][client] = number

    def status(self, now: float) -> dict[str, Any]:
        """The state of the training, and its numbers.

        Args:
            now: the time, in seconds since 1970.
        """
        row = self.rows[-1] if self.rows else None
        recent = [one.seconds for one in self.rows[-RECENT:] if one.seconds is not None]
        times = [finite(self._start.get("time")), None if row is None else row.time]
        said = max((time for time in times if time is not None), default=now)
        pace = statistics.median(recent) if recent else None
        until = self._start.get("until")
        until = until if type(until) is int and abs(until) < 2**53 else None
        begins = row is None or said > row.time  # It may compile.
        allowed = 2 * max(recent, default=60.0) + (60.0 if begins else 5.0)
        ended = self._end.get("start") == self._start.get("start") and bool(self._end)
        error = self._end.get("error") if ended else None
        state = "ended" if ended else "silent" if now - said > allowed else "training"
        done = 0 if row is None else row.round + 1
        left = None if until is None else max(0, until - done)
        forecast = None
        if state == "training" and pace is not None and left is not None:
            forecast = said + left * pace
        refused = sum(self._kinds.values(), collections.Counter())
        return {
            "now": now,
            "state": "failed" if error is not None else state,
            "error": plain(error) if error is not None else None,
            "done": done,
            "until": until,
            "loss": None if row is None else row.loss,
            "pace": pace,
            "allowed": allowed,
            "up": 0 if row is None else row.up,
            "down": 0 if row is None else row.down,
            "age": max(0.0, now - (finite(self._end.get("time")) or said if ended else said)),
            "forecast": forecast,
            "refused": dict(refused.most_common()),
            "strangers": dict(self._kinds.get(None, {})),
            "unread": self.unread,
        }

    def sites(self) -> list[dict[str, Any]]:
        """The sites that have a node or were heard, with what is known of each."""
        waiting, away = self._now.get("waiting", {}), set(self._now.get("away", ()))
        found = []
        for client in range(len(self._sums["up"])):
            last = {name: _number(column[client]) for name, column in self._last.items()}
            if client not in self._nodes and last["answered"] is None:
                continue
            state, note = self._state_of(client, last, waiting, away)
            took = last["seconds"] or math.nan
            sums = {name: _number(column[client]) for name, column in self._sums.items()}
            messages = (sums["accepted"] or 0) + (sums["late"] or 0)
            _, kind = self._kind.get(client, (0, ""))
            number, why = self._why.get((client, kind), (None, ""))
            found.append({
                "site": client,
                "node": self._nodes.get(client, (0, ""))[1],
                "state": state,
                "note": note,
                "seen": last["seen"],
                **{name: sums[name] for name in ("accepted", "late", "refused", "up", "down")},
                "reasons": dict(self._kinds.get(client, collections.Counter()).most_common()),
                "why": f"{kind}: {why}" if number is not None else kind,
                "age": _number((sums["ages"] or 0) / messages) if messages else None,
                "loss": last["loss"],
                "steps": _number((last["steps"] or 0) / took),
                "tokens": None if last["tokens"] is None else _number(last["tokens"] / took),
            })  # fmt: skip
        return found

    def _state_of(
        self, client: int, last: Mapping[str, Any], waiting: Mapping[int, int], away: set[int]
    ) -> tuple[str, str]:
        if client in away:
            return "away", ""
        if client in waiting:
            return "working", f"since round {waiting[client]:,}"
        if last["answered"] is None or last["answered"] < self._now.get("round", -1):
            return "not asked", ""
        event = _EVENTS[int(last["event"])]
        if event == "late":
            return event, f"{last['age']:,.0f} rounds"
        return event, self._kind[client][1] if event == "refused" else ""

    def news(self, epoch: int, after: int, now: float) -> dict[str, Any]:
        """Returns the rows that a page lacks, and the sites if there are new rows.

        Args:
            epoch: the epoch of its rows.
            after: how many it has.
            now: the time, in seconds since 1970.
        """
        after = after if epoch == self.epoch and after <= len(self.rows) else 0
        rows, new = self.rows[after:], epoch != self.epoch or after < len(self.rows)
        columns = {name: [getattr(row, name) for row in rows] for name in Row._fields[:6]}
        return {
            "epoch": self.epoch,
            "after": after,
            "rounds": columns,
            "sites": self.sites() if new else None,
            "status": self.status(now),
        }


def _number(value: float) -> float | int | None:
    """A number for JSON, as a whole one where it is."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else float(value)


def _keep(kept: dict[Any, tuple[int, str]], key: Any, number: int, text: str) -> None:
    """Keeps the text of the latest round."""
    if key not in kept or number >= kept[key][0]:
        kept[key] = number, text
