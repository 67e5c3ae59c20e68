"""Federated training: local rounds of many clients."""

import dataclasses
import statistics
from typing import Any

from rich.progress import track

import jaxcomp
from claims.claim import Claim, decide
from jaxcomp import federated, planning

METHODS = "federated/methods.json"
PART = "python benchmarks/federated_methods.py --part"
CLIENTS = "Thirty clients of two handwritten digits each, one division of the data"
DIGITS, SEEDS = f"{CLIENTS}, five seeds", 5


def _between(row: dict[str, Any], key: str, form: str = ".0f") -> str:
    """The median over the seeds, and the least and the most."""
    least, most = row["ranges"][key]
    return f"{row[key]:{form}} ({least:{form}} to {most:{form}})"


def _tau(found: dict[str, Any]) -> tuple[str, str]:
    rows = {r["tau"]: r for r in found["steps"]["records"] if r["name"] != "FedAvg"}
    times = {tau: row["seconds"] for tau, row in rows.items() if "seconds" in row}
    best = min(times, key=lambda tau: times[tau])
    inside = min(times) < best < max(times)
    words = ", ".join(f"{_between(rows[tau], 'seconds', '.1f')} s at τ = {tau}" for tau in SHOWN)
    gain = min(times[min(times)], times[max(times)]) / times[best]
    return f"{words}: the best is {gain:.1f} times faster than the nearer end", decide(
        False, part=inside and gain > 1.2
    )


SHOWN = (1, 5, 10, 100)
"""Numbers of local steps whose times a row tells."""


def _seeded(methods: Any, rounds: int, steps: int, target: float) -> dict[str, Any]:
    """Rounds and megabytes of all clients to a training loss; a value for each seed."""
    import federated_methods as benchmark

    found: dict[str, Any] = {}
    for name, method in methods.items():
        row: dict[str, list[float]] = {"rounds": [], "megabytes": []}
        for seed in track(range(SEEDS), description=name):
            curve = benchmark.train(method, rounds, steps, target, mixed=False, seed=seed)
            at = benchmark.first_below(curve, target)
            if at is None:
                raise RuntimeError(f"{name} must reach a loss of {target} in {rounds} rounds")
            row["rounds"].append(at)
            row["megabytes"].append(round(curve.up[at - 1], 5))
        found[name] = row
    return {"numbers": found}


def _fewer(numbers: dict[str, Any], name: str, base: str) -> list[float]:
    """How many times fewer bytes, for each seed."""
    pairs = zip(*(numbers[each]["megabytes"] for each in (base, name)), strict=True)
    return [one / two for one, two in pairs]


def _rounds(numbers: dict[str, Any], name: str) -> str:
    rounds = numbers[name]["rounds"]
    return f"{statistics.median(rounds):.0f} ({min(rounds)} to {max(rounds)})"


def _fedpaq() -> dict[str, Any]:
    import federated_methods as benchmark

    settings: Any = {"learning_rate": 0.1, "participants": 10}
    loss = benchmark.LOSS
    methods = {
        "FedAvg": federated.fedavg(loss, **settings),
        "FedPAQ": federated.fedpaq(jaxcomp.qsgd_inf(bits=2), loss, **settings),
    }
    return _seeded(methods, 600, 1, 0.5)


def _fedpaq_bytes(numbers: dict[str, Any]) -> tuple[str, str]:
    fewer = _fewer(numbers, "FedPAQ", "FedAvg")
    words = (
        f"{statistics.median(fewer):.0f} times fewer bytes ({min(fewer):.0f} to {max(fewer):.0f}) "
        f"in {_rounds(numbers, 'FedPAQ')} rounds; FedAvg {_rounds(numbers, 'FedAvg')}"
    )
    ours, whole = (numbers[name]["rounds"] for name in ("FedPAQ", "FedAvg"))
    same = statistics.median(ours) <= 1.05 * statistics.median(whole)
    return words, decide(same and min(fewer) > 10, part=min(fewer) > 10)


def _predicted() -> dict[str, Any]:
    import federated_methods as benchmark

    names = ("FedAvg", "FedPAQ, 2 bits", "predictive coding, λ = 0.001")
    every = benchmark.coders()
    return _seeded({name: every[name] for name in names}, 60, 20, 0.3)


def _predictive(numbers: dict[str, Any]) -> tuple[str, str]:
    name = "predictive coding, λ = 0.001"
    saved = {
        base: [100 * (1 - 1 / times) for times in _fewer(numbers, name, base)]
        for base in ("FedAvg", "FedPAQ, 2 bits")
    }
    words = ", ".join(
        f"{statistics.median(each):.1f} % ({min(each):.1f} to {max(each):.1f}) fewer bytes than "
        f"{base}"
        for base, each in saved.items()
    )
    words += f"; {_rounds(numbers, name)} rounds, FedAvg {_rounds(numbers, 'FedAvg')}"
    ours, whole = (numbers[each]["rounds"] for each in (name, "FedAvg"))
    better = statistics.median(ours) <= statistics.median(whole)
    return words, decide(
        better and statistics.median(saved["FedAvg"]) >= 99,
        part=min(saved["FedAvg"]) >= 90,
    )


