"""Limits of information theory, and codecs beside them."""

import math
import statistics
from typing import Any

from claims.claim import Claim, Judged, decide
from claims.codecs import CODECS, CODECS_COMMAND, SAVE_GRADIENTS
from claims.descent import least, within
from jaxcomp import theory

CEO, CEO_COMMAND = "rate_distortion/ceo.json", "python benchmarks/ceo.py"
MILLION = "A million numbers of a law, or a transformer's gradients, four draws."


def _finest(noise: float) -> float:
    """The distortion of eight workers that send everything."""
    return 1 / (1 + 8 / noise)


def _bound(found: dict[str, Any]) -> Judged:
    gaps = {
        (one["name"], noise): one["bits"] / one["least"][noise]
        for one in found["codecs"].values()
        for noise, distortion in one["distortion"].items()
        # At the least distortion of all, the bound is infinite, and a sample may lie below it.
        if distortion >= 1.05 * _finest(float(noise))
    }
    nearest = min(gaps, key=lambda name: gaps[name])
    words = (
        f"in {len(gaps)} cases of {len(found['codecs'])} codecs they take at least "
        f"{min(gaps.values()):.1f} times the bound ({nearest[0]} at a noise of {nearest[1]})"
    )
    return Judged(words, decide(min(gaps.values()) >= 1), least(*gaps.values()))


def _high_distortion(found: dict[str, Any]) -> Judged:
    codecs = found["codecs"]
    cheap = min(codecs.values(), key=lambda one: one["cost"])
    exact = min(codecs.values(), key=lambda one: one["distortion"]["0.1"])
    times = found["least"]["distortion"] / _finest(0.1)
    words = (
        f"the bound's cheapest training has {times:.1f} times the least distortion; of the codecs, "
        f"{cheap['name']} (distortion {cheap['distortion']['0.1']:.3f}) costs {cheap['cost']:,.0f} "
        f"bits an element, {exact['name']} ({exact['distortion']['0.1']:.3f}) {exact['cost']:,.0f}"
    )
    higher = cheap["distortion"]["0.1"] > 2 * exact["distortion"]["0.1"]
    verdict = decide(times > 2 and higher and cheap["cost"] < exact["cost"], part=times > 2)
    ratio = cheap["distortion"]["0.1"] / exact["distortion"]["0.1"]
    return Judged(words, verdict, least(times / 2, ratio / 2))


def _signs() -> dict[str, Any]:
    noises = (0.1, 1.0, 10.0)
    saved = {str(n): 1 - theory.sign_entropy(8, 1.0, n) / 8 for n in noises}
    return {"numbers": {"workers": 8, "saved": saved}}


def _saved(numbers: dict[str, Any]) -> Judged:
    saved = numbers["saved"]
    words = ", ".join(f"{100 * gain:.1f} % at σ²/σ_X² = {noise}" for noise, gain in saved.items())
    gains = list(saved.values())
    verdict = decide(min(gains) > 0.1, part=max(gains) > 0.1)
    return Judged(f"saved: {words}", verdict, least(min(gains) / 0.1))


def _drive(found: dict[str, Any]) -> Judged:
    errors = found["codecs"]["drive"]["error"]
    laws = [errors[law] for law in ("gaussian", "laplace", "heavy", "early", "middle", "late")]
    words = f"{min(laws):.3f} to {max(laws):.3f} on six laws; π/2 − 1 is {math.pi / 2 - 1:.3f}"
    worst = max(laws) / (math.pi / 2 - 1)
    return Judged(words, decide(worst <= 1.01, part=worst <= 1.1), least(within(1.01, worst)))


def _entropy_coded(found: dict[str, Any]) -> Judged:
    gaps = {
        bits: 0.5 * math.log2(found["codecs"][f"ecsq, minimum error {bits}"]["error"]["gaussian"])
        + bits
        for bits in (1, 2, 3, 4)
    }
    words = ", ".join(f"{gap:.3f} bits at {bits}" for bits, gap in gaps.items())
    most = max(gaps.values())
    return Judged(
        f"above the rate-distortion function: {words}",
        decide(most <= 0.28),
        least(within(0.28, most)),
    )


def _threshold(found: dict[str, Any]) -> Judged:
    ratios = [row[4] for row in found["ratios"]]
    near = sum(abs(ratio - 1) <= 0.2 for ratio in ratios) / len(ratios)
    words = (
        f"{statistics.median(ratios):.2f} times the share in the median of {len(ratios)} leaves, "
        f"shares and laws ({min(ratios):.2f} to {max(ratios):.2f}); {100 * near:.0f} % within a "
        "fifth"
    )
    farthest = max(abs(ratio - 1) for ratio in ratios)
    return Judged(words, decide(near == 1, part=near > 0.9), least(within(0.2, farthest)))


