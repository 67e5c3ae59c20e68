"""The answers of `choose.md` are those of its plans, and its methods keep what they claim."""

import pkgutil
import re
import shlex

import pytest
from helpers.paths import ROOT

import jaxcomp_command
from jaxcomp import expressions

DOCS = ROOT / "docs"
PAGE = (DOCS / "choose.md").read_text()
ROWS = re.findall(r"^\| (.+?) \| (.+?) \| \[(\d+)\]\(#plan-\3\): (.+) \|$", PAGE, re.MULTILINE)


def plans():
    """The commands below the table, in order."""
    part = PAGE.partition("### The plans\n")[2].partition("\nReplace")[0]
    blocks = re.findall(r'<a id="plan-(\d+)"></a>\n\n```bash\n# (\d+)\. .+\n([^`]+)```', part)
    assert all(anchor == number for anchor, number, _ in blocks)
    return [command.replace("\\\n", "").strip() for *_, command in blocks]


def test_every_situation_has_a_line_and_a_plan():
    assert [int(number) for *_, number, _ in ROWS] == list(range(1, len(ROWS) + 1))
    assert len(ROWS) == len(plans()) >= 10
    assert all(line.startswith("jaxcomp plan ") for line in plans())


@pytest.mark.core("1", "5", "6", "7", "10")
@pytest.mark.parametrize("number", [number for *_, number, _ in ROWS])
def test_the_numbers_of_a_situation_are_printed_by_its_plan(number, capsys):
    _, line, _, told = ROWS[int(number) - 1]
    jaxcomp_command.main(shlex.split(plans()[int(number) - 1])[1:])
    printed = capsys.readouterr().out
    numbers = re.findall(r"(?<![\w.])[\d,.]+(?: (?:ms|s|bytes up|times)\b|%)", told)
    assert numbers
    for one in numbers:
        assert one.removesuffix(" times") in printed, one
    best = re.search(r"jaxcomp\.compressed_mean\((.+), axis_name\)", printed)
    if best:  # A mean of the plan has the row's codec, or both have one with the same codec.
        (codec,) = set(re.findall(r"jaxcomp\.(?:PowerIteration|qsgd_inf)\(.+?\)", line))
        assert codec in best[1]
    assert ("do not compress" in line) == ("Do not compress" in printed)


def recommended():
    """The names in the second column of the tables that say what to take."""
    tables = PAGE.partition("## Claims that do not hold here")[0]
    cells = re.findall(r"^\|[^|\n]*\|([^|\n]*)\|", tables, re.MULTILINE)
    spans = re.findall(r"`([^`]+)`", "\n".join(cells))
    return {name for span in spans for name in re.findall(r"[A-Za-z_]\w+", span)}


def verdicts():
    """For each method, its claims with their verdicts."""
    lines = re.findall(
        r"^\* `?(\w+)`?: (.+)$", (DOCS / "reproductions.md").read_text(), re.MULTILINE
    )
    found = {}
    for method, claims in lines:
        found[method] = re.findall(r"\]\(#([\w-]+)\) \(([^)]+)\)", claims)
    return found


def test_recommended_methods_exist():
    """Calls of the library in the tables can be made; other words are of a reader's program."""
    table = PAGE.partition("## The codecs at a glance")[0]
    called = set(re.findall(r"jaxcomp((?:\.\w+)+)", "".join(re.findall(r"`[^`\n]+`", table))))
    called |= {f".{name}" for name in re.findall(r"`(algorithms\.\w+)", table)}
    called |= {f".{name}" for name in re.findall(r"`(federated\.\w+)", table)}
    assert {".compressed_mean", ".PowerIteration", ".algorithms.one_bit_adam"} <= called
    for path in called:
        assert pkgutil.resolve_name(f"jaxcomp{path}"), path
    for call in re.findall(r"`((?:qsgd_inf|sign|top_k|PowerIteration)\([^`]*\))`", table):
        expressions.evaluate(call)


def test_a_failed_claim_of_a_recommended_method_is_told():
    names, known = recommended(), verdicts()
    assert {"PowerIteration", "one_bit_adam", "qsgd_inf", "choco_sgd"} <= names
    failed = {
        claim
        for method in names & set(known)
        for claim, verdict in known[method]
        if verdict == "does not hold here"
    }
    assert len(failed) >= 5
    told = PAGE.partition("## Claims that do not hold here")[2].partition("\n## ")[0]
    assert {claim for claim in failed if f"(reproductions.md#{claim})" not in told} == set()


def test_claims_that_are_told_to_fail_do_or_are_undecided():
    bad = ("does not hold here", "undecided")
    failed = {c for claims in verdicts().values() for c, v in claims if v in bad}
    told = PAGE.partition("## Claims that do not hold here")[2].partition("\n## ")[0]
    assert set(re.findall(r"reproductions\.md#([\w-]+)", told)) <= failed


def test_no_page_takes_signs_before_adam():
    """At the rate of a dense run they may learn nothing: the pages that copy it say so."""
    bad = re.compile(r"compressed_mean\((?:jaxcomp\.)?(?:sign|top_k)\([^\n]*optax\.adam")
    assert [path.name for path in DOCS.glob("*.md") if bad.search(path.read_text())] == []
