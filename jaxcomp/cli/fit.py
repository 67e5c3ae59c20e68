"""`jaxcomp fit`: how well the laws that SIDCo assumes fit saved gradients, over training."""

import argparse
import pathlib
from operator import itemgetter
from typing import Any

import numpy as np

from jaxcomp import tables
from jaxcomp.cli import files, output
from jaxcomp.planning import plots
from jaxcomp.tables import Column
from jaxcomp.theory import magnitudes

_LEAST = 1024
"""Smallest leaf that is fitted by itself; `compressed_mean` sends smaller leaves dense."""
_POINTS = 60
_PANELS = 5
"""The most gradients that are drawn; of more, some at equal distances."""
_COLOURS = {"exponential": "#c44e52", "gamma": "#4c72b0", "pareto": "#55a868"}


_COLUMNS = (
    Column("gradient", itemgetter("gradient")),
    Column("law", itemgetter("law")),
    Column("distance", itemgetter("distance"), ".3f", right=True),
    Column("kept", itemgetter("kept"), ".2f", right=True),
    Column("kept, single leaves", itemgetter("span"), right=True),
    Column("best law", itemgetter("best")),
)


def fit(args: argparse.Namespace) -> None:
    """Fits each gradient as a whole and leaf by leaf, prints a table, and draws the laws."""
    path = args.plot or args.file[0].with_name("fit.png")
    plots.check(path)
    if args.share in (0, 1):
        raise ValueError(f"--share must be between 0 and 1, got {args.share:g}")
    names = _names(args.file)
    read = zip(names, map(files.arrays, args.file), strict=True)
    found = {name: fitted(gradient, args.share) for name, gradient in read}
    told = {"share": args.share, "gradients": found}
    figure = plots.figure_class()(figsize=(10, 6.6), layout="constrained")
    draw(figure, told)
    figure.savefig(path, dpi=120)
    rows = []
    for name, one in found.items():
        for law in magnitudes.LAWS:
            whole, best = one["whole"][law], one["whole"]["best"]
            kept = [leaf[law]["kept"] for leaf in one["leaves"].values()] or [whole["kept"]]
            span = f"{min(kept):.2f} to {max(kept):.2f}"
            first = law == magnitudes.LAWS[0]
            rows.append(
                {**whole, "gradient": name, "law": law, "span": span}
                | {"best": best if first else ""}
            )
    about = (
        "Distance is the largest between the distributions (0 is exact). Kept is the share above "
        f"the law's threshold for {100 * args.share:g} %, as a multiple of it, in one stage; sidco "
        f"refines it in further stages. The picture is {path}."
    )
    output.show(args, told, _COLUMNS, rows, about)


def draw(figure: Any, told: dict[str, Any]) -> None:
    """Above: the tails of elements and laws. Below: the share that each threshold keeps."""
    names = list(told["gradients"])
    places = np.unique(np.linspace(0, len(names) - 1, min(_PANELS, len(names))).round().astype(int))
    upper, lower = figure.subfigures(2, 1)
    panels = upper.subplots(1, len(places), sharex=True, sharey=True, squeeze=False)[0]
    for place, axes in zip(places, panels, strict=True):
        _tail(axes, names[place], told["gradients"][names[place]], told["share"])
        axes.label_outer()
    panels[0].set_ylabel("share of elements above")
    panels = lower.subplots(1, len(magnitudes.LAWS), sharey=True)
    for law, axes in zip(magnitudes.LAWS, panels, strict=True):
        _over_training(axes, law, told)
        axes.label_outer()


