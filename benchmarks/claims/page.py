"""The page docs/reproductions.md, from the claims and the committed results."""

import pathlib
import re
import textwrap
from collections import Counter

import reporting

from claims import papers, registry, scores
from claims.claim import CANNOT, HOLDS, VERDICTS, WHYS, Claim, Judged

INTRODUCTION = """\
# Reproductions

Each method of the library was published with a claim. This page says for each claim, by its
[paper](#by-paper) and its [method](#by-method), if it holds here, and with which command it was
measured. The link of a claim leads to our number, the criterion, the setting and the result.
`python benchmarks/reproduce.py --page` writes these pages from the claims in
[`benchmarks/claims`](../benchmarks/claims) and from the committed results.

**Verdicts.** A claim *holds* if its criterion is met in our setting. It *holds in part* if a part
of it is, or if it needs a condition that the paper does not name. It *does not hold here* if we
measured the opposite or no effect: our models are small, so this does not refute a paper. It
*cannot be tried here* if it needs data, models or devices that do not come with the library; the
row says which. It is *undecided* if nothing of it is shown, and the 95 % interval contains the
criterion's bound: more seeds may decide.

{whys}

**Criteria.** The criterion is the rule by which a program computes the verdict from the committed
numbers; nobody writes a verdict by hand. "before" says that criterion, program and settings were
committed before the measurement; a test compares that commit with the code and with the result.
"changed" says that one of them was replaced afterwards: the details say which, and the verdict by
the former one, which a test computes from the history. "beside" says that they were written with
the measurement or after it, as all were until November 2026.

**Rules.** Each result names the versions and the device that it was measured with. Unless a row
says otherwise, a number of random training is the median over at least five seeds, with the range
in parentheses, and the learning rates of compared methods, the uncompressed one included, come
from the same grid. "As good as" and "better" are judged on the differences of runs with the same
seed: the 95 % interval of their mean, by Student's t, must be above minus {margins} for "as good",
and above zero for "better". Negative results stay.

**Commands.** `make reproduce CLAIM=name` measures a claim again on the CPU, prints our number, its
verdict and whether the committed result has the same, and overwrites
`benchmarks/results/reproductions/name.json`: `git diff` shows the differences. With
`ARGS='--out out/reproduced'` it writes there, and with `ARGS=--json` it prints all numbers. Some
claims read the results of a larger benchmark: their command is that benchmark's, and `make
reproduce` prints the verdict of the committed results, or
[of your own](../benchmarks/README.md#a-verdict-on-your-own-numbers). `make reproduce` lists all
claims, and `make reproduce ARGS=--all` measures all that have a measurement of their own.
"""

PICTURE = """\
![For each family, a mark for each claim: its number over its criterion](reproductions.png)

Each mark is a claim: right of the line, the measured number meets the criterion, and by how many
times. Criteria without a number are at the left edge.
"""


class MissingError(LookupError):
    """A claim has no committed result."""


def judged(claim: Claim, results: pathlib.Path = reporting.RESULTS) -> Judged:
    """Our number in words, the verdict and the margin, from the committed results."""
    if not claim.tried:
        return Judged("–", CANNOT)
    missing = [name for name in claim.files if not (results / name).is_file()]
    if missing:
        raise MissingError(f"{claim.name} lacks {missing[0]}: measure it by\n{command(claim)}")
    return claim.verdict({name: reporting.read(results / name) for name in claim.files})


def command(claim: Claim) -> str:
    return claim.command or f"make reproduce CLAIM={claim.name}"


def names(claim: Claim) -> str:
    """The methods: names of the library as code, others as words."""
    return ", ".join(map(_name, claim.methods))


def _name(name: str) -> str:
    return f"`{name}`" if name.isidentifier() and name.islower() else name


def measured(results: pathlib.Path = reporting.RESULTS) -> list[tuple[str, tuple[Claim, ...]]]:
    """The headings of all families, and their claims that have a result."""
    later = registry.pending(results)
    every = [
        (heading, tuple(claim for claim in module.CLAIMS if claim.name not in later))
        for heading, module in registry.families()
    ]
    return [(heading, claims) for heading, claims in every if claims]


