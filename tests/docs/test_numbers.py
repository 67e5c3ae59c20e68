"""Numbers that stand on several pages are those of one committed result, or of the code."""

import re
import shlex
import statistics

import jax
import numpy as np
import pytest
from helpers.paths import ROOT

import jaxcomp
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


@pytest.mark.full
def test_errors_of_top_k_in_chunks_are_those_of_the_page():
    """Of the million elements that the other rows of the table have."""
    text = (ROOT / "docs" / "codecs.md").read_text()
    (row,) = re.findall(r"^\| `chunk_top_k\(\)` .*", text, re.MULTILINE)
    told = re.findall(r"0\.\d\d(?= \(|\))", row.partition("0.16")[2])
    normal = np.random.default_rng(0).normal(size=1_000_000).astype(np.float32)

    def error(codec, x):
        back = jaxcomp.roundtrip(codec, jax.random.key(0), {"x": x})["x"]
        return float(np.sum((back - x) ** 2) / np.sum(x**2))

    chunks, whole = jaxcomp.chunk_top_k(), jaxcomp.top_k(fraction=1 / 64)
    found = error(chunks, normal), error(chunks, normal**3), error(whole, normal**3)
    assert told == [f"{one:.2f}" for one in found]
