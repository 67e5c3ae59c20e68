"""Methods for clients whose data differ, or that are slow, on handwritten digits.

    python benchmarks/federated_drift.py

Thirty clients have two digits each. Two parts, each by itself with `--part`:

* `drift`: FedAvg, FedProx, SCAFFOLD, FedAdam and FedYogi, ten clients in a round with ten local
  steps of SGD, dense and compressed both ways: rounds and bytes to a loss, and accuracy;
* `late`: clients whose rounds take lognormal times, for which FedAvg waits and FedBuff does not:
  the time to a loss.

Each method's own rates are the best of a small grid (`--part tuning`), by the training loss after
all rounds with a seed of its own. Each case is kept in a folder of `--out`, and a run that was
stopped goes on from there. Numbers are medians over five seeds of batches, draws and rounding.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import federated_task as task
import numpy as np
import reporting
from federated_methods import Curve as Losses, first_below, loss_of_all
from federated_task import CLIENTS, DATA, LOSS, SEEDS, Cases, batches, medians, model
from reporting import Table
from rich.progress import track

import jaxcomp
from jaxcomp import federated
from jaxcomp.federated import Method

STEPS, PARTICIPANTS, TARGET = 10, 10, 0.3
TUNING_SEED = SEEDS
"""A seed that no measurement has."""
WAYS: dict[str, dict[str, Any]] = {
    "dense": {"codec": None},
    "4 bits up, 8 down": {
        "codec": jaxcomp.qsgd_inf(bits=4),
        "down": jaxcomp.Link(jaxcomp.blockwise(bits=8), jaxcomp.Residual()),
    },
}
"""What is sent, in both directions."""
RATES = (0.1, 0.3)
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "FedAvg": {},
    "FedProx": {"mu": (0.01, 0.1)},
    "SCAFFOLD": {},
    "FedAdam": {"server_rate": (0.01, 0.03)},
    "FedYogi": {"server_rate": (0.01, 0.03)},
}
"""The settings among which each method's are chosen, beside the clients' rates."""


@functools.cache
def method_of(name: str, way: str, *values: float) -> Method:
    """A method with values of its rates, made once for all seeds: equal ones compile once."""
    settings = dict(zip(("learning_rate", *GRIDS[name]), values, strict=True))
    given = {**WAYS[way], "loss": LOSS, "participants": PARTICIPANTS, **settings}
    if name == "FedAvg":  # The proximal term without a weight is zero to the last bit.
        return federated.fedprox(**given, mu=0.0)
    return getattr(federated, name.lower())(**given)


def train(
    method: Method, rounds: int, seed: int, delays: Any = None, longest: int = 0
) -> dict[str, Any]:
    """The loss on all training images after each round, megabytes of both ways, and accuracy."""
    params, given, drawn = model.init(0), batches(False, STEPS, seed), {}

    def data(numbers: np.ndarray, round: int) -> Any:
        drawn[round] = [*drawn.get(round, []), *map(int, numbers)]
        return given(numbers, round)

    sim = federated.Simulation(
        method,
        federated.add_control(params) if method.work.control else params,
        CLIENTS,
        data,
        key=seed,
        messages=1,
        delays=delays,
        faults=federated.Faults(longest=longest),
    )
    losses, up, down = [], [], []
    for _ in range(rounds):
        sim.round()
        own = sim.params.params if method.work.control else sim.params
        losses.append(float(loss_of_all(own)))
        up.append(sim.ledger.up / 1e6)
        down.append(sim.ledger.down / 1e6)
    correct = float(model.accuracy_of(own, *DATA.test))
    cohorts = [drawn[number] for number in sorted(drawn)]
    return {"loss": losses, "up": up, "down": down, "accuracy": correct, "drawn": cohorts}


def tuning(cases: Cases, rounds: int) -> dict[str, Any]:
    """Each method's settings with the lowest loss in the end, dense, with a seed of its own."""
    records = []
    for name, grid in track(GRIDS.items(), description="tuning"):
        tried = []
        for values in itertools.product(RATES, *grid.values()):
            settings = dict(zip(("learning_rate", *grid), values, strict=True))
            run = functools.partial(train, method_of(name, "dense", *values), rounds, TUNING_SEED)
            found = cases(f"tuning, {rounds} rounds: {name}, {settings}", run)
            loss = float(np.mean(found["loss"][-3:]))
            tried.append((loss if np.isfinite(loss) else np.inf, settings))
        loss, settings = min(tried, key=lambda one: one[0])
        records.append({"name": name, "settings": settings, "loss": loss, "tried": len(tried)})
    return {"records": records}


def drift(cases: Cases, rounds: int) -> dict[str, Any]:
    """Rounds and bytes to a loss, and the accuracy in the end."""
    chosen = {row["name"]: row["settings"] for row in tuning(cases, rounds)["records"]}

    def one(seed: int, name: str, way: str) -> dict[str, Any]:
        run = functools.partial(train, method_of(name, way, *chosen[name].values()), rounds, seed)
        found = cases(f"drift, {rounds} rounds: {name}, {way}, seed {seed}", run)
        row = {"name": name, "way": way, "loss": float(np.mean(found["loss"][-3:]))}
        row |= {"accuracy": found["accuracy"], "whole": found["up"][-1]}
        at = first_below(Losses(found["loss"], found["up"]), TARGET)
        if at is not None:
            row |= {"rounds": at, "up": found["up"][at - 1], "down": found["down"][at - 1]}
        return row

    every = list(itertools.product(WAYS, GRIDS))
    seeds = [
        [one(seed, name, way) for way, name in track(every, description=f"drift, seed {seed}")]
        for seed in range(SEEDS)
    ]
    return {"records": medians(seeds, ("name", "way"))}


