"""The form of recipes and public functions: short bodies, and signatures that hide nothing."""

import ast
import importlib
import inspect
import pathlib
import pkgutil

import pytest

import jaxcomp
import jaxcomp.algorithms

LINES = 10
ROOT = pathlib.Path(jaxcomp.__file__).parent
RECIPES = [
    (path, function)
    for glob in ("recipes/**/*.py", "algorithms/**/*.py", "federated/methods.py")
    for path in sorted(ROOT.glob(glob))
    if path.stem != "catalogue"
    for function in ast.parse(path.read_text()).body
    if isinstance(function, ast.FunctionDef)
]


@pytest.mark.parametrize(
    ("path", "function"), RECIPES, ids=[function.name for _, function in RECIPES]
)
def test_a_recipe_has_at_most_ten_lines(path, function):
    """Without the docstring, blank lines and comments, helpers of the recipes included."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    lines = path.read_text().splitlines()[body[0].lineno - 1 : body[-1].end_lineno]
    code = [line for line in lines if line.strip() and not line.strip().startswith("#")]
    assert len(code) <= LINES, "add the part that is missing to the package"


def public_functions():
    """Every public function and method, with its enclosing scope."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield f"{path.relative_to(ROOT)}:{node.name}", node
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                        yield f"{path.relative_to(ROOT)}:{node.name}.{method.name}", method


def test_no_public_signature_hides_its_arguments():
    """optax's protocol uses `**extra` for arguments of a chain. Nested functions are not public.

    `changed` takes the fields of `Facts`, as `dataclasses.replace` does, and checks their names.
    """
    found = [(name, node.args.kwarg.arg) for name, node in public_functions() if node.args.kwarg]
    found.remove(("base/codec.py:changed", "changes"))
    assert [name for name, arg in found if arg != "extra"] == []


def methods():
    modules = pkgutil.walk_packages(jaxcomp.algorithms.__path__, "jaxcomp.algorithms.")
    for module in map(importlib.import_module, sorted(found.name for found in modules)):
        for name, make in inspect.getmembers(module, inspect.isfunction):
            defined = make.__module__ == module.__name__ and not name.startswith("_")
            if defined and "axis_name" in inspect.signature(make).parameters:
                yield name, list(inspect.signature(make).parameters.values())


WRAPPERS = ("experts", "pipeline", "tensor_parallel")


def test_the_codec_comes_first_in_every_method():
    found = dict(methods())
    assert len(found) >= 20
    for name, parameters in found.items():
        names = [parameter.name for parameter in parameters]
        if name in WRAPPERS:  # Of a function, which comes first as in a decorator.
            assert names[1:3] == ["axis_name", "codec"], name
            continue
        assert "codec" not in names or names[:2] == ["codec", "axis_name"], name
        assert names[0] in ("codec", "axis_name"), name
