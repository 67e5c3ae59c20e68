"""The pages of details in docs/reproductions: a table of each family, and every claim whole."""

import pathlib
import textwrap
from collections.abc import Iterator
from typing import Any

import reporting

from claims import page, registry, scores
from claims.claim import LONGEST, Claim, Judged

HEAD = """\
# {title}

[Reproductions](../reproductions.md) has the verdicts by paper, and says how they are made.
"""


def texts(results: pathlib.Path = reporting.RESULTS) -> dict[str, str]:
    """All pages of claims, by their places in docs/."""
    found = {
        c.name: page.judged(c, results) for _, claims in page.measured(results) for c in claims
    }
    pages = {f"reproductions/{name}.md": text(name, found, results) for name in registry.PAGES}
    return {"reproductions.md": page.text(results)} | pages


def text(name: str, found: dict[str, Judged], results: pathlib.Path = reporting.RESULTS) -> str:
    """A page of details."""
    homes = registry.page_of()
    families = [
        (heading, kept)
        for heading, claims in page.measured(results)
        if (kept := tuple(claim for claim in claims if homes[claim.name] == name))
    ]
    parts = [HEAD.format(title=registry.PAGES[name][0])]
    for heading, claims in families:
        parts.append(_table(heading, claims, found))
        parts.extend(_details(claim, found[claim.name], results) for claim in claims)
    return "\n".join(parts)


def _table(heading: str, claims: tuple[Claim, ...], found: dict[str, Judged]) -> str:
    rows = []
    for claim in claims:
        one = found[claim.name]
        cells = (
            f"[{claim.name}](#{claim.name})",
            page.names(claim),
            _cell(one.words),
            _cell(claim.criterion or "–"),
            page.fixed(claim),
            page.verdict(claim, one),
        )
        rows.append(f"| {' | '.join(cells)} |")
    head = [
        "| claim | methods | our number | criterion | fixed | verdict |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([f"## {heading}", "", *head, *rows, ""])


def _cell(words: str) -> str:
    """At most so many characters; the details have all."""
    return textwrap.shorten(words, LONGEST, placeholder=" …").replace("|", "\\|")


def _details(claim: Claim, one: Judged, results: pathlib.Path) -> str:
    lines = [
        f"**Claim.** {claim.claim} ({claim.source})",
        f"**Methods.** {page.names(claim)}.",
        f"**Setting.** {claim.setting}",
        f"**Verdict: {page.verdict(claim, one)}.** Measured: {one.words}."
        if claim.tried
        else f"**Verdict: {page.verdict(claim, one)}.**",
    ]
    if claim.former:
        lines.append(
            f"**The committed result is of a former setting:** {claim.former}. The one above is "
            "not measured yet."
        )
    if claim.criterion:
        when = f"commit {claim.fixed}, before the measurement" if claim.fixed else "beside it"
        margin = "" if one.margin is None else f" Number over criterion: {one.margin:.3g}."
        lines.append(f"**Criterion.** {claim.criterion} ({when}).{margin}")
    lines += [
        f"**Changed.** {change.words} By commit {change.commit}: {change.verdict}."
        for change in claim.changed
    ]
    if claim.note:
        lines.append(f"**Note.** {claim.note}")
    if claim.tried:
        files = ", ".join(f"[`{name}`](../../benchmarks/results/{name})" for name in claim.files)
        minutes = f", about {claim.minutes:g} min" if claim.run else ""
        ways = ", then ".join(f"`{each}`" for each in page.command(claim).splitlines())
        lines.append(f"**Command.** {ways}{minutes}; result: {files}.")
    wrapped = [
        textwrap.fill(line, 118, break_long_words=False, break_on_hyphens=False) for line in lines
    ]
    for name in claim.files if claim.tried else ():
        wrapped += map(_compared, _comparisons(reporting.read(results / name)))
    return "\n\n".join([f"### {claim.name}", *wrapped, ""])


def _comparisons(found: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What `networks.compare` returned, wherever it is in a result, with its place."""
    if not isinstance(found, dict):
        return
    if {"better", "unit", "methods"} <= set(found):
        yield path, found
        return
    for name, one in found.items():
        yield from _comparisons(one, name if name != "numbers" else path)


def _compared(given: tuple[str, Any]) -> str:
    """A table of the grids, the edges and the paired differences."""
    place, found = given
    rows = {name: row for name, row in found["methods"].items() if "score" in row}
    first = next(iter(rows))
    lines = [
        f"| {place or 'method'} | seeds | rate | of the grid | better than {first} by |",
        "|---|---:|---:|---|---:|",
    ]
    for name, row in rows.items():
        grid = list(row.get("grid", {}))
        edge = ", at its edge" if row.get("edge") else ""
        of = f"{grid[0]} to {grid[-1]}{edge}" if grid else "–"
        rate = f"{row['rate']:g}" if "rate" in row else "–"
        by = scores.words(scores.paired(found, name, first)) if name != first else "–"
        lines.append(f"| {name} | {len(row['score'])} | {rate} | {of} | {by} |")
    return "\n".join(lines)
