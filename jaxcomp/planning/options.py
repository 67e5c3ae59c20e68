"""Numbers on the command line: counts, workers, speeds and times, with their units."""

import argparse
import math
import re

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


def count(text: str) -> int:
    """A number of things: 25000000, 25e6, 25M."""
    value = _number(text, _UNITS, "a positive whole number, as in 25e6 or 25M")
    if value < 1 or value != round(value):
        raise argparse.ArgumentTypeError(f"must be a positive whole number, got {text!r}")
    return round(value)


def levels(text: str) -> tuple[int, ...]:
    """The number of workers on each level: 8, or 4x8."""
    found = tuple(int(part) if part.isdecimal() else 0 for part in text.split("x"))
    if not 1 <= len(found) <= 2 or min(found) < 1 or math.prod(found) < 2:
        raise argparse.ArgumentTypeError(f"must be like 8 or 4x8, at least 2 in all, got {text!r}")
    return found


def bandwidth(text: str) -> float:
    """Bytes a second: 100Mbit, 10Gbit/s, 3.3TB."""
    units = {f"{k}bit": v / 8 for k, v in _UNITS.items()} | {f"{k}b": v for k, v in _UNITS.items()}
    return _number(text.removesuffix("/s"), units, "a speed such as 100Mbit, 10Gbit or 3.3TB")


def seconds(text: str) -> float:
    """A time: 0.25, 250ms, 50us."""
    return _number(text, {"": 1.0, **_TIMES}, "a time such as 0.25, 250ms or 50us")


def _number(text: str, units: dict[str, float], wanted: str) -> float:
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?\d+)?)\s*([a-zµ]*)\s*", text.lower())
    try:
        number = float(found.group(1)) * units[found.group(2)] if found else math.nan
    except (KeyError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
    return number