def _genqsgd() -> dict[str, Any]:
    """Energies of the plans, with the constants of the published code."""
    loss = planning.Loss(
        100_352, gap=2.5, gradient=33.63, smoothness=0.084, noise=33.18, learning_rate=0.01
    )
    server = planning.Machine(1, cycles=100, frequency=3e9, power=20, rate=7.5e7, levels=2**32)
    free: dict[str, Any] = {"mini-batch": {"steps": 1}, "parallel restarts": {"batch": 1}}
    found: dict[str, Any] = {}
    for bits in (14, 32):
        fast = planning.Machine(
            5, cycles=1e8, frequency=2e10 / 11, power=1.5, rate=5e6, levels=2**bits
        )
        machines = [fast, dataclasses.replace(fast, frequency=2e9 / 11)]
        for name, fixed in {"GenQSGD": {}, **free}.items():
            plan = planning.plan_genqsgd(loss, machines, server, error=0.25, seconds=1e5, **fixed)
            if plan is None:
                raise ValueError(f"{name} of {bits} bits must have a plan, got none")
            found[f"{name}, {bits} bits"] = {"energy": plan.energy, "error": plan.error}
    return {"numbers": found}


PUBLISHED = {
    "GenQSGD, 14 bits": 6738.55,
    "mini-batch, 14 bits": 14868.8,
    "parallel restarts, 14 bits": 8128.6,
    "GenQSGD, 32 bits": 11029.55,
    "mini-batch, 32 bits": 27175.4,
    "parallel restarts, 32 bits": 14280.5,
}
"""Of the published code, run with the constants of its repository."""


def _energy(numbers: dict[str, Any]) -> tuple[str, str]:
    ours = {name: row["energy"] for name, row in numbers.items()}
    same = all(abs(ours[name] - energy) <= 0.06 for name, energy in PUBLISHED.items())
    least = all(
        ours[f"GenQSGD, {b} bits"] < min(ours[f"{n}, {b} bits"] for n in ("mini-batch", "parallel "
                                                                         "restarts"))
        for b in (14, 32)
    )  # fmt: skip
    words = "joules at 14 bits: " + ", ".join(
        f"{name.removesuffix(', 14 bits')} {energy:,.1f}"
        for name, energy in ours.items()
        if "14" in name
    )
    return words, decide(same and least, part=least)


def _wyner_ziv(found: dict[str, Any]) -> tuple[str, str]:
    """The error beside that of the best quantizer of as many bits, without and with noise."""
    rows = {(r["width"], r["name"]): r for r in found["guesses"]["records"]}
    plain = ("QSGD", "QSGD by the maximum", "rotated uniform")
    words, gains = [], []
    for kind, label in (("exact", "exact gradients"), ("noisy", "noise of 0.3")):
        for bits in (2, 4):
            ours = rows[bits, "Wyner-Ziv, own last message"][kind]
            other = min(rows[bits, name][kind] for name in plain)
            shift = rows[bits, "Shift, contracted rotated uniform"][kind]
            gains.append(other / ours)
            words.append(
                f"{label}, {bits} bits: {ours:.1e}, without side information {other:.1e}, a shift "
                f"{shift:.1e}"
            )
    return f"squared error, {'; '.join(words)}", decide(min(gains) > 2, part=max(gains) > 2)


STARTS = ("random", "trained")


def _votes(found: dict[str, Any], rule: str, start: str) -> dict[int, dict[str, Any]]:
    rows = found["votes"]["records"]
    return {r["attackers"]: r for r in rows if (r["rule"], r["start"]) == (rule, start)}


def _resilient(found: dict[str, Any]) -> tuple[str, str]:
    """More than 90 % with credibility and less without, for the median and for every seed."""
    words, held = [], []
    for start in STARTS:
        plain, credible = (_votes(found, rule, start) for rule in ("plain", "credible"))
        each = ", ".join(
            f"{n} hostile {_between(credible[n], 'trained')} % "
            f"(plain mean {_between(plain[n], 'trained')})"
            for n in (0, 5, 10)
        )
        words.append(f"from {start} parameters: {each}")
        for n in (5, 10):
            least, most = credible[n]["ranges"]["trained"][0], plain[n]["ranges"]["trained"][1]
            held.append(least > 90 > most)
    return "; ".join(words), decide(all(held), part=any(held))


def _deployed(found: dict[str, Any]) -> tuple[str, str]:
    row = _votes(found, "plain", "random")[0]
    words = (
        f"trained {_between(row, 'trained', '.1f')} %, deployed with ternary weights "
        f"{_between(row, 'ternary', '.1f')} %, with binary ones {_between(row, 'binary', '.1f')} %"
    )
    good = [row[kind] >= row["trained"] - 10 for kind in ("ternary", "binary")]
    return words, decide(all(good), part=any(good))