SPREAD = 1.0
"""The deviation of the logarithm of a client's seconds for a round; their median is one second."""


def seconds_of(seed: int) -> np.ndarray:
    """The seconds of each client, of every round alike."""
    return np.random.default_rng((7, seed)).lognormal(0.0, SPREAD, CLIENTS)


def buffers(seconds: np.ndarray, size: int, rounds: int) -> tuple[dict[Any, int], np.ndarray]:
    """When messages arrive at a server that steps whenever it has so many.

    Returns:
        The delay of each client's message, by client and round, and the time after each round.
    """
    began = np.zeros(len(seconds), int)
    at, now, delays, ends = seconds.copy(), 0.0, {}, []
    for number in range(rounds):
        taken = np.argsort(at, kind="stable")[:size]
        now = max(now, float(at[taken].max()))
        for client in taken:
            delays[int(client), int(began[client])] = number - int(began[client])
        began[taken], at[taken] = number + 1, now + seconds[taken]
        ends.append(now)
    return delays, np.array(ends)


def late(cases: Cases, rounds: int) -> dict[str, Any]:
    """Rounds and seconds to a loss, where clients are slow."""
    chosen = {row["name"]: row["settings"] for row in tuning(cases, rounds)["records"]}
    rate = chosen["FedAvg"]["learning_rate"]

    def made(staleness: float) -> Method:
        return federated.fedbuff(None, LOSS, learning_rate=rate, staleness=staleness)

    ways = {"FedAvg": None, "FedBuff": made(0.5), "FedBuff, all ages alike": made(0.0)}

    def one(seed: int, name: str) -> dict[str, Any]:
        seconds = seconds_of(seed)
        if name == "FedAvg":
            method = method_of(name, "dense", *chosen[name].values())
            found = cases(
                f"drift, {rounds} rounds: FedAvg, dense, seed {seed}",
                functools.partial(train, method, rounds, seed),
            )
            ends = np.cumsum([seconds[cohort].max() for cohort in found["drawn"]])
            mean_age = 0.0
        else:
            trace, ends = buffers(seconds, PARTICIPANTS, rounds)

            def delays(numbers: np.ndarray, round: int) -> np.ndarray:
                # Messages that come after the last round have any larger delay.
                return np.array([trace.get((int(n), round), rounds) for n in numbers], int)

            run = functools.partial(train, ways[name], rounds, seed, delays, rounds)
            found = cases(f"late, {rounds} rounds: {name}, seed {seed}", run)
            mean_age = float(np.mean(list(trace.values())))
        row = {"name": name, "loss": float(np.mean(found["loss"][-3:])), "age": mean_age}
        row |= {"accuracy": found["accuracy"], "end": float(ends[-1])}
        at = first_below(Losses(found["loss"], found["up"]), TARGET)
        if at is not None:
            row |= {"rounds": at, "seconds": float(ends[at - 1])}
        return row

    seeds = [
        [one(seed, name) for name in track(ways, description=f"late, seed {seed}")]
        for seed in range(SEEDS)
    ]
    return {"records": medians(seeds, ("name",))}


TUNED = "method {name} | chosen {settings} | of {tried} | loss in the end {loss:.3f}"
DRIFT = (
    "method {name} | sent {way} | rounds to a loss of 0.3 {rounds} | MB up to it {up:.2f} | "
    "MB down {down:.2f} | loss in the end {loss:.3f} | test accuracy, % {accuracy:.1f} | "
    "MB up in all {whole:.2f}"
)
LATE = (
    "method {name} | mean age, rounds {age:.2f} | rounds to a loss of 0.3 {rounds} | seconds to it "
    "{seconds:.1f} | seconds of all rounds {end:.0f} | loss in the end {loss:.3f} | "
    "test accuracy, % {accuracy:.1f}"
)


def main() -> None:
    parts: dict[str, tuple[Callable[[Cases, int], dict[str, Any]], str, str]] = {
        "tuning": (tuning, TUNED, "Settings of each method, the best of a grid"),
        "drift": (
            drift,
            DRIFT,
            f"{PARTICIPANTS} of {CLIENTS} clients of two digits each, {STEPS} local steps of SGD",
        ),
        "late": (
            late,
            LATE,
            f"Clients of lognormal speed: {PARTICIPANTS} drawn in a round, or the first "
            f"{PARTICIPANTS} messages",
        ),
    }
    args = reporting.options(
        __doc__,
        "out/federated_drift",
        part=(parts, "some of the parts"),
        rounds=(24, "of training"),
    )
    path = args.out / "drift.json"
    found: dict[str, Any] = {"environment": reporting.environment()}
    if path.exists() and set(args.part) != set(parts):
        found = reporting.read(path)
    for name in args.part:
        found[name] = parts[name][0](Cases(args.out / "cases"), args.rounds)
        reporting.keep(path, found)
    tables = [
        Table(title, columns, found[name]["records"])
        for name, (_, columns, title) in parts.items()
        if name in found
    ]
    line = "# Methods for clients that differ, on handwritten digits\n\n"
    line += f"{reporting.line(found['environment'])}; batches of {task.BATCH}."
    reporting.sections([line, *tables], args.out / "drift.md")


if __name__ == "__main__":
    main()
