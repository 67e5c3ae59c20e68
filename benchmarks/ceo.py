"""Compares codecs with the CEO bound: the least bits for a signal that eight workers see in noise.

    python benchmarks/ceo.py

Elements are `X ~ N(0, 1)`, and worker `l` encodes `X + N_l` with `N_l ~ N(0, σ²)`. The server
decodes all messages, takes their mean and the multiple of it that is nearest to `X`. Bits are those
of all workers together, from the payloads; the distortion is `E (X̂ − X)²`. A picture shows some
codecs beside the bound, and the cost of a training of `T(D) = a + b D` rounds.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import reporting
from ceo_plot import COLORS, GROWTH, MODEL, NOISES, OVERHEAD, ROUNDS, WORKERS, plot
from rate_distortion import Entry, entries
from rich.progress import track

import jaxcomp
from jaxcomp.numerics import noise
from jaxcomp.theory import ceo_range, ceo_symmetric_rate, ceo_total_cost

SIZE = 2**15


def mean_of(codec: Any) -> Callable[[Any], Any]:
    """The mean of what workers send, for their inputs `[workers, size]`."""
    if codec.facts.sided:  # Workers agree on levels, which are set in the second step.
        link = jaxcomp.Link(jaxcomp.Policy(codec, min_size=0, min_ndim=0))
        mean = jaxcomp.compressed_mean(link, "workers", guard=False)

        def stepped(y: Any) -> Any:
            state = mean.init(y)
            for _ in range(3):
                arrived, state = mean.update(y, state)
            return arrived

        return lambda ys: jax.vmap(stepped, axis_name="workers")(ys)[0]

    def each(number: Any, y: Any) -> Any:
        return jaxcomp.roundtrip(codec, noise.raw(0), y, worker=number)

    return lambda ys: jnp.mean(jax.vmap(each)(jnp.arange(WORKERS, dtype=jnp.uint32), ys), 0)


def measure(entry: Entry, signal: np.ndarray, seen: np.ndarray) -> dict[str, Any]:
    """Bits of all workers, and the distortion for each variance of the noise."""
    means = np.asarray(jax.jit(lambda s: jax.lax.map(mean_of(entry.codec), s))(seen), np.float64)
    found = {}
    for variance, mean in zip(NOISES, means, strict=True):
        best = mean * (signal @ mean) / max(mean @ mean, 1e-300)
        found[f"{variance:g}"] = float(np.mean((best - signal) ** 2))
    bits = 8 * jaxcomp.wire_bytes(entry.codec, jax.ShapeDtypeStruct((SIZE,), jnp.float32)) / SIZE
    return {
        "name": entry.name,
        "series": entry.series,
        "family": entry.family,
        "bits": WORKERS * bits,
        "distortion": found,
    }


def beside(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the bound's bits at its distortions, and the cost of its training."""
    least = {}
    for variance in NOISES:
        low, high = ceo_range(1.0, [variance] * WORKERS)
        at = row["distortion"][f"{variance:g}"]
        if low < at < high:
            least[f"{variance:g}"] = float(ceo_symmetric_rate(at, 1.0, variance, WORKERS))
    rounds = ROUNDS + GROWTH * row["distortion"]["0.1"]
    cost = rounds * (row["bits"] + OVERHEAD)
    return {**row, "least": least, "cost": cost}


COLUMNS = (
    "codec {name} | bits of 8 workers {bits:.2f} | distortion, σ² 0.1 {distortion[0.1]:.4f} | "
    "least bits there {least[0.1]:.2f} | distortion, σ² 1 {distortion[1]:.4f} | least bits "
    "{least[1]:.2f} | distortion, σ² 10 {distortion[10]:.4f} | least bits {least[10]:.2f} | "
    "bits of the training {cost:,.0f}"
)


def main() -> None:
    every = sorted(entries(), key=lambda entry: entry.series not in COLORS)
    args = reporting.options(
        __doc__,
        "out/ceo",
        codec=({entry.series: entry for entry in every}, "some of them, by recipe"),
        update=(False, "keep the codecs that --out has, and measure only the others"),
    )
    draw = np.random.default_rng(0)
    signal = draw.standard_normal(SIZE)
    errors = draw.standard_normal((WORKERS, SIZE))
    seen = np.asarray([signal + variance**0.5 * errors for variance in NOISES], np.float32)
    path = args.out / "ceo.md"
    cases = path.with_suffix(".json")
    kept = reporting.read(cases)["codecs"] if args.update and cases.exists() else {}
    for entry in track(
        [e for e in every if e.series in args.codec], description=f"{WORKERS} workers"
    ):
        if entry.name not in kept:
            kept[entry.name] = measure(entry, signal, seen)
            reporting.keep(cases, {"codecs": kept})
    rows = {entry.name: beside(kept[entry.name]) for entry in entries() if entry.name in kept}
    best = ceo_total_cost(1.0, [0.1] * WORKERS, **MODEL)
    title = f"{WORKERS} workers beside the CEO bound"
    reporting.show(
        reporting.Table(title, COLUMNS, list(rows.values())),
        {"codecs": rows, "least": dataclasses.asdict(best)},
        path,
    )
    plot(rows, args.out / "ceo.png")


if __name__ == "__main__":
    main()