CLAIMS = (
    Claim(
        name="fedpaq-local-steps",
        methods=("fedpaq", "FedPAQ"),
        source="Reisizadeh et al., FedPAQ, 2020, abstract",
        claim="There is a trade-off of communication and computation: neither one local step nor "
        "very many give the least training time.",
        setting=f"{DIGITS}, ten in a round, to a training loss of 0.5, two bits, a link of "
        "2 Mbit/s, the round time of `jaxcomp.planning.fedpaq_round`.",
        judge=_tau,
        results=METHODS,
        command=f"{PART} steps",
        note="It holds for this link only: its rate was chosen after partial results, and at "
        "100 Mbit/s the best number of steps is at the edge of the sweep.",
    ),
    Claim(
        name="fedpaq-bytes",
        methods=("fedpaq", "FedPAQ"),
        source="Reisizadeh et al., FedPAQ, 2020, abstract",
        claim="Quantised messages reduce the communication without a loss of convergence.",
        setting=f"{CLIENTS}, ten in a round, one local step, two bits, to a training loss of 0.5, "
        "five seeds.",
        judge=_fedpaq_bytes,
        run=_fedpaq,
        minutes=1,
        note="Bytes are those of real messages, entropy-coded for both. On the byte model over a "
        "shaped link (network/local.json) FedPAQ and GenQSGD do not reach the target in 300 steps: "
        "their inner SGD has no momentum.",
    ),
    Claim(
        name="genqsgd-energy",
        methods=("genqsgd", "GenQSGD"),
        source="Li, Cui and Lau, Optimization-based GenQSGD for federated edge learning, 2021; the "
        "numbers are those of the published code",
        claim="Optimised rounds, local steps and batches take less energy than mini-batch SGD and "
        "parallel-restart SGD under the same limits of error and time.",
        setting="The constants of the published code: ten machines of two classes, 14 and 32 bits, "
        "`jaxcomp.planning.plan_genqsgd`.",
        judge=_energy,
        run=_genqsgd,
        minutes=0.1,
        note="This is the plan's model, not a measured energy.",
    ),
    Claim(
        name="predictive-coding-bytes",
        methods=("predictive coding",),
        source="Yue et al., Communication-efficient federated learning via predictive coding, "
        "2021, "
        "abstract",
        claim="Predictive coding reduces communication by up to 99 % with even better learning "
        "performance.",
        setting=f"{CLIENTS}, 20 local steps of Adam, all clients in all rounds, to a training loss "
        "of 0.3, five seeds.",
        judge=_predictive,
        run=_predicted,
        minutes=3,
        note="Bytes are those of real messages. No method's settings were tuned for this task. As "
        "good is: no more rounds in the median.",
    ),
    Claim(
        name="wyner-ziv-guesses",
        methods=("wyner_ziv", "Wyner-Ziv coding"),
        source="Liang et al., Wyner-Ziv gradient compression for federated learning, 2021, "
        "abstract",
        claim="Side information that the server has, such as historical gradients, reduces the "
        "bits "
        "of an upload at the same accuracy.",
        setting="A quadratic whose 16 clients have optima of their own, 40 rounds, the client's "
        "last message as side information; the best of three quantizers of as many bits beside "
        "it. A factor of two counts as fewer bits.",
        judge=_wyner_ziv,
        results=METHODS,
        command=f"{PART} guesses",
        note="Medians of five draws of the problem. The last messages are stale where gradients "
        "are noisy, so little is left to gain at four bits. Where the client knows the guess too, "
        "as here, a `Shift` is as good at the same bits.",
    ),
    Claim(
        name="fedvote-hostile",
        methods=("FedVote",),
        source="Yue et al., Federated learning via plurality vote, 2022, abstract",
        claim="Votes weighted by credibility enhance the resilience against Byzantine attacks.",
        setting="31 clients train a perceptron on handwritten digits, 20 rounds, hostile clients "
        "that send the opposite of the majority from the first round of random parameters on, or "
        "after 20 rounds without any; medians of five seeds and ranges; test accuracy.",
        judge=_resilient,
        results=METHODS,
        command=f"{PART} votes",
        note="Ten hostile clients break a training from random parameters, though they are below "
        "a third: votes for random parameters are nearly coin tosses, and ten clients that agree "
        "are their majority.",
    ),
    Claim(
        name="fedvote-deployed",
        methods=("FedVote",),
        source="Yue et al., Federated learning via plurality vote, 2022, abstract",
        claim="The trained model can be deployed with binary or ternary weights.",
        setting="31 clients train a perceptron on handwritten digits from random parameters, 20 "
        "rounds, nobody is hostile, medians of five seeds and ranges; test accuracy.",
        judge=_deployed,
        results=METHODS,
        command=f"{PART} votes",
        note="A drop of ten points counts as a model that can be deployed.",
    ),
)
