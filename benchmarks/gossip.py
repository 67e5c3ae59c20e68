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

# isort: split
import pictures  # pyright: ignore[reportMissingImports]

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


METHODS = ("CHOCO-SGD", "gradient tracking")
COLORS = dict(zip(("dense", *CODECS), (pictures.BASE, *pictures.COLORS), strict=False))


def picture(book: dict[str, Any], path: Any) -> None:
    """Two methods by link over bytes; and variance reduction by graph, over gradients and bytes."""
    dense, sign = (book["links"][f"{METHODS[1]}, {name}"]["bits"] for name in ("dense", "sign"))
    message = (
        "In gossip the method decides which error is reached, and the link how many bytes it "
        f"takes: signs need {dense / sign:.0f} times fewer than dense messages"
    )
    detail = (
        "Above: least squares of 8 workers that differ, on a ring; dense messages are float64. "
        "Below: lasso with dense messages; DPSVRG corrects its gradients at snapshots, DSPG does "
        "not."
    )
    figure, grid = pictures.page(message, detail, 2, 2, 4.7, sharey="row")
    for axes, method in zip(grid[0], METHODS, strict=True):
        by_link(axes, book, method)
    for axes, cost in zip(grid[1], ("gradients", "bytes"), strict=True):
        by_graph(axes, book["reduction"]["curves"], cost)
    grid[0, 0].set_ylabel("error of the mean model")
    grid[1, 0].set_ylabel("loss above its least value")
    for axes in grid.flat:
        axes.minorticks_off()
    pictures.save(figure, path)


def by_link(axes: Any, book: dict[str, Any], method: str) -> None:
    """The error of a method against the bytes of a worker, through every link."""
    faint = {"transform": axes.transAxes, "fontsize": pictures.SMALL}
    axes.text(0.04, 0.44, "bits an element and step:", color=pictures.FAINT, **faint)
    order = sorted(COLORS, key=lambda codec: -book["links"][f"{method}, {codec}"]["bits"])
    for rank, codec in enumerate(order):
        one = book["links"][f"{method}, {codec}"]
        sent = 50 / 8 * one["bits"] * (reporting.moments(book["link_steps"], 60) + 1)
        axes.loglog(sent, one["error"], color=COLORS[codec])
        text = f"{codec}, {one['bits']:.3g}"
        axes.text(0.04, 0.34 - 0.09 * rank, text, color=COLORS[codec], **faint)
    axes.set(xlabel="bytes sent by a worker", title=f"{method[0].upper()}{method[1:]}")


def by_graph(axes: Any, curves: dict[str, Any], cost: str) -> None:
    """The loss of DSPG on the first graph, and of DPSVRG on each, against what they cost."""
    first, *_ = GRAPHS
    # Other colours than those of links above.
    shown = [("DSPG", first, pictures.INK)]
    shown += [("DPSVRG", *one) for one in zip(GRAPHS, pictures.COLORS[3:], strict=False)]
    for name, graph, color in shown:
        one = curves[f"lasso, {graph}"][name.lower()]
        axes.loglog(one[cost], one["gap"], color=color)
        if cost == "gradients":
            end = next(at for at, gap in enumerate(one["gap"]) if gap < 10 * one["gap"][-1])
            up = one["gap"][-1] if name == "DPSVRG" else 60 * one["gap"][-1]
            axes.annotate(
                f"{name}, {graph}", (one[cost][end], up), (-5 if name == "DPSVRG" else 12, 0),
                textcoords="offset points", color=color, fontsize=pictures.SMALL, va="center",
                ha="right" if name == "DPSVRG" else "left",
            )  # fmt: skip
    what = "gradients of single rows" if cost == "gradients" else "bytes sent"
    axes.set(xlabel=f"{what} by a worker", ylim=(1e-13, 30), title=f"Lasso, by {cost}")


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
