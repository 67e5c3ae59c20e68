"""`jaxcomp report`: a run as one picture, a table and its alarms, from the file of a log."""

import argparse
import itertools
import math
import pathlib
import statistics
import sys
from operator import itemgetter
from typing import Any

import numpy as np

from jaxcomp.cli import output
from jaxcomp.planning import plots
from jaxcomp.tables import Column
from jaxcomp.telemetry import Alarms, read_csv
from jaxcomp.telemetry.alarms import WINDOWS
from jaxcomp.telemetry.records import Record
from jaxcomp.transforms.stats import Stats

_BYTES = ("payload_bytes", "link_bytes", "spare_bytes")
_COUNTS = ("skipped", "rounds", "messages")


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


_COLUMNS = (
    Column("of a step", itemgetter("name")),
    Column("first", itemgetter("first"), _short, right=True),
    Column("median", itemgetter("median"), _short, right=True),
    Column("last", itemgetter("last"), _short, right=True),
    Column("in all", itemgetter("total"), _short, right=True),
)


def report(args: argparse.Namespace) -> None:
    """Draws a run, and prints its numbers and alarms.

    Raises:
        ValueError: for a file that cannot be read or written, or a window below 2; and at the end,
            after the numbers and alarms, if matplotlib is not installed.
    """
    path, find = args.plot or args.file.with_suffix(".png"), Alarms(window=args.window)
    missing = _missing(path)
    records = read_csv(args.file)
    alarms = [alarm for record in records for alarm in find(record)]
    if not missing:
        figure = plots.figure_class()(figsize=(10, 13), layout="constrained")
        draw(figure, records, alarms)
        figure.savefig(path, dpi=120)
    found = [_summary(name, records) for name in records[0] if name != "step"]
    steps = f"{records[0]['step']:,.0f} to {records[-1]['step']:,.0f}"
    picture = "no picture" if missing else f"the picture is {path}"
    about = f"{len(records)} records of steps {steps}; {picture}."
    told = {"steps": len(records), "picture": None if missing else str(path), "values": found}
    told |= {"window": args.window, "unchecked": _unchecked(records, args.window)}
    told["alarms"] = [str(alarm) for alarm in alarms]
    output.show(args, told, _COLUMNS, found, about)
    if not args.json:
        print(f"\nAlarms over windows of {args.window} records (--window):")
        print(*told["unchecked"], *(alarms or ["no alarms"]), sep="\n")
    if missing:
        sys.stdout.flush()
        raise missing


def _missing(path: pathlib.Path) -> ValueError | None:
    """The error without matplotlib, which the numbers do not need; a wrong path raises at once."""
    try:
        plots.figure_class()
    except ValueError as error:
        return error
    plots.check(path)
    return None


def _unchecked(records: list[Record], window: int) -> list[str]:
    """Sentences about the alarms that this file cannot raise."""
    count, needed, found = len(records), WINDOWS * window, []
    if count < window:
        found.append(f"Alarms over a window are not checked: the file has {count} records.")
    elif count < needed:
        found.append(
            f"'residual grows' is not checked: {WINDOWS} windows need {needed} records, and the "
            f"file has {count}. Take --window {max(2, count // WINDOWS)}."
        )
    if not _ending(records, "residual_norm"):
        found.append("'residual grows' is not checked: the file has no residual_norm.")
    return found


def draw(figure: Any, records: list[Record], alarms: list[Any]) -> None:
    """Panels over the steps: own values, errors, norms, bytes and losses; lines mark alarms."""
    steps = [record["step"] for record in records]
    own = [
        name
        for name in records[0]
        if name.rpartition("/")[2] not in Stats._fields and name not in ("step", *_COUNTS)
    ]
    panels = {
        "values of the run": own,
        "relative error of a message": _ending(records, "relative_error"),
        "norm of the residual": _ending(records, "residual_norm"),
        "norm of the gradient": _ending(records, "gradient_norm"),
        "norm of the residual over that of the gradient": _ending(records, "residual_ratio"),
        "bytes over a device's link, in all": _ending(records, "link_bytes"),
        "fraction of clipped values": _ending(records, "saturation"),
        "lost elements": _ending(records, "lost"),
    }
    logarithmic = ("values of the run", "norm of the residual", "norm of the gradient")
    for (title, names), axes in zip(panels.items(), figure.subplots(4, 2).flat, strict=True):
        for name in names:
            values = np.array([record[name] for record in records])
            if name.endswith("link_bytes"):
                values = np.cumsum(values * _since(records))
            axes.plot(steps, values, label=name.rpartition("/")[0] or name, linewidth=1.3)
        for step in {alarm.step for alarm in alarms}:
            axes.axvline(step, color="red", linewidth=0.8, linestyle=":")
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        drawn = [record[name] for record in records for name in names]
        finite = [value for value in drawn if math.isfinite(value)]
        if title in logarithmic and finite and 0 < 100 * min(finite) < max(finite):
            axes.set_yscale("log")
        if len(names) > 1 or names == own != []:
            axes.legend(fontsize=8)
        if not names:
            axes.text(0.5, 0.5, "none in the file", ha="center", transform=axes.transAxes)


def _ending(records: list[Record], field: str) -> list[str]:
    """The columns of a field, of each mean."""
    return [name for name in records[0] if name.rpartition("/")[2] == field]


def _since(records: list[Record]) -> np.ndarray:
    """The steps that each record stands for: those since the one before."""
    steps = [record["step"] for record in records]
    gaps = [max(0.0, after - before) for before, after in itertools.pairwise(steps)]
    return np.array([gaps[0] if gaps else 1.0, *gaps])


def _summary(name: str, records: list[Record]) -> dict[str, Any]:
    values = [record[name] for record in records]
    finite = [value for value in values if math.isfinite(value)]
    total = None
    if name.rpartition("/")[2] in (*_BYTES, "lost"):
        with np.errstate(all="ignore"):  # Infinities and NaN of the file are its own.
            total = float(np.sum(np.array(values) * _since(records)))
    return {
        "name": name,
        "first": values[0],
        "median": statistics.median(finite) if finite else math.nan,
        "last": values[-1],
        "total": total,
    }
