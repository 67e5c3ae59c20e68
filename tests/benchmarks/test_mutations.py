"""The mistakes on which `benchmarks/mutations.py` tries the suite can be made in these files."""

import pytest
from helpers.paths import ROOT


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")  # As `reporting`, perhaps imported before.
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import mutations

    return mutations


def wrong(found):
    return [claim for claim, holds in found if not holds]


def test_every_mutation_can_be_made(driver):
    assert len(driver.mutations()) >= 40
    assert wrong(driver.applicable()) == []


def test_a_text_that_is_gone_and_a_name_that_comes_twice_are_found(driver):
    first = driver.mutations()[0]
    other = {**first, "old": "no such text"}
    assert wrong(driver.applicable([first, other])) == [
        "mutations have different names",
        f"{first['name']}: {first['file']} has its text once",
    ]


def test_results_are_of_these_texts_and_most_are_found_by_the_core_suite(
    driver, monkeypatch, tmp_path
):
    given = [one for one in driver.mutations() if not one.get("untried")]
    found = {one["name"]: {"stage": "core", "mutation": driver.digest(one)} for one in given}
    monkeypatch.setattr(driver, "mutations", lambda: given)
    monkeypatch.setattr(driver, "FOLDER", tmp_path)

    def failures():
        driver.reporting.keep(tmp_path / "results.json", {"mutations": found})
        return wrong(driver.results())

    assert failures() == []
    first, second = given[0]["name"], given[1]["name"]
    found[first]["mutation"] = "of other texts"
    found[second]["stage"] = None
    assert failures() == [f"{first} was tried with its texts", f"a test finds {second}"]
    late = len(given) // 8
    for one in given[:late]:
        found[one["name"]]["stage"] = "full"
    share = f"the core suite finds {len(given) - late} of {len(given)} mutations"
    assert share in failures()


def test_errors_are_told_in_a_line_without_paths_of_the_machine(driver):
    numpy = "AssertionError: \nNot equal to tolerance rtol=1e-07\n\nMismatch: 100%"
    assert driver.essence(numpy, False) == "AssertionError: Not equal to tolerance rtol=1e-07"
    doctest = "Expected:\n    1\nGot:\n    2\n\n/tmp/x-1/mutated/jaxcomp/a.py:12: DocTestFailure"
    assert driver.essence(doctest, True) == "jaxcomp/a.py:12: DocTestFailure"
    missing = "FileNotFoundError: no file /data/run-1/x.npz"
    assert driver.essence(missing, False) == "FileNotFoundError: no file x.npz"


@pytest.mark.parametrize(
    ("fails", "stage", "broken"),
    [("mutated", "core", []), ("both", None, ["tests/a.py::test"]), ("once", None, [])],
)
def test_only_a_failure_of_the_mutation_itself_counts(driver, tmp_path, fails, stage, broken):
    """Not one that comes without it too, and not one that does not come again."""
    runner = object.__new__(driver.Runner)
    runner.workers, runner.whole, runner.broken, runner.stages = 2, "whole", [], driver.STAGES

    def run(folder, *arguments):
        deselected = {*runner.broken, *(a.removeprefix("--deselect=") for a in arguments)}
        if "tests/a.py::test" in arguments:  # Alone.
            failed = fails == "both" or (fails == "mutated" and folder != "whole")
        else:
            failed = driver.CORE in arguments and "tests/a.py::test" not in deselected
            failed = failed and "tests/gates" not in arguments
        return driver.Ran(not failed, [("tests/a.py::test", "wrong")] if failed else [], "")

    def copy(name):
        (tmp_path / "jaxcomp" / "gates").mkdir(parents=True)
        (tmp_path / "jaxcomp" / "gates" / "a.py").write_text("one")
        return tmp_path

    runner.run, runner.copy = run, copy
    one = {"name": "one", "file": "jaxcomp/gates/a.py", "old": "one", "new": "two"}
    found = runner.result(one)
    assert (tmp_path / "jaxcomp" / "gates" / "a.py").read_text() == "two"
    assert (found["stage"], found["test"]) == (stage, stage and "tests/a.py::test")
    assert runner.broken == broken
