"""Numbers that stand on several pages are those of one committed result."""

import re
import shlex
import statistics

import pytest
from paths import ROOT

import jaxcomp_command

RESULTS = ROOT / "benchmarks" / "results"


def trained(rate, method, processes=4):
    """Median seconds of the training over shaped links."""
    import reporting

    cells = reporting.read(RESULTS / "network" / "train.json")["cells"]
    [cell] = [c for c in cells if (c["rate"], c["processes"]) == (rate, processes)]
    return statistics.median(cell["methods"][method]["seconds"])


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


SECONDS = {
    ("100mbit", "dense"): {
        "README.md": r"dense\s+gradients take (\S+) s;",
        "docs/choose.md": r"same transformer: \S+ s, \S+ s, and (\S+) s dense",
    },
    ("100mbit", "two shots, 4-bit"): {
        "README.md": r"reaches its loss in (\S+) s with four bits",
        "docs/choose.md": r"same transformer: \S+ s, (\S+) s, and",
        "docs/pytorch.md": r"and (\S+) s with four bits in two shots",
    },
    ("100mbit", "PowerSGD rank 4"): {
        "README.md": r"and in (\S+) s with matrices of low rank",
        "docs/choose.md": r"same transformer: (\S+) s,",
        "docs/pytorch.md": r"(\S+) s with `PowerIteration\(rank=4\)`",
    },
    ("1gbit", "two shots, 4-bit"): {
        "README.md": r"at 1 Gbit/s in (\S+) s,",
        "docs/choose.md": r"reaches its loss in (\S+) s with four bits",
    },
    ("1gbit", "PowerSGD rank 4"): {
        "README.md": r"at 1 Gbit/s in \S+ s, (\S+) s and",
        "docs/choose.md": r"with four bits, (\S+) s with PowerSGD",
    },
    ("1gbit", "dense"): {
        "README.md": r"at 1 Gbit/s in \S+ s, \S+ s and (\S+) s ",
        "docs/choose.md": r"with PowerSGD, (\S+) s dense",
    },
}
"""For each link and method, where its median seconds stand."""


@pytest.mark.parametrize("link", SECONDS, ids=" ".join)
def test_pages_have_the_same_seconds(link):
    want = trained(*link)
    for page, pattern in SECONDS[link].items():
        found = re.search(pattern, (ROOT / page).read_text())
        assert found, f"{page} has no {pattern}"
        digits = len(found.group(1).partition(".")[2])
        assert float(found.group(1)) == round(want, digits), page


def test_a_printed_plan_is_what_its_command_prints(capsys):
    text = (ROOT / "docs" / "network.md").read_text()
    command, printed = re.search(
        r"```bash\njaxcomp (.+?)\n```\n\n```text\n(.+?)```", text, re.DOTALL
    ).groups()
    jaxcomp_command.main(shlex.split(command))
    assert capsys.readouterr().out.strip() == printed.strip()
