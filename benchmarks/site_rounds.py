"""Training between sites that die, over links of the internet: time, steps, and where updates are.

    python benchmarks/site_rounds.py --only links
    python benchmarks/site_rounds.py --only events
    python benchmarks/site_rounds.py --only kills
    python benchmarks/site_rounds.py --only losses
    python benchmarks/site_rounds.py --only processes

All runs are those of `examples/sites.py`: Flower's processes, the processes of four sites, and a
relay before each. `links` compares rounds and the time to a loss over links with those over the
loopback; `processes` those of sites that stay up with those of Flower's nodes, and with those of a
process for each message; `events`
the rounds to a loss where one site is killed for a third of the run and one joins at half; `kills`
kills sites and the server at random, and adds up in whole numbers what sites gave, what the centre
got and what residuals hold; `losses` does so with the byte model, and compares its last loss with
those of undisturbed runs, which are those of the simulation to the bit.

A job of several seeds that has been stopped goes on with the next seed of its file.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np
import reporting
import site_integers
from rich.progress import track

# isort: split
import sites_network  # pyright: ignore[reportMissingImports]
from sites_network import Network  # pyright: ignore[reportMissingImports]

from jaxcomp import federated
from jaxcomp.adapters import flower
from jaxcomp.adapters.flower import files, raw, records
from jaxcomp.federated import block
from jaxcomp.theory import site_rounds

SITES, TARGET = 4, 4.0
LINKS = {
    "loopback": {},
    "20 ms, 100 Mbit/s": {"delay": 0.010, "rate": 100e6},
    "50 ms, 10 Mbit/s": {"delay": 0.025, "rate": 10e6},
    "50 ms, 10 Mbit/s, 1 % reset": {"delay": 0.025, "rate": 10e6, "resets": 0.01},
    "150 ms, 10 Mbit/s": {"delay": 0.075, "rate": 10e6},
}
"""The time there and back, and the rate each way."""
PATIENCE, KILL_DEADLINE, LONG_DEADLINE = 75.0, 30.0, 90.0
"""Seconds; a site that was killed is back, and has compiled, in less than the longest of them."""
KILLS = {
    "sites": 0.35,
    "nodes": 0.15,
    "sites and nodes": 0.15,
    "sites stopped": 0.15,
    "SuperLink": 0.1,
    "SuperLink and app": 0.1,
}
"""What is killed, or stopped for 5 to 20 s, and how often of all times."""
STARTING = 15.0
"""Seconds in which the server's app has begun."""
STEP = 0.015
"""Seconds of a step of the example's model, as sites report it: 0.30 s for 20 steps, in four
processes on two cores."""


def trained(
    config: dict[str, Any],
    link: dict[str, Any],
    happens: Callable[[Network, int], None],
    seconds: float,
    folder: pathlib.Path,
    **settings: Any,
) -> dict[str, Any]:
    """A run; `happens(net, rounds)` is called again and again with the rounds so far.

    `settings` are those of the network.
    """
    shutil.rmtree(folder, ignore_errors=True)
    begin = time.monotonic()
    sites = settings.pop("sites", SITES)
    first = config.pop("first", range(sites))
    config = {"patience": max(PATIENCE, 1.5 * config["deadline"]), **config}
    with Network(folder, config, sites, link, **settings) as net:
        net.start_server()
        net.join(*first)

        def ended() -> bool:
            lines = net.rounds()
            happens(net, lines[-1]["round"] if lines else 0)
            return net.ended

        net.wait(ended, seconds)
        return {"seconds": time.monotonic() - begin, "rounds": net.rounds()}


def nothing(net: Network, done: int) -> None:
    """Nothing happens."""


def reached(rounds: list[dict[str, Any]], target: float = TARGET) -> dict[str, float]:
    """When the loss is reached for the first time: rounds, and seconds since the first one began.

    The first round is left out, since sites compile in it and processes start.
    """
    first = next(row for row in rounds if row["round"] == 1)
    for row in rounds:
        if row["round"] and row["score"] <= target:
            return {"rounds": row["round"], "seconds": row["time"] - first["time"]}
    raise ValueError(f"the loss {target} was not reached: {rounds[-1]}")


def over_link(name: str, seed: int, folder: pathlib.Path, **kind: bool) -> Any:
    """Time and rounds to the loss over one link; `kind` is that of the sites' processes."""
    config = {"rounds": 12, "steps": 20, "quorum": SITES, "deadline": 60.0, "seed": seed}
    run = trained(config, LINKS[name], nothing, 600, folder, **kind)
    times = [row["time"] for row in run["rounds"] if row["round"]]
    last = run["rounds"][-1]
    seconds = statistics.median(np.diff(times))
    sent = {"up": last["up"], "down": last["down"]}
    return {**reached(run["rounds"]), "round_s": seconds, **sent, **parts_of(folder)}


