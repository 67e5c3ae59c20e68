"""Errors of quantizers."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

import jaxcomp
from claims.claim import Claim, Judged, decide
from claims.descent import least, within
from jaxcomp import codecs
from jaxcomp.quantize import levels

DRAWS, SIZE = 200, 4096


def _qsgd_error() -> dict[str, Any]:
    """The mean squared error of draws of one vector, by bits, beside the theorem's bound."""
    x = jax.random.normal(jax.random.key(0), (SIZE,))
    rows = []
    for bits in track((2, 4, 8), description="bits"):
        codec = jaxcomp.Policy(jaxcomp.qsgd(bits=bits, bucket_size=SIZE), min_size=0, min_ndim=0)

        def error(seed, codec=codec):
            sent = jaxcomp.roundtrip(codec, jax.random.key(seed), {"x": x})["x"]
            return jnp.sum((sent - x) ** 2) / jnp.sum(x**2), sent

        errors, sent = jax.jit(jax.vmap(error))(jnp.arange(DRAWS))
        steps = 2 ** (bits - 1) - 1
        rows.append({
            "bits": bits,
            "steps": steps,
            "error": float(np.mean(errors)),
            "bound": float(min(SIZE / steps**2, np.sqrt(SIZE) / steps)),
            "bias": float(jnp.linalg.norm(jnp.mean(sent, 0) - x) / jnp.linalg.norm(x)),
        })  # fmt: skip
    return {"numbers": {"draws": DRAWS, "size": SIZE, "rows": rows}}


def _qsgd_judged(numbers: dict[str, Any]) -> Judged:
    rows = numbers["rows"]
    used = [row["error"] / row["bound"] for row in rows]
    chance = [1.5 * (row["error"] / numbers["draws"]) ** 0.5 for row in rows]
    biases = [row["bias"] for row in rows]
    unbiased = all(bias <= most for bias, most in zip(biases, chance, strict=True))
    words = ", ".join(
        f"{row['error']:.3g} of {row['bound']:.3g} ({row['bits']} bits)" for row in rows
    )
    margin = least(within(1, max(used)), *map(within, chance, biases))
    return Judged(f"error and bound: {words}", decide(max(used) <= 1 and unbiased), margin)


LEVELS = (1, 2, 3, 4, 5, 6, 7)


def _dithering() -> dict[str, Any]:
    """Relative errors by the number of levels a side: natural, as many even ones, 2^(s − 1)."""
    normal = jax.random.normal(jax.random.key(0), (SIZE,))
    inputs = {"normal": normal, "Laplace": jax.random.laplace(jax.random.key(1), (SIZE,))}
    inputs["normal cubed"] = normal**3
    rows = []
    for count in track(LEVELS, description="levels"):
        ways = {
            "natural": levels.Float(positive=count),
            "even": codecs.Uniform(count),
            "many": codecs.Uniform(2 ** (count - 1)),
        }
        for law, x in inputs.items():
            found = {kind: _relative(level, x) for kind, level in ways.items()}
            rows.append({"levels": count, "law": law, **found})
    return {"numbers": {"draws": DRAWS, "size": SIZE, "rows": rows}}


def _relative(level: Any, x: Any) -> float:
    """The mean squared error over draws, relative to the vector, which is one bucket."""
    known = jaxcomp.qsgd(bits=4)
    codec = codecs.Quantizer(
        levels=level, scale=known.scale, rounding=known.rounding, bucket_size=SIZE
    )
    whole = jaxcomp.Policy(codec, min_size=0, min_ndim=0)

    def error(seed: Any) -> Any:
        sent = jaxcomp.roundtrip(whole, jax.random.key(seed), {"x": x})["x"]
        return jnp.sum((sent - x) ** 2) / jnp.sum(x**2)

    return float(f"{jnp.mean(jax.jit(jax.vmap(error))(jnp.arange(DRAWS))):.4g}")


def _dithering_judged(numbers: dict[str, Any]) -> Judged:
    """Natural levels against even ones, over the number of levels, for each law."""
    laws = sorted({row["law"] for row in numbers["rows"]})
    words, grows, equal, margins = [], [], [], []
    for law in laws:
        rows = [row for row in numbers["rows"] if row["law"] == law]
        gains = [row["even"] / row["natural"] for row in rows]
        grows.append(all(b > a for a, b in itertools.pairwise(gains[1:])))
        equal.append(all(row["natural"] <= 1.25 * row["many"] + 1 / 8 for row in rows))
        margins.extend(b / a for a, b in itertools.pairwise(gains[1:]))
        margins.extend(within(1.25 * row["many"] + 1 / 8, row["natural"]) for row in rows)
        listed = ", ".join(f"{gain:.2g}" for gain in gains)
        last = rows[-1]
        words.append(
            f"{law}: {listed}; with {last['levels']} levels {last['natural']:.2g}, "
            f"{2 ** (last['levels'] - 1)} even ones {last['many']:.2g}"
        )
    text = f"error of even levels over that of as many natural ones, 1 to {LEVELS[-1]}, "
    verdict = decide(all(grows) and all(equal), all(grows) or all(equal))
    return Judged(text + "; ".join(words), verdict, least(*margins))


CLAIMS = (
    Claim(
        name="qsgd-variance",
        methods=("QSGD",),
        source="Alistarh, Grubic, Li, Tomioka and Vojnovic, QSGD, 2017, Lemma 3.1",
        claim="Quantization with s levels is unbiased, and its variance is at most "
        "min(n/s², √n/s) ‖x‖².",
        setting=f"A normal vector of n = {SIZE} as one bucket, {DRAWS} draws, at 2, 4 and 8 bits "
        "(s = 1, 7, 127).",
        judge=_qsgd_judged,
        criterion="at 2, 4 and 8 bits, mean error at most the bound, and bias at most 1.5 "
        "√(error/draws)",
        run=_qsgd_error,
        minutes=0.2,
    ),
    Claim(
        name="natural-dithering-error",
        methods=("natural_dithering", "natural dithering"),
        source="Horváth et al., Natural compression for distributed deep learning, 2019, abstract "
        "and Theorem 8",
        claim="Natural dithering is exponentially better than dithering with evenly spaced "
        "levels: s levels have the variance of 2^(s − 1) even ones, and 1/8.",
        setting=f"Normal numbers, Laplace ones and cubes of normal ones, {SIZE:,} as one bucket "
        f"with its Euclidean norm, 1 to {LEVELS[-1]} levels a side, {DRAWS} draws.",
        judge=_dithering_judged,
        criterion="each law: gain grows with each level from 2 on; error ≤ 1/8 + 1.25 times "
        "that of 2^(s − 1) even levels",
        run=_dithering,
        minutes=0.7,
        note="One and two levels are the same in both. It holds if from two on the gain grows with "
        "each level, and the error is at most 1/8 above 1.25 times that of 2^(s − 1) even levels.",
    ),
)
