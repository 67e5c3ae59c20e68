"""Low rank and a thousandth of the elements, on matrices as wide as 512.

The driver is in `networks.py`.
"""

import functools
from typing import Any

import images
import jax
import optax

import jaxcomp
from claims import networks, scores
from claims.claim import FAILS, HOLDS, UNDECIDED, Change, Claim, Judged, decide
from claims.descent import least
from claims.networks import Plan, Task, everywhere, mean

WIDTH, STEPS = 512, 400
WARM, FRACTION = 0.016, 0.001
PLAN = Plan(STEPS, (0.02, 0.05, 0.1, 0.2, 0.4))
_SHAPES = {
    "first": (images.SIDE**2, WIDTH),
    "first_bias": (WIDTH,),
    "second": (WIDTH, WIDTH),
    "second_bias": (WIDTH,),
    "head": (WIDTH, 10),
    "head_bias": (10,),
}


def _logits(params: Any, pixels: Any) -> Any:
    x = jax.nn.relu(pixels @ params["first"] + params["first_bias"])
    x = jax.nn.relu(x @ params["second"] + params["second_bias"])
    return x @ params["head"] + params["head_bias"]


def perceptron() -> Task:
    """Two hidden layers of 512 units, 368,650 parameters, on the images of `networks.cnn`."""
    init = functools.partial(networks.normal, shapes=_SHAPES)
    return networks.cnn()._replace(name="perceptron", init=init, logits=_logits)


def _warmed_up() -> jaxcomp.ReducerSchedule:
    """More elements for a fifth of the steps: one of the paper's four phases."""
    memory = jaxcomp.MomentumCorrection(0.9)
    shares = ((0, WARM), (STEPS // 5, FRACTION))
    return jaxcomp.ReducerSchedule(
        tuple(
            (start, jaxcomp.Link(everywhere(jaxcomp.dgc(share)), memory)) for start, share in shares
        )
    )


def _train() -> dict[str, Any]:
    task, low = perceptron(), jaxcomp.PowerIteration(2)
    methods = {
        "dense": mean(jaxcomp.Dense()),
        "PowerSGD, rank 2": mean(low),
        "DGC, 0.1 %": mean(_warmed_up(), optax.sgd),
    }
    found = networks.compare(methods, task, PLAN)
    whole = jaxcomp.wire_bytes(jaxcomp.Dense(), networks.shapes(task), PLAN.workers)
    sent = jaxcomp.wire_bytes(low, networks.shapes(task), PLAN.workers)
    found["methods"]["PowerSGD, rank 2"]["times"] = round(whole / sent, 1)
    bits = networks.bits(everywhere(jaxcomp.dgc(FRACTION)), task)
    found["methods"]["DGC, 0.1 %"]["times"] = round(32 / bits, 1)
    return {"numbers": found}


def _judged(name: str, fewer: float) -> Any:
    """Whether a method is as good as dense with so many times fewer bytes."""

    def judge(numbers: dict[str, Any]) -> Judged:
        times = numbers["methods"][name]["times"]
        kept = scores.equal(numbers, name, "dense")
        told = scores.words(scores.paired(numbers, name, "dense"))
        words = (
            f"{scores.told(numbers, name)} with {times:.0f} times fewer bytes, "
            f"{scores.told(numbers, 'dense')}: {told}"
        )
        margin = least(times / fewer, scores.as_good(numbers, name, "dense"))
        undecided = scores.undecided(numbers, name, "dense")
        return Judged(words, decide(kept and times >= fewer, kept, undecided), margin)

    return judge


_SETTING = (
    f"A perceptron with two hidden layers of {WIDTH} units (368,650 parameters) on 5,000 images of "
    f"MNIST, {STEPS:,} steps, four workers, the best of five rates each, twenty seeds"
)

CLAIMS = (
    Claim(
        name="powersgd-wide",
        methods=("PowerIteration",),
        source="Vogels, Karimireddy and Jaggi, PowerSGD: practical low-rank gradient compression "
        "for distributed optimization, 2019, abstract and the table of ranks",
        claim="Rank 2 with error feedback reaches the test accuracy of SGD, with over a hundred "
        "times fewer bytes (136 on ResNet-18; layers of small networks save less).",
        setting=f"{_SETTING}; SGD with momentum after the mean.",
        judge=_judged("PowerSGD, rank 2", 50),
        criterion="as good as dense, by paired differences, with at least 50 times fewer bytes",
        fixed="5b9df73a",
        changed=(
            Change("9179b20c", HOLDS, "Five seeds."),
            Change(
                "3f8d5a98",
                HOLDS,
                "The grid of rates was moved, since DGC's best one was at its edge.",
            ),
        ),
        run=_train,
        minutes=25,
        note="The row `powersgd` has the same claim on a CNN and a GRU with small matrices. A "
        "first run had DGC's best rate at the upper edge of the grid, 0.2; the grid was moved.",
    ),
    Claim(
        name="dgc-wide",
        methods=("dgc", "DGC"),
        source="Lin, Han, Mao, Wang and Dally, Deep gradient compression, 2018, abstract",
        claim="With momentum correction and warm-up a thousandth of the elements trains without a "
        "loss of accuracy, with 270 to 600 times fewer bytes.",
        setting=f"{_SETTING}; 1.6 % for the first {STEPS // 5} steps, then 0.1 %.",
        judge=lambda found: _judged("DGC, 0.1 %", 270)(found["numbers"]),
        criterion="as good as dense, by paired differences, with at least 270 times fewer bytes",
        why="size",
        fixed="5b9df73a",
        changed=(
            Change("9179b20c", UNDECIDED, "Five seeds."),
            Change("bb7dfe7b", FAILS, "An interval that contains the bound counted as below it."),
        ),
        results="reproductions/powersgd-wide.json",
        command="make reproduce CLAIM=powersgd-wide",
        note="Bytes of a worker's message after the warm-up, which is a fifth of the training "
        "here, and four of 90 epochs in the paper, in four phases from 25 to 0.4 %. With twenty "
        "seeds the interval still contains the bound.",
    ),
)
