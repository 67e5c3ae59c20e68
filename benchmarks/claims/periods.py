"""Periods of averaging in training: constant, adaptive and scheduled.

The network and the driver are in `networks.py`.
"""

from typing import Any

import jax.numpy as jnp
import optax

import jaxcomp
from claims import networks, scores
from claims.claim import FAILS, PART, Change, Claim, Judged, decide
from claims.descent import least
from claims.networks import AXIS, Method, Plan, Rate, mean
from jaxcomp import algorithms

STEPS = 320
RATES = (0.25, 0.5, 1.0, 2.0, 4.0)
PERIODS = (1, 4, 8, 16)


def _probe(state: Any, centre: Any, own: Any) -> dict[str, Any]:
    """Whether this step ended a round, and the squared distance from the centre."""
    apart = optax.tree.norm(optax.tree.sub(own, centre), squared=True)
    return {"exchanges": (state.waited == 0).astype(jnp.float32), "variance": apart}


def _constant(period: int) -> Method:
    def make(rate: Rate, key: Any) -> Any:
        return algorithms.cpsgd(
            jaxcomp.Dense(), AXIS, learning_rate=rate, every=period, momentum=0.9, key=key
        )

    return make


def adaptive(start: int, steps: int = STEPS) -> Method:
    """Rounds that begin with `start` steps; a quarter of all steps is warm-up, as in the paper."""

    def make(rate: Rate, key: Any) -> Any:
        return algorithms.adpsgd(
            jaxcomp.Dense(),
            AXIS,
            learning_rate=rate,
            momentum=0.9,
            start=start,
            warmup=steps // (4 * start),
            key=key,
        )

    return make


def _scheduled(first: int, last: int, switch: int) -> Method:
    def make(rate: Rate, key: Any) -> Any:
        def every(taken: Any) -> Any:
            return jnp.where(taken < switch, first, last)

        return jaxcomp.local_updates(optax.sgd(rate, 0.9), None, AXIS, every=every, key=key)

    return make


