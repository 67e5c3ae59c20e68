"""The plugins of `conftest.py`: tiers of tests, and budgets of programs."""

import json
import types

import pytest
from helpers import programs, tiers

pytest_plugins = ["pytester"]
CASES = """
import pytest

@pytest.mark.core("top_*", "sign")
@pytest.mark.parametrize("codec", ["sign", "top_k", "qsgd"])
@pytest.mark.parametrize("mode", ["vmap", "pmap"])
def test_some(codec, mode):
    pass

@pytest.mark.full
def test_all():
    pass
"""


def collected(pytester, *selection):
    """The tests of a selection, and those that it leaves out."""
    plugin = tiers.Tiers()
    pytester.makeini("[pytest]\nmarkers =\n core\n full\n slow")
    result = pytester.inline_run("--collect-only", *selection, plugins=[plugin])
    (call,) = result.getcalls("pytest_collection_finish")
    return sorted(item.name for item in call.session.items), plugin.left_out


def test_cases_that_are_not_named_are_full(pytester):
    pytester.makepyfile(CASES)
    names, left_out = collected(pytester, "-m", "not full")
    assert names == [f"test_some[{m}-{c}]" for m in ("pmap", "vmap") for c in ("sign", "top_k")]
    assert left_out == {"full": 3}


def test_a_name_without_a_case_is_an_error(pytester):
    pytester.makepyfile(CASES.replace('"sign")', '"sin")'))
    plugin = tiers.Tiers()
    with pytest.raises(pytest.UsageError, match=r"no case of .*test_some is called \['sin'\]"):
        plugin.pytest_collection_modifyitems(pytester.inline_genitems()[0])


def budgeted(monkeypatch, tmp_path, allowed, processes=2):
    monkeypatch.setattr(programs, "BUDGETS", tmp_path / "programs.json")
    programs.BUDGETS.write_text(json.dumps({"core": allowed}))
    options = {"--costs": None, "--budget": "core", "tx": ["popen"] * processes}
    config = types.SimpleNamespace(getoption=lambda name, default=None: options[name])
    plugin = programs.Programs(config)
    plugin.costs["tests/gates/test_gates.py::test_a"]["programs"] = 3
    plugin.costs["tests/gates/test_gates.py::test_b"]["programs"] = 4
    plugin.costs["jaxcomp/gates/timed.py::jaxcomp.gates.timed.Every"]["programs"] = 2
    return plugin.excess(config)


def test_a_folder_that_compiles_more_than_its_budget_is_named(monkeypatch, tmp_path):
    assert budgeted(monkeypatch, tmp_path, {"tests/gates": 7, "jaxcomp": 2}) == []
    few = {"tests/gates": 6, "jaxcomp": 2}
    (line,) = budgeted(monkeypatch, tmp_path, few)
    assert line == "tests/gates: 7 programs, of 6 that programs.json allows"
    assert len(budgeted(monkeypatch, tmp_path, {})) == 2
    assert budgeted(monkeypatch, tmp_path, few, processes=4) == []  # They share less.