def text(results: pathlib.Path = reporting.RESULTS) -> str:
    """The whole page."""
    later, families = registry.pending(results), measured(results)
    found = {c.name: judged(c, results) for _, claims in families for c in claims}
    counts = Counter(one.verdict for one in found.values())
    total = ", ".join(f"{counts[verdict]} *{verdict}*" for verdict in VERDICTS)
    margins = " or ".join(f"{margin:g} {unit}" for unit, margin in scores.MARGINS.items())
    parts = [INTRODUCTION.format(margins=margins, whys=_whys(found))]
    parts += [f"**All {len(found)} claims:** {total}.\n", PICTURE]
    if later:
        names_ = ", ".join(f"`{name}`" for name in later)
        parts.append(f"Not measured yet, and without a row: {names_}.\n")
    parts.append(_by_paper([claim for _, claims in families for claim in claims], found))
    parts.append(_without(found))
    parts.append(_by_method([claim for _, claims in families for claim in claims], found))
    return "\n".join(parts)


def reasons(found: dict[str, Judged]) -> Counter[str]:
    """How many of the rows below "holds" have each word of `WHYS`."""
    every = registry.every()
    return Counter(every[name].why for name, one in found.items() if one.verdict != HOLDS)


def _whys(found: dict[str, Judged]) -> str:
    counts = reasons(found)
    told = ", ".join(f"*{word}* ({means}; {counts[word]} rows)" for word, means in WHYS.items())
    return textwrap.fill(f"**Why.** Each row below *holds* says why in one word: {told}.", 100)


def failing(found: dict[str, Judged]) -> list[str]:
    """The compared systems none of whose claims holds."""
    every = registry.every()
    held = {
        name
        for title, one in found.items()
        if one.verdict == HOLDS
        for name in every[title].methods
    }
    return [system for system, ours in registry.SYSTEMS.items() if not held & {system, ours}]


def _without(found: dict[str, Judged]) -> str:
    """The systems without a claim that holds, with what was tried."""
    lines = [
        f"* **{system}.** {registry.TRIED.get(system, 'Not measured.')}"
        for system in failing(found)
    ]
    wrapped = [textwrap.fill(line, 118, subsequent_indent="  ") for line in lines]
    return "\n".join(["## Systems without a claim that holds", "", *wrapped, ""])


def fixed(claim: Claim) -> str:
    """When the criterion was written."""
    if not claim.tried:
        return "–"
    return "changed" if claim.changed else "before" if claim.fixed else "beside"


def verdict(claim: Claim, one: Judged) -> str:
    return one.verdict + (f": {claim.why}" if one.verdict != HOLDS else "")


def _by_paper(claims: list[Claim], found: dict[str, Judged]) -> str:
    """A table of all claims, in the order of their papers' names."""
    pages, done, last = registry.page_of(), set(), ""
    rows = sorted(((paper, c) for c in claims for paper in papers.papers(c)), key=_by_name)
    lines = [
        "| paper | claim | verdict | criterion | command | minutes |",
        "|---|---|---|---|---|---:|",
    ]
    for paper, claim in rows:
        anchor = "" if claim.name in done else f'<a id="{claim.name}"></a>'
        done.add(claim.name)
        link = f"{anchor}[{claim.name}](reproductions/{pages[claim.name]}.md#{claim.name})"
        cells = (paper if paper != last else "", link, verdict(claim, found[claim.name]))
        lines.append(f"| {' | '.join((*cells, fixed(claim), *_run(claim)))} |")
        last = paper
    return "\n".join(["## By paper", "", *lines, ""])


def _by_name(row: tuple[str, Claim]) -> tuple[str, str]:
    return row[0].lower(), row[1].name


def _run(claim: Claim) -> tuple[str, str]:
    """The command of a claim's result in short, and its minutes where they are known."""
    if not claim.tried:
        return "–", "–"
    own = re.fullmatch(r"make reproduce CLAIM=(\S+)", command(claim))
    if own:
        return f"`{command(claim)}`", f"{registry.every()[own[1]].minutes:g}"
    programs = re.findall(r"(?:benchmarks|examples)/[\w/]+\.py", command(claim))
    return ", ".join(f"`{name}`" for name in dict.fromkeys(programs)), "–"


def _by_method(claims: list[Claim], found: dict[str, Judged]) -> str:
    """A line for each method: its claims with their verdicts."""
    rows: dict[str, list[str]] = {}
    for claim in claims:
        for name in claim.methods:
            link = f"[{claim.name}](#{claim.name}) ({found[claim.name].verdict})"
            rows.setdefault(_name(name), []).append(link)
    lines = [
        f"* {name}: {', '.join(rows[name])}"
        for name in sorted(rows, key=lambda name: name.strip("`").lower())
    ]
    return "\n".join(["## By method", "", *lines, ""])
