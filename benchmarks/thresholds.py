"""Compares the fraction that SIDCo's thresholds select with the wanted one, on real gradients.

    python examples/byte_lm.py --codec dense --save-gradients
    python benchmarks/thresholds.py

Each leaf is given as it is for forty steps, of which the first thirty are to find the number of
stages and the share to ask for; what is shown is the mean of the last ten, as a multiple of the
share. Beside it, in how many cases there is a number of stages that would do by itself. The leaves
are those that `compressed_mean` would compress, and all of them as one.
"""

import functools
import pathlib
from typing import Any, NamedTuple

import gradients
import jax
import jax.numpy as jnp
import numpy as np
import reporting
from rich.progress import track

from jaxcomp.sparsify import choices, fitted, selection

MOMENTS = ("early", "middle", "late")
SHARES = (0.1, 0.01, 0.001)
LAWS = {"exponential": 1.25, "pareto": 1.2}
"""With the factor that each should stay within."""

STEPS, LAST = 40, 10


class Case(NamedTuple):
    """The results of one leaf, and those with each number of stages."""

    moment: str
    name: str
    ratio: float
    each: list[float]


@functools.partial(jax.jit, static_argnums=(0, 1))
def found(law: str, share: float, x: jax.Array) -> jax.Array:
    """The fraction above the threshold in each step, as a multiple of the wanted one."""
    rule = fitted.Fitted(fraction=share, law=law)

    def step(stages, _):
        level = rule.threshold(x, stages.number, stages.aim)
        hits = selection.count(jnp.abs(x) >= level)
        ratio = hits / choices.share(share, x.shape[1])
        return rule._adapt(stages, ratio), ratio[0, 0]

    return jax.lax.scan(step, rule.init(1, 1), None, length=STEPS)[1]


@functools.partial(jax.jit, static_argnums=(0, 1))
def of_each_number(law: str, share: float, x: jax.Array) -> jax.Array:
    """The fraction above the threshold of each number of stages, relative to the wanted one."""
    rule = fitted.Fitted(fraction=share, law=law)

    def ratio(number):
        hits = selection.count(jnp.abs(x) >= rule.threshold(x, number[None, None]))[0, 0]
        return hits / choices.share(share, x.shape[1])

    return jax.lax.map(ratio, jnp.arange(1, rule.most + 1, dtype=jnp.int32))


def leaves(gradient: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The compressed leaves, and all of them as one."""
    large = {name: leaf for name, leaf in gradient.items() if leaf.ndim > 1 and leaf.size >= 4096}
    return {**large, "all as one": gradients.flat(gradient)}


COLUMNS = (
    "law {law} | share {share:g} % | cases {cases} | least {least:.2f} | median {median:.2f} | "
    "most {most:.2f} | off {off} | no number of stages {never}"
)


def record(law: str, share: float, some: list[Case]) -> dict[str, Any]:
    numbers, most = [case.ratio for case in some], LAWS[law]

    def off(ratio: float) -> bool:
        return not 2 - most <= ratio <= most

    never = [case for case in some if all(off(ratio) for ratio in case.each)]
    return {
        "law": law,
        "share": 100 * share,
        "cases": len(some),
        "least": min(numbers),
        "median": np.median(numbers),
        "most": max(numbers),
        "off": f"{100 * (most - 1):.0f} %: {named([case for case in some if off(case.ratio)])}",
        "never": named(never),
    }


def named(some: list[Case]) -> str:
    names = [f"{case.moment} {case.name.removeprefix('params/')}" for case in some]
    return ", ".join(names) or "none"


def main() -> None:
    folder = pathlib.Path("out/byte_lm/gradients")
    options = reporting.options(__doc__, "out/thresholds", gradients=(folder, "of the example"))
    cases = [
        (moment, name, law, share, leaf)
        for moment in MOMENTS
        for name, leaf in leaves(gradients.load(options.gradients / f"{moment}.npz")).items()
        for law in LAWS
        for share in SHARES
    ]
    ratios: dict[tuple[str, float], list[Case]] = {}
    for moment, name, law, share, leaf in track(cases, description="thresholds"):
        x = jnp.asarray(leaf).reshape(1, -1)
        ratio = float(found(law, share, x)[-LAST:].mean())
        each = np.asarray(of_each_number(law, share, x), float).round(3).tolist()
        ratios.setdefault((law, share), []).append(Case(moment, name, ratio, each))
    title = "Elements above SIDCo's threshold, as a multiple of the share, after 30 steps"
    table = reporting.Table(title, COLUMNS, [record(*key, some) for key, some in ratios.items()])
    results = {"ratios": [[*key, *case] for key, some in ratios.items() for case in some]}
    reporting.show(table, results, options.out / "thresholds.md")


if __name__ == "__main__":
    main()
