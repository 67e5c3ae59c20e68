"""Trains one model over a hundred clients that have two digits each, and compares what it cost.

In each round a fifth of the clients take local steps and send a message; a tenth of the messages
are lost. Compared are federated averaging, and the same with messages of fewer bits:

    python examples/federated_digits.py
    python examples/federated_digits.py --method fedavg stc --rounds 200 --lost 0.5
    python examples/federated_digits.py --checkpoint-every 20 --resume

It needs `pip install '.[examples]'`, downloads nothing, and leaves `federated.png` and
`results.json` in the folder that `--out` names. Bytes are those of messages as a
deployment would send them, in both directions; two of each round are written and measured.
"""

import argparse
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import federated_model
import jax
import numpy as np
import optax
import options
import pictures
import report
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

import jaxcomp
from jaxcomp import federated
from jaxcomp.federated import Method

CLIENTS, DIGITS_EACH, PARTICIPANTS = 100, 2, 20
IMAGES, EPOCHS, BATCH = 12, 5, 6
RATE = 0.1
MARGIN, WINDOW = 0.5, 5
"""Points within which an accuracy is as good; rounds of its mean."""
EVERYWHERE = {"min_size": 256, "min_ndim": 2}


def remembered(codec: jaxcomp.Codec, down: jaxcomp.Codec) -> Callable[[], Method]:
    """Local steps whose messages have a residual on both ends."""

    def make() -> Method:
        return Method(
            federated.LocalSteps(federated_model.loss_of, optax.sgd(RATE)),
            jaxcomp.Link(codec, jaxcomp.Residual()),
            down=jaxcomp.Link(down, jaxcomp.Residual()),
            sampling=federated.Exactly(PARTICIPANTS),
        )

    return make


COMMON: dict[str, Any] = {"learning_rate": RATE, "participants": PARTICIPANTS}
LOSS = federated_model.loss_of
METHODS: dict[str, tuple[str, Callable[[], Method]]] = {
    "fedavg": ("dense FedAvg", lambda: federated.fedavg(LOSS, **COMMON)),
    "fedpaq": (
        "FedPAQ, 4 bits up",
        lambda: federated.fedpaq(jaxcomp.qsgd_inf(bits=4), LOSS, **COMMON),
    ),
    "sign": (
        "signs with residuals",
        remembered(jaxcomp.sign(), jaxcomp.sign()),
    ),
    "top_k": (
        "top 1 % up, 4 bits down",
        remembered(jaxcomp.top_k(fraction=0.01), jaxcomp.blockwise(bits=4)),
    ),
    "stc": (
        "2 % sparse ternary",
        lambda: federated.stc(LOSS, fraction=0.02, **COMMON),
    ),
}


class Point(NamedTuple):
    """The model after a round.

    Attributes:
        round: how many rounds there were.
        accuracy: of the test images, in percent.
        megabytes: that an average client has sent and received.
    """

    round: int
    accuracy: float
    megabytes: float


class Run(NamedTuple):
    """A method's training.

    Attributes:
        name: of the method.
        up: bytes that all clients sent.
        down: bytes that all clients received.
        accepted: messages that became part of a mean.
        curve: a point for each round.
    """

    name: str
    up: int
    down: int
    accepted: int
    curve: list[Point]


