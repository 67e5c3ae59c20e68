"""Compares federated methods on handwritten digits: bytes, times, guesses and hostile clients.

    python benchmarks/federated_methods.py

Four parts, each by itself with `--part`; `--update` keeps the others of `--out`:

* `bytes`: methods of few bits with the same local work, to the same training loss;
* `steps`: FedPAQ over its number of local steps, to the same loss, with the time of its cost model;
* `guesses`: Wyner-Ziv coding against shifts and quantizers at equal bits;
* `votes`: FedVote with hostile clients, and the binary and ternary networks that it deploys.

Each case is kept in a folder of `--out`, and a run that was stopped goes on from there. Bytes are
those of messages as `to_bytes` writes them, two of each round measured. Numbers are medians over
five seeds, of batches, of rounding, of the parameters that FedVote starts from and of the quadratic
of `guesses`; the division of the images and the other parameters at the start are the same.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import federated_task as task
import jax
import jax.numpy as jnp
import numpy as np
import optax
import reporting
from federated_methods_plot import plot
from federated_task import CLIENTS, DATA, LOSS, SEEDS, Cases, batches, medians, model
from federated_votes import VOTERS, votes
from reporting import Table
from rich.progress import track

import jaxcomp
from jaxcomp import federated
from jaxcomp.federated import Method, Uplink
from jaxcomp.planning import Clients


class Curve(NamedTuple):
    """The training after each round: its loss on all training images, and megabytes sent."""

    loss: list[float]
    up: list[float]


@jax.jit
def loss_of_all(params: Any) -> Any:
    return LOSS(params, DATA.train)


def train(
    method: Method, rounds: int, steps: int, until: float, *, mixed: bool, seed: int = 0
) -> Curve:
    """A method's training; it ends early once the loss is low, or not finite."""
    sim = federated.Simulation(
        method, model.init(0), CLIENTS, batches(mixed, steps, seed), key=seed, chunk=30, messages=2
    )
    losses, up, found = [], [], Curve([], [])
    for _ in range(rounds):
        sim.round()
        losses.append(float(loss_of_all(sim.params)))
        up.append(sim.ledger.up / 1e6)
        found = Curve(losses, up)
        if not np.isfinite(losses[-1]) or first_below(found, until):
            break
    return found


def first_below(curve: Curve, target: float) -> int | None:
    """The number of the round after which the mean of the last three losses is at the target."""
    if len(curve.loss) < 3:
        return None
    smooth = np.convolve(curve.loss, np.ones(3) / 3, "valid")
    below = np.flatnonzero(smooth <= target)
    return int(below[0]) + 3 if len(below) else None


WORK = federated.LocalSteps(LOSS, optax.adam(5e-4))
"""The local work of the predictive coding paper: Adam, new in every round."""


def coders() -> dict[str, Method]:
    """Methods that differ in their messages only."""
    named = {
        "FedAvg": federated.fedavg(LOSS, learning_rate=1.0),
        "FedPAQ, 2 bits": federated.fedpaq(jaxcomp.qsgd_inf(bits=2), LOSS, learning_rate=1.0),
        "STC, 1 %": federated.stc(LOSS, learning_rate=1.0, fraction=0.01),
        "signs with residuals": Method(WORK, jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual())),
        "predictive coding, λ = 0.001": federated.predictive_coding(LOSS, rate=1e-3),
    }
    return {name: dataclasses.replace(method, work=WORK) for name, method in named.items()}


def bytes_(cases: Cases, rounds: int) -> dict[str, Any]:
    """Megabytes until a loss that is the same for all, for clients of two digits each.

    The curves are those of the first seed.
    """
    curves: dict[str, Any] = {}
    size = sum(leaf.size for leaf in model.init(0).values())

    def one(seed: int) -> list[dict[str, Any]]:
        records = []
        for name, method in track(coders().items(), description=f"bytes, seed {seed}"):
            run = functools.partial(
                train, method, rounds, 20, TARGETS["low"], mixed=False, seed=seed
            )
            case = f"bytes, {rounds} rounds, two digits each: {name}, seed {seed}"
            curve = Curve(*cases(case, run))
            curves.setdefault(name, curve._asdict())
            bits = 8e6 * curve.up[-1] / len(curve.up) / CLIENTS / size
            row = {"name": name, "bits": bits, "rounds": len(curve.up), "loss": curve.loss[-1]}
            for label, target in TARGETS.items():
                at = first_below(curve, target)
                if at is not None:
                    row[label] = curve.up[at - 1]
            records.append(row)
        for row in records:
            for other, label in (
                ("FedAvg", "dense"),
                ("FedPAQ, 2 bits", "paq"),
                ("STC, 1 %", "stc"),
            ):
                base = next(r for r in records if r["name"] == other)
                shared = [target for target in TARGETS if target in row and target in base]
                if shared:
                    row[f"than_{label}"] = 100 * (1 - row[shared[-1]] / base[shared[-1]])
        return records

    return {"records": medians([one(seed) for seed in range(SEEDS)], ("name",)), "curves": curves}


