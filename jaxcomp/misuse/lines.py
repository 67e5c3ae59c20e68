"""The line of a user's program that a call or an equation comes from."""

import os
import sys
from collections.abc import Iterable
from typing import Any

_BETWEEN = ("jax", "jaxcomp", "optax", "flax", "equinox", "jaxtyping", "beartype")
"""Libraries whose lines say nothing to a user."""


def of_user(frames: Iterable[tuple[str, int, str]]) -> str:
    """The first line that is no library's, as `file:line (function)`; empty if there is none.

    Args:
        frames: the file, line and function of each call, the innermost first.
    """
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _BETWEEN]
    folders = tuple(os.path.join(os.path.dirname(file), "") for file in files if file)
    for file, line, function in frames:
        if not file.startswith(folders):
            return f"{file}:{line} ({function})"
    return ""


def of_source(source: Any) -> str:
    """The user's line of an equation, from its `source_info`; empty if it is unknown."""
    frames = getattr(getattr(source, "traceback", None), "frames", ())
    return of_user((f.file_name, f.line_num, f.function_name) for f in frames)
