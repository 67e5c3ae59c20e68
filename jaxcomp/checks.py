"""Checks of settings: each raises a `ValueError` that names the argument and the allowed values."""

import math
import os
from typing import Any

import numpy as np


def bucket_size(value: Any) -> None:
    """Requires a positive number of elements, or None for one bucket a leaf."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            "`bucket_size` must be a positive integer, or None for one bucket a leaf, "
            f"got {value!r}"
        )


def fraction(value: Any) -> None:
    """Requires a fraction of the elements, above zero and at most one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"`fraction` must be a number in (0, 1], got {value!r}")
    if isinstance(value, int):
        raise ValueError(
            "`fraction` must be a fraction of the elements, got the integer 1: 1 % of them are "
            "0.01, one of 1,000 elements is 1/1000, and all of them are 1.0"
        )


def choice(name: str, value: Any, allowed: tuple) -> None:
    """Requires one of the allowed values."""
    if value not in allowed:
        listed = ", ".join(repr(option) for option in allowed)
        raise ValueError(f"`{name}` must be one of {listed}, got {value!r}")


def integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Requires an integer in a range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"`{name}` must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"`{name}` must be {span}, got {value}")


def multiple(name: str, value: Any, of: int) -> None:
    """Requires a positive multiple of an integer."""
    integer(name, value, of)
    if value % of:
        raise ValueError(f"`{name}` must be a multiple of {of}, got {value}")


def number(name: str, value: Any, low: float, high: float = math.inf) -> None:
    """Requires a finite number in a closed range."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not low <= value <= high
    ):
        span = f"at least {low}" if high == math.inf else f"from {low} to {high}"
        raise ValueError(f"`{name}` must be a number {span}, got {value!r}")


def numbers(name: str, value: Any, interval: str) -> np.ndarray:
    """The value as float64, if it is a number or an array in an interval such as "(0, 1]"."""
    low, high = map(float, interval[1:-1].split(","))
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        array = np.array(math.nan)
    above = array >= low if interval[0] == "[" else array > low
    below = array <= high if interval[-1] == "]" else array < high
    if not np.all(above & below):
        raise ValueError(f"`{name}` must be a number in {interval}, or an array, got {value!r}")
    return array


def positive(name: str, value: Any) -> None:
    """Requires a finite number above zero."""
    number(name, value, 0.0)
    if value == 0:
        raise ValueError(f"`{name}` must be a positive number, got 0")


def share(name: str, value: Any) -> None:
    """Requires a number above zero, at most one."""
    positive(name, value)
    number(name, value, 0.0, 1.0)


def decay(name: str, value: Any) -> None:
    """Requires a number from zero to below one."""
    number(name, value, 0.0, 1.0)
    if value == 1:
        raise ValueError(f"`{name}` must be below 1, got {value!r}")


def rate(value: Any) -> None:
    """Requires a learning rate: a schedule, or a number of at least zero."""
    if callable(value) or hasattr(value, "dtype"):
        return  # An array may be traced, for instance by `optax.inject_hyperparams`.
    number("learning_rate", value, 0.0)


def flag(name: str, value: Any) -> None:
    """Requires True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"`{name}` must be True or False, got {value!r}")


def sequence(name: str, value: Any) -> None:
    """Requires a tuple or a list."""
    if not isinstance(value, tuple | list):
        raise ValueError(f"`{name}` must be a tuple or a list, got {value!r}")


def path(name: str, value: Any) -> None:
    """Requires the name of a file."""
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"`{name}` must be the name of a file, such as 'run.csv', got {value!r}")


def function(name: str, value: Any) -> None:
    """Requires something to call."""
    if not callable(value):
        raise ValueError(f"`{name}` must be a function, got {value!r}")


def transformation(name: str, value: Any) -> None:
    """Requires an optax transformation, or what has its two functions."""
    if not all(callable(getattr(value, hook, None)) for hook in ("init", "update")):
        raise ValueError(
            f"`{name}` must be an optax transformation, such as optax.sgd(0.1), got {value!r}"
        )


def part(name: str, value: Any, protocol: type) -> None:
    """Requires an instance of an interface."""
    if not isinstance(value, protocol):
        raise ValueError(
            f"`{name}` must be an instance of a {protocol.__name__.lower()}, as in "
            f"{getattr(value, '__name__', 'Name')}(...), got {value!r}"
        )


def instance(name: str, value: Any, kind: type, call: str) -> None:
    """Requires an instance of a class of settings; `call` shows how to make one."""
    if not isinstance(value, kind):
        raise ValueError(f"`{name}` must be a {call}, got {value!r}")
