"""Counts the programs that tests compile, and what they cost.

    python -m pytest --costs costs.csv

One line a test, the dearest first, after a line of all: how many programs it gave to the compiler,
the seconds that tracing, lowering and compiling took, and the processor's seconds in all, of its
own process and of those that it started. What an earlier test of the same process compiled is not
compiled again, so a test may count more programs if it runs alone.

With `--budget core` or `--budget full` a run fails if a folder compiles more programs than
`programs.json` allows. Raise the number there only for tests that need the programs, and leave it
a tenth of room: a program is counted once in each process that needs it, and which process runs a
test changes from run to run.
"""

import collections
import csv
import json
import os
import pathlib

import jax.monitoring
import pytest

EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "traced",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowered",
    "/jax/core/compile/backend_compile_duration": "compiled",
}
COLUMNS = ("programs", *EVENTS.values(), "cpu")
BUDGETS = pathlib.Path(__file__).with_name("programs.json")
PROCESSES = 2
"""The budgets are for so many processes at most: each compiles what its own tests share."""


def spent() -> float:
    """Seconds of the processor, of this process and of those that it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def folder(name: str) -> str:
    """`tests/codecs` of `tests/codecs/test_bias.py::test_x`, `jaxcomp` of all examples there."""
    parts = pathlib.PurePosixPath(name.partition("::")[0]).parts
    return parts[0] if parts[0] != "tests" or len(parts) < 3 else "/".join(parts[:2])


class Programs:
    """A plugin of pytest, in the process that runs tests and in the one that collects results."""

    def __init__(self, config: pytest.Config):
        self.path, self.budget = config.getoption("--costs"), config.getoption("--budget")
        self.costs: dict[str, dict[str, float]] = collections.defaultdict(
            lambda: dict.fromkeys(COLUMNS, 0.0)
        )
        self.now = dict.fromkeys(COLUMNS, 0.0)
        jax.monitoring.register_event_duration_secs_listener(self.listen)

    def listen(self, event: str, seconds: float, **_):
        if name := EVENTS.get(event):
            self.now[name] += seconds
            self.now["programs"] += name == "compiled"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self):
        self.now = dict.fromkeys(COLUMNS, 0.0)
        self.begin = spent()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        """Each of a test's three reports has what was spent since the last."""
        report = yield
        report.costs = {**self.now, "cpu": spent() - self.begin}
        self.now, self.begin = dict.fromkeys(COLUMNS, 0.0), spent()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport):
        for name, cost in getattr(report, "costs", {}).items():
            self.costs[report.nodeid][name] += cost

    def programs(self) -> dict[str, int]:
        """The number of programs of each folder."""
        counts = collections.Counter[str]()
        for name, cost in self.costs.items():
            counts[folder(name)] += int(cost["programs"])
        return dict(sorted(counts.items()))

    def excess(self, config: pytest.Config) -> list[str]:
        """The folders that compiled more than their budget allows."""
        if not self.budget or len(config.getoption("tx", [])) > PROCESSES:
            return []
        allowed = json.loads(BUDGETS.read_text())[self.budget]
        return [
            f"{name}: {count} programs, of {allowed.get(name, 0)} that programs.json allows"
            for name, count in self.programs().items()
            if count > allowed.get(name, 0)
        ]

    def pytest_sessionfinish(self, session: pytest.Session):
        if hasattr(session.config, "workerinput"):
            return
        if self.excess(session.config) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.path:
            self.write()

    def write(self):
        with open(self.path, "w", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(("test", *COLUMNS))
            rows = sorted(self.costs.items(), key=lambda item: -item[1]["cpu"])
            for name, cost in [(f"all {len(rows)}", self.total()), *rows]:
                numbers = [f"{cost[column]:.2f}" for column in COLUMNS[1:]]
                table.writerow((name, int(cost["programs"]), *numbers))

    def total(self) -> dict[str, float]:
        return {column: sum(cost[column] for cost in self.costs.values()) for column in COLUMNS}

    def pytest_terminal_summary(self, terminalreporter, config):
        total = self.total()
        terminalreporter.write_line(
            f"{total['programs']:.0f} programs; {total['traced']:.0f} s tracing, "
            f"{total['lowered']:.0f} s lowering, {total['compiled']:.0f} s compiling, "
            f"{total['cpu']:.0f} s of the processor"
        )
        for line in self.excess(config):
            terminalreporter.write_line(line, red=True)
