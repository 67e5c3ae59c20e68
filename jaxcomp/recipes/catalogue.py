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
            if make.__module__ == module.name and not name.startswith("_") and _is_codec(make):
                found.append(_GIVEN.get(name) or _defaults(name, make))
    return (*found, *VARIANTS)


def _is_codec(make) -> bool:
    made = inspect.signature(make).return_annotation
    kinds = getattr(made, "__args__", (made,))  # A union's members.
    return all(isinstance(kind, type) and issubclass(kind, Codec) for kind in kinds)


def _defaults(name: str, make) -> str:
    """The expression with the recipe's first setting, which is the most important one."""
    first = next(iter(inspect.signature(make).parameters.values()))
    if first.default is first.empty:
        raise TypeError(f"{name} has no defaults: add its arguments to `_GIVEN`")
    return f"{name}()" if first.name == "bucket_size" else f"{name}({first.name}={first.default!r})"
