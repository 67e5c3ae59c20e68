"""Codecs by their errors, and 0/1 Adam by its bits."""

from typing import Any

import numpy as np

import jaxcomp
from claims.claim import FAILS, HOLDS, PART, Claim, Judged, decide
from claims.descent import least, within

CODECS = "rate_distortion/codecs.json"
SAVE_GRADIENTS = "python examples/byte_lm.py --codec dense --save-gradients"
CODECS_COMMAND = f"{SAVE_GRADIENTS}\npython benchmarks/rate_distortion.py"
BUCKET = 8192
"""The bucket of the paper's experiments, for the guarantees."""
LAWS = ("gaussian", "laplace", "heavy", "early", "middle", "late")
MILLION = "A million numbers of three laws and a transformer's gradients at three moments."


def _errors(found: dict[str, Any], name: str) -> list[float]:
    return [found["codecs"][name]["error"][law] for law in LAWS]


def _less(found: dict[str, Any], name: str, other: str) -> list[float]:
    """The error of one codec over that of another, by law."""
    pairs = zip(_errors(found, name), _errors(found, other), strict=True)
    return [one / two for one, two in pairs]


def _span(ratios: list[float]) -> str:
    return f"{min(ratios):.2g} to {max(ratios):.2g}"


def _nonuniform(found: dict[str, Any]) -> Judged:
    plain, largest = (_less(found, "nuqsgd 4", name) for name in ("qsgd 4", "qsgd_inf 4"))
    words = (
        f"error over that of QSGD {_span(plain)}, over that of QSGDinf {_span(largest)}, on six "
        "laws"
    )
    nonuniform, uniform = (
        make(bits=4, bucket_size=BUCKET).variance_bound(BUCKET) or np.inf
        for make in (jaxcomp.nuqsgd, jaxcomp.qsgd)
    )
    words += f"; guarantees for {BUCKET:,} elements: {nonuniform:.2f} against {uniform:.1f}"
    better = nonuniform < uniform and max(plain) < 1
    margins = uniform / nonuniform, within(1, max(plain)), within(1.05, max(largest))
    return Judged(words, decide(better and max(largest) <= 1.05, part=better), least(*margins))


def _clipped(found: dict[str, Any]) -> Judged:
    ratios = _less(found, "terngrad", "terngrad, not clipped")
    words = f"error over that without clipping {_span(ratios)}, on six laws"
    verdict = decide(max(ratios) < 0.5, part=max(ratios) < 1)
    return Judged(words, verdict, least(within(0.5, max(ratios))))


def _fast(found: dict[str, Any]) -> Judged:
    row = found["codecs"]["fastsgd 1 %"]
    ratio = 32 / row["bits"]["gaussian"]
    words = f"{ratio:.0f} times fewer bits than float32 at 1 % of the elements"
    return Judged(words, decide(ratio >= 1e4, part=ratio >= 100), least(ratio / 1e4))


def _zero_one(found: dict[str, Any]) -> Judged:
    curves = found["curves"]["least squares, 8 workers"]
    one, none, steps = (
        curves[name]
        for name in (
            "one_bit_adam", "zero_one_adam, no local steps", "zero_one_adam, 16 local steps"
        )
    )  # fmt: skip
    fewer = none["bits"][-1] / one["bits"][-1], steps["bits"][-1] / one["bits"][-1]
    ends = [curve["errors"][-1] for curve in (one, none, steps)]
    words = (
        f"squared error {ends[1]:.0e} for {100 * fewer[0]:.0f} % of the bits without local steps, "
        f"{ends[2]:.0e} for {100 * fewer[1]:.0f} % with up to 16; 1-bit Adam {ends[0]:.0e}"
    )
    good = [ends[1] <= 2 * ends[0] and fewer[0] < 1, ends[2] <= 2 * ends[0] and fewer[1] < 1]
    verdict = HOLDS if all(good) else PART if any(good) else FAILS
    margins = [within(2 * ends[0], error) for error in ends[1:]]
    return Judged(words, verdict, least(*margins, *(within(1, each) for each in fewer)))


CLAIMS = (
    Claim(
        name="nuqsgd-error",
        methods=("nuqsgd", "NUQSGD", "qsgd_inf", "QSGDinf", "qsgd"),
        source="Ramezani-Kebrya et al., NUQSGD, 2021, abstract",
        claim="Nonuniform levels have stronger guarantees than QSGD and match or exceed the "
        "empirical performance of QSGDinf.",
        setting=f"{MILLION} Four bits, buckets of 512.",
        judge=_nonuniform,
        criterion="a smaller bound than QSGD's at d = 8,192; on six laws, error below QSGD's, at "
        "most 1.05 times QSGDinf's",
        why="false",
        results=CODECS,
        command=CODECS_COMMAND,
        note="Errors of messages, not a training. QSGDinf has the smaller error where no element "
        "is much larger than the others.",
    ),
    Claim(
        name="terngrad-clipping-error",
        methods=("terngrad", "TernGrad"),
        source="Wen et al., TernGrad, 2017, section on gradient clipping",
        claim="Clipping at 2.5 standard deviations reduces the variance of ternary gradients.",
        setting=MILLION,
        judge=_clipped,
        criterion="on all six laws, error less than half of that without clipping",
        results=CODECS,
        command=CODECS_COMMAND,
        note="Clipped gradients are biased.",
    ),
    Claim(
        name="fastsgd-bits",
        methods=("fastsgd", "FastSGD"),
        source="FastSGD: a fast compressed SGD framework for distributed machine learning, 2021, "
        "abstract",
        claim="FastSGD compresses gradients by up to four orders of magnitude.",
        setting="A million normal numbers, 1 % of the elements.",
        judge=_fast,
        criterion="at least 10,000 times fewer bits than float32",
        why="premise",
        results=CODECS,
        command=CODECS_COMMAND,
        note="Fewer elements: the row `fastsgd-ratio`.",
    ),
    Claim(
        name="zero-one-adam-bits",
        methods=("zero_one_adam",),
        source="Lu et al., 0/1 Adam, 2022, abstract",
        claim="0/1 Adam reduces the data volume by up to 87 % against 1-bit Adam at the same "
        "convergence.",
        setting="Least squares of eight workers with optima of their own, full gradients, 10,000 "
        "steps.",
        judge=_zero_one,
        criterion="without local steps and with them, error at most twice 1-bit Adam's, and "
        "fewer bits",
        why="premise",
        results="convergence/methods.json",
        command="python benchmarks/methods.py",
        note="Local steps move each worker towards its own optimum, and these have nothing in "
        "common here. The method is made for workers that draw from the same data, as those of "
        "the row `zero-one-adam`.",
    ),
)
