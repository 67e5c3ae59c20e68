"""Draws methods beside the lower bounds of `jaxcomp.theory.rates`, from the committed results.

    make reproduce CLAIM=lower-bounds
    python benchmarks/bounds.py

The first command measures, the second draws docs/lower_bounds.png. A message of SGD has all
elements, so it has the bound of `δ = 1`; all others send a tenth of them, and have that of
`δ = 0.1`.
"""

import pathlib
from typing import Any

import numpy as np
import reporting
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator

# isort: split
import pictures  # pyright: ignore[reportMissingImports]

FREE = "SGD"
NAMES = {
    "DIANA, unbiased": "DIANA",
    "QSGD-like, unbiased": "unbiased, no memory",
    "EF21-SGDM, random": "EF21-SGDM",
    "EF, random": "error feedback",
    "NEOLITHIC, random, both ways": "NEOLITHIC, both ways",
}
BOUNDS = {"uncompressed": "Everything is sent (δ = 1)", "bound": "A tenth is sent (δ = 0.1)"}
"""The keys of the bounds, and the titles of their panels."""


def draw(found: dict[str, Any], path: pathlib.Path) -> None:
    """SGD beside its bound, and methods that compress beside theirs."""
    ((title, rows),) = found["problems"].items()
    figure, (grid,) = pictures.page(
        message(rows),
        f"{title.capitalize()}, 8 workers, noisy gradients: median and range of the seeds, best "
        "learning rate. Dashed: lower bounds, which are for the worst loss and known up to a "
        "constant: a method may be below.",
        columns=2,
        height=3.2,
        sharey=True,
        width_ratios=(2, 3),
    )
    lines = [
        panel(axes, rows, methods, bound)
        for axes, bound, methods in zip(grid, BOUNDS, ({FREE: FREE}, NAMES), strict=True)
    ]
    for axes, name, some in zip(grid, BOUNDS.values(), lines, strict=True):
        axes.set(title=name, xlabel="messages of a worker", yscale="log")
        pictures.log_axis(axes, "x")
        pictures.log_axis(axes, "y")
        axes.xaxis.set_major_locator(FixedLocator([50, 200, 1000]))
        axes.set(ylim=axes.get_ylim())
        pictures.name_ends(axes, some, gap=0.07)
    grid[0].set_ylabel("squared gradient, mean so far")
    pictures.save(figure, path)


def message(rows: dict[str, Any]) -> str:
    last = {name: curve[-1][0] for name, curve in rows["curves"].items()}
    ratio = last["NEOLITHIC, random, both ways"] / rows["bound"][-1]
    free = last[FREE] / rows["uncompressed"][-1]
    return (
        f"After {rows['steps'][-1]:,} messages NEOLITHIC is at {ratio:.2f} times the rate of its "
        f"lower bound, and SGD at {free:.2f} times that of its own"
    )


def panel(axes: Axes, rows: dict[str, Any], methods: dict[str, str], bound: str) -> list[Any]:
    steps, lines = np.array(rows["steps"]), []
    for (name, label), color in zip(methods.items(), pictures.COLORS, strict=False):
        middle, low, high = np.array(rows["curves"][name]).T
        axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
        lines += axes.plot(steps, middle, color=color, label=label)
    lines += axes.plot(steps, rows[bound], "--", color=pictures.BASE, label="rate of the bound")
    return lines


def main() -> None:
    path = pathlib.Path("docs/lower_bounds.png")
    options = reporting.options(__doc__, path.parent)
    found = reporting.read(reporting.RESULTS / "reproductions" / "lower-bounds.json")["numbers"]
    draw(found, options.out / path.name)


if __name__ == "__main__":
    main()
