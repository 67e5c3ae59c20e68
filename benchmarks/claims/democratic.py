"""Democratic embeddings: rates, thresholds and sparsifiers."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from convergence import AXIS, Way, everywhere, price
from rich.progress import track
from sklearn import datasets

import jaxcomp
from claims import descent
from claims.claim import Claim, decide
from claims.descent import Oracle
from jaxcomp import algorithms, codecs
from jaxcomp.testing import problems

WIDTHS = (0.5, 1, 2, 3, 4)
SIZES = (32, 512)
DESCENT = 120
CLOSE = 0.01
"""How far above the factor of exact descent a factor is still as good."""


def evenly(bits: float, size: int) -> codecs.Quantizer:
    """The levels of `ndsc` without an embedding."""
    return codecs.Quantizer(
        levels=codecs.MidRise(int(bits), cells=True),
        scale=codecs.MaxAbs(),
        rounding=codecs.Nearest(),
        bucket_size=size,
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
    rows = []
    inputs = [("diagonal", n) for n in SIZES] + [("Gaussian", SIZES[-1])]
    cases = [(*given, name, bits) for given in inputs for name in CODES for bits in WIDTHS]
    for title, size, name, bits in track(cases, description="rates"):
        if name == "scalar" and bits < 1:
            continue
        problem = squares(size, title)
        rate = 2 / (problem.smoothness * (1 + 1 / problem.condition))
        codec = everywhere(CODES[name](bits, size))

        def make(traced: Any, key: Any, codec: Any = codec, rate: float = rate) -> Way:
            return Way(algorithms.dgd_def(codec, AXIS, learning_rate=rate, key=key))

        with warnings.catch_warnings():  # The codes do not contract every input.
            warnings.simplefilter("ignore", UserWarning)
            runs = descent.run(make, problem, rates=[rate], steps=DESCENT, oracle=Oracle(batch=0))
        factors = runs.errors[0, :, -1] ** (0.5 / DESCENT)
        exact = (problem.condition - 1) / (problem.condition + 1)
        rows.append(
            {"matrix": title, "size": size, "code": name, "bits": bits, "exact": exact}
            | {"codes": (price(codec, size) - 32) / size, "factor": descent.spread(factors)}
        )
    return {"numbers": {"steps": DESCENT, "rows": rows}}


def _least(numbers: dict[str, Any], title: str, size: int, code: str) -> float:
    """The bits of codes from which on descent is as fast as without quantisation."""
    found = np.inf
    for row in sorted(numbers["rows"], key=lambda row: -row["bits"]):
        if (row["matrix"], row["size"], row["code"]) == (title, size, code):
            if row["factor"][0] > row["exact"] + CLOSE:
                break
            found = row["codes"]
    return found


def _thresholds_judged(numbers: dict[str, Any]) -> tuple[str, str]:
    inputs = sorted({(row["matrix"], row["size"]) for row in numbers["rows"]}, reverse=True)
    least = {code: [_least(numbers, *given, code) for given in inputs] for code in CODES}
    words = "; ".join(
        f"{title} matrix, d = {size}: "
        + ", ".join(
            f"{code} {found[at]:.2f}" if np.isfinite(found[at]) else f"{code} above {max(WIDTHS)}"
            for code, found in least.items()
        )
        for at, (title, size) in enumerate(inputs)
    )
    below = ", ".join(
        f"{row['factor'][0]:.3f} ({row['code']}, {row['matrix']}, d = {row['size']})"
        for row in numbers["rows"]
        if row["bits"] < 1
    )
    large = [at for at, (_, size) in enumerate(inputs) if size == max(SIZES)]
    ours, near, scalar = least["democratic"], least["near-democratic"], least["scalar"]
    same = max(ours) - min(ours) <= 1
    fewer = all(ours[at] < scalar[at] for at in large)
    both = fewer and all(near[at] <= scalar[at] for at in large)
    text = f"bits an element from which the factor is within {CLOSE} of exact descent, {words}"
    return f"{text}; factors at half a bit: {below}", decide(same and both, same and fewer)


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


def _sparsifiers_judged(numbers: dict[str, Any]) -> tuple[str, str]:
    words, gains = [], []
    for row in numbers["rows"]:
        gains.append(row["alone"][0] / row["embedded"][0])
        words.append(f"{row['input']}, {row['sparsifier']} {gains[-1]:.2f}")
    text = f"error alone over error embedded: {', '.join(words)}"
    return text, decide(min(gains) > 1.2, max(gains) > 1.2)


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
        run=_thresholds,
        minutes=4,
        note="The democratic code needs the fewest bits, the near-democratic one more than a "
        "scalar quantiser: the largest of its Gaussian coordinates grows as √log d, while error "
        "feedback flattens what the scalar quantiser gets. Below one bit the theorem promises "
        "nothing. Bits are those of the payload without its scale.",
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
        run=_sparsifiers,
        minutes=0.5,
    ),
)
