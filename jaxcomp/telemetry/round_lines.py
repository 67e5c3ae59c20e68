"""Lines of the file of rounds: whether they are right, and many of them as columns."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

WRONG = (ValueError, TypeError, KeyError, AttributeError, OverflowError)
"""Errors of a line that is not one of ours."""

_SITES = 1 << 20
"""More sites than a training has; a larger number is not that of a site."""
_LETTERS = 200
_LONG = 1e12
"""Seconds that no round takes, and after which none ends."""
_ASKED = ("client", "down")
_ACCEPTED = ("client", "age", "up", "loss", "steps", "seconds", "tokens")
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)  # NaN and infinities, too.
_COUNTS = ("client", "down", "age", "up")


class Row(NamedTuple):
    """The numbers of a round; None where a line has none.

    Attributes:
        round: its number, from 0.
        time: when it ended, in seconds since 1970.
        seconds: since the round before ended, or since the server began.
        loss: the mean of the accepted sites' losses.
        asked: how many sites were asked.
        accepted: how many messages were part of the mean.
        up: bytes that sites sent so far.
        down: bytes that the server sent so far.
    """

    round: int
    time: float
    seconds: float | None
    loss: float | None
    asked: int
    accepted: int
    up: float
    down: float


class Tables(NamedTuple):
    """Lines of rounds, as columns.

    Attributes:
        rows: the row of each line.
        asked: the columns of all sites that were asked, and the round of each.
        accepted: the same of all accepted messages.
        refused: the round, client, kind, cause and bytes of each refused answer.
        nodes: the round, client and node of each seat that was taken.
        current: the sites that work, and those that are away, at the end of the last line.
        highest: the highest number of a site; -1 for none.
    """

    rows: list[Row]
    asked: dict[str, np.ndarray]
    accepted: dict[str, np.ndarray]
    refused: list[tuple[int, int | None, str, str | None, float]]
    nodes: list[tuple[int, int, str]]
    current: dict[str, Any]
    highest: int


def parse(text: bytes) -> dict[str, Any] | None:
    """A line whose kind, round and time are right; None for others."""
    try:
        line = _DECODER.decode(text.decode())
        right = line["kind"] == "end" or 0 <= line["round"] < 2**53
        right &= type(line.get("round", 0)) is int and 0 <= line["time"] < _LONG
        return line if right and line["kind"] in ("start", "round", "end") else None
    except (*WRONG, RecursionError):
        return None


def tables(batch: Sequence[Mapping[str, Any]]) -> Tables:
    """Lines of rounds in ascending order, as columns.

    Raises:
        WRONG: if one of the lines is not right.
    """
    asked, accepted = _table(batch, "asked", _ASKED), _table(batch, "accepted", _ACCEPTED)
    refused = [one for line in batch for one in _refusals(line)]
    nodes = [one for line in batch for one in _nodes(line)]
    columns = asked["client"], accepted["client"]
    highest = max(int(column.max(initial=-1)) for column in columns)
    highest = max(highest, *(one for _, one, *_ in refused if one is not None), -1)
    highest = max(highest, *(one for _, one, _ in nodes), -1)
    rows = [_row(line) for line in batch]
    return Tables(rows, asked, accepted, refused, nodes, _current(batch[-1]), highest)


def plain(text: Any) -> str:
    """A text that cannot move the cursor, turn the direction of writing, or be long."""
    cut = str(text)[:_LETTERS]
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in cut
    )


def finite(value: Any) -> float | None:
    """A number of JSON; None for others, infinities and NaN."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _row(line: Mapping[str, Any]) -> Row:
    time, up, down = (finite(line[name]) for name in ("time", "up", "down"))
    if time is None or up is None or down is None:
        raise ValueError("a number is missing")
    seconds, loss = finite(line.get("seconds")), finite(line.get("loss"))
    seconds = None if seconds is None or not 0 <= seconds < _LONG else seconds
    counts = len(line["asked"]["client"]), len(line["accepted"]["client"])
    return Row(line["round"], time, seconds, loss, *counts, up, down)


def _table(
    batch: Sequence[Mapping[str, Any]], part: str, names: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """The columns of a table of all lines, and the round of each element.

    A column of equal elements is written as one element.
    """
    columns: dict[str, list[Any]] = {name: [] for name in (*names, "round")}
    for line in batch:
        table = line[part]
        count = len(table["client"])
        for name in names:
            column = table.get(name)
            column = column if type(column) is list else [column] * count
            if len(column) != count:
                raise ValueError(f"{name} must have {count} elements")
            columns[name] += column
        columns["round"] += [line["round"]] * count
    found = {name: np.array(column, np.float64) for name, column in columns.items()}
    for name, column in found.items():
        if column.ndim != 1 or (name in _COUNTS and not np.all((column >= 0) & (column < 2**53))):
            raise ValueError(f"{name} must have counts")
        column[~np.isfinite(column)] = np.nan
    clients = found["client"]
    if np.any((clients >= _SITES) | (clients != np.floor(clients))):
        raise ValueError("client must have numbers of sites")
    return found


def _number(value: Any, below: int = _SITES) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise ValueError("not the number of a site or round")
    return value


def _refusals(line: Mapping[str, Any]) -> list[tuple[int, int | None, str, str | None, float]]:
    """The round, client, kind, cause and bytes of each refused answer."""
    found = []
    for one in line.get("refused") or ():
        client = None if one["client"] is None else _number(one["client"])
        why = plain(one["why"]) if one.get("why") is not None else None
        up = finite(one.get("up", 0))
        if up is None or up < 0:
            raise ValueError("up must be a count")
        found.append((line["round"], client, plain(one["kind"])[:40], why, up))
    return found


def _nodes(line: Mapping[str, Any]) -> list[tuple[int, int, str]]:
    """The round, client and node of each seat that was taken."""
    nodes = line.get("nodes") or {}
    return [(line["round"], _number(int(n)), plain(node)) for n, node in nodes.items()]


def _current(line: Mapping[str, Any]) -> dict[str, Any]:
    """The sites that work, and those that are away, at the end of a round."""
    waiting, away = line.get("waiting") or {}, line.get("away") or ()
    pairs = zip(waiting.get("client", ()), waiting.get("since", ()), strict=True)
    working = {_number(client): _number(since, 2**53) for client, since in pairs}
    return {"round": line["round"], "waiting": working, "away": [_number(n) for n in away]}
