"""Numbers on the command line: counts, workers, speeds and times, with their units."""

import argparse
import math
import re
from collections.abc import Callable

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_COUNTS = {**_PREFIXES, "b": 1e9}  # 7B parameters.
_SIZES = {prefix + unit: factor for prefix, factor in _PREFIXES.items() for unit in ("", "b")}
_TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
_NUMBER = r"\s*(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)\s*"
_SPEED = re.compile(_NUMBER + r"([kKmMgGtT]?)(bits?|bps|Bps|[Bb]ytes?|B|b)(?:/s|/sec)?\s*")


def count(text: str) -> int:
    """A number of things: 25000000, 25e6, 25M."""
    value = _with_unit(text, _COUNTS, "a positive whole number, as in 25e6 or 25M")
    if value < 1 or value != round(value):
        raise argparse.ArgumentTypeError(f"must be a positive whole number, got {text!r}")
    return round(value)


def size(text: str) -> int:
    """A number of bytes: 400000, 400kB, 1.5MB."""
    value = _with_unit(text, _SIZES, "a number of bytes, as in 400kB or 1.5MB")
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least one byte, got {text!r}")
    return int(value)


def port(text: str) -> int:
    """A port: 0 to 65535."""
    found = int(text) if re.fullmatch(r"[0-9]{1,5}", text) else -1
    if not 0 <= found <= 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 0 to 65535, got {text!r}")
    return found


def workers(text: str) -> tuple[int, ...]:
    """The number of workers on each axis: 8, or 4x8."""
    found = tuple(int(part) if part.isdecimal() else 0 for part in text.split("x"))
    if not 1 <= len(found) <= 2 or min(found) < 1 or math.prod(found) < 2:
        raise argparse.ArgumentTypeError(f"must be like 8 or 4x8, at least 2 in all, got {text!r}")
    return found


def mesh(text: str) -> dict[str, int]:
    """The names and sizes of a mesh's axes, slowest first: data=2,fsdp=4."""
    axes = [re.fullmatch(r"\s*([^\s=]+)=([1-9]\d{0,8})\s*", part) for part in text.split(",")]
    found = {axis[1]: int(axis[2]) for axis in axes if axis}
    if len(found) < len(axes):
        raise argparse.ArgumentTypeError(
            f"must be names of axes with their sizes, as in data=2,fsdp=4, got {text!r}"
        )
    return found


def bandwidth(text: str) -> float:
    """Bytes a second: 100Mbit, 10Gbit/s, 10Gbps, 1.25GB/s, 3.3TB."""
    found = _SPEED.fullmatch(text)
    if not found:
        raise argparse.ArgumentTypeError(
            f"must be a speed such as 100Mbit, 10Gbps or 1.25GB/s, got {text!r}"
        )
    number, prefix, unit = found.groups()
    if unit == "b" and not prefix.isupper():
        raise argparse.ArgumentTypeError(
            f"must say if it is bits or bytes, as in {number}{prefix.upper()}bit or "
            f"{number}{prefix.upper()}B, got {text!r}"
        )
    whole = float(number) * _PREFIXES[prefix.lower()]
    return whole if unit in ("B", "Bps") or "yte" in unit else whole / 8


def seconds(text: str) -> float:
    """A time: 0.25, 250ms, 50us."""
    return _with_unit(text, _TIMES, "a time such as 0.25, 250ms or 50us")


def number(low: float, high: float = math.inf) -> Callable[[str], float]:
    """Makes a reader of numbers from `low` to `high`."""

    def read(text: str) -> float:
        span = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        value = _with_unit(text, {"": 1.0}, f"a number {span}")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be a number {span}, got {text!r}")
        return value

    return read


def one_of(*allowed: str) -> Callable[[str], str]:
    """Makes a reader of one of these words."""

    def read(text: str) -> str:
        if text not in allowed:
            listed = " or ".join((", ".join(allowed[:-1]), allowed[-1]))
            raise argparse.ArgumentTypeError(f"must be {listed}, got {text!r}")
        return text

    return read


def time_or_name(text: str) -> float | str:
    """A time, or `MODULE:NAME` of a function to time, which is imported later."""
    return text if ":" in text else seconds(text)


def key(text: str) -> str:
    """The 32 bytes of a public key, in hexadecimal."""
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise argparse.ArgumentTypeError(f"must be 64 hexadecimal digits, got {text!r}")
    return text


def name(text: str) -> str:
    """`MODULE:NAME`, which is imported later."""
    module, _, attribute = text.partition(":")
    if not module or not attribute:
        raise argparse.ArgumentTypeError(
            f"must be MODULE:NAME, as in my_model:shapes, got {text!r}"
        )
    return text


def _with_unit(text: str, units: dict[str, float], wanted: str) -> float:
    found = re.fullmatch(_NUMBER + r"([a-zµ]*)\s*", text.lower())
    try:
        value = float(found.group(1)) * units[found.group(2)] if found else math.nan
    except KeyError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
    return value