def parts_of(folder: pathlib.Path) -> dict[str, float]:
    """Medians of what the sites' nodes say of each round's parts; nothing of Flower's nodes."""
    pattern = r"received in ([\d.]+) s, answered in ([\d.]+) s, sent in ([\d.]+) s"
    rows: list[Any] = []
    for log in (folder / "logs").glob("node*.log"):
        rows += re.findall(pattern, log.read_text())[1:]  # Sites compile in the first round.
    names = ("received_s", "answered_s", "sent_s")
    middle = np.median(np.array(rows, float), axis=0).tolist() if rows else []
    return dict(zip(names, middle, strict=False))


CALM, DISTURBED = "calm", "one killed for a third, one joins at half"


def with_events(name: str, seed: int, folder: pathlib.Path) -> Any:
    """Rounds to the loss, calm or with a site that is killed and one that joins late.

    A run has 18 rounds: one of four sites is away from the third to the ninth, and one is there
    from the ninth on.
    """
    todo = [] if name == CALM else [(3, _kill), (9, _join)]

    def happens(net: Network, done: int) -> None:
        while todo and done >= todo[0][0]:
            todo.pop(0)[1](net)

    config = {"rounds": 18, "steps": 8, "quorum": 3, "deadline": 30.0, "seed": seed}
    config["first"] = range(SITES if name == CALM else SITES - 1)
    run = trained(config, LINKS["50 ms, 10 Mbit/s"], happens, 900, folder)
    return {**reached(run["rounds"]), "last": run["rounds"][-1]}


KINDS = {
    "site and node stay up": {},
    "the site stays up, Flower's node": {"node": False},
    "a process for each message": {"resident": False},
}
"""The processes of a site."""


def of_processes(name: str, seed: int, folder: pathlib.Path) -> Any:
    """Time and rounds to the loss over the loopback."""
    return over_link("loopback", seed, folder, **KINDS[name])


JOBS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "links": (over_link, tuple(LINKS)),
    "events": (with_events, (CALM, DISTURBED)),
    "processes": (of_processes, tuple(KINDS)),
}
"""The jobs of several seeds, and the runs of each, which alternate."""


def of_seeds(
    job: str, seeds: int, only: Collection[str], folder: pathlib.Path, out: pathlib.Path
) -> None:
    """Does the runs of a job named in `only`, seed by seed, after those that its file has."""
    run, names = JOBS[job]
    file = out / f"{job}.json"
    found: dict[str, list[Any]] = {name: [] for name in names}
    if file.exists():
        found = json.loads(file.read_text())[job]
    for seed in range(seeds):
        for name in names:
            if name in only and len(found[name]) == seed:
                found[name].append(run(name, seed, folder))
                print(seed, name, found[name][-1], flush=True)
        reporting.show(table_of(job, found), {job: found}, out / f"{job}.md")


def _kill(net: Network) -> None:
    net.kill_site(1)


def _join(net: Network) -> None:
    net.join(1, 3)


def kills(seed: int, folder: pathlib.Path, rounds: int) -> dict[str, Any]:
    """A run in whole numbers with random kills; whether all sums are equal."""
    config = {"task": "site_integers", "rounds": rounds, "steps": 2, "seed": seed, "quorum": 2}
    return {**_killed(seed, folder, config), **balance(folder, seed, config["steps"])}


