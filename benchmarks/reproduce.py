"""Measures a published claim, prints the numbers and the verdict, and writes pages.

    python benchmarks/reproduce.py --list
    python benchmarks/reproduce.py --claim qsgd-variance
    python benchmarks/reproduce.py --claim qsgd-variance --out out/reproduced --json
    python benchmarks/reproduce.py --page

`make reproduce CLAIM=name` runs one claim, and overwrites its committed result unless `--out` names
another folder. A claim that reads the results of another benchmark is not measured again: its
verdict on the results in `--out` is printed, or on the committed ones, with the command that
measures them.
"""

import argparse
import difflib
import json
import pathlib
import subprocess
import sys
import time

import reporting
from claims import details, page, registry
from claims.claim import HOLDS, WHYS, Claim, Judged

DOCS = reporting.HERE.parent / "docs"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--claim", nargs="+", metavar="NAME", help="measure these claims")
    what.add_argument("--all", action="store_true", help="measure all claims, each in a process")
    what.add_argument("--list", action="store_true", help="list the claims and their verdicts")
    what.add_argument("--page", action="store_true", help="write the pages of docs")
    folder = "of new results (default: that of the committed ones, which are overwritten)"
    parser.add_argument("--out", type=pathlib.Path, default=reporting.RESULTS, help=folder)
    parser.add_argument("--json", action="store_true", help="print all measured numbers")
    options = parser.parse_args()
    known = registry.every()
    for name in options.claim or ():
        if name not in known:
            close = difflib.get_close_matches(name, known, 3, 0.75)
            hint = f"did you mean {' or '.join(close)}?" if close else "--list prints all claims"
            parser.error(f"argument --claim: must be the name of a claim, got {name!r}: {hint}")
    return options


def measure(claim: Claim, out: pathlib.Path = reporting.RESULTS, *, whole: bool = False) -> Judged:
    """Runs a claim, writes the result, and returns our number in words, verdict and margin.

    Args:
        claim: one without `run` is judged by the results that `out` has, or by the committed ones.
        out: the folder of results.
        whole: whether all numbers are printed.
    """
    try:
        before = page.judged(claim)
    except (page.MissingError, KeyError):  # None yet, or of a program with other methods.
        before = None
    if claim.run:
        start, started = time.perf_counter(), reporting.now()
        found = claim.run()
        minutes = round((time.perf_counter() - start) / 60, 2)
        environment = reporting.environment()
        results = {
            "environment": environment,
            "measured": started,
            "minutes": minutes,
            "numbers": found["numbers"],
        }
        path = out / claim.files[0]
        reporting.keep(path, results)
        if whole:
            print(json.dumps(results, indent=1))
        print(f"written to {path}")
    elif not all((out / name).is_file() for name in claim.files):
        out = reporting.RESULTS
    after = page.judged(claim, out)
    if claim.results:
        print(f"read: {', '.join(str(out / name) for name in claim.files)}")
    if before and (claim.run or out != reporting.RESULTS):
        print(compared(before, after))
    return after


def compared(before: Judged, after: Judged) -> str:
    """Whether number and verdict are those of the committed result."""
    if before[:2] == after[:2]:
        return "the committed result has the same number and verdict"
    verdict = f"the verdict {before.verdict!r}"
    if before.verdict == after.verdict:
        verdict = "the same verdict"
    return f"the committed result has {verdict} and the number: {before.words}"


def show(claim: Claim, number: str, verdict: str) -> None:
    print(f"\nclaim: {claim.claim} ({claim.source})")
    print(f"setting: {claim.setting}")
    if claim.tried:
        print(f"ours: {number}")
    why = f" ({WHYS[claim.why]})" if claim.why and verdict != HOLDS else ""
    print(f"verdict: {verdict}{why}" + (f". {claim.note}" if claim.note else ""))
    if claim.results:
        commands = "\n  ".join(claim.command.splitlines())
        print(f"this claim reads {claim.results.replace(' ', ' and ')}, measured by\n  {commands}")


def every(out: pathlib.Path) -> int:
    """Measures all claims one after another, and returns how many of them stopped."""
    failed = []
    for name in registry.every():  # Some change JAX's configuration, so each has a process.
        command = [sys.executable, __file__, "--claim", name, "--out", str(out)]
        failed += [name] * bool(subprocess.run(command, check=False).returncode)
    if failed:
        print(f"stopped: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


def listing() -> reporting.Table:
    rows = []
    for name, claim in registry.every().items():
        try:
            verdict = page.judged(claim)[1]
        except page.MissingError:
            verdict = "not measured yet"
        minutes = f"{claim.minutes:g}" if claim.run else ""
        methods = ", ".join(claim.methods)
        rows.append({"name": name, "methods": methods, "minutes": minutes, "verdict": verdict})
    columns = "claim {name} | minutes {minutes} | verdict {verdict} | methods {methods}"
    return reporting.Table("Claims", columns, rows)


def main() -> None:
    options, known = parse(), registry.every()
    if options.list:
        listing().print()
    elif options.page:
        for name, text in details.texts().items():
            (DOCS / name).parent.mkdir(exist_ok=True)
            (DOCS / name).write_text(text)
            print(f"written to {DOCS / name}")
    elif options.all:
        sys.exit(min(1, every(options.out)))
    for name in options.claim or ():
        show(known[name], *measure(known[name], options.out, whole=options.json)[:2])


if __name__ == "__main__":
    main()
