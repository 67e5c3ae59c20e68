"""Declared versions are those that `make matrix` and the workflow run; warnings are errors."""

import re
import tomllib
import types
import warnings

import pytest
from helpers import matrix
from helpers.paths import ROOT, TESTS
from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_lowest_versions_that_are_declared_are_those_that_are_tried():
    extras = PROJECT["optional-dependencies"]
    declared = {}
    for line in [*PROJECT["dependencies"], *extras["examples"], *extras["test"], *extras["plot"]]:
        requirement = Requirement(line)
        lowest = [s.version for s in requirement.specifier if s.operator == ">="]
        declared[requirement.name] = Version(*lowest)
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    tried = {name: Version(version) for name, version in (line.split("==") for line in lines)}
    assert tried == declared


def test_every_python_that_is_declared_is_tried():
    known = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert known == [environment.python for environment in matrix.ENVIRONMENTS]


def test_the_hosted_workflow_has_the_environments_of_the_matrix():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    hosted = re.findall(r"- \{ environment: (\S+), python: \"(\S+)\" \}", text)
    assert hosted == [(e.name, e.python) for e in matrix.ENVIRONMENTS]


def test_every_part_of_the_core_suite_is_there():
    for file, _ in matrix.CORE:
        assert (TESTS / f"{file}.py").exists()


def warn_from(module):
    """A deprecation whose `stacklevel` names this module."""
    frame = types.ModuleType(module)
    code = "def call(warnings): warnings.warn('old', DeprecationWarning, stacklevel=1)"
    exec(code, vars(frame))
    with warnings.catch_warnings(record=True):
        frame.call(warnings)


OWN = [
    "jaxcomp",
    "jaxcomp.codecs.quantizer",
    *sorted(p.stem for p in TESTS.rglob("*.py") if p.parent.name != "helpers"),
    *sorted(f"helpers.{p.stem}" for p in TESTS.glob("helpers/*.py")),
]


@pytest.mark.parametrize("module", OWN)
def test_warnings_of_our_own_modules_are_errors(module):
    with pytest.raises(DeprecationWarning, match="old"):
        warn_from(module)


@pytest.mark.parametrize("module", ["jax._src.lax", "matplotlib", "pyparsing.util", "flax.nnx"])
def test_warnings_of_other_packages_are_not(module):
    warn_from(module)
