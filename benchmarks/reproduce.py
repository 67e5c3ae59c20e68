"""Measures a published claim, prints the numbers and the verdict, and writes docs/reproductions.md.

    python benchmarks/reproduce.py --list
    python benchmarks/reproduce.py --claim qsgd-variance
    python benchmarks/reproduce.py --page

`make reproduce CLAIM=name` runs one claim. A claim that reads the results of another benchmark
is not measured again: its verdict on the committed results is printed, with its command.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

import reporting
from claims import page, registry
from claims.claim import Claim

PAGE = reporting.HERE.parent / "docs" / "reproductions.md"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--claim", nargs="+", metavar="NAME", help="measure these claims")
    what.add_argument("--all", action="store_true", help="measure all claims, each in a process")
    what.add_argument("--list", action="store_true", help="list the claims and their verdicts")
    what.add_argument("--page", action="store_true", help=f"write {PAGE.name} of docs")
    parser.add_argument("--out", type=pathlib.Path, default=reporting.RESULTS, help="folder")
    options = parser.parse_args()
    known = registry.every()
    for name in options.claim or ():
        if name not in known:
            parser.error(f"argument --claim: must be one of {', '.join(known)}; got {name!r}")
    return options


def measure(claim: Claim, out: pathlib.Path = reporting.RESULTS) -> tuple[str, str]:
    """Runs a claim, writes what it found, and returns our number in words and the verdict."""
    if claim.run:
        start = time.perf_counter()
        found = claim.run()
        minutes = round((time.perf_counter() - start) / 60, 2)
        environment = reporting.environment()
        results = {"environment": environment, "minutes": minutes, "numbers": found["numbers"]}
        path = out / claim.files[0]
        reporting.keep(path, results)
        print(json.dumps(results, indent=1))
        print(f"written to {path}")
    return page.judged(claim, out if claim.run else reporting.RESULTS)


def show(claim: Claim, number: str, verdict: str) -> None:
    print(f"\nclaim: {claim.claim} ({claim.source})")
    print(f"setting: {claim.setting}")
    if claim.tried:
        print(f"ours: {number}")
    print(f"verdict: {verdict}" + (f". {claim.note}" if claim.note else ""))
    if claim.results:
        print(f"measured before: {claim.results}; by: {claim.command}")


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
        PAGE.write_text(page.text())
        print(f"written to {PAGE}")
    elif options.all:
        sys.exit(min(1, every(options.out)))
    for name in options.claim or ():
        show(known[name], *measure(known[name], options.out))


if __name__ == "__main__":
    main()
