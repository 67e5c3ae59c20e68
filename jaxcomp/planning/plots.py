"""The picture of a plan: the time of a step over the speed of the link."""

import dataclasses
import math
import pathlib
from typing import Any

from jaxcomp.theory import units
from jaxcomp.theory.comparison import Comparison

_DECADES = 6
_POINTS = 240


def check(path: pathlib.Path) -> None:
    """Checks that a picture can be written there, before work that takes long.

    Raises:
        ValueError: if matplotlib is not installed, does not know the ending, or if there is no such
            folder.
    """
    kinds = figure_class()().canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise ValueError(f"a picture must end in .png, .svg or .pdf, got {str(path)!r}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"a picture must be in a folder that exists, got {str(path)!r}")


def figure_class() -> Any:
    """matplotlib's `Figure`, which draws without a window.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # An extra, and slow to import.
    except ImportError:
        raise ValueError(
            "a picture needs matplotlib, which is not installed: pip install 'jaxcomp[plot]', or "
            "pip install '.[plot]' in a clone"
        ) from None
    return Figure


def save(compared: Comparison, path: pathlib.Path) -> None:
    """Draws a plan on slower and faster links too, and writes it as the path's ending says.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    figure = figure_class()(figsize=(9, 5.2), layout="constrained")
    draw(figure.add_subplot(), compared)
    figure.savefig(path, dpi=160)


def draw(axes: Any, compared: Comparison) -> None:
    """Seconds of a step over bits per second, a line per way, on axes of matplotlib."""
    here = compared.network.bandwidth
    low = math.log10(here) - _DECADES / 2
    speeds = [10 ** (low + _DECADES * i / (_POINTS - 1)) for i in range(_POINTS)]
    names = [forecast.way.name for forecast in compared.forecasts]
    curves: dict[str, list[float]] = {name: [] for name in names}
    for bandwidth in speeds:
        network = dataclasses.replace(compared.network, bandwidth=bandwidth)
        for forecast in compared.on(network).forecasts:
            curves[forecast.way.name].append(forecast.step)
    dense = {forecast.way.name for forecast in compared.forecasts if forecast.way.dense}
    for name in names:
        style = {"color": "black", "linestyle": "-" if name == compared.baseline else ":"}
        width = 2.5 if name in (compared.baseline, compared.best.way.name) else 1.2
        axes.loglog(
            [8 * speed for speed in speeds],
            curves[name],
            linewidth=width,
            label=name,
            **(style if name in dense else {}),
        )
    axes.axvline(8 * here, color="grey", linewidth=0.8)
    axes.text(
        8 * here,
        0.99,
        f" {units.speed(here)}",
        rotation=90,
        va="top",
        ha="right",
        transform=axes.get_xaxis_transform(),
        color="grey",
    )
    edge = compared.best.break_even
    if compared.compress and speeds[0] < edge < speeds[-1]:
        axes.axvspan(8 * edge, 8 * speeds[-1], color="grey", alpha=0.12)
        axes.text(
            8 * edge,
            0.02,
            f" {compared.best.way.name} no longer pays",
            transform=axes.get_xaxis_transform(),
            color="grey",
        )
    axes.set_xlabel("bits a second of the slow link")
    axes.set_ylabel("seconds a step" if compared.compute else "seconds a mean")
    axes.set_title(compared.about, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper right")
