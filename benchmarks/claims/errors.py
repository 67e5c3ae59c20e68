"""Errors of quantizers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

import jaxcomp
from claims.claim import Claim, decide

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


def _qsgd_judged(numbers: dict[str, Any]) -> tuple[str, str]:
    rows = numbers["rows"]
    used = [row["error"] / row["bound"] for row in rows]
    unbiased = all(row["bias"] <= 1.5 * (row["error"] / numbers["draws"]) ** 0.5 for row in rows)
    words = ", ".join(
        f"{row['error']:.3g} of {row['bound']:.3g} ({row['bits']} bits)" for row in rows
    )
    return f"error and bound: {words}", decide(max(used) <= 1 and unbiased)


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
        run=_qsgd_error,
        minutes=0.2,
    ),
)
