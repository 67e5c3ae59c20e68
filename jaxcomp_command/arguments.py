"""The commands and their options, read without importing JAX."""

import argparse
import difflib
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jaxcomp_command import options
from jaxcomp_command.examples import EXAMPLES

MODELS = ("gpt2", "resnet50")
"""The known models; `jaxcomp.planning.models` has their shapes."""

_ABOUT = {
    "codecs": "Lists every recipe of a codec: bits an element, kind, feedback.",
    "bench": "Times encoding and decoding on this device, in comparison with a copy.",
    "plan": "Says if compressing pays on a link, and by what, before you train.",
    "audit": "Counts the bytes that one device sends in a compiled program, from its saved HLO.",
    "report": "Draws a run as one picture, from the file of jaxcomp.telemetry.Csv; lists alarms.",
    "fit": "Says how well the laws that sidco assumes fit your gradients, and draws it.",
    "weights": "Lists the versions of weights at a URL: bytes, ratios, ages; checks their files.",
    "watch": "Shows a training between sites while it runs: loss, rounds, sites, refusals, bytes.",
}


class _Parser(argparse.ArgumentParser):
    """Answers bad input in one line, in the words of the library's own errors."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {_plain(message)}; see {self.prog} --help\n")


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the arguments; help and mistakes end the process."""
    parser, commands = build()
    if not argv:
        parser.print_help()
        parser.exit(2)
    first = argv[0]
    if first not in commands and first not in ("-h", "--help", "--version"):
        near = difflib.get_close_matches(first, commands, 1)
        said = f"; did you mean {near[0]}?" if near else ""
        parser.error(f"the first argument must be {_listed(commands)}, got {first!r}{said}")
    args, rest = parser.parse_known_args(argv)
    if rest:
        known = [text for action in commands[first]._actions for text in action.option_strings]
        near = difflib.get_close_matches(rest[0].partition("=")[0], known, 1)
        if "--codec" in known and not rest[0].startswith("-"):
            near = [f"--codec {rest[0]!r}"]
        said = f"; did you mean {near[0]}?" if near else ""
        commands[first].error(f"{rest[0]!r} must be an option of this command{said}")
    if first == "plan":
        needed = {"--workers": args.workers or args.weights, "--link": args.link}
        if missing := [text for text, value in needed.items() if value is None]:
            commands[first].error(f"the following arguments are required: {', '.join(missing)}")
    return args