def shards(data: federated_model.Data, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The images of each client, mostly of two digits, `[clients, images, 64]`; and the digits."""
    images, digits = data.train
    order = np.argsort(digits, kind="stable")[: CLIENTS * IMAGES]
    cut = order.reshape(CLIENTS * DIGITS_EACH, -1)
    dealt = np.random.default_rng(seed).permutation(len(cut)).reshape(CLIENTS, DIGITS_EACH)
    own = cut[dealt].reshape(CLIENTS, IMAGES)
    return images[own], digits[own]


def train(name: str, args: argparse.Namespace, data: federated_model.Data, bars: Any) -> Run:
    """Trains by one method; its bar shows the rounds."""
    images, digits = shards(data, args.seed)
    label, make = METHODS[name]

    def batches(numbers: np.ndarray, round: int) -> tuple[np.ndarray, np.ndarray]:
        """Every image of a client once an epoch, in an order of its own."""
        draw = np.random.default_rng((args.seed, round))
        order = draw.random((len(images), EPOCHS, IMAGES)).argsort(axis=-1)[numbers]
        order = order.reshape(len(numbers), EPOCHS * IMAGES // BATCH, BATCH)
        rows = numbers[:, None, None]
        return images[rows, order], digits[rows, order]

    sim = federated.Simulation(
        make(),
        federated_model.init(args.seed),
        CLIENTS,
        batches,
        key=args.seed,
        faults=federated.Faults(lost=args.lost),
        chunk=PARTICIPANTS,
        messages=2,
    )
    kept, curve, accepted = args.out / f"{name}.checkpoint", [], 0
    notes = args.out / f"{name}.json"
    if args.resume:
        sim.restore(kept, missing_ok=True)
    if int(sim.state.round):
        known = json.loads(notes.read_text())[: int(sim.state.round)]
        curve, accepted = [Point(*p[:3]) for p in known], sum(p[3] for p in known)
        log = known
    else:
        log = []
    task = bars.add_task(label, total=args.rounds, completed=len(curve), now="")
    for round in range(len(curve), args.rounds):
        done = sim.round()
        accuracy = float(federated_model.accuracy_of(sim.params, *data.test))
        megabytes = (sim.ledger.up + sim.ledger.down) / CLIENTS / 1e6
        curve.append(Point(round + 1, accuracy, megabytes))
        accepted += done.accepted
        log.append([*curve[-1], done.accepted])
        bars.update(task, completed=round + 1, now=f"{accuracy:.1f} %  {megabytes:.2f} MB a client")
        if bars.disable and (round + 1) % max(args.rounds // 4, 1) == 0:
            bars.console.print(
                f"{label:<24} round {round + 1:>4} of {args.rounds}  {accuracy:.1f} %"
            )
        if args.checkpoint_every and (round + 1) % args.checkpoint_every == 0:
            notes.write_text(json.dumps(log))
            sim.save(kept)
    return Run(name, sim.ledger.up, sim.ledger.down, accepted, curve)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--method", nargs="+", choices=METHODS, default=list(METHODS), help="what to compare")
    add("--rounds", type=options.at_least(1), default=150, help="(default: 150)")
    add("--lost", type=float, default=0.1, help="probability that a message is lost (default: 0.1)")
    add("--seed", type=options.at_least(0), default=0, help="of everything random (default: 0)")
    add("--checkpoint-every", type=options.at_least(1), metavar="ROUNDS", help="(default: never)")
    add("--resume", action="store_true", help="go on from the checkpoints in `--out`")
    add(
        "--out", type=pathlib.Path, default=pathlib.Path("out/federated"), help="folder for results"
    )
    args = parser.parse_args(argv)
    if not 0 <= args.lost < 1:
        parser.error(f"argument --lost: must be a number from 0 to below 1, got {args.lost}")
    args.method = list(dict.fromkeys(args.method))
    return args


def print_table(console: Console, runs: Sequence[Run]) -> None:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for heading in (
        "test\naccuracy",
        "sent by\na client",
        "received by\na client",
        "messages\nin means",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            METHODS[run.name][0],
            f"{run.curve[-1].accuracy:.1f} %",
            f"{run.up / CLIENTS / 1e6:.3f} MB",
            f"{run.down / CLIENTS / 1e6:.3f} MB",
            f"{run.accepted:,}",
        )
    console.print(table)
    console.print(
        "Bytes are those of messages of an average client over all rounds, two of each round "
        "measured; a client that missed rounds receives what it missed, or the whole model if "
        "that is less."
    )


def smooth(run: Run) -> list[float]:
    """Means over the last rounds: with clients of two digits each, a round's model swings."""
    scores = np.array([point.accuracy for point in run.curve])
    padded = np.pad(scores, (WINDOW - 1, 0), "edge")
    return np.convolve(padded, np.ones(WINDOW) / WINDOW, "valid").tolist()


def headline(runs: Sequence[Run]) -> str:
    """The method with the fewest bytes among those as good as dense, or as the best one."""
    scores = {run.name: smooth(run)[-1] for run in runs}
    dense = next((run for run in runs if run.name == "fedavg"), None)
    base = dense or max(runs, key=lambda run: scores[run.name])
    sizes = {run.name: run.up + run.down for run in runs}
    fewer = [run for run in runs if sizes[run.name] < sizes[base.name]]
    good = [run for run in fewer if scores[run.name] >= scores[base.name] - MARGIN]
    label, score = METHODS[base.name][0], f"{scores[base.name]:.1f} %"
    if not good:
        moved = f"a client sends and receives {report.short(base.curve[-1].megabytes)} MB"
        also = f"; no smaller one is within {MARGIN:g} points" if fewer else ""
        return f"{label} ends at {score} of test digits correct; {moved}{also}"
    found = min(good, key=lambda run: sizes[run.name])
    ratio = f"{report.short(sizes[base.name] / sizes[found.name])} times fewer bytes"
    return (
        f"{METHODS[found.name][0]} moves {ratio} than {label} and ends at "
        f"{scores[found.name]:.1f} % of test digits correct ({label}: {score})"
    )


def picture(runs: Sequence[Run], rounds: int) -> Figure:
    """Accuracy against megabytes that a client has sent and received, and against rounds."""
    figure, ((by_bytes,), (by_round,)) = pictures.page(
        headline(runs),
        f"Handwritten digits, {CLIENTS} clients of {DIGITS_EACH} digits each, {PARTICIPANTS} in a "
        f"round, {rounds} rounds; accuracy is a mean over {WINDOW} rounds. Methods within "
        f"{MARGIN:g} points are taken as equal.",
        rows=2,
        height=5.2,
    )
    colors = dict(zip(METHODS, (pictures.BASE, *pictures.COLORS), strict=False))
    scores = {run.name: smooth(run) for run in runs}
    low = max(0, 5 * int((min(ends[-1] for ends in scores.values()) - 25) / 5))
    high = max(max(ends) for ends in scores.values())
    marks, lines, seen = [], [], []
    for run in runs:
        (label, _), color, ends = METHODS[run.name], colors[run.name], scores[run.name]
        sizes = [point.megabytes for point in run.curve]
        report.curve(by_bytes, sizes, ends, label, color)
        marks.append(pictures.Mark(sizes[-1], ends[-1], f"{label}, {ends[-1]:.1f} %", color))
        count = range(1, len(ends) + 1)
        lines.append(report.curve(by_round, count, ends, label, color, run.name == "fedavg"))
        seen += [size for size, score in zip(sizes, ends, strict=True) if score >= low]
    for axes in (by_bytes, by_round):
        top = min(100, high + 0.06 * (high - low))
        axes.set(ylim=(low, top), ylabel="test accuracy, %")
    by_bytes.set(xscale="log", xlim=(0.7 * min(seen), 1.8 * max(seen)))
    by_bytes.set_xlabel("megabytes that a client has sent and received (log)")
    by_round.set(xlabel="rounds", xlim=(0, 1.02 * rounds))
    pictures.log_axis(by_bytes, "x")
    pictures.name_ends(by_round, lines)
    pictures.flags(by_bytes, marks)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    console = report.console()
    data = federated_model.load()
    with report.progress(console) as bars:
        runs = [train(name, args, data, bars) for name in args.method]
    print_table(console, runs)
    results = {
        "environment": {"jax": jax.__version__, "jaxcomp": jaxcomp.__version__},
        "settings": {k: v for k, v in vars(args).items() if k not in ("out", "resume")},
        "runs": [run._asdict() | {"curve": [p._asdict() for p in run.curve]} for run in runs],
    }
    (args.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    pictures.save(picture(runs, args.rounds), args.out / "federated.png")
    console.print(f"Saved {args.out / 'results.json'}")


if __name__ == "__main__":
    main()
