"""Trains a byte model between sites that come and go, on this machine.

A server and four sites behind links with a delay and a rate of the internet. While they train, one
site is killed and comes back, one joins late, and the server is killed and restarted. The picture
has the loss against time and bytes, with what happened.

    python examples/sites.py
    python examples/sites.py --rounds 30 --delay 0.075 --rate 100e6 --method sparseloco

It needs `pip install '.[examples,flower]'` in a clone, takes about five minutes, and
downloads nothing.
"""

import argparse
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import options
import pictures
import report
from sites_network import Network

import jaxcomp

SITES, KILLED, LATE = 4, 1, 3
PATIENCE = 90.0


class Event(NamedTuple):
    """Something that happens when the server has taken so many rounds."""

    round: int
    text: str
    do: Callable[[Network], None]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--rounds", type=options.at_least(4), default=24, help="of training (default: 24)")
    add("--steps", type=options.at_least(1), default=20, help="of a round (default: 20)")
    add(
        "--method",
        choices=["diloco", "streaming", "sparseloco"],
        default="diloco",
        help="(default: diloco)",
    )
    add("--delay", type=options.positive, default=0.05, help="seconds one way (default: 0.05)")
    add("--rate", type=options.positive, default=10e6, help="bits per second (default: 10e6)")
    add("--resets", type=float, default=0.01, help="of all connections (default: 0.01)")
    add("--quorum", type=options.at_least(1), default=2, help="of sites (default: 2)")
    add("--deadline", type=options.positive, default=60.0, help="of a round, s (default: 60)")
    add("--calm", action="store_true", help="nothing happens: all sites from the beginning on")
    add("--seed", type=options.at_least(0), default=0, help="of everything (default: 0)")
    add("--timeout", type=options.positive, default=1800.0, help="seconds for all (default: 1800)")
    add("--out", type=pathlib.Path, default=pathlib.Path("out/sites"), help="(default: out/sites)")
    return parser.parse_args(argv)


