"""The work of the `jaxcomp` command, whose arguments `jaxcomp_command` reads."""

import argparse

from jaxcomp.cli import audit, codecs, fit, planned, report, watch, weights

COMMANDS = {
    "codecs": codecs.codecs,
    "bench": codecs.bench,
    "plan": planned.plan,
    "audit": audit.audit,
    "report": report.report,
    "fit": fit.fit,
    "weights": weights.weights,
    "watch": watch.watch,
}


def run(args: argparse.Namespace) -> None:
    """Runs the command that was read.

    Raises:
        ValueError: for arguments that do not fit together; the command prints it as one line.
    """
    COMMANDS[args.command](args)
