"""The `jaxcomp` command. It reads its arguments before JAX is imported, so that help is immediate.

It is a package of its own because importing any module of `jaxcomp` imports JAX. The work is done
by `jaxcomp.cli`.
"""

import sys
import warnings
from collections.abc import Sequence

from jaxcomp_command import arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command; an invalid argument ends it with one line on standard error and status 2."""
    args = arguments.read(sys.argv[1:] if argv is None else argv)
    from jaxcomp import cli  # JAX is imported here, after the arguments are read.

    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: _say(args.command, message)
            cli.run(args)
    except ValueError as error:
        _say(args.command, error)
        raise SystemExit(2) from None
    except BrokenPipeError:  # For instance `jaxcomp codecs | head`.
        sys.stderr.close()


def _say(command: str, said: Warning | Exception | str) -> None:
    """Prints a warning or an error as one line."""
    print(f"jaxcomp {command}: {' '.join(str(said).split())}", file=sys.stderr)
