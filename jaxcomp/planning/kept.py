"""Times of codecs that were measured before, so that a plan answers at once.

A codec is measured once on a machine, and its times are kept in a file of the user's cache. For
the codecs that plans compare by default the package has the times of a machine of its own, which
are scaled by the time of a copy here.
"""

import dataclasses
import functools
import importlib
import json
import os
import pathlib
import platform
import tempfile
from collections.abc import Callable
from typing import Any

import jax

from jaxcomp.planning import timing
from jaxcomp.planning.timing import Measured

ELEMENTS = 2**22
"""Elements of a measurement that is kept."""

TABLE = pathlib.Path(__file__).with_name("times.json")
"""Written by `benchmarks/plan_times.py`."""


Clock = Callable[[Any], Measured]


def noting(clock: Clock | None, link_only: bool) -> tuple[Clock, set[str]]:
    """A clock for a plan, and the other machines that its times are of, once it was asked.

    Args:
        clock: the given one, if any.
        link_only: whether work is counted as no time.
    """
    machines: set[str] = set()

    def ask(way: Any) -> Measured:
        took = (clock or (untimed if link_only else measure))(way)
        took = took.free if link_only else took
        machines.update({took.machine} - {""})
        return took

    return ask, machines


def measure(way: Any) -> Measured:
    """The times of a link or reducer: kept ones, those of the table, or measured now and kept.

    Args:
        way: as for `timing.measure`.
    """
    name = name_of(way)
    if (found := _own(name)) is not None:
        return found
    if jax.default_backend() != "cpu" or name not in _table()["times"]:
        return exact(way)
    own = Measured(**_table()["times"][name])
    faster = _table()["copy"] / _copy()
    return dataclasses.replace(own.faster(faster), spread=0.0, machine=_table()["machine"])


def exact(way: Any, elements: int = ELEMENTS, *, repeats: int = 5) -> Measured:
    """The times of a link or reducer, measured now; kept if they are of the usual size.

    Args:
        way: as for `timing.measure`.
        elements: as for `timing.measure`.
        repeats: as for `timing.measure`.
    """
    took = timing.measure(way, elements, repeats=repeats)
    if elements == ELEMENTS:
        known = _read(path())
        own = known.get(_here(), {}) | {name_of(way): dataclasses.asdict(took)}
        _write(path(), known | {_here(): own})
    return took


def untimed(way: Any) -> Measured:
    """The error of a link or reducer without its times: that of the table, or a new one."""
    found = _table()["times"].get(name_of(way))
    return timing.untimed(way) if found is None else Measured(**found).free


def name_of(way: Any) -> str:
    """The name of a way in the table: its `repr`, without the delay of its links."""
    fields = {field.name for field in dataclasses.fields(way)}
    return repr(dataclasses.replace(way, delay=None) if "delay" in fields else way)


def path() -> pathlib.Path:
    """The file with the times of this user's machines."""
    folder = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(folder) / "jaxcomp" / "times.json"


def machine() -> str:
    """The device and the processor, as a person would name them."""
    device, own = jax.local_devices()[0], platform.processor() or platform.machine()
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        own = next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # Not Linux, or a processor without a name.
        pass
    kind = "" if device.platform == "cpu" else f"{device.device_kind} beside "
    return f"{kind}{os.cpu_count()} cores of {own}"


@functools.cache
def _here() -> str:
    """All that times depend on, beside the codec."""
    own = importlib.import_module("jaxcomp").__version__
    return f"{machine()}, jaxcomp {own}, jax {jax.__version__}"


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())


@functools.cache
def _copy() -> float:
    return timing.copy()


def _own(name: str) -> Measured | None:
    """The kept times of a way on this machine; None for those of a version with other fields."""
    try:
        return Measured(**_read(path())[_here()][name])
    except (KeyError, TypeError):
        return None


def _read(file: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The kept times; none where there is no file, or one that was cut short."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(file: pathlib.Path, known: dict[str, Any]) -> None:
    """Replaces the file in one step, so that a reader never finds a part of it.

    A folder that cannot be written costs a measurement in the next process, and nothing else.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            json.dump(known, new, indent=1)
        os.replace(new.name, file)
    except OSError:
        return
