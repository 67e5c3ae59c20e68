"""An adapter takes part once its framework is imported, and not before."""

import pathlib
import sys
import types

import jax.numpy as jnp
import pytest

import jaxcomp
from jaxcomp.base import adapter
from jaxcomp.mesh import hints


class Toy(adapter.Adapter):
    module = "toy"
    complete = "Module"
    hints = {"toys are broken": "jaxcomp: mend the toys."}
    of_leaves = "Of a toy, take its wheels."

    def __init__(self):
        self._stored = []

    def store(self, cls):
        self._stored.append(cls)


def told(toy, node):
    """All that the library asks of an adapter outside of a step."""
    with pytest.raises(ValueError, match="every leaf must have a floating dtype") as error:
        jaxcomp.describe(jaxcomp.sign(), {"count": jnp.zeros(64, jnp.int32)}, workers=2)
    hash(node)
    return toy.of_leaves in str(error.value), hints.hints_for(ValueError("toys are broken"))


def test_a_framework_is_known_once_it_is_imported(monkeypatch):
    toy, node = Toy(), adapter.Stored("Node", (), {})
    monkeypatch.setattr(adapter, "_KNOWN", [*adapter._KNOWN])
    adapter.register(toy)
    assert told(toy, node) == (False, [])
    module = types.ModuleType("toy")
    monkeypatch.setitem(sys.modules, "toy", module)  # Its import has begun.
    assert told(toy, node) == (False, [])
    assert toy._stored == []
    module.Module = object
    assert told(toy, node) == (True, ["jaxcomp: mend the toys."])
    assert toy._stored == [node]


def test_a_hook_that_does_not_exist_is_refused():
    with pytest.raises(TypeError, match="did you mean of_leaves"):

        class _(adapter.Adapter):
            module, complete, of_leafs = "toy", "Module", "Take its wheels."


def test_no_other_part_asks_which_frameworks_are_imported():
    """But `misuse/`, which finds the user's line between those of other packages, and `backend/`,
    which replaces JAX's functions wherever a module has them.
    """
    package = pathlib.Path(jaxcomp.__file__).parent
    users = {
        path.relative_to(package).parts[0]
        for path in package.rglob("*.py")
        if "sys.modules" in path.read_text()
    }
    assert users == {"adapters", "backend", "base", "misuse"}