TARGETS = {"high": 0.8, "low": 0.3}
"""Training losses."""

SPEED = Clients(CLIENTS, shift=1e-3, tail=1e-3, bandwidth=2e6)
"""A sample takes 2 ms on average, and the server receives 2 Mbit/s: ten dense messages take 8
seconds, a step of ten clients with ten samples, of which the slowest counts, 39 ms.
"""
SWEEP = (1, 2, 5, 10, 20, 50, 100)
PARTICIPANTS = 10


def steps(cases: Cases, most: int) -> dict[str, Any]:
    """Rounds and bytes to a loss, and the time of the cost model, over the local steps."""
    codecs = {"FedPAQ, 2 bits": jaxcomp.qsgd_inf(bits=2), "FedAvg": None}
    every = [(name, tau) for name in codecs for tau in (SWEEP if codecs[name] else SWEEP[:2])]

    def one(seed: int, name: str, tau: int) -> dict[str, Any]:
        settings: dict[str, Any] = {"learning_rate": 0.1, "participants": PARTICIPANTS}
        made = federated.fedavg(LOSS, **settings)
        if codecs[name] is not None:
            made = federated.fedpaq(codecs[name], LOSS, **settings)
        rounds = min(most // tau, 600)
        run = functools.partial(train, made, rounds, tau, STEPS_TARGET, mixed=False, seed=seed)
        curve = Curve(*cases(f"steps, {rounds} rounds of {tau}: {name}, seed {seed}", run))
        at = first_below(curve, STEPS_TARGET)
        row = {"name": name, "tau": tau}
        if at is None:
            return row
        # The model of `jaxcomp.planning.fedpaq_round`, with the bytes that were measured.
        work = at * tau * task.BATCH * SPEED.seconds(PARTICIPANTS)
        sent = 8e6 * curve.up[at - 1] / SPEED.bandwidth
        row |= {"rounds": at, "iterations": at * tau, "megabytes": curve.up[at - 1]}
        return row | {"seconds": work + sent}

    seeds = [
        [one(seed, name, tau) for name, tau in track(every, description=f"steps, seed {seed}")]
        for seed in range(SEEDS)
    ]
    return {"records": medians(seeds, ("name", "tau"))}


STEPS_TARGET = 0.5


def quadratic(up: Any, noise: float, mean: str, rounds: int, seed: int) -> list[float]:
    """Squared distances to the optimum of clients that differ, and the bits of an element."""
    size, clients = 4096, 16
    rng = np.random.default_rng(seed)
    targets = rng.normal(size=(clients, 1, 1, size // 64, 64)).astype(np.float32)
    scales = np.float32(0.3 + rng.random((size // 64, 64)))
    best = targets.mean((0, 1, 2))

    def loss(params: Any, batch: Any) -> Any:
        x, noise = batch
        return jnp.sum(scales * (params - x[0]) ** 2) / 2 + jnp.vdot(params, noise)

    def data(numbers: Any, round: int) -> Any:
        drawn = np.random.default_rng((1 + seed, round)).normal(size=targets.shape) * noise
        return targets[numbers], drawn[numbers, :, 0].astype(np.float32)

    method = Method(federated.LocalSteps(loss, optax.sgd(0.5)), up, mean=mean)
    zero = np.zeros((size // 64, 64), np.float32)
    sim = federated.Simulation(method, zero, clients, data, key=seed, chunk=clients)
    found = []
    for _ in range(rounds):
        sim.round()
        found.append(float(np.mean((np.asarray(sim.params) - best) ** 2)))
    return [*found, sim.ledger.up * 8 / rounds / clients / size]


def guesses(cases: Cases, rounds: int) -> dict[str, Any]:
    """The distance to the optimum of a quadratic whose clients differ, at equal bits.

    The curves are those of the first seed.
    """
    curves: dict[str, Any] = {}
    every = [(bits, name, *way) for bits in (2, 4) for name, way in ways(bits).items()]

    def one(seed: int, bits: int, name: str, up: Any, mean: str) -> dict[str, Any]:
        row: dict[str, Any] = {"width": bits, "name": name}
        for noise, label in ((0.0, "exact"), (0.3, "noisy")):
            run = functools.partial(quadratic, up, noise, mean, rounds, seed)
            *curve, sent = cases(f"guesses, {bits} bits, {noise:g}: {name}, seed {seed}", run)
            curves.setdefault(f"{bits} bits, noise {noise:g}: {name}", curve)
            row |= {"bits": sent, label: float(np.median(curve[-5:]))}
        return row

    seeds = [
        [one(seed, *each) for each in track(every, description=f"guesses, seed {seed}")]
        for seed in range(SEEDS)
    ]
    return {"records": medians(seeds, ("width", "name")), "curves": curves}


def ways(bits: int) -> dict[str, tuple[Any, str]]:
    """Ways up of about as many bits an element, and over whom their mean is taken."""
    levels, some = 2**bits, "participants"
    ziv = functools.partial(jaxcomp.wyner_ziv, levels=levels, bucket_size=512)
    inf, rotated = jaxcomp.qsgd_inf(bits=bits), jaxcomp.rotated_uniform(bits=bits, bucket_size=512)

    def shifted(codec: Any) -> tuple[Any, str]:
        return jaxcomp.Link(codec, jaxcomp.Shift(1 / (1 + codec.variance_bound(512)))), "all"

    return {
        "Wyner-Ziv, own last message": (Uplink(ziv(), federated.History()), some),
        "Wyner-Ziv, server's last step": (Uplink(ziv(), federated.LastMean()), some),
        "Wyner-Ziv, private rounding": (Uplink(ziv(private=True), federated.History()), some),
        "Shift, QSGD by the maximum": shifted(inf),
        "Shift, rotated uniform": shifted(rotated),
        "Shift, contracted rotated uniform": (
            jaxcomp.Link(jaxcomp.codecs.Contractive(codec=rotated), jaxcomp.Shift()),
            "all",
        ),
        "QSGD": (jaxcomp.qsgd(bits=bits), some),
        "QSGD by the maximum": (inf, some),
        "rotated uniform": (rotated, some),
    }


BYTES = (
    "method {name} | bits a parameter and round {bits:.3f} | rounds {rounds} | loss in the end "
    "{loss:.3f} | MB to a loss of 0.8 {high:.2f} | MB to 0.3 {low:.2f} | fewer than FedAvg, % "
    "{than_dense:.1f} | than FedPAQ, 2 bits, % {than_paq:.1f} | than STC, % {than_stc:.1f}"
)
STEPS = (
    "method {name} | local steps τ {tau} | rounds {rounds} | iterations {iterations} | "
    "MB {megabytes:.2f} | seconds of the model {seconds:.1f}"
)
GUESSES = (
    "width {width} | way up {name} | bits an element {bits:.2f} | squared error, exact gradients "
    "{exact:.2e} | with noise of 0.3 {noisy:.2e}"
)
VOTES = (
    "method {name} | parameters at the start {start} | mean {rule} | hostile {attackers} | "
    "trained, % {trained:.1f} | deployed binary, % {binary:.1f} | "
    "deployed ternary, % {ternary:.1f} | MB {megabytes:.2f}"
)


def main() -> None:
    parts: dict[str, tuple[Callable[[Cases, int], dict[str, Any]], str]] = {
        "bytes": (bytes_, BYTES),
        "steps": (steps, STEPS),
        "guesses": (guesses, GUESSES),
        "votes": (votes, VOTES),
    }
    args = reporting.options(
        __doc__,
        "out/federated_methods",
        part=(parts, "some of the parts"),
        rounds=(60, "of training; of FedVote a third"),
        update=(False, "keep the parts that --out has and that are not run now"),
    )
    path = args.out / "methods.json"
    found = reporting.read(path) if args.update else {"environment": reporting.environment()}
    amounts = {"bytes": args.rounds, "steps": 20 * args.rounds, "guesses": 40}
    for name in args.part:
        found[name] = parts[name][0](Cases(args.out / "cases"), amounts.get(name, args.rounds // 3))
        reporting.keep(path, found)
    tables = [
        Table(TITLES[name], columns, found[name]["records"])
        for name, (_, columns) in parts.items()
        if name in found
    ]
    line = f"# Federated methods on handwritten digits\n\n{reporting.line(found['environment'])}."
    reporting.sections([line, *tables], args.out / "methods.md")
    if set(parts) <= set(found):
        plot(found, args.out / "federated_methods.png")


TITLES = {
    "bytes": f"{CLIENTS} clients, 20 local steps of Adam: megabytes of all clients to a loss",
    "steps": f"FedPAQ's local steps: {PARTICIPANTS} of {CLIENTS} clients of two digits each, to a "
    f"loss of {STEPS_TARGET}",
    "guesses": "A quadratic whose 16 clients differ, at equal bits",
    "votes": f"FedVote with hostile ones among {VOTERS} clients",
}


if __name__ == "__main__":
    main()