def events_of(rounds: int, calm: bool) -> list[Event]:
    """What happens to whom, at a quarter, at half and at three quarters of the rounds."""
    if calm:
        return [Event(0, "all sites", lambda net: net.join(*range(SITES)))]
    first = [number for number in range(SITES) if number != LATE]

    def restart(net: Network) -> None:
        net.kill_server()
        net.start_link()
        net.start_server()

    return [
        Event(0, "three sites", lambda net: net.join(*first)),
        Event(rounds // 4, "one is killed", lambda net: net.kill_site(KILLED)),
        Event(rounds // 2, "one joins", lambda net: net.join(LATE)),
        Event(rounds // 4 + rounds // 3, "it comes back", lambda net: net.join(KILLED)),
        Event(3 * rounds // 4, "server restarts", restart),
    ]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, and returns the server's report and when each event happened."""
    folder = (args.out / "run").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    names = ("rounds", "steps", "method", "seed", "quorum", "deadline")
    config = {name: getattr(args, name) for name in names} | {"patience": PATIENCE}
    link = {"delay": args.delay, "rate": args.rate, "resets": args.resets}
    console, happened = report.console(), []
    until = time.monotonic() + args.timeout
    with Network(folder, config, SITES, link) as net, report.progress(console) as bars:
        bar = bars.add_task("rounds", total=args.rounds, now="")
        net.start_server()

        def taken() -> int:
            lines = net.rounds()
            done = lines[-1]["round"] if lines else 0
            shown = f"{lines[-1]['score']:.3f} bits per byte" if lines else "starting"
            bars.update(bar, completed=done, now=shown)
            return done

        for event in events_of(args.rounds, args.calm):
            net.wait(lambda event=event: taken() >= event.round, until - time.monotonic())
            happened.append({"time": time.time(), "round": event.round, "text": event.text})
            console.print(f"round {event.round}: {event.text}")
            event.do(net)
        net.wait(lambda: taken() >= args.rounds and net.ended, until - time.monotonic())
        sockets = {
            "up": sum(relay.up for relay in net.relays.values()),
            "down": sum(relay.down for relay in net.relays.values()),
            "connections": sum(relay.accepted for relay in net.relays.values()),
            "reset": sum(relay.broken for relay in net.relays.values()),
        }
        return {"rounds": net.rounds(), "events": happened, "sockets": sockets}


def headline(rounds: Sequence[Any], events: Sequence[Any]) -> str:
    """The loss that was reached, and what happened on the way."""
    last = rounds[-1]
    reached = f"reaches {last['score']:.2f} bits per byte in {last['round']} rounds"
    more = " while one is killed, one joins late and the server restarts"
    return f"Training between {SITES} sites {reached}{more if len(events) > 1 else ''}"


def draw(found: dict[str, Any], path: pathlib.Path) -> None:
    """The loss against time and against bytes, with what happened."""
    rounds, events, sockets = found["rounds"], found["events"], found["sockets"]
    begin = rounds[0]["time"]
    losses = [row["score"] for row in rounds]
    figure, ((by_time,), (by_bytes,)) = pictures.page(
        headline(rounds, events),
        f"A byte model on held-out text, one point per round. {sockets['reset']} of "
        f"{sockets['connections']} connections broke. All processes ran on one machine, behind "
        "relays that delay and limit each link.",
        rows=2,
        height=4.8,
    )
    # The untrained model is out of the panel.
    top = 1.15 * max(row["score"] for row in rounds if row["round"])
    low = min(losses) - 0.06 * (top - min(losses))
    for axes in (by_time, by_bytes):
        axes.set(ylim=(low, top), ylabel="bits per byte")
    minutes = [(row["time"] - begin) / 60 for row in rounds]
    by_time.plot(minutes, losses, marker="o", color=pictures.COLORS[0])
    by_time.set(xlabel="minutes", xlim=(0, 1.03 * minutes[-1]))
    ways = (
        ("up", "sites to server", (8, 0), "left"),
        ("down", "server to sites", (0, 16), "right"),
    )
    for (way, label, place, side), color in zip(ways, pictures.COLORS, strict=False):
        sizes = [row[way] / 1e6 for row in rounds]
        by_bytes.plot(sizes, losses, marker="o", color=color)
        by_bytes.annotate(
            f"{label}, {sizes[-1]:.1f} MB", (sizes[-1], losses[-1]), xytext=place, color=color,
            textcoords="offset points", ha=side, va="center", fontsize=pictures.SMALL,
        )  # fmt: skip
    by_bytes.set(xlabel="megabytes of messages, all sites together", xlim=(0, None))
    at = [max(0.0, (event["time"] - begin) / 60) for event in events]
    marks = [
        pictures.Mark(x, low, event["text"], pictures.FAINT)
        for x, event in zip(at, events, strict=True)
    ]
    pictures.flags(by_time, marks)
    pictures.save(figure, path)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    found = run(args)
    versions = {"jax": jax.__version__, "jaxcomp": jaxcomp.__version__, "cores": os.cpu_count()}
    results = {"environment": versions, **found}
    (args.out / "sites.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(found, args.out / "sites.png")
    last, sockets = found["rounds"][-1], found["sockets"]
    seconds = last["time"] - found["rounds"][0]["time"]
    print(f"{last['round']} rounds in {seconds:.0f} s: {last['score']:.3f} bits per byte")
    print(f"late messages by age: {last['late'] or 'none'}; refused: {last['refused'] or 'none'}")
    for way in ("up", "down"):
        print(f"{way}: {last[way]:,} bytes of messages, {sockets[way]:,} on the sockets")
    print(f"{sockets['reset']} of {sockets['connections']} connections were reset")
    print(f"written to {args.out / 'sites.json'}")


if __name__ == "__main__":
    main()
