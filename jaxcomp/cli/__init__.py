"""The work of the `jaxcomp` command, whose arguments `jaxcomp_command` reads."""

import argparse

from jaxcomp.cli import audit, planned, tables

COMMANDS = {
    "codecs": tables.codecs,
    "bench": tables.bench,
    "plan": planned.plan,
    "audit": audit.audit,
}


def run(args: argparse.Namespace) -> None:
    """Runs the command that was read.

    Raises:
        ValueError: for arguments that do not fit together; the command prints it as one line.
    """
    COMMANDS[args.command](args)
