"""Modules and names that are imported when they are first used: `import jaxcomp` stays light."""

import ast
import importlib
import importlib.util
import pathlib
from collections.abc import Callable
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


def exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package whose names are imported when used.

    The stub beside its `__init__.py`, which type checkers and editors read, says where they come
    from; modules of the package are found too. `lazy_loader.attach_stub` does the same, but not for
    names of other packages.

    Args:
        package: the package's `__name__`.
    """
    module = importlib.import_module(package)  # Its import has begun.
    stub = ast.parse(pathlib.Path(str(module.__file__)).with_suffix(".pyi").read_text())
    homes = {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def getattribute(name: str) -> Any:
        home, attribute = homes.get(name, (package, name))
        if home != package:
            found = getattr(importlib.import_module(home), attribute)
            setattr(module, name, found)
            return found
        if name[0] != "_" and importlib.util.find_spec(f"{package}.{name}"):
            return importlib.import_module(f"{package}.{name}")
        said = f"module {package!r} has no attribute {name!r}"
        raise AttributeError(said, name=name, obj=module)

    def directory() -> list[str]:
        return sorted({*vars(module), *homes})

    return getattribute, directory, list(homes)
