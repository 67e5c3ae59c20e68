"""Codecs by their errors, and in a training of one seed."""

from typing import Any

from claims.claim import FAILS, HOLDS, PART, Claim, decide

CODECS = "rate_distortion/codecs.json"
SAVE_GRADIENTS = "python examples/byte_lm.py --codec dense --save-gradients"
CODECS_COMMAND = f"{SAVE_GRADIENTS}\npython benchmarks/rate_distortion.py"
LAWS = ("gaussian", "laplace", "heavy", "early", "middle", "late")
MILLION = "A million numbers of three laws and a transformer's gradients at three moments."
BYTE_LM, DIGITS = "convergence/byte_lm.json", "convergence/digits.json"
_SPARSE = "--codec dense top_k top_k_alone sidco dgc powersgd demo --optimizer momentum"
LM_COMMAND = (
    f"python examples/byte_lm.py {_SPARSE} --steps 800 --layers 2 --width 128 --context 64 "
    "--out out/byte_lm_sparse"
)
DIGITS_COMMAND = f"python examples/train_digits.py {_SPARSE} --epochs 60 --out out/digits_sparse"
NETWORKS = "convergence/networks.json"


def _errors(found: dict[str, Any], name: str) -> list[float]:
    return [found["codecs"][name]["error"][law] for law in LAWS]


def _less(found: dict[str, Any], name: str, other: str) -> list[float]:
    """The error of one codec over that of another, by law."""
    pairs = zip(_errors(found, name), _errors(found, other), strict=True)
    return [one / two for one, two in pairs]


def _span(ratios: list[float]) -> str:
    return f"{min(ratios):.2g} to {max(ratios):.2g}"


def _nonuniform(found: dict[str, Any]) -> tuple[str, str]:
    plain, largest = (_less(found, "nuqsgd 4", name) for name in ("qsgd 4", "qsgd_inf 4"))
    words = (
        f"error over that of QSGD {_span(plain)}, over that of QSGDinf {_span(largest)}, on six "
        "laws"
    )
    return words, decide(max(plain) < 1 and max(largest) <= 1.05, part=max(plain) < 1)


def _clipped(found: dict[str, Any]) -> tuple[str, str]:
    ratios = _less(found, "terngrad", "terngrad, not clipped")
    return f"error over that without clipping {_span(ratios)}, on six laws", decide(
        max(ratios) < 0.5, part=max(ratios) < 1
    )


def _fast(found: dict[str, Any]) -> tuple[str, str]:
    row = found["codecs"]["fastsgd 1 %"]
    ratio = 32 / row["bits"]["gaussian"]
    words = f"{ratio:.0f} times fewer bits than float32 at 1 % of the elements"
    return words, decide(ratio >= 1e4, part=ratio >= 100)


def _gradients_left_out(found: dict[str, Any]) -> tuple[str, str]:
    text = {run["name"]: run for run in found[BYTE_LM]["runs"]}
    digits = {run["name"]: run for run in found[DIGITS]["runs"]}
    lost = digits["dense"]["test_accuracy"] - digits["dgc"]["test_accuracy"]
    worse = text["dgc"]["bits_per_byte"] / text["dense"]["bits_per_byte"] - 1
    words = (
        f"{text['dgc']['times_less_than_dense']:.0f} times fewer bytes in a step after the "
        "warm-up; "
        f"{lost:.1f} points less on digits, {100 * worse:.0f} % more bits a byte"
    )
    return words, decide(lost <= 0.5 and worse <= 0.01, part=lost <= 0.5)


def _decoupled(found: dict[str, Any]) -> tuple[str, str]:
    runs = {run["name"]: run for run in found["runs"]}
    worse = runs["demo"]["bits_per_byte"] / runs["dense"]["bits_per_byte"] - 1
    fewer = runs["demo"]["times_less_than_dense"]
    words = f"{fewer:.0f} times fewer bytes in a step, {100 * worse:.1f} % more bits a byte"
    return words, decide(fewer >= 85 and worse <= 0.01, part=fewer >= 10 and worse <= 0.1)


