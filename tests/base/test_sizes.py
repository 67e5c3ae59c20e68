"""A function fits on a screen, and a file is short enough to be read."""

import ast
import io
import pathlib
import tokenize

import pytest

import jaxcomp
from jaxcomp.base import interface

PACKAGE = pathlib.Path(jaxcomp.__file__).parent
LINES_OF_FILE, LINES_OF_FUNCTION = 400, 60
LINES_OF_CODE = 35_000
"""Without docstrings, comments, blanks and imports; lowered when the package gets shorter."""


def length(function):
    """The lines of a function without its docstring; nested functions count."""
    docstring = function.body[0] if ast.get_docstring(function) is not None else None
    spared = 0 if docstring is None else docstring.end_lineno - docstring.lineno + 1
    return function.end_lineno - function.lineno + 1 - spared


def long_functions(text, limit=LINES_OF_FUNCTION):
    found = {}
    for node in ast.walk(ast.parse(text)):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and length(node) > limit:
            found[node.name] = length(node)
    return found


@pytest.fixture(scope="module")
def sources():
    texts = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    return {str(path.relative_to(PACKAGE)): text for path, text in texts.items()}


def test_no_file_is_long(sources):
    lines = {name: len(text.splitlines()) for name, text in sources.items()}
    assert len(lines) > 100
    assert {name: count for name, count in lines.items() if count > LINES_OF_FILE} == {}


def test_no_function_is_longer_than_a_screen(sources):
    found = {name: long_functions(text) for name, text in sources.items()}
    assert {name: functions for name, functions in found.items() if functions} == {}


def code_lines(text):
    """The lines with code: no docstring, comment, blank or import."""
    silent = (
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENDMARKER,
    )  # fmt: skip
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        said = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if said or isinstance(node, ast.Import | ast.ImportFrom):
            found -= set(range(node.lineno, node.end_lineno + 1))
    return len(found)


def test_docstrings_begin_with_a_noun_or_a_verb(sources):
    """A relative clause names nothing: "What a reducer declares" are its facts."""
    found = {
        name: [line.strip() for line in text.splitlines() if line.strip().startswith('"""What ')]
        for name, text in sources.items()
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_the_package_does_not_grow_unseen(sources):
    assert code_lines('"""Says."""\nimport os\n\n\ndef f():  # Why.\n    return os\n') == 2
    assert sum(map(code_lines, sources.values())) <= LINES_OF_CODE


@pytest.mark.parametrize(("kind", "most"), [(jaxcomp.Reducer, 6), (jaxcomp.Feedback, 7)])
def test_an_interface_fits_into_a_head(kind, most):
    assert 3 < len(interface.hooks(kind)) <= most


def test_nested_functions_count_and_docstrings_do_not():
    text = (
        'def outer():\n    """One.\n\n    Two.\n    """\n    def inner():\n        return 1\n'
        "    return inner\n"
    )
    assert long_functions(text, 3) == {"outer": 4}
    assert long_functions(text, 4) == {}
