"""Makes mistakes in the package one by one, and finds out which tests notice them.

    python benchmarks/mutations.py
    python benchmarks/mutations.py --continue
    python benchmarks/mutations.py --only censoring-threshold-not-a-root --out out/mutations

`results/mutations/mutations.json` has the mistakes: each is a text of one file and the text in its
place, and `tests` if they are not in the folder of the file's name. A mistake is made in a copy of
the tracked files, where the tests run in four stages, each only if the one before has passed: the
core suite's tests of the file's folder, the rest of the core suite, and in the same order the rest
of the full suite. A test has found the mistake if it fails, fails again alone, and passes without
the mistake. `--continue` skips mistakes that were found;
`--stages folder` is a quick look, after which `--continue` tries what is left. A mistake that is
marked `untried` was seen to be found when it was written, and has no result here yet.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import reporting
from reporting import HERE, RESULTS
from rich.console import Console

ROOT = HERE.parent
FOLDER = RESULTS / "mutations"
CORE = "not slow and not full"
"""The tests that run at every change."""
FULL = "not slow"
STAGES = ("folder", "core", "full folder", "full")
LEAST = 0.9
"""The fraction of the mutations that the core suite must find."""
IGNORED = ("tests/base/test_sizes.py", "tests/benchmarks/test_mutations.py")
"""These tests look at source text."""
DESELECTED = ("tests/benchmarks/test_benchmarks.py::test_committed_results_hold",)
PLUGIN = """
import json, os

def pytest_configure(config):
    config.addinivalue_line("markers", "full: not in the core suite")

def pytest_runtest_logreport(report):
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = report.longreprtext if crash is None else crash.message
        with open(os.environ["MUTATION_REPORT"], "a") as file:
            print(json.dumps([report.nodeid, text, crash is None]), file=file)
"""
"""Writes down the id and the error of each failed test."""
Found = Iterator[tuple[str, bool]]
Mutation = Mapping[str, Any]


class Ran(NamedTuple):
    """A run of pytest: whether no test failed, the failed tests and errors, and its last line."""

    passed: bool
    failures: list[tuple[str, str]]
    last: str


class Runner:
    """Runs tests in copies of the repository, which are made in `folder`."""

    def __init__(
        self, folder: pathlib.Path, workers: int, limit: float, stages: Sequence[str] = STAGES
    ):
        self.folder, self.workers, self.limit, self.stages = folder, workers, limit, stages
        self.broken = [*DESELECTED]  # And what fails without a mutation too.
        (folder / "plugin").mkdir()
        (folder / "plugin" / "mutation_report.py").write_text(PLUGIN)
        self.whole = self.copy("whole")

    def copy(self, name: str) -> pathlib.Path:
        """A copy of all files that git does not ignore, from which `jaxcomp` is imported."""
        to = self.folder / name
        shutil.rmtree(to, ignore_errors=True)
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        for path in filter(None, listed.stdout.split("\0")):
            if (ROOT / path).is_file():
                (to / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, to / path)
        ask = [sys.executable, "-c", "import jaxcomp; print(jaxcomp.__file__)"]
        said = subprocess.run(ask, cwd=to, env=self.settings(to), capture_output=True, text=True)
        if pathlib.Path(said.stdout.strip()).resolve() != (to / "jaxcomp/__init__.py").resolve():
            raise SystemExit(f"jaxcomp must come from {to}, got {said.stdout or said.stderr}")
        return to

    def settings(self, folder: pathlib.Path) -> dict[str, str]:
        """The environment of a run; compiled programs are kept as by `make test`."""
        home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        return os.environ | {
            "PYTHONPATH": os.pathsep.join([str(folder), str(self.folder / "plugin")]),
            "JAX_COMPILATION_CACHE_DIR": f"{home}/jaxcomp/xla",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "MUTATION_REPORT": str(self.folder / "failures"),
        }

    def run(self, folder: pathlib.Path, *arguments: str) -> Ran:
        """The tests that the arguments select, in this copy, up to the first failure."""
        failures = self.folder / "failures"
        failures.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-p", "mutation_report", *(f"--ignore={path}" for path in IGNORED)]
        process = subprocess.Popen(
            [*command, *(f"--deselect={test}" for test in self.broken), *arguments],
            cwd=folder,
            env=self.settings(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # So that its workers can be ended with it.
        )
        try:
            output, code = process.communicate(timeout=self.limit)[0], process.returncode
        except subprocess.TimeoutExpired:
            output, code = f"not done after {self.limit:g} s", 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        lines = failures.read_text().splitlines() if failures.exists() else []
        found = [(test, essence(text, located)) for test, text, located in map(json.loads, lines)]
        said = [line for line in output.splitlines() if "rror" in line][-1:] or [output]
        if code == 4:
            raise SystemExit(f"pytest must take these arguments, it said {said[0]}")
        return Ran(code in (0, 5), found, essence(said[0], True))  # 5: no test was selected.

    def first_failure(self, folder: pathlib.Path, *arguments: str) -> tuple[str | None, str] | None:
        """The first failed test, None if a run has failed without one, and the error."""
        parallel, chance, seen = ("-n", str(self.workers), "--dist", "worksteal"), [], set()
        while not (ran := self.run(folder, *parallel, *chance, "-m", *arguments)).passed:
            if not (new := [one for one in ran.failures if one[0] not in seen]):
                return None, f"no test failed: {ran.last}"
            for test, error in new:
                alone = ("-n", "0", "-m", FULL, test)
                if not self.run(self.whole, *alone).passed:
                    self.broken.append(test)
                elif not self.run(folder, *alone).passed:
                    return test, error
                else:
                    chance.append(f"--deselect={test}")
            seen |= {test for test, _ in new}
        return None

    def result(self, mutation: Mutation) -> dict[str, Any]:
        """The stage and the test that find a mutation."""
        start, folder = time.monotonic(), self.copy("mutated")
        path = folder / mutation["file"]
        path.write_text(path.read_text().replace(mutation["old"], mutation["new"]))
        own = mutation.get("tests", f"tests/{pathlib.Path(mutation['file']).parts[1]}")
        here = (ROOT / own).exists()
        stages = [("folder", [CORE, own])] if here else []
        stages += [("core", [CORE, *([f"--ignore={own}"] if here else [])])]
        rest = f"({FULL}) and not ({CORE})"
        stages += [("full folder", [rest, own])] if here else []
        stages += [("full", [rest, *([f"--ignore={own}"] if here else [])])]
        stage = test = error = None
        for name, arguments in stages:
            if name not in self.stages:
                continue
            found = self.first_failure(folder, *arguments)
            if found is not None:
                test, error = found
                stage = name if test else None
                break
        found = {"stage": stage, "test": test, "error": error, "mutation": digest(mutation)}
        return {**found, "seconds": round(time.monotonic() - start)}


def essence(text: str, located: bool) -> str:
    """The last line of a traceback (`located`) or the first of an error, without local paths."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    line = lines[-1] if located else lines[0]
    if not located and line.endswith("Error:"):  # As of numpy's assertions.
        line = " ".join(lines[:2])
    line = re.sub(r"/[\w./-]*/(?=(?:tests|jaxcomp|benchmarks|examples|docs)/)", "", line)
    return re.sub(r"(?<![\w.])/(?:[\w.-]+/)+", "", line)[:200]


