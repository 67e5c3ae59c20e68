"""Checks that a part is a setting: hashable, and equal by value."""

import dataclasses
from typing import Any, cast

from jaxcomp.base import Codec


def assert_is_setting(codec: Any) -> None:
    """Checks that it is a `Codec`, hashable and comparable by value."""
    if isinstance(codec, type):
        raise AssertionError(f"check an instance, as in {codec.__name__}(...), not the class")
    if not isinstance(codec, Codec):
        raise AssertionError(f"a codec must derive from jaxcomp.Codec, and {codec!r} does not")
    assert_hashable(codec)


def assert_hashable(setting: Any) -> None:
    """Checks that it is an instance, hashable and equal by value; equal ones compile once."""
    if isinstance(setting, type):
        raise AssertionError(f"check an instance, as in {setting.__name__}(...), not the class")
    try:
        hash(setting)
    except TypeError as error:
        raise AssertionError(
            f"a setting must be hashable by value, so that equal ones compile once: {error}. Use "
            "@dataclasses.dataclass(frozen=True) with numbers, strings, tuples or other settings."
        ) from error
    if dataclasses.is_dataclass(setting) and dataclasses.replace(cast(Any, setting)) != setting:
        raise AssertionError(f"two settings with the same values must be equal: {setting!r}")