def _tail(axes: Any, name: str, one: dict[str, Any], share: float) -> None:
    curve = one["curve"]
    axes.loglog(curve["magnitude"], curve["share"], color="black", linewidth=2.4)
    ends = {"gradient": (curve["magnitude"][-1], curve["share"][-1], "black")}
    for law, shares in curve["laws"].items():
        inside = [at for at, each in enumerate(shares) if each >= curve["share"][-1]]
        x, y = ([values[at] for at in inside] for values in (curve["magnitude"], shares))
        if not inside:  # Of a gradient of one element.
            continue
        axes.loglog(x, y, color=_COLOURS[law], linewidth=1.2)
        ends[law] = (x[-1], y[-1], _COLOURS[law])
    for rank, (label, (_, _, colour)) in enumerate(ends.items()):
        axes.text(
            0.04, 0.05 + 0.09 * rank, label, color=colour, fontsize=9, transform=axes.transAxes
        )
    axes.axhline(share, color="grey", linewidth=0.7, linestyle=":")
    axes.set_title(name[-24:])
    axes.set_xlabel("magnitude, in root mean squares")
    axes.set_xlim(left=1e-3)  # Hardly anything happens below.
    axes.grid(alpha=0.3)


def _over_training(axes: Any, law: str, told: dict[str, Any]) -> None:
    """The share of each gradient above one law's threshold: a line per leaf, and one for all."""
    of_all = list(told["gradients"].values())
    at = range(len(of_all))
    least = 1e-2
    for leaf in dict.fromkeys(leaf for one in of_all for leaf in one["leaves"]):
        kept = [one["leaves"].get(leaf, {}).get(law, {}).get("kept", np.nan) for one in of_all]
        axes.semilogy(at, np.maximum(kept, least), color="#bbbbbb", linewidth=0.8, marker=".")
    kept = [one["whole"][law]["kept"] for one in of_all]
    axes.semilogy(at, np.maximum(kept, least), color=_COLOURS[law], linewidth=2.2, marker="o")
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    title = f"{law}: kept, over {100 * told['share']:g} %"
    axes.set(title=title, xticks=list(at), xticklabels=[name[-24:] for name in told["gradients"]])
    axes.text(0.03, 0.05, "grey: single leaves", color="grey", fontsize=9, transform=axes.transAxes)
    for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatter("{x:g}")
    axes.tick_params(axis="y", which="both", labelsize=8)
    axes.tick_params(axis="x", rotation=30 if len(of_all) > _PANELS else 0)
    axes.grid(alpha=0.3)


def _names(files: list[pathlib.Path]) -> list[str]:
    """Short names of the files: their stems, with as many folders as make them differ.

    Raises:
        ValueError: for a file that is given twice.
    """
    whole = [file.absolute().with_suffix("").parts for file in files]
    for length in range(1, max(map(len, whole)) + 1):
        names = ["/".join(parts[-length:]) for parts in whole]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"each gradient must be given once, got {', '.join(map(str, files))}")


def fitted(gradient: dict[str, np.ndarray], share: float) -> dict[str, Any]:
    """The fits of all elements and of each large leaf that is not all zero, and curves to draw."""
    flat = np.concatenate([leaf.ravel() for leaf in gradient.values()])
    large = {name: x for name, x in gradient.items() if x.size >= _LEAST and x.any()}
    whole = magnitudes.fit_laws(flat, (share,))
    return {
        "whole": _told(whole),
        "leaves": {name: _told(magnitudes.fit_laws(x, (share,))) for name, x in large.items()},
        "curve": _curve(flat, whole),
    }


def _told(found: magnitudes.LawFits) -> dict[str, Any]:
    laws = {
        law.name: {**tables.attributes(law, "shape", "scale", "distance"), "kept": law.kept[0]}
        for law in found.laws
    }
    return {"elements": found.elements, "zeros": found.zeros, **laws, "best": found.best.name}


def _curve(x: np.ndarray, found: magnitudes.LawFits) -> dict[str, Any]:
    """Points of the share of elements above a magnitude, and of the laws there."""
    a = np.sort(np.abs(x[x != 0].astype(np.float64)))[::-1]
    at = np.unique(np.geomspace(1, a.size, _POINTS).astype(int))[::-1]
    unit = a[0] * float(np.sqrt(np.sum((a / a[0]) ** 2) / x.size))
    some = a.size / x.size
    # Six digits are enough to draw, and keep files small.
    short = lambda values: [float(f"{value:.6g}") for value in values]  # noqa: E731
    return {
        "magnitude": short(a[at - 1] / unit),
        "share": short(at / x.size),
        "laws": {law.name: short(some * law.above(a[at - 1])) for law in found.laws},
    }
