"""Expressions for all recipes of codecs."""

import functools
import importlib
import inspect
import pkgutil

from jaxcomp import recipes
from jaxcomp.base import Codec

VARIANTS = (
    "cast('float8_e4m3fn')",
    "cast('float8_e5m2')",
    "qsgd_inf(bits=8)",
    "mx('nvfp4')",
    "eden(bits=2)",
)
"""Settings beside the defaults that users compare."""

_GIVEN = {"msc": "msc(sign(), stages=2)", "threshold": "threshold(2.6, fraction=0.012)"}
"""Recipes that have no defaults."""


@functools.cache
def expressions() -> tuple[str, ...]:
    """An expression for each recipe that returns a codec, at its defaults, and `VARIANTS`.

    Example:
        >>> "qsgd_inf(bits=4)" in expressions()
        True
    """
    found = []
    for module in pkgutil.iter_modules(recipes.__path__, f"{recipes.__name__}."):
        loaded = importlib.import_module(module.name)
        for name, make in inspect.getmembers(loaded, inspect.isfunction):
            signature = inspect.signature(make)
            made = signature.return_annotation
            kinds = getattr(made, "__args__", (made,))  # A union's members.
            codec = all(isinstance(kind, type) and issubclass(kind, Codec) for kind in kinds)
            if make.__module__ != module.name or name.startswith("_") or not codec:
                continue
            # The expression has the recipe's first setting, which is the most important one.
            first = next(iter(signature.parameters.values()))
            if name not in _GIVEN and first.default is first.empty:
                raise TypeError(f"{name} has no defaults: add its arguments to `_GIVEN`")
            setting = "" if first.name == "bucket_size" else f"{first.name}={first.default!r}"
            found.append(_GIVEN.get(name, f"{name}({setting})"))
    return (*found, *VARIANTS)