def build() -> tuple[argparse.ArgumentParser, dict[str, _Parser]]:
    """Builds the parser, and those of its commands by name."""
    parser = _Parser(
        prog="jaxcomp",
        description="Communication-compressed training: what there is, what it takes, if it pays.",
        epilog="jaxcomp plan --help, for instance, has the options and examples of a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, help="print the version of jaxcomp")
    kinds = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands = {
        name: kinds.add_parser(
            name,
            help=about[0].lower() + about[1:-1],
            description=about,
            epilog=EXAMPLES[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for name, about in _ABOUT.items()
    }
    for name, command in commands.items():
        command.add_argument("--json", action="store_true", help="print JSON")
        if name not in ("audit", "report", "fit", "weights", "watch"):
            command.add_argument(
                "--codec", nargs="+", metavar="EXPRESSION", help="these, and no others"
            )
    for name in ("codecs", "bench"):
        commands[name].add_argument(
            "--elements", type=options.count, default=2**22, help="(default: 4,194,304)"
        )
    commands["bench"].add_argument(
        "--repeats", type=options.count, default=7, help="the fastest counts (default: 7)"
    )
    commands["audit"].add_argument(
        "file", nargs="+", type=pathlib.Path, help="the text of a compiled program"
    )
    commands["audit"].add_argument(
        "--mesh",
        type=options.mesh,
        metavar="AXES",
        help="the mesh of the programs, as in data=2,fsdp=4: count bytes by axis",
    )
    commands["report"].add_argument("file", type=pathlib.Path, help="as Csv wrote it")
    commands["report"].add_argument(
        "--plot",
        type=pathlib.Path,
        metavar="FILE",
        help="the picture, as .png, .svg or .pdf (default: beside the file, as .png)",
    )
    commands["report"].add_argument(
        "--window",
        type=options.count,
        default=50,
        help="the records of a window of the alarms (default: 50, as in Log)",
    )
    _options_of_fit(commands["fit"].add_argument)
    _options_of_weights(commands["weights"].add_argument)
    _options_of_watch(commands["watch"].add_argument)
    _options_of_plan(commands["plan"].add_argument)
    return parser, commands


class _Version(argparse.Action):
    """Prints the version, for which the package is imported."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any):
        super().__init__(option_strings, dest, nargs=0, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import jaxcomp  # It imports JAX.

        print(jaxcomp.__version__)
        parser.exit()


def _plain(message: str) -> str:
    """An error of argparse, in the library's words."""
    found = re.fullmatch(r"argument (\S+): (.*)", message, re.DOTALL)
    if found:
        option, said = found.groups()
        return f"{option} needs a value" if said.startswith("expected") else f"{option} {said}"
    missing = re.fullmatch(r"the following arguments are required: (.*)", message)
    return f"needs {missing.group(1).replace(', ', ' and ')}" if missing else message


def _listed(names: Sequence[str] | dict[str, Any]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}"


def _options_of_fit(add: Callable[..., Any]) -> None:
    add("file", nargs="+", type=pathlib.Path, help="a saved gradient (.npz), in order of training")
    add(
        "--share",
        type=options.number(0, 1),
        default=0.01,
        help="the fraction that a threshold should keep (default: 0.01)",
    )
    add(
        "--plot",
        type=pathlib.Path,
        metavar="FILE",
        help="the picture, as .png, .svg or .pdf (default: fit.png beside the first file)",
    )


def _options_of_weights(add: Callable[..., Any]) -> None:
    add("url", help="where they are published: a path, or a URL that fsspec opens")
    add("--verify", action="store_true", help="read and check the files of all versions")
    add(
        "--key",
        type=options.key,
        metavar="HEX",
        help="the ed25519 public key that must have signed all documents, in hexadecimal",
    )


def _options_of_watch(add: Callable[..., Any]) -> None:
    add("folder", type=pathlib.Path, help="of the server's checkpoints")
    add(
        "--port",
        type=options.port,
        default=7171,
        help="of the page on 127.0.0.1; 0 for any that is free (default: 7171)",
    )
    add("--once", action="store_true", help="print the numbers as text, and end")


def _options_of_plan(add: Callable[..., Any]) -> None:
    _options_of_model(add)
    _options_of_links(add)
    _options_of_steps(add)
    error = (
        "leave out codecs with a larger error, and recommend any other (default: none above 0.9, "
    )
    error += "nor above 0.2 with a residual)"
    add("--max-error", type=options.number(0), help=error)
    add(
        "--device-bandwidth",
        type=options.bandwidth,
        help="memory bandwidth of the device to plan for, as in 3.3TB: codecs are timed here, and "
        "taken to be faster by so much as its memory is",
    )
    add(
        "--exact",
        action="store_true",
        help="time every codec now, which takes a minute: without it, times are those kept of this "
        "machine, or the library's own, scaled by a copy here",
    )
    add("--elements", type=options.count, help="of an exact timing (default: 4,194,304)")
    add("--repeats", type=options.count, help="of an exact timing; the fastest counts (default: 7)")
    add("--plot", type=pathlib.Path, metavar="FILE", help="draw it, as .png, .svg or .pdf")


def _options_of_model(add: Callable[..., Any]) -> None:
    add(
        "--params",
        type=options.count,
        help="as in 125e6: a transformer like GPT-2 of so many parameters",
    )
    add(
        "--model",
        type=options.model(*MODELS),
        metavar="NAME",
        help=f"the shapes of a known model: {_listed(MODELS)}; for others, --params or --tree",
    )
    add(
        "--tree",
        type=options.name,
        metavar="MODULE:NAME",
        help="a tree of parameters or shapes, or what returns one",
    )
    add(
        "--weights",
        type=options.count,
        help="plan patches of so many weights, as in 7e9, from a trainer to readers, instead of "
        "means of gradients; with --rate and --rms",
    )
    add("--rate", type=options.number(0), help="with --weights, the learning rate, as in 3e-6")
    add(
        "--rms",
        type=options.number(0),
        default=0.2,
        help="with --weights, the root mean square of Adam's step at rate 1 (default: 0.2)",
    )
    add(
        "--gradients",
        nargs="+",
        type=pathlib.Path,
        metavar="FILE",
        help="with --budget, gradients of one worker in one step or several: .npz, an array a leaf",
    )
    add(
        "--budget",
        type=options.size,
        metavar="SIZE",
        help="link bytes of a device in a step, as in 400kB, to spend on codecs leaf by leaf; "
        "--codec names those to choose from",
    )


def _options_of_experts(add: Callable[..., Any]) -> None:
    add(
        "--experts",
        action="store_true",
        help="plan the all-to-all of tokens to experts and back, instead of means of gradients; "
        "with --tokens and --width; --codec names codecs for both, or 'TOKENS / ANSWERS'",
    )
    add("--tokens", type=options.count, help="with --experts, tokens of a device in a step")
    add("--width", type=options.count, help="with --experts, the features of a token")
    add(
        "--top",
        type=options.count,
        default=2,
        help="with --experts, the experts that each token goes to (default: 2)",
    )
    add(
        "--layers",
        type=options.count,
        default=1,
        help="with --experts, the layers that have them (default: 1)",
    )


def _options_of_links(add: Callable[..., Any]) -> None:
    add("--workers", type=options.workers, help="8; or 4x8: four hosts of eight devices")
    add(
        "--link",
        type=options.bandwidth,
        help="speed of the slow link of one worker, or of one host with --workers 4x8, as in "
        "10Gbps or 1.25GB/s",
    )
    add(
        "--link-per",
        type=options.one_of("host", "device"),
        default="host",
        help="with --workers 4x8, whose link that is: of a host, whose devices share it, or of "
        "each device (default: host)",
    )
    add(
        "--link-only",
        action="store_true",
        help="count the links alone: time no codec, as if encoding and decoding took no time",
    )
    add("--latency", type=options.seconds, default=50e-6, help="of a message (default: 50us)")
    add("--fast-link", type=options.bandwidth, help="of one device to the others of its host")
    add("--fast-latency", type=options.seconds, default=5e-6, help="(default: 5us)")


def _options_of_steps(add: Callable[..., Any]) -> None:
    add(
        "--step",
        type=options.time_or_name,
        default=0.0,
        help="seconds without communication, with a unit, as in 250ms; or MODULE:NAME to time",
    )
    add("--backward", type=options.seconds, default=0.0, help="of that, the backward pass")
    add(
        "--overlap",
        type=options.number(0, 1),
        default=0.0,
        help="share of it that the mean runs beside",
    )
    add(
        "--every",
        type=options.count,
        default=1,
        help="steps from one mean to the next (default: 1)",
    )
    add(
        "--fsdp",
        action="store_true",
        help="plan a fully sharded model, whose weights cross the links, too; --codec names codecs "
        "for both, or 'WEIGHTS / GRADIENTS'",
    )
    add(
        "--gathers",
        type=options.count,
        default=2,
        help="with --fsdp, how often a step gathers the weights (default: 2, forward and back)",
    )
    add(
        "--second-copy",
        action="store_true",
        help="with --fsdp and --fast-link, gather once between hosts, and the other times within "
        "them: policy=jaxcomp.second_copy",
    )
    _options_of_experts(add)
    add(
        "--sites",
        action="store_true",
        help="plan rounds between sites on Flower, of --every steps, over links with --latency one "
        "way; --codec names that of a site, or 'SITE / SERVER'",
    )
    add(
        "--upload",
        type=options.bandwidth,
        help="with --sites, the speed from a site to the server, where --link is that to the site",
    )
    add(
        "--rounds",
        action="store_true",
        help="plan rounds of local steps: how many, by which codec, with which delay",
    )
    add(
        "--stall",
        type=options.number(0),
        default=0.05,
        help="with --rounds, the share that exchanges may add to steps (default: 0.05)",
    )
    add(
        "--longest",
        type=options.count,
        default=100,
        help="with --rounds, the longest round to prefer (default: 100 steps)",
    )
