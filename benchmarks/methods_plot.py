"""The pictures of `methods.py`: error against the kilobytes of a worker's messages."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import reporting  # noqa: F401  It makes the examples importable.
from matplotlib.ticker import LogLocator, NullLocator

# isort: split
import pictures  # pyright: ignore[reportMissingImports]

DENSE, SQUARES = "dense descent", "least squares, 8 workers"
LOGISTIC = ("breast cancer, 8 workers", "digits, odd or even, 8 workers")
COMPOSITE = ("breast cancer with an l1 norm", "digits, hinge loss in a ball")
RESIDUALS = (
    "ef_sgd, top 10 %",
    "ef_signsgd",
    "double_squeeze, top 10 %",
    "dgd_def, 3 bits",
    "neolithic, 4 signs",
)
BIASED = ("ef21, top 10 %", "ef21_sgdm, top 10 %", "ef21_bc, sign", "cd_adam, sign")
UNBIASED = (
    "diana, qsgd",
    "mcm, qsgd",
    "marina, random 10 %",
    "artemis, half of the workers",
    "dore, qsgd and sign",
)
ADAM = ("one_bit_adam", "zero_one_adam, no local steps")
FAMILIES = {
    "Residuals": RESIDUALS,
    "Shifts, biased codecs": BIASED,
    "Shifts or differences, unbiased codecs": UNBIASED,
    "Signs, and skipped messages": (
        "signsgd, majority vote",
        *ADAM,
        "lag",
        "clag, top 10 %",
    ),
}
"""The panels of least squares; all other methods are in the table."""
REAL = {
    "residuals": (
        "ef_signsgd",
        "double_squeeze, top 10 %",
        "dgd_def, 3 bits",
        "one_bit_adam",
        "neolithic, 4 signs",
    ),
    "shifts, skipping": (
        "ef21_bc, sign",
        "diana, qsgd",
        "marina, random 10 %",
        "lag",
        "censored heavy ball",
    ),
}
"""The rows of logistic regression."""
KILOBYTES = "kB, messages and answers"
COUNTED = "Answers count where a server sends them; workers that gather all messages need none."
LEAST = 1e-32
WAYS = {
    "threshold, nothing fed back": "errors dropped",
    "stochastic ternary": "random rounding",
    "threshold, residuals": "residuals",
    "threshold, shifts": "shifts",
    "0.5 bits": "0.5 bits",
    "1 bit": "1 bit",
    "2 bits": "2 bits",
    "4 bits": "4 bits",
    "not quantised": "whole gradients",
    "whole subgradients": "whole",
}
"""The labels of methods of composite problems; what compresses nothing is the last."""


def draw(found: Mapping[str, Mapping[str, Any]], path: pathlib.Path) -> None:
    """Three pictures of the curves as they are kept in `methods.json`.

    Least squares are at `path`, logistic regression and composite problems beside it.
    """
    if SQUARES in found:
        squares(found[SQUARES], path)
    if all(title in found for title in LOGISTIC):
        logistic(found, path.with_stem(f"{path.stem}_logistic"))
    if all(title in found for title in COMPOSITE):
        composed(found, path.with_stem(f"{path.stem}_composite"))


def panel(axes: Any, curves: Mapping[str, Any], names: Mapping[str, str], by: str) -> None:
    """Some methods by steps or by kilobytes; the last, in grey, compresses nothing."""
    colors = (*pictures.COLORS[: len(names) - 1], pictures.BASE)
    for (method, label), color in zip(names.items(), colors, strict=True):
        x = np.asarray(curves[method][by], float) / (8e3 if by == "bits" else 1)
        y = np.maximum(curves[method]["errors"], LEAST)
        style = "--" if color == pictures.BASE else "-"
        axes.plot(x[x > 0], y[x > 0], style, color=color, label=label)
    axes.set(xlabel=KILOBYTES if by == "bits" else "steps", yscale="log")
    pictures.log_axis(axes, "x")
    axes.xaxis.set_major_locator(LogLocator(100))
    axes.yaxis.set_minor_locator(NullLocator())


def short(names: Sequence[str]) -> dict[str, str]:
    """Names without the codecs, those of dense descent too."""
    return {name: name.partition(",")[0] for name in (*names, DENSE)}


def finish(figure: Any, grid: Any, label: str, path: pathlib.Path) -> None:
    """Names the lines once the panels have their places."""
    for row in grid:
        row[0].set_ylabel(label)
    for axes in grid[:-1].flat:
        if axes.get_xlabel() == grid[-1, 0].get_xlabel():
            axes.set_xlabel("")
    for axes in grid.flat:
        pictures.name_ends(axes, list(axes.lines), gap=0.085, lead=True)
    pictures.save(figure, path)


def squares(curves: Mapping[str, Any], path: pathlib.Path) -> None:
    """Least squares, a panel a family."""
    stays = min(curves[name]["errors"][-1] for name in (*RESIDUALS, *ADAM))
    reached = max(curves[name]["errors"][-1] for name in (*BIASED, *UNBIASED))
    steps = curves[DENSE]["steps"][-1]
    figure, grid = pictures.page(
        f"Methods with residuals alone stay at an error of {pictures.power(stays)} or more; these "
        f"with learned shifts come to {pictures.power(reached)}",
        f"Least squares of eight workers with optima of their own, full gradients, {steps:,} "
        f"steps. {COUNTED}",
        rows=2,
        columns=2,
        height=4.6,
    )
    for axes, (title, names) in zip(grid.flat, FAMILIES.items(), strict=True):
        panel(axes, curves, short(names), "bits")
        axes.set(title=title, ylim=(LEAST, 100))
    finish(figure, grid, "squared error / ‖x*‖²", path)


def logistic(found: Mapping[str, Mapping[str, Any]], path: pathlib.Path) -> None:
    """Logistic regression on two sets."""
    sets = [found[title] for title in LOGISTIC]
    fewest = [min(curves, key=lambda name: first(curves[name], 1e-3)) for curves in sets]
    if len(set(fewest)) == 1:
        message = f"On two real data sets, {fewest[0]} comes to an error of 0.001 with the fewest"
    else:
        message = "On two real data sets, other methods come to an error of 0.001 with the fewest"
    steps = sets[0][DENSE]["steps"][-1]
    figure, grid = pictures.page(
        f"{message} kilobytes",
        f"Logistic regression, rows sorted by label before eight workers get them, {steps:,} "
        f"steps, step lengths not tuned. {COUNTED}",
        rows=2,
        columns=2,
        height=4.6,
    )
    for row, (kind, names) in zip(grid, REAL.items(), strict=True):
        for axes, title, curves in zip(row, LOGISTIC, sets, strict=True):
            panel(axes, curves, short(names), "bits")
            axes.set(title=f"{title.removesuffix(', 8 workers')}: {kind}", ylim=(1e-8, 20))
    finish(figure, grid, "squared error / ‖x*‖²", path)


def first(curve: Mapping[str, Any], error: float) -> float:
    """The bits by which a curve has come to an error; infinite if it never has."""
    reached = zip(curve["bits"], curve["errors"], strict=True)
    return next((at for at, found in reached if found <= error), np.inf)


def composed(found: Mapping[str, Mapping[str, Any]], path: pathlib.Path) -> None:
    """The l1 norm by both methods, and the ball by steps and by bits."""
    l1, ball = (found[title] for title in COMPOSITE)
    cases = (
        (l1, "qcmd_adagrad", "bits", "l1 norm, qcmd_adagrad"),
        (l1, "qrda_adagrad", "bits", "l1 norm, qrda_adagrad"),
        (ball, "dq_psgd", "steps", "In a ball, dq_psgd"),
        (ball, "dq_psgd", "bits", "In a ball, dq_psgd"),
    )
    worst = max(
        l1[f"{method}, {way}"]["errors"][-1] / l1[f"{method}, not quantised"]["errors"][-1]
        for method in ("qcmd_adagrad", "qrda_adagrad")
        for way in ("stochastic ternary", "threshold, residuals", "threshold, shifts")
    )
    four = ball["dq_psgd, 4 bits"]["errors"][-1] / ball["dq_psgd, whole subgradients"]["errors"][-1]
    figure, grid = pictures.page(
        f"Ternary gradients end at up to {worst:.2f} times the error of whole ones unless their "
        f"errors are dropped; subgradients of four bits end at {four:.2f} times",
        "Above: logistic regression with an l1 norm, gradients made ternary by a threshold, or by "
        f"random rounding. Below: a hinge loss in a ball. {COUNTED}",
        rows=2,
        columns=2,
        height=4.6,
    )
    for axes, (curves, method, by, title) in zip(grid.flat, cases, strict=True):
        names = {f"{method}, {way}": label for way, label in WAYS.items()}
        panel(axes, curves, {name: names[name] for name in names if name in curves}, by)
        axes.set(title=title, ylim=axes.get_ylim())
    finish(figure, grid, "objective above its least\n(at zero: 1)", path)
