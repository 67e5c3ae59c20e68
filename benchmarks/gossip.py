"""Decentralised methods: gradients, bytes and bits against error, on problems with known solutions.

    python benchmarks/gossip.py

`choco` mixes random models on a ring of 16 with several step sizes. `reduction` compares DPSVRG
with DSPG on a lasso and on a sparse logistic regression, over graphs that change and that do not,
at equal gradient evaluations and at equal bytes. `links` trains with every method through links of
four bits, signs and the largest tenth of the elements. `drift` is the distance between models
against the learning rate. Workers are simulated on one device, in float64. Tables, a picture and
`gossip.json` are in the `--out` folder; parts that are in it already are not run again.
"""

from collections.abc import Callable
from typing import Any

import gossip_links
import gossip_sums
import jax
import numpy as np
import reporting
from gossip_links import CODECS
from gossip_sums import GRAPHS
from reporting import Table

CHOCO = "γ {mixing:.2f} | steps {steps} | variance {variance:.1e} | move of the mean {moved:.1e}"
REDUCTION = (
    "problem, graph {name} | slope of DSPG {dspg_slope:.2f} | with long steps {settled:.2f} | "
    "slope of DPSVRG {dpsvrg_slope:.2f} | "
    "equal gradients {gradients:.0f} | DSPG {dspg_gradients:.1e} | DPSVRG {dpsvrg_gradients:.1e} | "
    "equal megabytes {megabytes:.1f} | DSPG {dspg_bytes:.1e} | DPSVRG {dpsvrg_bytes:.1e} | "
    "DPSVRG, one round a step {single:.1e}"
)
LINKS = (
    "method, link {name} | bits an element and step {bits:.2f} | steps {steps} | "
    "error {error:.1e} | distance of the models {apart:.1e}"
)
DRIFT = "η {rate:.4f} | distance of the models {apart:.2e} | distance / η² {constant:.2f}"


def thinned(found: dict[str, Any]) -> dict[str, Any]:
    """Curves at moments that are evenly spaced on a log scale."""

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: short(one) for name, one in value.items()}
        if np.ndim(value) == 0:
            return float(value)
        value = np.asarray(value, float)
        return [float(f"{x:.4g}") for x in value[reporting.moments(len(value), 60)]]

    return short(found)


INK = "#222222"
COLOURS = dict(zip(("dense", *CODECS), ("#222222", "#1b6ca8", "#d1495b", "#3c8d5a"), strict=True))
METHODS = ("CHOCO-SGD", "DeepSqueeze", "gradient tracking")


def picture(book: dict[str, Any], path: Any) -> None:
    """Variance reduction by graph, over gradients and over bytes; and links by method."""
    figure, grid = reporting.panels(3, 3, (13.5, 11.5), layout=None)
    figure.subplots_adjust(0.07, 0.05, 0.91, 0.93, wspace=0.42, hspace=0.4)
    for row, cost, label in (
        (grid[0], "gradients", "gradients of single rows, a worker"),
        (grid[1], "bytes", "bytes sent by a worker"),
    ):
        for axes, graph in zip(row, GRAPHS, strict=True):
            both = book["reduction"]["curves"][f"lasso, {graph}"]
            lines = [
                axes.loglog(both[name][cost], both[name]["gap"], color=colour, label=name.upper())[
                    0
                ]
                for name, colour in (("dspg", "#d1495b"), ("dpsvrg", "#1b6ca8"))
            ]
            axes.set(xlabel=label, ylim=(1e-13, 30), title=f"Lasso, {graph}")
            reporting.label_ends(axes, lines)
        row[0].set_ylabel("loss above its least value")
    for axes, method in zip(grid[2], METHODS, strict=True):
        lines = []
        for codec, colour in COLOURS.items():
            one = book["links"][f"{method}, {codec}"]
            sent = 50 / 8 * one["bits"] * (reporting.moments(book["link_steps"], 60) + 1)
            lines += axes.loglog(sent, one["error"], color=colour, label=codec)
        axes.set(xlabel="bytes sent by a worker", title=f"Least squares, {method}")
        falls = min(line.get_ydata()[-1] for line in lines) < 1e-3
        axes.set_ylim(1e-8 if falls else 0.1, 2)
        if not falls:
            axes.set_yticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"])
            axes.set_yticks([], minor=True)
        place = "lower left" if falls else "upper right"
        axes.legend(loc=place, frameon=False, labelcolor="linecolor", fontsize=9)
    grid[2, 0].set_ylabel("error of the mean model")
    title = "Decentralised methods: variance reduction on three graphs, and three methods by link"
    figure.text(0.07, 0.965, title, size=15, weight="bold", color=INK)
    reporting.draw(figure, path)


def write(folder: Any, book: dict[str, Any], *, quiet: bool = False) -> None:
    parts: list[Any] = [f"{reporting.line(book['environment'])}."]
    parts.append(
        Table("CHOCO on a ring of 16, the largest tenth of the elements", CHOCO, book["choco"])
    )
    title = "DPSVRG against DSPG: loss above its least value, mean over the workers"
    parts.append(Table(title, REDUCTION, book["reduction"]["table"]))
    rows = [
        {"name": name, "bits": one["bits"], "error": one["error"][-1], "apart": one["apart"][-1]}
        | {"steps": book["link_steps"]}
        for name, one in book["links"].items()
    ]
    parts.append(Table("Least squares on a ring of 8, workers that differ", LINKS, rows))
    parts.append(Table("D-PSGD on a ring of 8 with constant rates", DRIFT, book["drift"]))
    reporting.sections(parts, folder / "gossip.md", quiet=quiet)


def main() -> None:
    chosen = reporting.options(
        __doc__,
        "out/gossip",
        steps=(20_000, "steps of DPSVRG and DSPG"),
        link_steps=(2_000, "steps through each link"),
    )
    jax.config.update("jax_enable_x64", True)
    path = chosen.out / "gossip.json"
    book = reporting.read(path) if path.exists() else {"environment": reporting.environment()}
    book["link_steps"] = chosen.link_steps

    def reduced() -> dict[str, Any]:
        found = gossip_sums.reduction(chosen.steps)
        rows = [gossip_sums.reduced_record(name, one) for name, one in found.items()]
        return {"curves": thinned(found), "table": rows}

    jobs: dict[str, Callable[[], Any]] = {
        "choco": gossip_links.choco,
        "drift": gossip_links.drift,
        "reduction": reduced,
        "links": lambda: thinned(
            gossip_links.links(chosen.link_steps) | gossip_links.means(chosen.link_steps)
        ),
    }
    for name, job in jobs.items():
        if name not in book:
            book[name] = job()
            reporting.keep(path, book)
    write(chosen.out, book)
    picture(book, chosen.out / "gossip.png")


if __name__ == "__main__":
    main()
