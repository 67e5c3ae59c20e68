"""How near SIDCo's thresholds come to the share that they are for, on a transformer's gradients.

    python examples/byte_lm.py --codec dense --save-gradients
    python benchmarks/thresholds.py

Each leaf is given as it is for forty steps, of which the first thirty are to find the number of
stages; what is shown is the mean of the last ten, as a multiple of the share. The leaves are those
that `compressed_mean` would compress, and all of them as one.
"""

import argparse
import functools
import pathlib

import gradients
import jax
import jax.numpy as jnp
import numpy as np
from harness import show
from rich.progress import track

from jaxcomp.sparsify import choices, fitted, selection

MOMENTS = ("early", "middle", "late")
SHARES = (0.1, 0.01, 0.001)
LAWS = {"exponential": 1.25, "pareto": 1.2}
"""With the factor that each should stay within."""

STEPS, LAST = 40, 10


@functools.partial(jax.jit, static_argnums=(0, 1))
def found(law: str, share: float, x: jax.Array) -> jax.Array:
    """What exceeds the threshold in each step, as a multiple of the share."""
    rule = fitted.Fitted(fraction=share, law=law)

    def step(stages, _):
        hits = selection.count(jnp.abs(x) >= rule.threshold(x, stages.number))[:, 0]
        ratio = hits / choices.share(share, x.shape[1])
        return rule._adapted(stages, ratio), ratio[0]

    return jax.lax.scan(step, rule.init(1, x.shape[1]), None, length=STEPS)[1]


def leaves(gradient: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Those that are compressed, and all in one."""
    large = {name: leaf for name, leaf in gradient.items() if leaf.ndim > 1 and leaf.size >= 4096}
    return {**large, "all as one": gradients.flat(gradient)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--gradients", type=pathlib.Path, default=pathlib.Path("out/byte_lm/gradients"))
    add("--out", type=pathlib.Path, default=pathlib.Path("out/thresholds"))
    options = parser.parse_args()
    cases = [
        (moment, name, law, share, leaf)
        for moment in MOMENTS
        for name, leaf in leaves(gradients.load(options.gradients / f"{moment}.npz")).items()
        for law in LAWS
        for share in SHARES
    ]
    ratios: dict[tuple[str, float], list[tuple[str, str, float]]] = {}
    for moment, name, law, share, leaf in track(cases, description="thresholds"):
        ratio = float(found(law, share, jnp.asarray(leaf).reshape(1, -1))[-LAST:].mean())
        ratios.setdefault((law, share), []).append((moment, name, ratio))
    rows = [row(law, share, some) for (law, share), some in ratios.items()]
    columns = ("law", "share", "cases", "least", "median", "most", "further off than")
    title = "Elements above SIDCo's threshold, as a multiple of the share, after 30 steps"
    results = {"ratios": [[*key, *case] for key, some in ratios.items() for case in some]}
    show(title, columns, rows, results, options.out / "thresholds.md")


def row(law: str, share: float, some: list[tuple[str, str, float]]) -> tuple[str, ...]:
    numbers, most = [ratio for *_, ratio in some], LAWS[law]
    off = [
        f"{moment} {name.removeprefix('params/')} ({ratio:.2f})"
        for moment, name, ratio in some
        if not 2 - most <= ratio <= most
    ]
    return (
        law,
        f"{100 * share:g} %",
        str(len(some)),
        *(f"{value:.2f}" for value in (min(numbers), np.median(numbers), max(numbers))),
        f"{100 * (most - 1):.0f} %: {', '.join(off) or 'none'}",
    )


if __name__ == "__main__":
    main()