def losses(rounds: int, folder: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """The last loss of the byte model with random kills, and of five undisturbed runs.

    A quorum of all waits for who is killed, up to the deadline; one of two counts half of the
    messages in their round.
    """
    file, steps = out / "losses.json", 8
    found = json.loads(file.read_text())["losses"] if file.exists() else {}
    if "undisturbed" not in found:
        found["undisturbed"] = [_undisturbed(seed, rounds, steps) for seed in range(5)]
    for quorum, deadline in ((2, KILL_DEADLINE), (SITES, KILL_DEADLINE), (SITES, LONG_DEADLINE)):
        name = f"quorum of {quorum}, {deadline:g} s"
        if name not in found:
            config = {"rounds": rounds, "steps": steps, "seed": 0, "quorum": quorum}
            found[name] = _killed(0, folder, {**config, "deadline": deadline})
            keep = {"environment": reporting.environment(), "losses": found}
            reporting.keep(file, keep)
    return found


def _undisturbed(seed: int, rounds: int, steps: int) -> float:
    sys.path.append(str(sites_network.APP))
    from byte_sites.task import Task  # pyright: ignore[reportMissingImports]

    task = Task("diloco", seed, 1, 64, steps)

    def batches(numbers: Any, round: int) -> Any:
        each = [task.data(int(number), round * steps) for number in numbers]
        return tuple(np.stack(parts) for parts in zip(*each, strict=True))

    sim = federated.Simulation(task.build(), task.params(), SITES, batches)
    for _ in track(range(rounds), description=f"undisturbed, seed {seed}"):
        sim.round()
    return task.score(sim.params)


def _killed(seed: int, folder: pathlib.Path, config: dict[str, Any]) -> dict[str, Any]:
    """A run with random kills."""
    rounds, stopped = config["rounds"], {}
    draw, killed = np.random.default_rng(seed), dict.fromkeys(KILLS, 0)
    next_at, last, since, restarts = 1, 0, time.monotonic(), []
    longest, late, started = 0.0, [], time.monotonic()

    def happens(net: Network, done: int) -> None:
        nonlocal next_at, longest, last, since, started
        now = time.monotonic()
        longest = max(longest, now - since)
        if done > last:
            if now - since > config["deadline"]:
                after = [now - begin for begin in restarts]
                late.append({"round": done, "seconds": now - since, "after_restarts_s": after})
            last, since = done, now
            restarts.clear()
        for number in range(SITES):
            if not net.alive(f"site{number}"):
                net.start_site(number)
        for pid in [pid for pid, until in stopped.items() if until < now]:
            del stopped[pid]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if done and net.server is None and not net.ended and now - started > STARTING:
            started = now
            net.start_server()
            restarts.append(now)
        if done < next_at or done >= rounds:
            return
        next_at = done + 1 + int(draw.integers(0, 3))
        time.sleep(float(draw.uniform(0, 3)))  # At any point of a round.
        kind, number = str(draw.choice(list(KILLS), p=list(KILLS.values()))), draw.integers(SITES)
        killed[kind] += 1
        if kind == "sites stopped" and net.alive(f"site{number}"):
            pid = net.pid(f"site{number}")
            os.kill(pid, signal.SIGSTOP)
            stopped[pid] = time.monotonic() + float(draw.uniform(5, 20))
        if kind in ("sites", "sites and nodes"):
            net.kill(f"site{number}")
        if kind in ("nodes", "sites and nodes"):
            net.kill(f"node{number}")
        if kind == "SuperLink and app":
            net.kill_server()
        if kind == "SuperLink":
            net.kill("link")
        if not net.alive("link"):
            net.start_link()

    config = {"deadline": KILL_DEADLINE, **config}
    run = trained(config, LINKS["20 ms, 100 Mbit/s"], happens, 4000, folder)
    return {
        "killed": killed,
        "deadline": config["deadline"],
        "longest_s": longest,
        "above_deadline": late,
        "seconds": run["seconds"],
        "last": run["rounds"][-1],
    }


def balance(folder: pathlib.Path, seed: int, steps: int) -> dict[str, Any]:
    """What sites gave, what the centre got, what residuals hold: largest difference, and sums."""
    task = site_integers.Task(seed, steps)
    method, params = task.build(), task.params()
    strategy = flower.CompressedFedAvg(method, params, SITES)
    strategy.restore(folder / "server" / "checkpoint")
    gave, held = np.zeros(site_integers.FEATURES), np.zeros(site_integers.FEATURES)
    for number in range(SITES):
        state = files.read(files.folder_of(folder / f"site{number}" / "memory"))
        config = state["jaxcomp.state"]
        client, taken = config["client"], int(state["jaxcomp.site"]["taken"])
        gave += sum(task.batch(client, step) for step in range(taken))
        name = "accepted" if config["round"] == strategy.accepted[client] else "refused"
        like = jax.eval_shape(lambda p: block.init(method, p).memory, params)
        data = records.bytes_of(state["jaxcomp.memory"][name], records.MEMORY)
        held += np.asarray(sum(jax.tree.leaves(raw.read(data, like).feedback))).reshape(-1)
    got = SITES * np.asarray(strategy.params["w"], np.float64)
    return {
        "difference": float(np.abs(gave - (got - held)).max()),
        "gave": float(np.abs(gave).sum()),
        "got": float(np.abs(got).sum()),
        "held": float(np.abs(held).sum()),
    }


LINK_COLUMNS = (
    "link, there and back {name} | seeds {seeds} | rounds {rounds:.0f} | seconds {seconds:.1f} | "
    "of all seeds {spread} | ÷ loopback {times:.2f} | a round, s {round_s:.2f} | "
    "forecast, s {forecast:.2f}"
)
PROCESS_COLUMNS = (
    "process {name} | seeds {seeds} | a round, s {round_s:.2f} | received {received_s:.2f} | "
    "answered {answered_s:.2f} | sent {sent_s:.2f}"
)
EVENT_COLUMNS = "run {name} | seeds {seeds} | rounds, median {rounds:.0f} | from {low} | to {high}"
KILL_COLUMNS = (
    "rounds {rounds} | killed or stopped {killed} | late messages {late} | "
    "gave − got − held {difference:g} | longest round, s {longest_s:.0f} | deadline, s {deadline:g}"
)


def forecast(name: str, one: dict[str, Any], rounds: int = 12, steps: int = 20) -> float:
    """Seconds of a round, from the bytes of a message and the link alone."""
    link, each = LINKS[name], 8 / (rounds * SITES)
    sending = (one["up"] + one["down"]) * each / link["rate"] if "rate" in link else 0.0
    delay = 2 * link.get("delay", 0.0)
    return site_rounds.SitesPlan(steps, STEP, 0, 0, 1.0, delay).seconds + sending


def table_of(job: str, found: Any) -> reporting.Table:
    """The table of a job."""
    if job == "processes":
        rows = [
            {"name": name, "seeds": len(runs), **{k: _middle(runs, k) for k in runs[0]}}
            for name, runs in found.items()
            if runs
        ]
        return reporting.Table("Rounds of 20 steps over the loopback", PROCESS_COLUMNS, rows)
    if job == "links":
        base = statistics.median(one["seconds"] for one in next(iter(found.values())))
        rows = []
        for name, runs in found.items():
            middle = {key: _middle(runs, key) for key in runs[0]}
            ahead = forecast(name, middle)
            spread = " to ".join(f"{f(one['seconds'] for one in runs):.1f}" for f in (min, max))
            more = {"times": middle["seconds"] / base, "forecast": ahead, "spread": spread}
            rows.append({"name": name, **middle, **more, "seeds": len(runs)})
        title = f"Four sites to {TARGET} bits a byte, medians of the seeds"
        return reporting.Table(title, LINK_COLUMNS, rows)
    if job == "events":
        rows = []
        for name, runs in found.items():
            rounds = [one["rounds"] for one in runs]
            spread = {"low": min(rounds), "high": max(rounds)}
            middle = statistics.median(rounds)
            rows.append({"name": name, "seeds": len(runs), "rounds": middle, **spread})
        return reporting.Table(f"Rounds of 8 steps to {TARGET} bits a byte", EVENT_COLUMNS, rows)
    if job == "losses":
        spread = {"low": min(found["undisturbed"]), "high": max(found["undisturbed"])}
        rows = [
            {"name": name, **_row(one), **spread, "loss": one["last"]["score"]}
            for name, one in found.items()
            if name != "undisturbed"
        ]
        return reporting.Table("Random kills, the byte model", LOSS_COLUMNS, rows)
    row = _row(found)
    return reporting.Table("Random kills, in whole numbers", KILL_COLUMNS, [row])


def _middle(runs: list[Any], name: str) -> float:
    return statistics.median(one[name] for one in runs)


def _row(found: dict[str, Any]) -> dict[str, Any]:
    """A row of a run with kills."""
    last = found["last"]
    late = sum(last["late"].values())
    killed = ", ".join(f"{count} {kind}" for kind, count in found["killed"].items())
    return {**found, "killed": killed, "rounds": last["round"], "late": late}


LOSS_COLUMNS = (
    "run {name} | rounds {rounds} | killed or stopped {killed} | "
    "late messages {late} | loss, bits a byte {loss:.3f} | undisturbed, from {low:.3f} | "
    "to {high:.3f} | longest round, s {longest_s:.0f} | deadline, s {deadline:g}"
)


def main() -> None:
    jobs = dict.fromkeys((*JOBS, "kills", "losses"))
    names = [name for _, names in JOBS.values() for name in names]
    options = reporting.options(
        __doc__,
        "out/sites",
        only=(jobs, "what to run"),
        runs=(dict.fromkeys(names), "which runs of a job"),
        seeds=(5, "seeds"),
        rounds=(100, "rounds with kills"),
    )
    for job in options.only:
        with tempfile.TemporaryDirectory() as place:
            folder = pathlib.Path(place)
            if job in JOBS:
                of_seeds(job, options.seeds, options.runs, folder, options.out)
                continue
            if job == "kills":
                found = kills(0, folder, options.rounds)
            else:
                found = losses(options.rounds, folder, options.out)
            reporting.show(table_of(job, found), {job: found}, options.out / f"{job}.md")


if __name__ == "__main__":
    main()
