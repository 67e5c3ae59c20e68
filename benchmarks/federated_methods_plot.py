"""The picture of `federated_methods.py`: bytes, local steps, guesses and votes."""

import pathlib
from typing import Any

import reporting

INK, FAINT = "#222222", "#777777"
COLORS = ("#4b5261", "#2274b5", "#d17d00", "#21936a", "#c2304c", "#7b4fa3", "#8a6240", "#0f9d9f")


def plot(found: dict[str, Any], path: pathlib.Path) -> None:
    figure, grid = reporting.panels(2, 2, (12.5, 10), layout=None)
    figure.subplots_adjust(0.07, 0.06, 0.985, 0.9, wspace=0.17, hspace=0.24)
    bytes_(grid[0, 0], found["bytes"])
    steps(grid[0, 1], found["steps"]["records"])
    guesses(grid[1, 0], found["guesses"]["curves"])
    votes(grid[1, 1], found["votes"]["records"])
    title = "What federated methods send, and what hostile clients do to them"
    figure.text(0.07, 0.955, title, size=16, weight="bold", color=INK)
    reporting.draw(figure, path)


def bytes_(axes: Any, part: dict[str, Any]) -> None:
    """The loss over the megabytes that clients have sent, for data of two digits each."""
    for (name, curve), color in zip(part["curves"].items(), COLORS, strict=False):
        style = "--" if "predictive" in name else "-"
        axes.plot(curve["up"], curve["loss"], style, color=color, linewidth=1.8, label=name)
    axes.set(xscale="log", xlabel="megabytes that all clients sent", ylabel="training loss")
    axes.set_title("30 clients of two digits each", loc="left")
    axes.legend(frameon=False, fontsize=8)


def steps(axes: Any, records: list[dict[str, Any]]) -> None:
    """Modelled seconds to a loss over the number of local steps."""
    for name, color in (("FedAvg", COLORS[0]), ("FedPAQ, 2 bits", COLORS[1])):
        rows = [row for row in records if row["name"] == name and "seconds" in row]
        at, seconds = [row["tau"] for row in rows], [row["seconds"] for row in rows]
        axes.plot(at, seconds, "o-", color=color, label=name)
        best = min(rows, key=lambda row: row["seconds"])
        axes.annotate(
            f"τ = {best['tau']}: {best['megabytes']:.1f} MB",
            (best["tau"], best["seconds"]),
            (0, 10),
            textcoords="offset points",
            ha="center",
            size=9,
            color=color,
        )
    axes.set(xscale="log", yscale="log", xlabel="local steps of a round, τ")
    axes.set_ylabel("seconds to the loss, by the cost model")
    axes.set_title("FedPAQ's best number of local steps is inside", loc="left")
    axes.legend(frameon=False)


def guesses(axes: Any, curves: dict[str, list[float]]) -> None:
    """The squared error over rounds, two bits an element, exact gradients."""
    start = "2 bits, noise 0: "
    shown = {n.removeprefix(start): c for n, c in curves.items() if n.startswith(start)}
    for (name, curve), color in zip(shown.items(), COLORS * 2, strict=False):
        style = "-" if "Wyner" in name else ("--" if "Shift" in name else ":")
        axes.plot(range(1, len(curve) + 1), curve, style, color=color, linewidth=1.8, label=name)
    axes.set(yscale="log", xlabel="rounds", ylabel="squared distance to the optimum")
    axes.set_title("2 bits an element: guesses against shifts and quantizers", loc="left")
    axes.legend(frameon=False, fontsize=8)


def votes(axes: Any, records: list[dict[str, Any]]) -> None:
    """Accuracy over the number of hostile clients."""
    for rule, color in (("plain", COLORS[1]), ("credible", COLORS[0])):
        for start, style in (("random", ":"), ("trained", "-")):
            rows = [row for row in records if (row["rule"], row["start"]) == (rule, start)]
            axes.plot(
                [row["attackers"] for row in rows],
                [row["trained"] for row in rows],
                "o" + style,
                color=color,
                label=f"{rule} mean, from {start} parameters",
            )
    axes.set(ylim=(0, 100), xlabel="hostile clients of 31", ylabel="test accuracy, %")
    axes.set_title("FedVote and hostile clients: where votes begin matters", loc="left")
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(0.0, 0.36))