CLAIMS = (
    Claim(
        name="ceo-sum-rate",
        methods=("CEO", "eden", "drive"),
        source="Zhang, Tao, Wang and Xu, Fundamental limits of communication efficiency for model "
        "aggregation, 2022, sum-rate-distortion function",
        claim="No way to aggregate gradients within a distortion takes fewer bits than the sum "
        "rate of the Gaussian CEO problem.",
        setting="Eight workers that see a Gaussian gradient through noise of 0.1, 1 and 10 times "
        "its variance; bits and distortions of codecs as measured, where the distortion is 5 % "
        "above the least.",
        judge=_bound,
        criterion="every codec takes at least the bound's bits, where its distortion is at least "
        "5 % above the least",
        results=CEO,
        command=CEO_COMMAND,
        note="A bound cannot be proved by examples: a codec below it would refute it.",
    ),
    Claim(
        name="ceo-high-distortion",
        methods=("CEO", "drive"),
        source="Zhang, Tao, Wang and Xu, Fundamental limits of communication efficiency for model "
        "aggregation, 2022, abstract",
        claim="A high distortion of the gradients can achieve a low total communication cost.",
        setting="The same codecs at a noise of 0.1; a model of a training: 100 + 2000 D rounds, "
        "each with 2 bits an element beside the messages.",
        judge=_high_distortion,
        criterion="the cheapest training has over twice the least distortion, by the "
        "bound and among the codecs",
        results=CEO,
        command=CEO_COMMAND,
        note="The numbers of rounds and the 2 bits are an illustration, not measured on a "
        "training: with other ones the verdict may differ.",
    ),
    Claim(
        name="ceo-sign-correlation",
        methods=("CEO", "signsgd"),
        source="Zhang, Tao, Wang and Xu, Fundamental limits of communication efficiency for model "
        "aggregation, 2022, abstract",
        claim="The gain of exploiting the correlation between workers is significant for SignSGD.",
        setting="The joint entropy of the signs of eight workers, by their noise σ² over the "
        "common signal σ_X².",
        judge=_saved,
        criterion="over 10 % of the bits saved at each of the noises 0.1, 1 and 10",
        why="premise",
        run=_signs,
        minutes=0.1,
        note="It needs workers that agree: nothing is left to gain where noise is ten times the "
        "signal, as late in training. The entropy is an exact formula, derived here.",
    ),
    Claim(
        name="drive-error",
        methods=("drive", "eden"),
        source="Vargaftik et al., DRIVE: one-bit distributed mean estimation, 2021, theorem on the "
        "error after a random rotation",
        claim="With one bit an element and an unbiased scale the relative squared error is π/2 − 1 "
        "= 0.571, on any input.",
        setting=MILLION,
        judge=_drive,
        criterion="relative squared error at most 1.01 · (π/2 − 1) on all six laws",
        results=CODECS,
        command=CODECS_COMMAND,
        note="The theorem has uniform rotations; the library's are random signs and Hadamard "
        "transforms, after which a sparse input is not quite Gaussian.",
    ),
    Claim(
        name="ecsq-quarter-bit",
        methods=("ecsq",),
        source="Gish and Pierce, Asymptotically efficient quantizing, 1968",
        claim="At high rates a uniform quantizer with an entropy coder is 0.255 bits above the "
        "rate-distortion function of any memoryless source.",
        setting="A million normal numbers at 1, 2, 3 and 4 bits, contractive scale.",
        judge=_entropy_coded,
        criterion="at most 0.28 bits above the rate-distortion function at 1, 2, 3 and 4 bits",
        results=CODECS,
        command=CODECS_COMMAND,
        note="Real messages, with scales and the coder's own loss: up to 0.28, a tenth more, "
        "counts.",
    ),
    Claim(
        name="sidco-thresholds",
        methods=("sidco", "SIDCo"),
        source="Abdelmoniem et al., An efficient statistical-based gradient compression technique, "
        "2021, abstract",
        claim="A threshold from a fitted law, in stages, keeps nearly the wanted share of "
        "elements.",
        setting="The leaves of a byte transformer early, in the middle and late in training, two "
        "laws, shares of 10, 1 and 0.1 %, after 30 steps of adaptation.",
        judge=_threshold,
        criterion="in every case the kept share is within a fifth of the wanted one",
        results="thresholds/thresholds.json",
        command=f"{SAVE_GRADIENTS}\npython benchmarks/thresholds.py",
        note="Some leaves need the adaptation of the number of stages. How the laws fit your own "
        "gradients: `jaxcomp fit`.",
    ),
)