def _one_bit(found: dict[str, Any]) -> tuple[str, str]:
    text, digits = "bits a byte, held out", "test accuracy, %"
    ends = {name: curve[-1][1] for name, curve in found["curves"].items()}
    worse = ends[f"{text}: one_bit_adam"] / ends[f"{text}: dense, Adam"] - 1
    lost = ends[f"{digits}: dense, Adam"] - ends[f"{digits}: one_bit_adam"]
    words = f"{100 * worse:+.1f} % bits a byte, {-lost:+.1f} points on digits, against dense Adam"
    return words, decide(worse <= 0.01 and lost <= 0.5, part=worse <= 0.1 and lost <= 0.5)


def _zero_one(found: dict[str, Any]) -> tuple[str, str]:
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
    return words, HOLDS if all(good) else PART if any(good) else FAILS


CLAIMS = (
    Claim(
        name="nuqsgd-error",
        methods=("nuqsgd", "NUQSGD", "qsgd_inf", "QSGDinf", "qsgd"),
        source="Ramezani-Kebrya et al., NUQSGD, 2021, abstract",
        claim="Nonuniform levels have stronger guarantees than QSGD and match or exceed the "
        "empirical performance of QSGDinf.",
        setting=f"{MILLION} Four bits, buckets of 512.",
        judge=_nonuniform,
        results=CODECS,
        command=CODECS_COMMAND,
        note="Errors of messages, not a training. QSGDinf has the smaller error where no element "
        "is "
        "much larger than the others.",
    ),
    Claim(
        name="terngrad-clipping-error",
        methods=("terngrad", "TernGrad"),
        source="Wen et al., TernGrad, 2017, section on gradient clipping",
        claim="Clipping at 2.5 standard deviations reduces the variance of ternary gradients.",
        setting=MILLION,
        judge=_clipped,
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
        results=CODECS,
        command=CODECS_COMMAND,
        note="Fewer elements: the row `fastsgd-ratio`.",
    ),
    Claim(
        name="dgc-accuracy",
        methods=("dgc", "DGC"),
        source="Lin et al., Deep gradient compression, 2018, abstract",
        claim="Gradients are compressed 270 to 600 times without losing accuracy.",
        setting="A perceptron on digits and a byte transformer, eight workers, momentum, 0.1 % of "
        "the elements, one seed; rates were not tuned.",
        judge=_gradients_left_out,
        results=f"{BYTE_LM} {DIGITS}",
        command=f"{LM_COMMAND}\n{DIGITS_COMMAND}",
        note="One test digit is 0.2 points. 600 and 800 steps are few for 0.1 %. The row "
        "`sparsifiers-training` has tuned rates and five seeds, on smaller networks.",
    ),
    Claim(
        name="demo-bytes",
        methods=("demo_sgd",),
        source="Peng et al., DeMo: decoupled momentum optimization, 2024, abstract of the second "
        "version",
        claim="DeMo transmits up to 85 times less data than AdamW at a comparable loss.",
        setting="A byte transformer, eight workers, 800 steps, one seed, against dense momentum, "
        "with its rate.",
        judge=_decoupled,
        results=BYTE_LM,
        command=LM_COMMAND,
        note="32 of 4,096 coefficients, gathered from seven others. The row `demo` has AdamW as "
        "the baseline, tuned rates and five seeds, on a smaller network.",
    ),
    Claim(
        name="one-bit-adam-networks",
        methods=("one_bit_adam",),
        source="Tang et al., 1-bit Adam, 2021, abstract",
        claim="1-bit Adam has the convergence speed of uncompressed Adam.",
        setting="A perceptron on digits, 140 steps, and a byte transformer, 300 steps, eight "
        "workers, the first fifth dense, dense Adam's learning rates, one seed.",
        judge=_one_bit,
        results=NETWORKS,
        command="python benchmarks/networks.py",
        note="Equal rates and a transformer; the row `one-bit-adam` has tuned rates, five seeds "
        "and the count of bits, on a GRU.",
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
        results="convergence/methods.json",
        command="python benchmarks/methods.py",
        note="Local steps move each worker towards its own optimum, and these have nothing in "
        "common here. The method is made for workers that draw from the same data, as those of "
        "the row `zero-one-adam`.",
    ),
)
