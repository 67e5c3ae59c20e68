"""The answers of `choose.md` are those of its plans, and its methods keep what they claim."""

import re
import shlex

import pytest
from helpers.paths import ROOT

import jaxcomp_command

PAGE = (ROOT / "docs" / "choose.md").read_text()
ROWS = re.findall(r"^\| (.+?) \| (.+?) \| \[(\d+)\]\(#the-plans\): (.+) \|$", PAGE, re.MULTILINE)


def plans():
    """The commands below the table, in order."""
    (block,) = re.findall(r"### The plans\n\n```bash\n(.+?)```", PAGE, re.DOTALL)
    return block.replace("\\\n", "").strip().splitlines()


def test_every_situation_has_a_line_and_a_plan():
    assert [int(number) for *_, number, _ in ROWS] == list(range(1, len(ROWS) + 1))
    assert len(ROWS) == len(plans()) >= 10
    assert all(line.startswith("jaxcomp plan ") for line in plans())


@pytest.mark.core("1", "5", "10")
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
        (codec,) = re.findall(r"jaxcomp\.(?:PowerIteration|qsgd_inf)\(.+?\)", line)
        assert codec in best[1]
    assert ("do not compress" in line) == ("Do not compress" in printed)