def digest(mutation: Mutation) -> str:
    texts = json.dumps([mutation["file"], mutation["old"], mutation["new"]])
    return hashlib.blake2b(texts.encode(), digest_size=8).hexdigest()


def mutations() -> list[Mutation]:
    return reporting.read(FOLDER / "mutations.json")


def applicable(given: Sequence[Mutation] | None = None) -> Found:
    """Whether each mutation, by default of the committed list, can be made in these files."""
    given = mutations() if given is None else given
    names = [one["name"] for one in given]
    yield "mutations have different names", len(set(names)) == len(names)
    for one in given:
        path = ROOT / one["file"]
        there = path.is_file() and path.read_text().count(one["old"]) == 1
        yield f"{one['name']}: {one['file']} has its text once", there
        yield f"{one['name']} changes the text", one["old"] != one["new"] and bool(one["what"])


def results() -> Found:
    """Whether all mutations were tried, and found often enough."""
    path = FOLDER / "results.json"
    given = [one for one in mutations() if not one.get("untried")]
    found = reporting.read(path)["mutations"] if path.is_file() else {}
    for one in given:
        tried = found.get(one["name"], {}).get("mutation") == digest(one)
        yield f"{one['name']} was tried with its texts", tried
    stages = [found.get(one["name"], {}).get("stage") for one in given]
    core = sum(stage in ("folder", "core") for stage in stages)
    yield f"the core suite finds {core} of {len(given)} mutations", core >= LEAST * len(given)
    for one, stage in zip(given, stages, strict=True):
        yield f"a test finds {one['name']}", stage is not None


def main() -> None:
    known = {one["name"]: one for one in mutations()}
    options = reporting.options(
        __doc__,
        FOLDER,
        only=(known, "the mutations to try"),
        workers=(2, "processes of a run"),
        limit=(5400.0, "seconds that a run may take"),
        stages=(STAGES, "the stages to go through"),
        **{"continue": (False, "skip mutations that were found")},
    )
    if wrong := [claim for claim, holds in applicable() if not holds]:
        raise SystemExit("\n".join(wrong))
    path, console = options.out / "results.json", Console(soft_wrap=True, highlight=False)
    goes_on, some = getattr(options, "continue"), len(options.only) < len(known)
    kept = reporting.read(path)["mutations"] if path.is_file() and (goes_on or some) else {}
    kept = {n: kept[n] for n in known if n in kept and kept[n]["mutation"] == digest(known[n])}
    with tempfile.TemporaryDirectory(prefix="mutations-") as copies:
        settings = options.workers, options.limit, options.stages
        runner = Runner(pathlib.Path(copies), *settings)
        for number, name in enumerate(options.only, 1):
            if goes_on and kept.get(name, {}).get("stage"):
                continue
            found = kept[name] = runner.result(known[name])
            ordered = {each: kept[each] for each in known if each in kept}
            reporting.keep(path, {"environment": reporting.environment(), "mutations": ordered})
            by = f"{found['stage']}: {found['test']}" if found["stage"] else "NOT FOUND"
            said = f"{number:3}/{len(options.only)} {found['seconds']:5} s  {name}  {by}"
            console.print(said, markup=False)


if __name__ == "__main__":
    main()
