"""The page docs/reproductions.md, from the claims and the committed results."""

import pathlib
import textwrap
from collections import Counter

import reporting

from claims import registry
from claims.claim import CANNOT, VERDICTS, Claim

INTRODUCTION = """\
# Reproductions

Each method of the library was published with a claim. This page says for each claim if it holds
here, with our number and the command that measures it. `python benchmarks/reproduce.py --page`
writes this page from the claims in [`benchmarks/claims`](../benchmarks/claims) and from the
committed results.

**Verdicts.** A claim *holds* if its number, or its order of methods, was measured in our setting.
It *holds in part* if a part of it was, or if it needs a condition that the paper does not name. It
*does not hold here* if we measured the opposite or no effect: our models are small, so this does
not refute a paper. It *cannot be tried here* if it needs data, models or devices that do not come
with the library; the row says which.

**Rules.** A program computes each verdict from the committed numbers; nobody writes it by hand.
Each result names the versions and the device that it was measured with. Unless a row says
otherwise, a number of random training is the median over at least five seeds, with the range in
parentheses, and the learning rates of compared methods, the uncompressed one included, come from
the same grid. Negative results stay.

**Commands.** `make reproduce CLAIM=name` measures a claim again on the CPU, prints our number, its
verdict and whether the committed result has the same, and overwrites
`benchmarks/results/reproductions/name.json`: `git diff` shows the differences. With
`ARGS='--out out/reproduced'` it writes there, and with `ARGS=--json` it prints all numbers. Some
claims read the results of a larger benchmark: their command is that benchmark's, and `make
reproduce` prints the verdict of the committed results, or
[of your own](../benchmarks/README.md#a-verdict-on-your-own-numbers). `make reproduce` lists all
claims, and `make reproduce ARGS=--all` measures all that have a measurement of their own.
"""


class MissingError(LookupError):
    """A claim has no committed result."""


def judged(claim: Claim, results: pathlib.Path = reporting.RESULTS) -> tuple[str, str]:
    """Our number in words and the verdict, from the committed results."""
    if not claim.tried:
        return "–", CANNOT
    missing = [name for name in claim.files if not (results / name).is_file()]
    if missing:
        raise MissingError(f"{claim.name} lacks {missing[0]}: measure it by\n{command(claim)}")
    return claim.verdict({name: reporting.read(results / name) for name in claim.files})


def command(claim: Claim) -> str:
    return claim.command or f"make reproduce CLAIM={claim.name}"


def names(claim: Claim) -> str:
    """The methods: names of the library as code, others as words."""
    return ", ".join(
        f"`{name}`" if name.isidentifier() and name.islower() else name for name in claim.methods
    )


def text(results: pathlib.Path = reporting.RESULTS) -> str:
    """The whole page."""
    later = registry.pending(results)
    every = [
        (heading, tuple(claim for claim in module.CLAIMS if claim.name not in later))
        for heading, module in registry.families()
    ]
    families = [(heading, claims) for heading, claims in every if claims]
    found = {c.name: judged(c, results) for _, claims in families for c in claims}
    counts = Counter(verdict for _, verdict in found.values())
    total = ", ".join(f"{counts[verdict]} *{verdict}*" for verdict in VERDICTS)
    parts = [INTRODUCTION, f"**All {len(found)} claims:** {total}.\n"]
    if later:
        names_ = ", ".join(f"`{name}`" for name in later)
        parts.append(f"Not measured yet, and without a row: {names_}.\n")
    for heading, claims in families:
        parts.append(_table(heading, claims, found))
    for heading, claims in families:
        parts.append(f"## Details: {heading}\n")
        parts.extend(_details(claim, *found[claim.name]) for claim in claims)
    return "\n".join(parts)


def _table(heading: str, claims: tuple[Claim, ...], found: dict[str, tuple[str, str]]) -> str:
    rows = [
        f"| [{claim.name}](#{claim.name}) | {names(claim)} | {_cell(found[claim.name][0])} | "
        f"{found[claim.name][1]} |"
        for claim in claims
    ]
    head = ["| claim | methods | our number | verdict |", "|---|---|---|---|"]
    return "\n".join([f"## {heading}", "", *head, *rows, ""])


def _cell(words: str) -> str:
    return words.replace("|", "\\|")


def _details(claim: Claim, number: str, verdict: str) -> str:
    lines = [
        f"**Claim.** {claim.claim} ({claim.source})",
        f"**Methods.** {names(claim)}.",
        f"**Setting.** {claim.setting}",
        f"**Verdict: {verdict}.** Measured: {number}."
        if claim.tried
        else f"**Verdict: {verdict}.**",
    ]
    if claim.note:
        lines.append(f"**Note.** {claim.note}")
    if claim.tried:
        files = ", ".join(f"[`{name}`](../benchmarks/results/{name})" for name in claim.files)
        minutes = f", about {claim.minutes:g} min" if claim.run else ""
        ways = ", then ".join(f"`{each}`" for each in command(claim).splitlines())
        lines.append(f"**Command.** {ways}{minutes}; result: {files}.")
    wrapped = (
        textwrap.fill(line, 118, break_long_words=False, break_on_hyphens=False) for line in lines
    )
    return "\n\n".join([f"### {claim.name}", *wrapped, ""])