def _train() -> dict[str, Any]:
    third = STEPS // 3
    methods: dict[str, Method] = {
        **{f"rounds of {period}": _constant(period) for period in PERIODS},
        "ADPSGD from 4": adaptive(4),
        "ADPSGD from 8": adaptive(8),
        "front-loaded: 4, then 16": _scheduled(4, 16, third),
        "back-loaded: 16, then 4": _scheduled(16, 4, STEPS - third),
    }
    falls = optax.piecewise_constant_schedule(1.0, {STEPS // 2: 0.1, 3 * STEPS // 4: 0.1})
    plan = Plan(STEPS, RATES, size=4, schedule=falls, probe=_probe)
    found = networks.compare(methods, networks.gru(), plan)
    for one in found["methods"].values():
        one["exchanges"] = [round(STEPS * share) for share in one["exchanges"]]
    return {"numbers": found}


LATE_STEPS, LATE_WORKERS, LATE_SIZE = 416, 8, 64
LATE_RATES = {
    "large batches": (0.1, 0.2, 0.4, 0.8, 1.6),
    "post-local": (0.1, 0.2, 0.4, 0.8, 1.6),
    "small batches": (0.01, 0.02, 0.05, 0.1, 0.2),
}


def _post_local(rate: Rate, key: Any) -> Any:
    """Synchronous up to the first drop of the rate, then rounds of 16."""
    return algorithms.post_local_sgd(
        jaxcomp.Dense(),
        AXIS,
        learning_rate=rate,
        synchronous=LATE_STEPS // 2,
        every=16,
        momentum=0.9,
        key=key,
    )


def _late(steps: int) -> Rate:
    """A warm-up of a sixtieth, and a rate that falls after a half and after three quarters."""
    warm = optax.linear_schedule(0.0, 1.0, steps // 60)
    falls = optax.piecewise_constant_schedule(1.0, {steps // 2: 0.1, 3 * steps // 4: 0.1})
    return lambda step: warm(step) * falls(step)


def _train_late() -> dict[str, Any]:
    """Batches of all workers, the same with rounds at the end, and those of one worker alone."""
    cases: dict[str, tuple[Method, int, int]] = {
        "large batches": (mean(jaxcomp.Dense()), LATE_WORKERS, LATE_STEPS),
        "post-local": (_post_local, LATE_WORKERS, LATE_STEPS),
        "small batches": (mean(jaxcomp.Dense()), 1, LATE_WORKERS * LATE_STEPS),
    }
    task, found = networks.cnn(), {}
    for name, (method, workers, steps) in cases.items():
        plan = Plan(steps, LATE_RATES[name], workers, LATE_SIZE, _late(steps))
        found |= networks.compare({name: method}, task, plan)["methods"]
    return {"numbers": {"better": task.better, "unit": task.unit, "methods": found}}


def _late_judged(numbers: dict[str, Any]) -> Judged:
    found = scores.paired(numbers, "post-local", "large batches")
    gap = scores.paired(numbers, "small batches", "large batches")
    told = ", ".join(scores.told(numbers, name) for name in numbers["methods"])
    words = (
        f"{told}: post-local is better than large batches by {scores.words(found)}, small batches "
        f"by {scores.words(gap)}"
    )
    verdict = decide(found.low > 0, undecided=found.low <= 0 <= found.high)
    return Judged(words, verdict, least(scores.surely(numbers, "post-local", "large batches")))


def _at_equal_exchanges(numbers: dict[str, Any], name: str) -> str:
    """The constant period with as many exchanges, or the next one with more."""
    methods = numbers["methods"]
    most = scores.median(methods[name], "exchanges")
    counts = {
        each: scores.median(methods[each], "exchanges")
        for each in methods
        if each.startswith("rounds")
    }
    enough = {each: count for each, count in counts.items() if count >= most}
    return min(enough, key=lambda each: enough[each])


def _told(numbers: dict[str, Any], name: str) -> str:
    one = numbers["methods"][name]
    count, apart = (scores.median(one, key) for key in ("exchanges", "variance"))
    return f"{scores.told(numbers, name)}, {count:.0f} exchanges, variance {apart:.2g}"


def _adpsgd_judged(numbers: dict[str, Any]) -> Judged:
    words, lower, nearer, ratios = [], [], [], []
    for name in ("ADPSGD from 4", "ADPSGD from 8"):
        other = _at_equal_exchanges(numbers, name)
        lower.append(scores.better(numbers, name, other))
        ratios.append(scores.surely(numbers, name, other))
        one, two = (scores.median(numbers["methods"][x], "variance") for x in (name, other))
        nearer.append(one < two)
        words.append(
            f"{_told(numbers, name)} against {_told(numbers, other)}: better by "
            f"{scores.words(scores.paired(numbers, name, other))}"
        )
    return Judged("; ".join(words), decide(all(lower), any(lower) or all(nearer)), least(*ratios))


def _early_judged(numbers: dict[str, Any]) -> Judged:
    front, back = "front-loaded: 4, then 16", "back-loaded: 16, then 4"
    names = (front, "rounds of 8", back)
    wins = [scores.better(numbers, front, other) for other in names[1:]]
    words = "; ".join(_told(numbers, name) for name in names)
    words += "; front-loaded is better by " + " and ".join(
        scores.words(scores.paired(numbers, front, other)) for other in names[1:]
    )
    margin = least(*(scores.surely(numbers, front, other) for other in names[1:]))
    return Judged(words, decide(all(wins), any(wins)), margin)


_JIANG = (
    "Jiang and Agrawal, Adaptive periodic averaging: a practical approach to reducing "
    "communication in distributed learning, 2020"
)
_SETTING = (
    f"A GRU on bytes of the standard library, {STEPS} steps, four workers, local SGD with momentum "
    "whose rate falls tenfold after a half and after three quarters, dense averages, the best of "
    "five rates each, twenty seeds"
)

CLAIMS = (
    Claim(
        name="adpsgd-training",
        methods=("adpsgd", "cpsgd", "local_sgd"),
        source=f"{_JIANG}, experiments",
        claim="Adaptive periods reach a lower loss and a higher accuracy than constant periods, "
        "with fewer exchanges.",
        setting=f"{_SETTING}; compared with the constant period of the grid that has the next "
        "larger number of exchanges (20 to 27 % more).",
        judge=_adpsgd_judged,
        criterion="from 4 and from 8, better than the constant period of as many exchanges",
        why="size",
        fixed="833c7706",
        changed=(
            Change(
                "833c7706", PART, "The program's rounds have a name that others use; no setting."
            ),
        ),
        run=_train,
        minutes=6,
    ),
    Claim(
        name="early-averaging",
        methods=("local_updates",),
        source=f"{_JIANG}, motivation of the adaptive period",
        claim="At an equal number of exchanges, averaging often at first and rarely later is "
        "better than evenly, and evenly better than the reverse.",
        setting=f"{_SETTING}; rounds of 4, 8 and 16 steps.",
        judge=lambda found: _early_judged(found["numbers"]),
        criterion="front-loaded better than rounds of 8, and than back-loaded",
        why="false",
        fixed="833c7706",
        results="reproductions/adpsgd-training.json",
        command="make reproduce CLAIM=adpsgd-training",
    ),
    Claim(
        name="post-local-accuracy",
        methods=("post_local_sgd",),
        source="Lin, Stich, Patel and Jaggi, Don't use large mini-batches, use local SGD, 2020, "
        "abstract",
        claim="Post-local SGD significantly improves the generalisation of large-batch training, "
        "and is as efficient.",
        setting=f"A CNN on 3,600 images of MNIST, {LATE_WORKERS} workers with batches of "
        f"{LATE_SIZE}, {LATE_STEPS} steps (59 epochs) of SGD with momentum, a warm-up and a rate "
        "that falls tenfold after a half and after three quarters; rounds of 16 steps from the "
        "first drop on, against synchronous steps, and against as many epochs with the batches of "
        "one worker; the best of five rates each, twenty seeds.",
        judge=_late_judged,
        criterion="post-local better than large batches, by paired differences",
        fixed="470f473f",
        changed=(
            Change(
                "9179b20c",
                FAILS,
                "A batch was 128 images for all workers, for which there is no gap to close, the "
                "rate was not tuned, and the best seed of the other was asked for.",
            ),
        ),
        run=_train_late,
        minutes=12,
        note="No weight decay, which the paper has. The gain is small, 0.06 points, and so is the "
        "gap to close: small batches are better than large ones by 0.14 points, or not at all.",
    ),
)
