"""The tiers of tests, and a word at the end of a run about what it left out.

The core suite (`make test`) has each public part once as people use it, and each contract once on a
representative. The full suite (`make test-all`) adds the tests and cases with the marker `full`:
every recipe, method, mode and dtype. Those with the marker `slow` run before a release.

`pytest.mark.core("sign", "top_*")` marks all cases of a test `full` but those named: a name is a
case's id or a part of it between hyphens, with `*` for any text.
"""

import collections
import fnmatch

import pytest

COMMANDS = {"full": "make test-all", "slow": "make test-all ARGS=\"-m ''\""}
"""The smallest run that has them."""


def in_core(item: pytest.Function, names: tuple[str, ...]) -> list[str]:
    """The names that fit a case."""
    case = item.callspec.id
    return [n for n in names if any(fnmatch.fnmatchcase(p, n) for p in (case, *case.split("-")))]


LONG_EXAMPLES = (
    "codecs.modulo.Modulo",
    "entropy.elias.Elias",
    "entropy.huffman.Huffman",
    "entropy.rans.Rans",
    "entropy.rice.Rice",
    "planning.planner.plan",
    "quantize.adaptive.alq",
    "quantize.adaptive.amq",
    "recipes.votes.Vote",
    "testing.codec.check_codec",
)
"""The docstrings in `jaxcomp` whose examples are not in the core suite."""


class Tiers:
    """A plugin of pytest: marks cases, and counts the tests that a selection leaves out."""

    def __init__(self):
        self.left_out = collections.Counter[str]()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        cases, unused = collections.Counter(), {}
        for item in items:
            if item.name.removeprefix("jaxcomp.") in LONG_EXAMPLES:
                item.add_marker(pytest.mark.full)
            if (marker := item.get_closest_marker("core")) is None:
                continue
            test = item.nodeid.partition("[")[0]
            found = in_core(item, marker.args)
            cases[test] += 1
            unused[test] = unused.get(test, set(marker.args)) - set(found)
            if not found:
                item.add_marker(pytest.mark.full)
        for test, names in unused.items():
            if names and cases[test] > 1:  # Not if single cases were asked for.
                raise pytest.UsageError(f"no case of {test} is called {sorted(names)}")

    def pytest_deselected(self, items):
        for item in items:
            tier = next((t for t in ("slow", "full") if item.get_closest_marker(t)), None)
            self.left_out[tier] += 1

    def pytest_sessionfinish(self, session: pytest.Session):
        if hasattr(session.config, "workerinput"):
            session.config.workeroutput["left_out"] = dict(self.left_out)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        """All processes collect the same tests."""
        self.left_out = collections.Counter(getattr(node, "workeroutput", {}).get("left_out", {}))

    def pytest_terminal_summary(self, terminalreporter):
        for tier, command in COMMANDS.items():
            if count := self.left_out[tier]:
                terminalreporter.write_line(f"{count} {tier} tests were left out: {command}")
