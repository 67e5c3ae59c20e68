"""The tiers of tests, and a word at the end of a run about what it left out.

The core suite (`make test`) has each public part once as people use it, and each contract once on a
representative. The full suite (`make test-all`) adds the tests and cases with the marker `full`:
every recipe, method, mode and dtype. Those with the marker `slow` run before a release.
"""

import collections

import pytest

COMMANDS = {"full": "make test-all", "slow": "make test-all ARGS=\"-m ''\""}
"""The smallest run that has them."""


class Tiers:
    """A plugin of pytest: counts the tests that a selection by markers leaves out."""

    def __init__(self):
        self.left_out = collections.Counter[str]()

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
