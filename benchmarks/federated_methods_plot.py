"""The picture of `federated_methods.py`: bytes, local steps, guesses and votes."""

import pathlib
from typing import Any

import reporting

INK, FAINT = "#222222", "#777777"
COLORS = ("#4b5261", "#2274b5", "#d17d00", "#21936a", "#c2304c", "#7b4fa3", "#8a6240", "#0f9d9f")


GUESSES = {"Wyner-Ziv, ": "Wyner-Ziv coding", "Shift, ": "shifts", "": "quantizers alone"}
"""Beginnings of names, with the title of their panel."""


def plot(found: dict[str, Any], path: pathlib.Path) -> None:
    figure = reporting.plt.figure(figsize=(13.5, 13))
    figure.subplots_adjust(0.065, 0.045, 0.9, 0.925)
    rows = figure.add_gridspec(3, 1, hspace=0.32)
    top = rows[0].subgridspec(1, 2, wspace=0.3)
    middle = rows[1].subgridspec(1, 2, wspace=0.3)
    bottom = rows[2].subgridspec(1, 3, wspace=0.55)
    bytes_(_panel(figure, top[0]), found["bytes"])
    steps(_panel(figure, top[1]), found["steps"]["records"])
    for at, start in enumerate(("random", "trained")):
        votes(_panel(figure, middle[at]), found["votes"]["records"], start)
    guesses([_panel(figure, bottom[at]) for at in range(3)], found["guesses"]["curves"])
    title = "What federated methods send, and what hostile clients do to them"
    figure.text(0.065, 0.965, title, size=16, weight="bold", color=INK)
    reporting.draw(figure, path)


def _panel(figure: Any, place: Any) -> Any:
    axes = figure.add_subplot(place)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _range(rows: list[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """The least and the most over the seeds."""
    least, most = zip(*(row["ranges"][key] for row in rows), strict=True)
    return list(least), list(most)


def bytes_(axes: Any, part: dict[str, Any]) -> None:
    """The loss over the megabytes that clients have sent, each curve named at its start."""
    for (name, curve), color in zip(part["curves"].items(), COLORS, strict=False):
        style = "--" if "predictive" in name else "-"
        axes.plot(curve["up"], curve["loss"], style, color=color, linewidth=1.8)
    axes.set(xscale="log", xlabel="megabytes that all clients sent", ylabel="training loss")
    axes.set(ylim=(0, 2.9))
    places = {  # Above a curve's first round, or beside its last one.
        "FedAvg": (0, (0, 8), "center"),
        "FedPAQ, 2 bits": (-1, (6, -4), "left"),
        "STC, 1 %": (0, (0, 8), "left"),
        "signs with residuals": (-1, (-2, -14), "center"),
        "predictive coding, λ = 0.001": (-1, (-12, -4), "right"),
    }
    for (name, curve), color in zip(part["curves"].items(), COLORS, strict=False):
        at, offset, side = places[name]
        axes.annotate(
            name,
            (curve["up"][at], curve["loss"][at]),
            offset,
            textcoords="offset points",
            color=color,
            ha=side,
            size=9,
        )
    axes.set_title("30 clients of two digits each", loc="left")


def steps(axes: Any, records: list[dict[str, Any]]) -> None:
    """Modelled seconds to a loss over the local steps: medians, and the range of the seeds."""
    lines = []
    for name, color in (("FedAvg", COLORS[0]), ("FedPAQ, 2 bits", COLORS[1])):
        rows = [row for row in records if row["name"] == name and "seconds" in row]
        at, seconds = [row["tau"] for row in rows], [row["seconds"] for row in rows]
        lines += axes.plot(at, seconds, "o-", color=color)
        axes.fill_between(at, *_range(rows, "seconds"), color=color, alpha=0.15, linewidth=0)
        best = min(rows, key=lambda row: row["seconds"])
        axes.annotate(
            f"{name}\nτ = {best['tau']}: {best['megabytes']:.1f} MB",
            (best["tau"], best["seconds"]),
            (0, 14) if name != "FedAvg" else (12, -4),
            textcoords="offset points",
            ha="center" if name != "FedAvg" else "left",
            size=9,
            color=color,
        )
    axes.set(xscale="log", yscale="log", xlabel="local steps of a round, τ", ylim=(6, 400))
    axes.set_ylabel("seconds to the loss, by the cost model")
    axes.set_title("FedPAQ's best number of local steps is inside", loc="left")


def guesses(panels: list[Any], curves: dict[str, list[float]]) -> None:
    """The squared error over rounds, two bits an element, exact gradients: a panel a kind."""
    start = "2 bits, noise 0: "
    shown = {n.removeprefix(start): c for n, c in curves.items() if n.startswith(start)}
    for axes, (kind, title) in zip(panels, GUESSES.items(), strict=True):
        names = [n for n in shown if n.startswith(kind)] if kind else []
        names = names or [n for n in shown if not n.startswith(("Wyner", "Shift"))]
        lines = []
        for name, color in zip(names, COLORS[1:], strict=False):
            curve, label = shown[name], name.removeprefix(kind).replace(", ", ",\n")
            label = label.replace(" rotated", "\nrotated").replace(" by the", "\nby the")
            rounds = range(1, len(curve) + 1)
            lines += axes.plot(rounds, curve, color=color, linewidth=1.8, label=label)
        axes.set(yscale="log", xlabel="rounds", ylim=(1e-9, 1))
        axes.set_title(f"2 bits: {title}", loc="left")
        reporting.label_ends(axes, lines, 0.13)
    panels[0].set_ylabel("squared distance to the optimum")


def votes(axes: Any, records: list[dict[str, Any]], start: str) -> None:
    """Accuracy over the number of hostile clients: medians, and the range of the seeds."""
    lines = []
    for rule, color in (("plain", COLORS[2]), ("credible", COLORS[1])):
        rows = [row for row in records if (row["rule"], row["start"]) == (rule, start)]
        hostile, right = ([row[key] for row in rows] for key in ("attackers", "trained"))
        lines += axes.plot(hostile, right, "o-", color=color, label=f"{rule} mean")
        axes.fill_between(hostile, *_range(rows, "trained"), color=color, alpha=0.15, linewidth=0)
    axes.set(ylim=(0, 100), xlabel="hostile clients of 31", ylabel="test accuracy, %")
    axes.set_title(f"FedVote from {start} parameters", loc="left")
    reporting.label_ends(axes, lines)
