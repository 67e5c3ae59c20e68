"""Democratic embeddings: rates, thresholds and sparsifiers."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import composite
import jax
import jax.numpy as jnp
import numpy as np
import optax
from convergence import AXIS, Way, everywhere, price
from rich.progress import track
from sklearn import datasets

import jaxcomp
from claims import descent
from claims.claim import PART, Change, Claim, Judged, decide
from claims.descent import Oracle, least, within
from jaxcomp import algorithms, codecs
from jaxcomp.testing import problems

WIDTHS = (0.5, 1, 2, 3, 4)
SIZES = (32, 512)
DESCENT = 120
CLOSE = 0.01
"""How far above the factor of descent without quantisation a factor is still as good."""


def evenly(bits: float, size: int) -> codecs.Quantizer:
    """The levels of `ndsc` without an embedding."""
    levels = codecs.MidRise(int(bits), cells=True)
    return codecs.Quantizer(
        levels=levels, scale=codecs.MaxAbs(), rounding=codecs.Nearest(), bucket_size=size
    )


CODES: dict[str, Callable[[float, int], Any]] = {
    "near-democratic": lambda bits, n: jaxcomp.ndsc(bits, bucket_size=n, dithered=False),
    "democratic": lambda bits, n: jaxcomp.dsc(bits, bucket_size=None, dithered=False),
    "scalar": evenly,
}


@functools.cache
def squares(size: int, title: str) -> problems.Quadratics:
    """One worker's least squares of condition about ten, whose solution has heavy tails.

    With a diagonal matrix the gradient has heavy tails too; a Gaussian one spreads it evenly.
    """
    plain = problems.quadratics(workers=1, size=size, rows=int(3.7 * size), ridge=0.0)
    solution = np.random.default_rng(1).standard_normal(size) ** 3
    if title == "diagonal":
        values = np.linspace(0.1, 1, size)
        matrix = np.diag(np.sqrt(values))
        plain = plain._replace(smoothness=1.0, condition=10.0)
    else:
        matrix = np.asarray(plain.matrices[0])
    return plain._replace(
        matrices=jnp.asarray(matrix[None]),
        targets=jnp.asarray((matrix @ solution)[None]),
        solution=jnp.asarray(solution),
    )


@descent.in_float64
def _thresholds() -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    inputs = [("diagonal", n) for n in SIZES] + [("Gaussian", SIZES[-1])]
    cases = [(*given, name, bits) for given in inputs for name in CODES for bits in WIDTHS]
    whole = [_factor(*given, codecs.Identity()) for given in inputs]
    for title, size, name, bits in track(cases, description="rates"):
        if name == "scalar" and bits < 1:
            continue
        code = CODES[name](bits, size)
        rows.append({
            "matrix": title,
            "size": size,
            "code": name,
            "bits": bits,
            "whole": whole[inputs.index((title, size))][0],
            "codes": (price(everywhere(code), size) - 32) / size,
            "factor": _factor(title, size, code),
        })  # fmt: skip
    return {"numbers": {"steps": DESCENT, "rows": rows}}


def _factor(title: str, size: int, code: Any) -> list[float]:
    """The factor of a step in the distance from the solution, the mean over all steps."""
    problem = squares(size, title)
    rate = 2 / (problem.smoothness * (1 + 1 / problem.condition))

    def make(traced: Any, key: Any) -> Way:
        return Way(algorithms.dgd_def(everywhere(code), AXIS, learning_rate=rate, key=key))

    with warnings.catch_warnings():  # The codes do not contract every input.
        warnings.simplefilter("ignore", UserWarning)
        runs = descent.run(make, problem, rates=[rate], steps=DESCENT, oracle=Oracle(batch=0))
    return descent.spread(runs.errors[0, :, -1] ** (0.5 / DESCENT))


def _least(numbers: dict[str, Any], title: str, size: int, code: str) -> float:
    """The bits of codes from which on descent is as fast as without quantisation."""
    found = np.inf
    for row in sorted(numbers["rows"], key=lambda row: -row["bits"]):
        if (row["matrix"], row["size"], row["code"]) == (title, size, code):
            if row["factor"][0] > row["whole"] + CLOSE:
                break
            found = row["codes"]
    return found


def _thresholds_judged(numbers: dict[str, Any]) -> Judged:
    inputs = sorted({(row["matrix"], row["size"]) for row in numbers["rows"]}, reverse=True)
    starts = {code: [_least(numbers, *given, code) for given in inputs] for code in CODES}
    words = "; ".join(
        f"{title} matrix, d = {size}: "
        + ", ".join(
            f"{code} {found[at]:.2f}" if np.isfinite(found[at]) else f"{code} above {max(WIDTHS)}"
            for code, found in starts.items()
        )
        for at, (title, size) in enumerate(inputs)
    )
    below = ", ".join(
        f"{row['factor'][0]:.3f} ({row['code']}, {row['matrix']}, d = {row['size']})"
        for row in numbers["rows"]
        if row["bits"] < 1
    )
    large = [at for at, (_, size) in enumerate(inputs) if size == max(SIZES)]
    ours, near, scalar = starts["democratic"], starts["near-democratic"], starts["scalar"]
    same = max(ours) - min(ours) <= 1
    fewer = [all(code[at] < scalar[at] for at in large) for code in (ours, near)]
    text = f"bits an element from which the factor is within {CLOSE} of exact descent, {words}"
    verdict = decide(same and all(fewer), same and any(fewer))
    ratios = [within(scalar[at], code[at]) for code in (ours, near) for at in large]
    margin = least(within(1, max(ours) - min(ours)), *ratios)
    return Judged(f"{text}; factors at half a bit: {below}", verdict, margin)


SUBGRADIENT_STEPS, SHORT = 4000, (None, 2, 1, 0.5, 0.25)
FACTORS = tuple(10.0 ** (j / 2) for j in range(-4, 3))


@descent.in_float64
def _subgradients() -> dict[str, Any]:
    features, labels = datasets.load_digits(return_X_y=True)
    problem, radius = composite.in_a_ball(features, labels % 2, workers=8)
    size = problem.solution.size

    def ball(tree: Any) -> Any:
        return optax.projections.projection_l2_ball(tree, radius)

    found = []
    for bits in track(SHORT, description="bits"):
        code = codecs.Identity() if bits is None else jaxcomp.ndsc(bits=bits, bucket_size=size)
        codec = everywhere(code)

        def make(factor: Any, key: Any, codec: Any = codec) -> Way:
            def rate(step: Any) -> Any:
                return factor * radius / jnp.sqrt(1.0 + step)

            given = {"learning_rate": rate, "projection": ball, "key": key}
            return Way(algorithms.dq_psgd(codec, AXIS, **given))

        runs = descent.run(
            make,
            problem,
            rates=FACTORS,
            steps=SUBGRADIENT_STEPS,
            oracle=Oracle(batch=8),
            every=10,
        )
        at = descent.best(runs.averaged[..., -1])
        ends = runs.averaged[at]
        middle = np.median(ends, axis=0)
        found.append({
            "bits": bits,
            "factor": FACTORS[at],
            "gap": descent.spread(ends[:, -1]),
            "slope": float(np.log(middle[-1] / middle[len(middle) // 10 - 1]) / np.log(10)),
        })  # fmt: skip
    return {"numbers": {"steps": SUBGRADIENT_STEPS, "rows": found}}


def _subgradients_judged(numbers: dict[str, Any]) -> Judged:
    gaps = {row["bits"]: row["gap"][0] for row in numbers["rows"]}
    slopes = {row["bits"]: row["slope"] for row in numbers["rows"]}
    listed = ", ".join(
        f"{'whole' if bits is None else f'{bits:g} bits'} {gap:.1e} (T^{slopes[bits]:.2f})"
        for bits, gap in gaps.items()
    )
    half, quarter = gaps[0.5] / gaps[1], gaps[0.25] / gaps[1]
    rates = all(slope <= -0.45 for slope in slopes.values())
    below = half <= 1.2 * 2**0.5 and quarter <= 1.2 * 2
    words = f"gap: {listed}; half a bit {half:.2f} and a quarter {quarter:.2f} times one bit"
    margin = least(-max(slopes.values()) / 0.45, within(1.2 * 2**0.5, half), within(2.4, quarter))
    return Judged(words, decide(rates and below, rates or below), margin)


DRAWS = 40


def sparsified(key: Any, x: Any, fraction: float) -> Any:
    """Elements that are drawn at random, each rounded to ± the largest of them without bias."""
    drawn, coin = jax.random.split(key)
    size = x.shape[-1]
    kept = jax.random.permutation(drawn, size) < round(fraction * size)
    top = jnp.max(jnp.abs(jnp.where(kept, x, 0)))
    up = jax.random.uniform(coin, x.shape) * 2 - 1 < x / top
    return jnp.where(kept, jnp.where(up, top, -top), 0) / fraction


def _sparsifiers() -> dict[str, Any]:
    cubed = np.random.default_rng(0).standard_normal(4096) ** 3
    inputs = {"Gaussian cubed": cubed, "gradient": _gradient()}
    short = jaxcomp.qsgd_inf(bits=4, bucket_size=128)
    rows = []
    for title, values in inputs.items():
        x = jnp.asarray(values, jnp.float32)
        n = x.size
        pairs: dict[str, tuple[Any, Any]] = {
            "random half, 1 bit": (None, jaxcomp.ndsc(0.5, bucket_size=n)),
            "random tenth, whole": (
                jaxcomp.random_k(0.1, bucket_size=n),
                codecs.Rotated(codec=jaxcomp.random_k(0.1, bucket_size=n)),
            ),
            "top tenth, whole": (
                jaxcomp.top_k(0.1, bucket_size=n),
                codecs.Rotated(codec=jaxcomp.top_k(0.1, bucket_size=n)),
            ),
            "top tenth, 4 bits": (
                jaxcomp.top_k(0.1, bucket_size=n, values=short),
                codecs.Rotated(codec=jaxcomp.top_k(0.1, bucket_size=n, values=short)),
            ),
        }
        for name, (alone, embedded) in track(pairs.items(), description=title):
            one = lambda key, x=x, codec=alone: _error(codec, key, x)  # noqa: E731
            two = lambda key, x=x, codec=embedded: _error(codec, key, x)  # noqa: E731
            keys = jax.random.split(jax.random.key(3), DRAWS)
            errors = [np.asarray(jax.jit(jax.vmap(each))(keys)) for each in (one, two)]
            rows.append({
                "input": title,
                "sparsifier": name,
                "alone": descent.spread(errors[0]),
                "embedded": descent.spread(errors[1]),
            })  # fmt: skip
    return {"numbers": {"draws": DRAWS, "rows": rows}}


def _error(codec: Any, key: Any, x: Any) -> Any:
    if codec is None:
        back = sparsified(key, x, 0.5)
    else:
        back = jaxcomp.roundtrip(everywhere(codec), key, {"x": x[None]})["x"][0]
    return jnp.sum((back - x) ** 2) / jnp.sum(x**2)


def _gradient() -> np.ndarray:
    """A gradient of a perceptron on digits, at its start: the leaf of the hidden layer."""
    features, labels = datasets.load_digits(return_X_y=True)
    x, y = jnp.asarray(features / 16, jnp.float32), jnp.asarray(labels)
    first, last = (
        jax.random.normal(jax.random.key(seed), shape) / np.sqrt(shape[0])
        for seed, shape in ((0, (64, 64)), (1, (64, 10)))
    )

    def loss(weights: Any) -> Any:
        scores = jax.nn.relu(x[:64] @ weights) @ last
        return optax.softmax_cross_entropy_with_integer_labels(scores, y[:64]).mean()

    return np.asarray(jax.jit(jax.grad(loss))(first)).ravel()


def _sparsifiers_judged(numbers: dict[str, Any]) -> Judged:
    words, gains = [], []
    for row in numbers["rows"]:
        gains.append(row["alone"][0] / row["embedded"][0])
        words.append(f"{row['input']}, {row['sparsifier']} {gains[-1]:.2f}")
    text = f"error alone over error embedded: {', '.join(words)}"
    return Judged(text, decide(min(gains) > 1.2, max(gains) > 1.2), least(min(gains) / 1.2))


def _values() -> dict[str, Any]:
    """Errors of the kept values alone: a scalar quantiser of them, and one after an embedding."""
    cubed = np.random.default_rng(0).standard_normal(4096) ** 3
    rows = []
    for title, values in {"Gaussian cubed": cubed, "gradient": _gradient()}.items():
        drawn = np.random.default_rng(1).permutation(values.size)
        kept = {"top tenth": np.argsort(-np.abs(values)), "random tenth": drawn}
        for name, order in track(kept.items(), description=title):
            x = jnp.asarray(values[np.sort(order[: values.size // 10])], jnp.float32)
            for bits in (1, 2):
                ways = {
                    "alone": evenly(bits, x.size),
                    "near-democratic": jaxcomp.ndsc(bits, bucket_size=x.size, dithered=False),
                    "democratic": jaxcomp.dsc(bits, bucket_size=None, dithered=False),
                }
                row: dict[str, Any] = {"input": title, "kept": name, "bits": bits}
                for way, codec in ways.items():
                    one = lambda key, x=x, codec=codec: _error(codec, key, x)  # noqa: E731
                    keys = jax.random.split(jax.random.key(3), DRAWS)
                    row[way] = descent.spread(jax.jit(jax.vmap(one))(keys))
                rows.append(row)
    return {"numbers": {"draws": DRAWS, "rows": rows}}


def _values_judged(numbers: dict[str, Any]) -> Judged:
    words, gains = [], []
    for row in numbers["rows"]:
        each = [row["alone"][0] / row[way][0] for way in ("near-democratic", "democratic")]
        gains += each
        words.append(
            f"{row['input']}, {row['kept']}, {row['bits']} bits {each[0]:.2f} and {each[1]:.2f}"
        )
    text = f"error alone over error embedded, near-democratic and democratic: {', '.join(words)}"
    return Judged(text, decide(min(gains) > 1.2, max(gains) > 1.2), least(min(gains) / 1.2))


_PAPER = (
    "Saha, Pilanci and Goldsmith, Efficient randomized subspace embeddings for distributed "
    "optimization under a communication budget, 2022, "
)

CLAIMS = (
    Claim(
        name="dgd-def-threshold",
        methods=("dgd_def", "DGD-DEF"),
        source=_PAPER + "the theorem of DGD-DEF and the figure of the factor over R",
        claim="From a threshold of bits on that does not depend on the dimension, descent by "
        "democratically coded gradients converges as fast as without quantisation (up to √log d "
        "for near-democratic codes); a scalar quantiser needs more bits.",
        setting="Least squares of one worker and condition about ten, whose solution is Gaussian "
        "cubed, with a diagonal matrix, which keeps heavy tails in the gradient, and with a "
        f"Gaussian one, 0.5 to 4 bits an element, {DESCENT} steps of 2/(L + μ), "
        f"{descent.SEEDS} seeds.",
        judge=_thresholds_judged,
        criterion="democratic thresholds at most 1 bit apart; at d = 512 those of both codes "
        "below the scalar one's",
        why="false",
        run=_thresholds,
        minutes=4,
        note="The scalar quantiser needs more bits in more dimensions where the gradient has heavy "
        "tails, and no more than one where it has none; the near-democratic code needs two on "
        "both, since the largest of its Gaussian coordinates grows as √log d. Below one bit the "
        "theorem promises nothing. Bits are those of the payload without its scale. It holds if "
        "both codes need fewer bits than the scalar quantiser on both matrices.",
    ),
    Claim(
        name="dq-psgd-bits",
        methods=("dq_psgd", "DQ-PSGD"),
        source=_PAPER + "the theorem of DQ-PSGD",
        claim="The gap falls as 1/√(min(1, R) T): as fast as with whole subgradients from one bit "
        "on, up to a constant, and slower by √(1/R) below.",
        setting="A support vector machine in a ball on digits (odd or even), 8 workers, batches of "
        f"8, {SUBGRADIENT_STEPS:,} steps, each number of bits at its best of seven steps, "
        f"{descent.SEEDS} seeds.",
        judge=_subgradients_judged,
        criterion="all slopes ≤ −0.45; gap at 1/2 bit ≤ 1.2 √2 times that at one bit, at 1/4 "
        "bit ≤ 2.4 times",
        run=_subgradients,
        minutes=1,
        note="The paper has one worker. It holds if every slope is at most −0.45 and no ratio to "
        "one bit is a fifth above √(1/R).",
    ),
    Claim(
        name="democratic-sparsifiers",
        methods=("ndsc", "top_k", "random_k"),
        source=_PAPER + "abstract",
        claim="The embeddings significantly improve the performance of gradient sparsification.",
        setting="A vector of Gaussians cubed and a gradient of a perceptron on digits, of 4,096 "
        f"elements, {DRAWS} draws: the relative error of sparsifiers alone and of the same "
        "sparsifiers of the rotated vector.",
        judge=_sparsifiers_judged,
        criterion="error alone more than 1.2 times that embedded, for each of four "
        "sparsifiers on both vectors",
        why="premise",
        run=_sparsifiers,
        minutes=0.5,
        note="Outside its assumptions: here the whole vector is embedded, and then sparsified, "
        "which destroys what top-k needs. The authors' order is the row `democratic-values`.",
    ),
    Claim(
        name="democratic-values",
        methods=("ndsc", "dsc", "top_k", "random_k"),
        source=_PAPER + "abstract and the experiments with sparsified and quantised gradients",
        claim="The embeddings significantly improve the performance of gradient sparsification: "
        "the kept values are embedded, then quantised.",
        setting="The largest tenth and a random tenth of a vector of Gaussians cubed and of a "
        f"gradient of a perceptron on digits, of 4,096 elements, {DRAWS} draws: the relative error "
        "of the kept values at one and two bits, by a scalar quantiser of as many bits and by "
        "(near-)democratic codes.",
        judge=_values_judged,
        criterion="error alone more than 1.2 times that embedded, for both codes, both kinds of "
        "kept values, bits and vectors",
        why="false",
        fixed="814d4410",
        changed=(Change("814d4410", PART, "Names in the program; no setting."),),
        run=_values,
        minutes=0.3,
        note="The order of the authors; the row `democratic-sparsifiers` embeds first.",
    ),
)
