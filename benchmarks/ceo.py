"""Compares codecs with the CEO bound: the least bits for a signal that eight workers see in noise.

    python benchmarks/ceo.py

Elements are `X ~ N(0, 1)`, and worker `l` encodes `X + N_l` with `N_l ~ N(0, σ²)`. The server
decodes all messages, takes their mean and the multiple of it that is nearest to `X`. Bits are those
of all workers together, from the payloads; the distortion is `E (X̂ − X)²`. A picture shows every
codec beside the bound, and the cost of a training of `T(D) = a + b D` rounds.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import reporting
from rate_distortion import Entry, entries
from rate_distortion_plot import CLOUD, FAINT, INK, name_points
from rich.progress import track

import jaxcomp
from jaxcomp.numerics import noise
from jaxcomp.planning import ceo_range, ceo_symmetric_rate, ceo_total_cost, ceo_unbinned_rate

WORKERS, SIZE = 8, 2**15
NOISES = (0.1, 1.0, 10.0)
"""`σ²`, where the signal has the variance 1."""
ROUNDS, GROWTH, OVERHEAD = 100.0, 2000.0, 2.0
"""`a`, `b`, and the bits an element that a round costs beside its gradients: an illustration."""


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
    every = sorted(entries(), key=lambda entry: entry.series not in NAMED)
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


MODEL: Any = {"rounds": ROUNDS, "growth": GROWTH, "overhead": OVERHEAD}


def plot(rows: dict[str, Any], path: pathlib.Path) -> None:
    figure, grid = reporting.panels(2, 2, (12, 11.5), layout=None)
    figure.subplots_adjust(0.085, 0.06, 0.985, 0.87, wspace=0.14, hspace=0.2)
    for axes, variance in zip(grid.flat, NOISES, strict=False):
        low, high = ceo_range(1.0, [variance] * WORKERS)
        at = low + (high - low) * np.geomspace(1e-4, 0.999, 300)
        least = ceo_symmetric_rate(at, 1.0, variance, WORKERS)
        alone = ceo_unbinned_rate(at, 1.0, [variance] * WORKERS)
        axes.fill_between(least, at, low / 2, color="#e9e9e9", linewidth=0, zorder=0)
        axes.plot(least, at, color=INK, linewidth=1.6)
        axes.plot(alone, at, color=INK, linewidth=1.2, linestyle=(0, (5, 2)))
        axes.axhline(low, color=FAINT, linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlim=(0.05, 150), ylim=(low * 0.8, high * 1.25))
        axes.set_title(f"noise of a worker: {variance:g} times the signal's variance", loc="left")
        curves = [np.stack([least, at], 1), np.stack([alone, at], 1)]
        points = {n: (r["bits"], r["distortion"][f"{variance:g}"]) for n, r in rows.items()}
        named = dots(axes, points, rows)
        figure.canvas.draw()
        name_points(axes, named, curves, NAMED)
        axes.set(xlabel="bits an element of all workers", ylabel="distortion of the signal, D")
    total(figure, grid[1, 1], rows)
    figure.text(0.085, 0.965, TITLE, size=16, weight="bold", color=INK)
    figure.text(0.085, 0.9, CAPTION, size=9, color=INK)
    reporting.draw(figure, path)


TITLE = "The least bits for a gradient that eight workers see through noise"
CAPTION = """\
Solid: the CEO bound, no code is below. Dashed: the least if each message is decoded alone.
Thin: the distortion that no rate reaches. The server takes the multiple of the mean nearest to \
the signal.
Where noise is small, messages are alike, and codecs that encode alone are far above the bound. \
Grey: all other codecs."""


NAMED = {
    "ecsq, minimum error": "#0f9d9f",
    "eden, minimum error": "#2a7f4f",
    "drive": "#1f5c99",
    "sign": "#7b4fa3",
    "qsgd_inf": "#1b6ca8",
    "nuqsgd": "#d1495b",
    "top_k": "#8a6240",
}
"""Series that have a colour and a name; all others are grey."""


def dots(
    axes: Any, points: dict[str, tuple[float, float]], rows: dict[str, Any]
) -> dict[str, list[tuple[float, float]]]:
    """The points of all codecs; those of the named series, by its name."""
    named: dict[str, list[tuple[float, float]]] = {}
    for name, place in points.items():
        series = rows[name]["series"]
        if series in NAMED:
            named.setdefault(series, []).append(place)
        else:
            axes.scatter(*place, s=12, color=CLOUD, linewidth=0, zorder=1.5)
    for series, places in named.items():
        axes.plot(*zip(*places, strict=True), "o-", color=NAMED[series], linewidth=1.2, ms=5)
    return named


def total(figure: Any, axes: Any, rows: dict[str, Any]) -> None:
    """The cost of a training over the distortion of its gradients."""
    low, high = ceo_range(1.0, [0.1] * WORKERS)
    at = low + (high - low) * np.geomspace(1e-3, 0.999, 200)
    cost = functools.partial(ceo_total_cost, 1.0, [0.1] * WORKERS, **MODEL)
    bits = np.array([cost(distortion=float(d)).bits for d in at])
    axes.plot(at, bits, color=INK, linewidth=1.6)
    best = cost()
    axes.plot(best.distortion, best.bits, "o", color="white", markeredgecolor=INK, zorder=4)
    axes.annotate(
        f"fewest bits in all: D = {best.distortion:.3f},\n{best.distortion / low:.1f} times the "
        "least distortion",
        (best.distortion, best.bits),
        (0.03, best.bits * 0.55),
        size=9,
        color=INK,
    )
    points = {n: (r["distortion"]["0.1"], r["cost"]) for n, r in rows.items()}
    named = dots(axes, points, rows)
    axes.set(xscale="log", yscale="log", xlim=(low * 0.9, 1.3), ylim=(best.bits * 0.4, 2e4))
    figure.canvas.draw()
    seen = {n: [p for p in places if p[1] < 2e4] for n, places in named.items()}
    name_points(axes, {n: p for n, p in seen.items() if p}, [np.stack([at, bits], 1)], NAMED)
    axes.set(xlabel="distortion of the signal, D", ylabel="bits an element over the training")
    text = f"a training of {ROUNDS:g} + {GROWTH:g} D rounds, noise 0.1"
    axes.set_title(text, loc="left")


if __name__ == "__main__":
    main()
