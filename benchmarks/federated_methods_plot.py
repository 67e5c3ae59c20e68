"""The picture of `federated_methods.py`: bytes, local steps, guesses and hostile votes."""

import pathlib
from typing import Any

import reporting  # noqa: F401  It makes the examples importable.

# isort: split
import pictures  # pyright: ignore[reportMissingImports]

CODED, PAQ, DENSE = "predictive coding, λ = 0.001", "FedPAQ, 2 bits", "FedAvg"
SIDES = {
    "rotated uniform": ("no guess", pictures.BASE),
    "Wyner-Ziv, server's last step": ("Wyner-Ziv, server", pictures.COLORS[2]),
    "Shift, rotated uniform": ("shift", pictures.COLORS[1]),
    "Wyner-Ziv, own last message": ("Wyner-Ziv, client", pictures.COLORS[0]),
}
"""Ways of `guesses` that are drawn: whose last message is the guess."""
VOTES = {
    ("credible", "trained"): ("credible mean,\ntrained start", pictures.COLORS[0], "-"),
    ("credible", "random"): ("credible mean,\nrandom start", pictures.COLORS[1], "-"),
    ("plain", "trained"): ("plain mean,\ntrained start", pictures.BASE, "--"),
}


def plot(found: dict[str, Any], path: pathlib.Path) -> None:
    """A panel a question, each with its answer above."""
    rows = {row["name"]: row for row in found["bytes"]["records"]}
    sent = {name: row["low"] for name, row in rows.items() if "low" in row}
    never = [name for name in rows if name not in sent]
    late = f" {', '.join(never)} does not reach it." if never else ""
    figure, ((first, second), (third, fourth)) = pictures.page(
        f"To the same loss predictive coding sends {sent[CODED]:.1f} MB up, FedPAQ "
        f"{sent[PAQ]:.0f} MB and FedAvg {sent[DENSE]:.0f} MB",
        f"First panel: 30 clients of two digits each, 20 local steps, until the training loss is "
        f"0.3.{late} Medians of five seeds, shades are their range; last panel: one seed.",
        rows=2,
        columns=2,
        height=4.6,
    )
    bytes_(first, sent)
    steps(second, found["steps"]["records"])
    votes(third, found["votes"]["records"])
    guesses(fourth, found["guesses"]["curves"])
    pictures.save(figure, path)


def bytes_(axes: Any, sent: dict[str, float]) -> None:
    """The megabytes to the loss, the fewest first."""
    values = dict(sorted(sent.items(), key=lambda item: item[1]))
    short = {name.partition(",")[0]: value for name, value in values.items()}
    words = {name: f"{pictures.power(value)} MB" for name, value in short.items()}
    pictures.dots(axes, short, words, {DENSE: pictures.BASE}, room=0.32)
    axes.set(title=f"{next(iter(short)).capitalize()} sends the least", xlabel="megabytes up")


def _band(axes: Any, at: list[int], rows: list[dict[str, Any]], key: str, color: str) -> None:
    least, most = zip(*(row["ranges"][key] for row in rows), strict=True)
    axes.fill_between(at, least, most, color=color, alpha=0.15, linewidth=0)


def steps(axes: Any, records: list[dict[str, Any]]) -> None:
    """Modelled seconds to a loss over the local steps."""
    for name, color, style in ((PAQ, pictures.COLORS[0], "o-"), (DENSE, pictures.BASE, "o--")):
        rows = [row for row in records if row["name"] == name and "seconds" in row]
        at = [row["tau"] for row in rows]
        axes.plot(at, [row["seconds"] for row in rows], style, color=color)
        _band(axes, at, rows, "seconds", color)
        axes.annotate(
            name, (at[-1], rows[-1]["seconds"]), (0, 8), textcoords="offset points",
            color=color, ha="right" if name == PAQ else "left",
        )  # fmt: skip
        if name == PAQ:
            best = min(rows, key=lambda row: row["seconds"])["tau"]
    axes.set_ylim(5, 400)
    pictures.log_axis(axes, "x")
    pictures.log_axis(axes, "y")
    axes.set(
        title=f"FedPAQ is fastest with {best} local steps",
        xlabel="local steps of a round",
        ylabel="modelled seconds to loss 0.5",
    )


def votes(axes: Any, records: list[dict[str, Any]]) -> None:
    """Accuracy over the number of hostile clients."""
    lines = []
    for (rule, start), (label, color, style) in VOTES.items():
        rows = [row for row in records if (row["rule"], row["start"]) == (rule, start)]
        at = [row["attackers"] for row in rows]
        right = [row["trained"] for row in rows]
        lines += axes.plot(at, right, f"o{style}", color=color, label=label)
        _band(axes, at, rows, "trained", color)
    axes.set(
        title="FedVote: begin from a trained model",
        xlabel="hostile clients of 31",
        ylabel="test accuracy, %",
        ylim=(0, 100),
    )
    pictures.name_ends(axes, lines, gap=0.2)


def guesses(axes: Any, curves: dict[str, list[float]]) -> None:
    """The squared error over rounds, two bits an element, exact gradients."""
    lines = []
    for name, (label, color) in SIDES.items():
        curve = curves[f"2 bits, noise 0: {name}"]
        lines += axes.plot(range(1, len(curve) + 1), curve, color=color, label=label)
    axes.set(
        title="Shifts are close to Wyner-Ziv coding",
        xlabel="rounds",
        ylabel="squared distance",
        yscale="log",
        ylim=(1e-9, 1),
    )
    pictures.name_ends(axes, lines, gap=0.1)
