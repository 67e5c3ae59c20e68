"""Habits of the repository: names of tests, the changelog, subjects of commits."""

import ast
import re
import subprocess
from collections import Counter

import pytest
from helpers.paths import ROOT, TESTS

LINES_OF_UNRELEASED, LETTERS_OF_LINE, LETTERS_OF_SUBJECT = 150, 140, 72
RULED_SINCE = "31d3c820c2c933b788b88a800d7edc070d14074f"
"""Subjects of commits after this one follow the rules."""


def names_of_tests(text):
    """The functions and classes that pytest collects."""
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, defined)]
    return [name for name in names if name.startswith(("test_", "Test"))]


def test_names_of_tests_are_unique():
    """Those of files too: pytest imports them by name, and cannot collect the second one."""
    files = list(TESTS.rglob("test_*.py"))
    names = Counter(name for path in files for name in names_of_tests(path.read_text()))
    assert len(names) > 1000
    for counts in (names, Counter(path.name for path in files)):
        assert [name for name, count in counts.items() if count > 1] == []


def test_names_are_those_of_functions_and_classes():
    text = (
        "class TestA:\n  def test_b(self): ...\nclass B: ...\nasync def test_a(): ...\ndef a(): ..."
    )
    assert sorted(names_of_tests(text)) == ["TestA", "test_a", "test_b"]


def test_the_changelog_of_the_next_version_is_short():
    """It tells users what they notice, in groups; pages have the details."""
    for part in re.split(r"^(?=## )", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE):
        lines = part.splitlines()
        groups = [line.removeprefix("### ") for line in lines if line.startswith("### ")]
        assert groups == [g for g in ("Added", "Changed", "Fixed", "Removed") if g in groups]
        assert max(map(len, lines)) <= LETTERS_OF_LINE
        if lines[0].endswith("(unreleased)"):
            assert len(lines) <= LINES_OF_UNRELEASED


def faults(subject):
    """Why a commit may not have this subject; of what a program can tell."""
    found = {
        "length": len(subject) > LETTERS_OF_SUBJECT,
        "capital": not re.match(r"[A-Z]|`", subject),
        "two things": ";" in subject,
        "full stop": subject.endswith("."),
    }
    return [name for name, true in found.items() if true]


def test_subjects_of_commits_are_short():
    """Where git and the history are there: not in an unpacked sdist or a shallow clone."""
    command = ["git", "log", "--format=%s", f"{RULED_SINCE}..HEAD"]
    try:
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs git")
    if said.returncode or not (ROOT / ".git").exists():
        pytest.skip("needs the history of this repository")
    assert {s: faults(s) for s in said.stdout.splitlines() if faults(s)} == {}


def test_faults_of_subjects_are_found():
    assert faults("Keep the tests' helper modules in tests/helpers") == []
    assert faults("names are unique.") == ["capital", "full stop"]
    assert faults(f"Rename {'x' * 60}; move y") == ["length", "two things"]
