"""Fits the laws that SIDCo assumes to a transformer's gradients, early, in the middle and late.

    python examples/byte_lm.py --codec dense --save-gradients
    python benchmarks/laws.py

It keeps what `jaxcomp fit` prints, and draws it.
"""

import pathlib
from typing import Any

import reporting

from jaxcomp.cli import files, fit

# isort: split
import pictures  # pyright: ignore[reportMissingImports]

MOMENTS = ("early", "middle", "late")
COLORS = dict(zip(("exponential", "gamma", "pareto"), pictures.COLORS, strict=False))


def draw(told: dict[str, Any], path: pathlib.Path) -> None:
    """Above, the tails of gradients and laws; below, the share that each law's threshold keeps."""
    share, gradients = 100 * told["share"], told["gradients"]
    most = {
        law: share * max(one["whole"][law]["kept"] for one in gradients.values()) for law in COLORS
    }
    figure, (upper, lower) = pictures.page(
        f"Asked for {share:g} %, the exponential law's threshold keeps up to "
        f"{most['exponential']:.1f} % of a gradient, the Pareto law's at most "
        f"{most['pareto']:.1f} %",
        "Gradients of a transformer on text, at three moments of its training. Above: the share of "
        f"elements above a magnitude, the dotted line is {share:g} %. Below, shaded: the range of "
        "its single arrays.",
        rows=2,
        columns=3,
        height=4.6,
        sharey="row",
    )
    for axes, (name, one) in zip(upper, gradients.items(), strict=True):
        tail(axes, one["curve"])
        axes.axhline(told["share"], color=pictures.FAINT, linewidth=1, linestyle=":")
        axes.set_title(name.capitalize())
    for axes, (law, color) in zip(lower, COLORS.items(), strict=True):
        over_training(axes, law, color, told)
        axes.set_title(law.capitalize())
    upper[0].set_ylabel("share of elements above")
    lower[0].set_ylabel("% of the elements kept")
    pictures.log_axis(lower[0], "y")
    for axes in lower[1:]:
        axes.tick_params(labelleft=False)
    pictures.save(figure, path)


def tail(axes: Any, curve: dict[str, Any]) -> None:
    """The share of elements above a magnitude, of the gradient and by each law."""
    least = curve["share"][-1]
    names = {"gradient": pictures.INK} | COLORS
    for rank, (name, color) in enumerate(names.items()):
        shares = curve["share"] if name == "gradient" else curve["laws"][name]
        points = zip(curve["magnitude"], shares, strict=True)
        inside = [(x, y) for x, y in points if y >= least]
        axes.plot(*zip(*inside, strict=True), color=color, linewidth=2.4 - 0.8 * bool(rank))
        axes.text(0.04, 0.36 - 0.1 * rank, name, color=color, transform=axes.transAxes)
    axes.set(xscale="log", yscale="log", xlim=(1e-2, None))
    axes.set_xticks([0.1, 10], ["0.1", "10"])
    axes.set_xticks([], minor=True)
    axes.set_yticks([1e-6, 1e-4, 1e-2, 1])
    axes.set_yticks([], minor=True)
    axes.set_xlabel("magnitude / root mean square")


def over_training(axes: Any, law: str, color: str, told: dict[str, Any]) -> None:
    """What one law's threshold keeps of each gradient, and of its arrays the least and the most."""
    share, each = 100 * told["share"], list(told["gradients"].values())
    leaves = [[share * leaf[law]["kept"] for leaf in one["leaves"].values()] for one in each]
    at = range(len(each))
    axes.fill_between(
        at, list(map(min, leaves)), list(map(max, leaves)), color=color, alpha=0.15, linewidth=0
    )
    axes.plot(at, [share * one["whole"][law]["kept"] for one in each], "o-", color=color)
    axes.axhline(share, color=pictures.FAINT, linewidth=1, linestyle=":")
    axes.set_xticks(list(at), list(told["gradients"]))
    axes.set_xlim(-0.3, len(each) - 0.7)


def main() -> None:
    folder = pathlib.Path("out/byte_lm/gradients")
    options = reporting.options(
        __doc__,
        "out/fit",
        gradients=(folder, "of the example"),
        share=(0.01, "that a threshold should keep"),
    )
    found = {
        name: fit.fitted(files.arrays(options.gradients / f"{name}.npz"), options.share)
        for name in MOMENTS
    }
    told = {"share": options.share, "gradients": found}
    results = {"environment": reporting.environment(), **told}
    reporting.keep(options.out / "fit.json", results)
    draw(told, options.out / "fit.png")


if __name__ == "__main__":
    main()
