"""Modules that are imported when they are first used, so that `import jaxcomp` stays light."""

import importlib
from typing import Any


class Lazy:
    """Stands for a module, and imports it when one of its attributes is first read.

    For packages of hundreds of milliseconds that few programs need: scipy's solvers, and Pallas,
    which a CPU never uses. `tests/test_import.py` keeps them out of `import jaxcomp`.

    Args:
        name: the full name of the module.

    Example:
        >>> special = Lazy("scipy.special")
        >>> float(special.gamma(5.0))
        24.0
    """

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # What inspects objects must not import the module.
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)

    def __repr__(self) -> str:
        return f"Lazy({self._name!r})"
