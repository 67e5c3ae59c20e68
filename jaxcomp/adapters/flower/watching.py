"""The file of rounds for `jaxcomp watch`: a line of JSON when training begins, for each round, and
when training ends.

A line is written after the round's checkpoint, so the file has no round that a restart repeats. A
client chooses the numbers in it and the words of "why", but no name.
"""

import contextlib
import json
import math
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxcomp.adapters.flower.seats import Seats
from jaxcomp.adapters.flower.server_round import Refusal, Round, Taken, log
from jaxcomp.federated.checkpoint import ROUNDS
from jaxcomp.federated.simulation import Report
from jaxcomp_files import lines

_REPORTED = ("steps", "seconds", "tokens")
"""The numbers of a client that are written, if it reports them."""


class Watch:
    """Appends what happened to the file of rounds; an error of the disk ends no training.

    Args:
        folder: the folder of the checkpoints; None to write nothing.
        seats: which node is which client.
    """

    def __init__(self, folder: pathlib.Path | None, seats: Seats):
        self._path = None if folder is None else folder / ROUNDS
        self._seats = seats
        self._nodes: dict[int, int] = {}  # As the lines of this process have them.
        self._why: dict[tuple[int, str], str] = {}
        self._last = time.monotonic()
        self._failed = False

    @contextlib.contextmanager
    def training(self, first: int, rounds: int, clients: int) -> Iterator[None]:
        """Writes when rounds begin, and how they end."""
        start = time.time_ns()
        self._nodes, self._why, self._last = {}, {}, time.monotonic()
        more = {"round": first, "until": first + rounds, "clients": clients}
        self._append({"kind": "start", "start": start, "time": start / 1e9, **more})
        said = None
        try:
            yield
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"[:200]
            raise
        finally:
            self._append({"kind": "end", "start": start, "time": time.time(), "error": said})

    def write(
        self,
        report: Report,
        totals: tuple[int, int],
        rounds: Sequence[Round],
        taken: Mapping[int, Taken],
        sizes: Mapping[int, int],
    ) -> None:
        """Writes a round.

        Args:
            report: of the round.
            totals: bytes of all messages so far, up and down.
            rounds: the round, after those whose clients may still have answered.
            taken: the accepted messages, by client.
            sizes: bytes of the messages of this round, by client.
        """
        refusals = [one for each in rounds for one in each.refusals]
        for each in rounds:
            each.refusals.clear()
        if self._path is None:
            return
        try:
            line = self._line(report, totals, rounds, taken, sizes)
            line["refused"] = [self._refused(one, sizes) for one in refusals]
            self._append(line)
        except Exception as error:  # Whatever clients report, training goes on.
            self._fail(error)

    def _line(
        self,
        report: Report,
        totals: tuple[int, int],
        rounds: Sequence[Round],
        taken: Mapping[int, Taken],
        sizes: Mapping[int, int],
    ) -> dict[str, Any]:
        now, last = time.monotonic(), self._last
        self._last = now
        nodes = self._seats.nodes
        new = {str(n): str(node) for n, node in nodes.items() if self._nodes.get(n) != node}
        self._nodes = nodes
        order = sorted(taken)
        accepted: dict[str, Any] = {
            "client": order,
            "age": _column([report.round - taken[client].round for client in order]),
            "up": _column([sizes.get(client, 0) for client in order]),
            "loss": _column([_number(taken[client].loss) for client in order]),
        }
        reported = [_reported(taken[client]) for client in order]
        for name in _REPORTED:
            accepted[name] = _column([_plain(numbers.get(name)) for numbers in reported])
        waiting = [(client, each.number) for each in rounds for client in sorted(each.waiting)]
        return {
            "kind": "round",
            "round": report.round,
            "time": round(time.time(), 3),
            "seconds": round(now - last, 3),
            "loss": _number(report.loss),
            "up": totals[0],
            "down": totals[1],
            "asked": {
                "client": list(rounds[-1].sizes),
                "down": _column(list(rounds[-1].sizes.values())),
            },
            "accepted": accepted,
            "waiting": {
                "client": [client for client, _ in waiting],
                "since": [number for _, number in waiting],
            },
            "away": self._seats.away,
            "nodes": new,
        }

    def _refused(self, one: Refusal, sizes: Mapping[int, int]) -> dict[str, Any]:
        """A refused answer, with its cause if it is another than last time."""
        found: dict[str, Any] = {"client": one.client, "kind": one.kind}
        if one.client is None:  # Anybody's words.
            return found
        if one.client in sizes:
            found["up"] = sizes[one.client]
        if self._why.get((one.client, one.kind)) != one.why:
            self._why[one.client, one.kind] = found["why"] = one.why
        return found

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        text = json.dumps(line, separators=(",", ":"), allow_nan=False)
        try:
            lines.append(self._path, text.encode())
        except OSError as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            log.warning("`jaxcomp watch` misses rounds: %s: %r", self._path, error)
        self._failed = True
        self._nodes, self._why = {}, {}  # The next line has them again.


def _column(values: list[Any]) -> Any:
    """A column of the line: one element if all are equal."""
    return values[0] if len(set(values)) == 1 else values


def _number(value: float) -> float | None:
    """A number with the digits of float32; None if it is not finite, which JSON has no word for."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def _reported(one: Taken) -> dict[str, Any]:
    """All that a client reports, by name."""
    found: dict[str, Any] = {}
    for record in one.metrics.values():  # `metric_records` copies them, which takes long.
        found.update(record.items())
    return found


def _plain(value: Any) -> float | int | None:
    """A number that a client reports; None for lists, and if it is not finite."""
    if isinstance(value, int):
        return value if abs(value) < 2**53 else None
    return _number(value) if isinstance(value, float) else None
