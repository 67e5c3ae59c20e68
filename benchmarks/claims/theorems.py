"""Theorems about codecs and descent, measured: compositions, trade-offs, dimensions, regret."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import coded
import jax
import jax.numpy as jnp
import numpy as np
from convergence import AXIS, Way, everywhere
from rich.progress import track

import jaxcomp
from claims import bidirectional, descent
from claims.claim import HOLDS, PART, Change, Claim, Judged, decide
from claims.descent import Oracle, least, plain, within
from claims.sparse_models import text
from jaxcomp import algorithms, codecs, optimizers

DRAWS, SIZE = 400, 4096


def _inputs() -> dict[str, Any]:
    """Vectors of three laws."""
    normal = jax.random.normal(jax.random.key(0), (SIZE,))
    laplace = jax.random.laplace(jax.random.key(1), (SIZE,))
    return {"normal": normal, "Laplace": laplace, "normal cubed": normal**3}


def _composed(inner: Mapping[str, Any]) -> dict[str, Any]:
    """The error and the bias of natural compression after other codecs."""
    natural = everywhere(jaxcomp.natural())
    rows = []
    for law, x in _inputs().items():
        for name, codec in track(inner.items(), description=law):

            def both(seed: Any, codec: Any = codec, x: Any = x) -> Any:
                one, two = jax.random.split(jax.random.key(seed))
                sent = jaxcomp.roundtrip(everywhere(codec), one, {"x": x})
                again = jaxcomp.roundtrip(natural, two, sent)["x"]
                each = [jnp.sum((y - x) ** 2) / jnp.sum(x**2) for y in (sent["x"], again)]
                return *each, again

            alone, errors, sent = jax.jit(jax.vmap(both))(jnp.arange(DRAWS))
            rows.append({
                "law": law,
                "codec": name,
                "alone": float(jnp.mean(alone)),
                "error": float(jnp.mean(errors)),
                "chance": float(jnp.std(errors) / math.sqrt(DRAWS)),
                "bias": float(jnp.linalg.norm(jnp.mean(sent, 0) - x) / jnp.linalg.norm(x)),
            })  # fmt: skip
    return {"numbers": {"draws": DRAWS, "rows": rows}}


def _composed_judged(numbers: dict[str, Any]) -> Judged:
    words, margins = [], []
    for row in numbers["rows"]:
        bound = 9 / 8 * (1 + row["alone"]) - 1
        unbiased = 1.5 * math.sqrt(row["error"] / numbers["draws"])
        words.append(f"{row['law']}, {row['codec']}: {row['error']:.3g} of {bound:.3g}")
        margins += [within(bound + 3 * row["chance"], row["error"]), within(unbiased, row["bias"])]
    return Judged(
        f"error and bound: {', '.join(words)}", decide(min(margins) >= 1), least(*margins)
    )


ALONE = {"alone": codecs.Identity()}
AFTER = {
    "a tenth at random": jaxcomp.random_k(0.1, bucket_size=SIZE),
    "QSGD, 7 levels": jaxcomp.qsgd(bits=4, bucket_size=SIZE),
}
STEPS_OF_QSGD = (1, 3, 7, 15, 31, 64)


def _of_message(codec: codecs.Quantizer, x: Any, *, sparse: bool) -> float:
    """Bits of a message, by a symbol for each element or by the gaps between nonzero ones."""
    elias = codecs.Coded(codec=codec, coder=codecs.Elias("omega", sparse=sparse), capacity=40.0)
    unused, lost = coded.lost(elias, x)
    if lost:
        raise RuntimeError(f"{lost:.1%} of the elements do not fit: raise the capacity")
    return 8 * jaxcomp.wire_bytes(elias, x) - unused * SIZE


def _traded() -> dict[str, Any]:
    rows = []
    for law, x in _inputs().items():
        for steps in track(STEPS_OF_QSGD, description=law):
            known = jaxcomp.qsgd(bits=4, bucket_size=SIZE)
            codec = codecs.Quantizer(
                levels=codecs.Uniform(steps),
                scale=known.scale,
                rounding=known.rounding,
                bucket_size=SIZE,
            )
            bits = min(_of_message(codec, x, sparse=sparse) for sparse in (False, True))
            whole = everywhere(codec)

            def error(seed: Any, codec: Any = whole, x: Any = x) -> Any:
                sent = jaxcomp.roundtrip(codec, jax.random.key(seed), {"x": x})["x"]
                return jnp.sum((sent - x) ** 2) / jnp.sum(x**2)

            errors = jax.jit(jax.vmap(error))(jnp.arange(DRAWS // 4))
            rows.append({
                "law": law,
                "steps": steps,
                "bits": round(float(bits)),
                "error": float(f"{jnp.mean(errors):.4g}"),
            })  # fmt: skip
    return {"numbers": {"size": SIZE, "rows": rows}}


def _traded_judged(numbers: dict[str, Any]) -> Judged:
    """Bits of a message, times the steps that its variance asks for, over the elements."""
    size = numbers["size"]
    products = [row["bits"] * (1 + row["error"]) / size for row in numbers["rows"]]
    first = [each for row, each in zip(numbers["rows"], products, strict=True) if row["steps"] == 1]
    words = (
        f"bits × (1 + error) from {min(products):.2g} to {max(products):.2g} times n; with one "
        f"level {min(first):.2g} to {max(first):.2g}"
    )
    margins = min(products), within(math.log2(size), max(products))
    return Judged(words, decide(min(margins) >= 1, part=margins[0] >= 1), least(*margins))


DIMENSIONS, RATES = (64, 256, 1024, 4096), (2, 4)


def _dimensions() -> dict[str, Any]:
    rows = []
    for size in track(DIMENSIONS, description="dimensions"):
        normal = np.random.default_rng(size).standard_normal((4, size))
        worst = [np.eye(size)[0], np.eye(size)[size // 2], normal[0] ** 3, normal[1] ** 5]
        inputs = jnp.asarray(np.stack([*worst, *normal[2:]]), jnp.float32)
        for bits in RATES:
            codes = {
                "democratic": dataclasses.replace(
                    jaxcomp.dsc(bits, bucket_size=None, dithered=False), block=16_384
                ),
                "near-democratic": jaxcomp.ndsc(bits, bucket_size=size, dithered=False),
                "scalar": codecs.Quantizer(
                    levels=codecs.MidRise(bits, cells=True),
                    scale=codecs.MaxAbs(),
                    rounding=codecs.Nearest(),
                    bucket_size=size,
                ),
            }
            for name, code in codes.items():

                def error(x: Any, seed: Any, codec: Any = everywhere(code)) -> Any:
                    sent = jaxcomp.roundtrip(codec, jax.random.key(seed), {"x": x[None]})["x"][0]
                    return jnp.linalg.norm(sent - x) / jnp.linalg.norm(x)

                errors = jax.jit(jax.vmap(jax.vmap(error, (None, 0)), (0, None)))(
                    inputs, jnp.arange(8)
                )
                worst_error = float(jnp.max(jnp.mean(errors, axis=1)))
                rows.append({
                    "size": size, "bits": bits, "code": name, "error": float(f"{worst_error:.4g}"),
                })  # fmt: skip
    return {"numbers": {"rows": rows}}


def _dimensions_judged(numbers: dict[str, Any]) -> Judged:
    words, margins = [], {}
    for name in ("democratic", "near-democratic", "scalar"):
        for bits in RATES:
            found = [
                row["error"] * 2**bits
                for row in numbers["rows"]
                if (row["code"], row["bits"]) == (name, bits)
            ]
            grown = found[-1] / found[0]
            words.append(f"{name}, {bits} bits: {found[0]:.2f} to {found[-1]:.2f}")
            logs = math.sqrt(math.log(2 * DIMENSIONS[-1]) / math.log(2 * DIMENSIONS[0]))
            margins[name, bits] = {
                "democratic": within(1.15, grown),
                "near-democratic": within(1.15 * logs, grown),
                "scalar": grown / 2,
            }[name]
    text_ = f"worst error × 2^bits in {DIMENSIONS[0]} and in {DIMENSIONS[-1]:,} dimensions: "
    ours = [each for (name, _), each in margins.items() if name != "scalar"]
    verdict = decide(min(margins.values()) >= 1, part=min(ours) >= 1 or max(ours) >= 1)
    return Judged(text_ + ", ".join(words), verdict, least(*margins.values()))


WIDTHS = (2, 3, 4)


@descent.in_float64
def _levels() -> dict[str, Any]:
    problem = bidirectional.problem("least squares")
    size = problem.solution.size
    rate = 2.0**-8 / problem.smoothness
    found: dict[str, Any] = {}
    ways: dict[str, Any] = {"sgd": plain(jaxcomp.Dense())}
    for bits in WIDTHS:
        codec = everywhere(jaxcomp.qsgd(bits=bits, bucket_size=size))
        ways[f"{bits} bits"] = descent.method(algorithms.artemis, codec)
    runs = descent.run_all(
        ways,
        problem,
        "artemis",
        rates=[rate],
        steps=2 * bidirectional.STEPS,
        oracle=Oracle(batch=8),
        every=bidirectional.EVERY,
    )
    for name, each in runs.items():
        found[name] = descent.spread(each.floors[0])
    omega = {
        str(bits): jaxcomp.qsgd(bits=bits, bucket_size=size).variance_bound(size) for bits in WIDTHS
    }
    return {"numbers": {"floors": found, "omega": omega}}


def _levels_judged(numbers: dict[str, Any]) -> Judged:
    words, margins, ratios = [], [], []
    for bits in WIDTHS:
        ratio = numbers["floors"][f"{bits} bits"][0] / numbers["floors"]["sgd"][0]
        most = (1 + numbers["omega"][str(bits)]) ** 2
        ratios.append(ratio)
        words.append(f"{bits} bits {ratio:.2f} (ω = {numbers['omega'][str(bits)]:.2f})")
        margins.append(within(most, ratio))
    margins += [ratios[0] / ratios[1], ratios[1] / ratios[2]]
    text_ = f"floor over that of SGD: {', '.join(words)}"
    return Judged(text_, decide(min(margins) >= 1), least(*margins))


REGRET_STEPS, REGRET_RATES = 8000, tuple(10.0 ** (j / 2) for j in range(-3, 2))


@descent.quietly
def _regret() -> dict[str, Any]:
    problem = text()
    regularizer = optimizers.L1(problem.weight)
    code = {
        "whole": codecs.Identity(),
        "ternary": jaxcomp.terngrad(clip=None, bucket_size=512),
    }
    ways = {}
    for name, codec in code.items():
        for make in (algorithms.qcmd_adagrad, algorithms.qrda_adagrad):

            def way(rate: Any, key: Any, make: Any = make, codec: Any = codec) -> Way:
                given = {"learning_rate": rate, "regularizer": regularizer, "key": key}
                return Way(make(everywhere(codec), AXIS, **given))

            ways[f"{make.__name__}, {name}"] = way
    runs = descent.run_all(
        ways,
        problem,
        "regret",
        rates=REGRET_RATES,
        steps=REGRET_STEPS,
        oracle=Oracle(batch=4),
        seeds=3,
        every=40,
    )
    lowest = min(float(np.nanmin(each.errors)) for each in runs.values())
    found = {}
    for name, each in runs.items():
        regret = 40 * np.cumsum(each.errors - lowest, axis=-1)
        at = descent.best(regret[..., -1])
        middle = np.median(regret[at], axis=0)
        tenth = len(middle) // 10
        found[name] = {
            "rate": REGRET_RATES[at],
            "regret": descent.spread(regret[at][:, -1]),
            "slope": float(np.log(middle[-1] / middle[tenth - 1]) / np.log(len(middle) / tenth)),
        }
    return {"numbers": {"steps": REGRET_STEPS, "lowest": lowest, "found": found}}


def _regret_judged(numbers: dict[str, Any]) -> Judged:
    words, margins = [], []
    for name, row in numbers["found"].items():
        words.append(f"{name} {row['regret'][0]:.0f} (T^{row['slope']:.2f})")
        if not name.endswith("whole"):
            whole = numbers["found"][name.replace("ternary", "whole")]
            ratio = row["regret"][0] / whole["regret"][0]
            words.append(f"{ratio:.2f} times the whole one's")
            margins += [within(0.55, row["slope"]), within(2, ratio)]
    text_ = f"regret after {numbers['steps']:,} steps: {', '.join(words)}"
    return Judged(text_, decide(min(margins) >= 1, part=max(margins) >= 1), least(*margins))


_NATURAL = "Horváth et al., Natural compression for distributed deep learning, 2019, "
_SAHA = (
    "Saha, Pilanci and Goldsmith, Efficient randomized subspace embeddings for distributed "
    "optimization under a communication budget, 2022, "
)

CLAIMS = (
    Claim(
        name="natural-variance",
        methods=("natural", "natural compression"),
        source=_NATURAL + "abstract",
        claim="Random rounding to powers of two is unbiased, with a relative variance of at most "
        "1/8.",
        setting=f"Normal numbers, Laplace ones and cubes of normal ones, {SIZE:,}, {DRAWS} draws.",
        judge=_composed_judged,
        criterion="on three laws error ≤ 1/8 + 3 standard errors, and bias ≤ 1.5 √(error/draws)",
        fixed="814d4410",
        run=functools.partial(_composed, ALONE),
        minutes=0.2,
    ),
    Claim(
        name="natural-composition",
        methods=("natural", "random_k", "qsgd"),
        source=_NATURAL + "theorem on compositions",
        claim="Natural compression after an unbiased operator of variance ω is unbiased, and has "
        "the variance 9/8 (1 + ω) − 1 at most.",
        setting=f"Normal numbers, Laplace ones and cubes of normal ones, {SIZE:,}, {DRAWS} draws; "
        "after a tenth of the elements at random, and after QSGD with 7 levels.",
        judge=_composed_judged,
        criterion="in six cases error ≤ 9/8 (1 + measured ω) − 1 + 3 standard errors, and bias ≤ "
        "1.5 √(error/draws)",
        fixed="814d4410",
        run=functools.partial(_composed, AFTER),
        minutes=0.3,
    ),
    Claim(
        name="qsgd-trade-off",
        methods=("qsgd", "elias_qsgd", "QSGD"),
        source="Alistarh, Grubic, Li, Tomioka and Vojnovic, QSGD, 2017, introduction and "
        "Theorems 3.2 and 3.4",
        claim="The trade-off of bits and variance is nearly optimal: a lower bound of Ω(n) bits "
        "holds for all of a training, and QSGD is within a logarithm of it at every number of "
        "levels.",
        setting=f"Vectors of {SIZE:,} elements of three laws, 1 to 64 levels, Elias omega codes of "
        "each element, or of the gaps between nonzero ones where that is shorter: the bits of a "
        "message times 1 + its squared error, by which steps grow.",
        judge=_traded_judged,
        criterion="bits × (1 + error) from n to n log₂ n for every law and number of levels",
        fixed="9cec10f4",
        changed=(
            Change(
                "9179b20c",
                PART,
                "Every element had a symbol, where the paper codes the gaps between nonzero ones "
                "at few levels.",
            ),
        ),
        run=_traded,
        minutes=0.5,
        note="The bound counts a training's bits up to a constant, so this is its order only.",
    ),
    Claim(
        name="democratic-dimensions",
        methods=("dsc", "ndsc", "DGD-DEF"),
        source=_SAHA + "theorems on the error of (near-)democratic source coding",
        claim="The worst-case error of democratic codes is a constant times the lower bound 2⁻ᴿ "
        "of every code, whatever the dimension; near-democratic codes lose √log d, scalar ones √d.",
        setting=f"{DIMENSIONS[0]} to {DIMENSIONS[-1]:,} dimensions, {RATES[0]} and {RATES[1]} "
        "bits, the worst of six inputs (two unit vectors, powers of normal numbers, normal ones), "
        "the mean of 8 draws of the frame.",
        judge=_dimensions_judged,
        criterion="from 64 to 4,096: democratic ≤ 1.15 times the error, near-democratic ≤ 1.15 "
        "√(log) times, scalar ≥ 2 times",
        fixed="814d4410",
        changed=(
            Change(
                "814d4410",
                HOLDS,
                "Democratic codes have blocks of 16,384 elements, so that all dimensions are one "
                "block.",
            ),
        ),
        run=_dimensions,
        minutes=0.5,
        note="The worst of six inputs is not the worst of all. One frame for all elements: in a "
        "first run by the same criterion frames had 2,730 elements at most, as by default, and "
        "two of them with one scale had 1.44 times the error in 4,096 dimensions.",
    ),
    Claim(
        name="artemis-levels",
        methods=("artemis", "Artemis"),
        source="Philippenko and Dieuleveut, Artemis, 2020, theorem on the asymptotic variance",
        claim="The variance that is left grows at most as (1 + ω)² with compression both ways, and "
        "less compression leaves less of it.",
        setting="Least squares of 8 workers that disagree, batches of 8 of 100 rows, steps of "
        f"2⁻⁸/L, {2 * bidirectional.STEPS:,} steps, {descent.SEEDS} seeds, QSGD of 2, 3 and 4 bits "
        "both ways; ω is the sharp bound of the codec.",
        judge=_levels_judged,
        criterion="floor over SGD's at most (1 + ω)² at 2, 3 and 4 bits, and lower with each bit",
        fixed="814d4410",
        run=_levels,
        minutes=1,
    ),
    Claim(
        name="adagrad-regret",
        methods=("qcmd_adagrad", "qrda_adagrad", "QCMD-Adagrad", "QRDA-Adagrad"),
        source="Xu et al., Quantized adaptive subgradient algorithms and their applications, 2022, "
        "theorems on the regret",
        claim="With ternary gradients without bias the regret grows as √T, as without "
        "quantisation.",
        setting="Logistic regression with an l1 norm on the words of the standard library, 8 "
        f"workers, batches of 4, {REGRET_STEPS:,} steps, 3 seeds, each method at its best of "
        f"{len(REGRET_RATES)} rates: the sum of the objective above the least one of all runs.",
        judge=_regret_judged,
        criterion="ternary: regret ∝ T^p with p ≤ 0.55 over the last decade, and at most twice "
        "that of whole gradients",
        fixed="814d4410",
        run=_regret,
        minutes=2,
        note="The regret is that of the mean loss, whose least value is that of the best iterate.",
    ),
)
