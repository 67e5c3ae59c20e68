"""`jaxcomp weights`: the versions that are published at a URL."""

import argparse
import time

from jaxcomp.cli import output
from jaxcomp.tables import Column
from jaxcomp.theory import units
from jaxcomp_weights import listing
from jaxcomp_weights.errors import WeightsError
from jaxcomp_weights.listing import Way

_COLUMNS = (
    Column("version", "version", ",d", right=True),
    Column("step", "step", ",d", right=True),
    Column("from", "base", ",d", right=True),
    Column("bytes", "size", ",d", right=True),
    Column("times less", lambda way: way.dense / max(way.size, 1), ".1f", right=True),
    Column("age", lambda way: time.time() - way.time, units.duration, right=True),
    Column("files", lambda way: way.fault or None, str),
)


def weights(args: argparse.Namespace) -> None:
    """Lists versions with their bytes and ages; `--verify` reads and checks every file.

    Raises:
        ValueError: for a URL that cannot be opened, or without versions; and after the table if
            files are damaged.
    """
    try:
        found = listing.ways(
            args.url,
            check=args.verify,
            verify=None if args.key is None else bytes.fromhex(args.key),
            progress=lambda done, of: output.progress(f"read {done} of {of} versions"),
        )
    except WeightsError as error:
        raise ValueError(str(error)) from None
    if not found:
        raise ValueError(f"URL must have published versions, got none at {args.url}")
    wrong = [way for way in found if way.fault]
    output.show(args, [_row(way) for way in found], _COLUMNS, found, _about(found, args.verify))
    if wrong:
        raise ValueError(f"{len(wrong)} of {len(found)} ways to versions are damaged")


def _row(way: Way) -> dict[str, object]:
    return {**way._asdict(), "ratio": way.dense / max(way.size, 1)}


def _about(found: list[Way], checked: bool) -> str:
    versions = len({way.version for way in found})
    total = sum(way.size for way in found)
    said = f"{versions} versions of {found[-1].dense:,} bytes, in files of {total:,} bytes"
    if not checked:
        return said + "."
    wrong = sum(way.fault is not None for way in found)
    return said + (f"; {wrong} ways are damaged." if wrong else "; all files are right.")
