"""Periods of averaging in training: constant, adaptive and scheduled.

The network and the driver are in `networks.py`.
"""

from typing import Any

import jax.numpy as jnp
import optax

import jaxcomp
from claims import networks, scores
from claims.claim import PART, Change, Claim, Judged, decide
from claims.descent import least
from claims.networks import AXIS, Method, Plan, Rate
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
)
