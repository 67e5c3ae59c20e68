"""Trainings of the examples' perceptron and transformer, over five seeds."""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import reporting

from claims.claim import Claim, Judged, decide
from claims.descent import least, within
from claims.scores import told

EXAMPLES = reporting.HERE.parent / "examples"
DIGITS, BYTES = "digits", "bytes"
ADAMS = ("dense, Adam", "one_bit_adam")


SEEDS = 5


def _each_seed(result: str, *command: str) -> Iterator[Any]:
    """What a program writes to `result` for each seed."""
    for seed in range(SEEDS):
        with tempfile.TemporaryDirectory() as out:
            seeded = [sys.executable, *command, "--seed", str(seed), "--out", out]
            subprocess.run(seeded, check=True)
            yield json.loads(pathlib.Path(out, result).read_text())


def _example(script: str, score: str, codecs: str, *options: str) -> dict[str, Any]:
    """The scores of an example, and how many times fewer bytes a step sends, by codec."""
    names = codecs.split()
    found = {name: {"score": [], "times": []} for name in names}
    command = (str(EXAMPLES / f"{script}.py"), "--optimizer", "momentum", "--codec", *names)
    for results in _each_seed("results.json", *command, *options):
        for run in results["runs"]:
            found[run["name"]]["score"].append(round(run[score], 4))
            found[run["name"]]["times"].append(round(run["times_less_than_dense"], 1))
    return found


def _sparse() -> dict[str, Any]:
    model = "--steps 800 --layers 2 --width 128 --context 64"
    text = _example("byte_lm", "bits_per_byte", "dense dgc demo", *model.split())
    digits = _example("train_digits", "test_accuracy", "dense dgc", "--epochs", "60")
    return {
        "numbers": {
            BYTES: {"better": -1, "unit": "bits a byte", "methods": text},
            DIGITS: {"better": 1, "unit": "%", "methods": digits},
        }
    }


def _worse(found: dict[str, Any], name: str, than: str) -> float:
    """How much worse the median is: as a fraction of bits a byte, or in points of accuracy."""
    one, other = (statistics.median(found["methods"][each]["score"]) for each in (name, than))
    return other - one if found["better"] > 0 else one / other - 1


def _fewer(found: dict[str, Any], name: str) -> float:
    return min(found["methods"][name]["times"])


def _gradients_left_out(numbers: dict[str, Any]) -> Judged:
    text, digits = numbers[BYTES], numbers[DIGITS]
    lost, worse = _worse(digits, "dgc", "dense"), _worse(text, "dgc", "dense")
    words = (
        f"{_fewer(text, 'dgc'):.0f} times fewer bytes in a step after the warm-up; digits: "
        f"{told(digits, 'dense')}, {told(digits, 'dgc')}; bytes: {told(text, 'dense')}, "
        f"{told(text, 'dgc')}: {100 * worse:+.0f} %"
    )
    verdict = decide(lost <= 0.5 and worse <= 0.01, part=lost <= 0.5)
    return Judged(words, verdict, least(within(0.5, lost), within(0.01, worse)))


def _decoupled(found: dict[str, Any]) -> Judged:
    text = found["numbers"][BYTES]
    fewer, worse = _fewer(text, "demo"), _worse(text, "demo", "dense")
    words = (
        f"{fewer:.0f} times fewer bytes in a step; {told(text, 'dense')}, {told(text, 'demo')}: "
        f"{100 * worse:+.1f} %"
    )
    verdict = decide(fewer >= 85 and worse <= 0.01, part=fewer >= 10 and worse <= 0.1)
    return Judged(words, verdict, least(fewer / 85, within(0.01, worse)))


def _adams() -> dict[str, Any]:
    numbers: dict[str, Any] = {
        DIGITS: {"better": 1, "unit": "%", "methods": {way: {"score": []} for way in ADAMS}},
        BYTES: {
            "better": -1,
            "unit": "bits a byte",
            "methods": {way: {"score": []} for way in ADAMS},
        },
    }
    program = str(reporting.HERE / "networks.py")
    for results in _each_seed("networks.json", program, "--method", *ADAMS):
        for name, curve in results["curves"].items():
            metric, _, way = name.partition(": ")
            task = DIGITS if metric.endswith("%") else BYTES
            numbers[task]["methods"][way]["score"].append(round(curve[-1][1], 4))
    return {"numbers": numbers}


def _one_bit(numbers: dict[str, Any]) -> Judged:
    lost, worse = (_worse(numbers[name], ADAMS[1], ADAMS[0]) for name in (DIGITS, BYTES))
    words = "; ".join(
        f"{name}: {', '.join(told(numbers[name], way) for way in ADAMS)}"
        for name in (DIGITS, BYTES)
    )
    words += f": {100 * worse:+.1f} %"
    verdict = decide(worse <= 0.01 and lost <= 0.5, part=worse <= 0.1 and lost <= 0.5)
    return Judged(words, verdict, least(within(0.01, worse), within(0.5, lost)))


CLAIMS = (
    Claim(
        name="dgc-accuracy",
        methods=("dgc", "DGC"),
        source="Lin et al., Deep gradient compression, 2018, abstract",
        claim="Gradients are compressed 270 to 600 times without losing accuracy.",
        setting="A perceptron on digits, 600 steps, and a byte transformer, 800 steps, eight "
        "workers, momentum, 0.1 % of the elements, five seeds; rates were not tuned.",
        judge=_gradients_left_out,
        criterion="medians: accuracy on digits at most 0.5 points below dense, bits a byte at "
        "most 1 % above",
        why="size",
        run=_sparse,
        minutes=30,
        note="One test digit is 0.2 points. 600 and 800 steps are few for 0.1 %. The row "
        "`sparsifiers-training` has tuned rates, on smaller networks.",
    ),
    Claim(
        name="one-bit-adam-networks",
        methods=("one_bit_adam",),
        source="Tang et al., 1-bit Adam, 2021, abstract",
        claim="1-bit Adam has the convergence speed of uncompressed Adam.",
        setting="A perceptron on digits, 140 steps, and a byte transformer, 300 steps, eight "
        "workers, the first fifth dense, dense Adam's learning rates, five seeds.",
        judge=_one_bit,
        criterion="medians: bits a byte at most 1 % above dense Adam's, accuracy on digits at "
        "most 0.5 points below",
        why="size",
        run=_adams,
        minutes=6,
        note="Equal rates and a transformer; the row `one-bit-adam` has tuned rates and the count "
        "of bits, on a CNN.",
    ),
)
