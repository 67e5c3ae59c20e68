"""Tables and pictures of the results over the slow wire.

python benchmarks/network/tables.py out/network
"""

import math
import pathlib
import re
import statistics
import sys
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import reporting
from reporting import Table

BASE = "dense float32"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
MEAN = (
    "method {name} | seconds {seconds:.3f} | from {least:.3f} | to {most:.3f} | "
    "link bytes, MB {link} | sent, MB {sent:.2f} | time ÷ (bytes ÷ rate) {over} | "
    "times faster than dense {faster}"
)
TRAIN = (
    "method {name} | bits a byte {bits:.3f} | steps {steps} | runs {runs} | "
    "seconds {seconds:.1f} | from {least:.1f} | to {most:.1f} | sent, MB {sent:.0f} | "
    "times faster than dense {faster}"
)
LOCAL = (
    "method {name} | bits a byte {bits:.3f} | reached {reached} | steps {steps} | runs {runs} | "
    "seconds {seconds:.1f} | from {least:.1f} | to {most:.1f} | sent, MB {sent:.2f}"
)
GOSSIP = (
    "exchange {name} | seconds {seconds:.3f} | from {least:.3f} | to {most:.3f} | "
    "forecast {forecast:.3f} | of the busiest link {wire:.3f} | of work {work:.3f} | "
    "link bytes, MB {link} | sent, MB {sent:.2f}"
)
OVERLAP = (
    "what {codec} | steps of a round {every} | delay {delay} | idle, s {idle:.1f} | "
    "a step, s {step:.3f} | an exchange, s {exchange:.2f} | a round, s {round:.2f} | "
    "predicted {predicted:.2f} | hidden {hidden:.0%} | bits a byte {bits:.3f} | "
    "without delay {bits_alone:.3f}"
)
SHARDED = (
    "step {name} | seconds {seconds:.3f} | from {least:.3f} | to {most:.3f} | "
    "link bytes, MB {link} | sent, MB {sent:.2f} | time ÷ (bytes ÷ rate) {over} | "
    "times faster {faster} | than {base} | weights on a device, MB {weights:.2f} | "
    "optimizer on a device, MB {optimizer:.2f}"
)


def bytes_a_second(rate: str) -> float | None:
    """Bits a second of a rate as `tc` writes it; None without one."""
    if rate == "unshaped":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if not found:
        raise ValueError(f"must be like 100mbit or 1gbit, or unshaped, got {rate!r}")
    return float(found[1]) * UNITS[found[2]] / 8


def bound(cell: dict[str, Any], method: dict[str, Any]) -> float | None:
    """Seconds of the bytes of a mean or a training on the link; for peers, of the counted bytes."""
    speed = bytes_a_second(cell["rate"])
    sent = method["curve"][-1][3] if "curve" in method else method["sent"]
    return None if speed is None else method.get("link_bytes", sent) / speed


def spread(name: str, method: dict[str, Any]) -> dict[str, Any]:
    seconds = method["seconds"]
    times = {"seconds": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}
    return {"name": name, **times}


def mean_record(cell: dict[str, Any], name: str, method: dict[str, Any]) -> dict[str, Any]:
    found, least, base = spread(name, method), bound(cell, method), cell["methods"].get(BASE)
    dense = base and f"{statistics.median(base['seconds']) / found['seconds']:.2f}"
    return {
        **found,
        "link": f"{method['link_bytes'] / 1e6:.2f}" if "link_bytes" in method else "–",
        "sent": method["sent"] / 1e6,
        "over": f"{found['seconds'] / least:.2f}" if least else "–",
        "faster": dense or "–",
    }


def train_record(cell: dict[str, Any], name: str, method: dict[str, Any]) -> dict[str, Any]:
    found, base = spread(name, method), cell["methods"].get("dense")
    steps, _, bits, sent = method["curve"][-1]
    both = base and base["reached"] and method["reached"]
    dense = both and f"{statistics.median(base['seconds']) / found['seconds']:.2f}"
    ends = {"steps": steps, "bits": bits, "sent": sent / 1e6, "runs": len(method["seconds"])}
    reached = "yes" if method["reached"] else "no"
    return {**found, **ends, "faster": dense or "not reached", "reached": reached}


def gossip_record(cell: dict[str, Any], name: str, method: dict[str, Any]) -> dict[str, Any]:
    del cell
    link, sent = f"{method['link_bytes'] / 1e6:.2f}", method["sent"] / 1e6
    return {**method, **spread(name, method), "link": link, "sent": sent}


def overlap_record(cell: dict[str, Any], name: str, method: dict[str, Any]) -> dict[str, Any]:
    del cell, name
    return method


def sharded_record(cell: dict[str, Any], name: str, method: dict[str, Any]) -> dict[str, Any]:
    record, base = mean_record(cell, name, method), cell["methods"].get(method["base"])
    faster = base and f"{statistics.median(base['seconds']) / record['seconds']:.2f}"
    memory = {kind: size / 1e6 for kind, size in method["memory"].items()}
    return {**record, **memory, "faster": faster or "–", "base": method["base"] or "–"}


def title(cell: dict[str, Any]) -> str:
    what = "One exchange" if "links" in cell else "One mean"
    if "target" in cell:
        what = f"Training to {cell['target']:g} bits a byte"
        what += f", at most {cell['steps']} steps" if "steps" in cell else ""
    elif any("memory" in method for method in cell["methods"].values()):
        what = "One step"
    elif any("hidden" in method for method in cell["methods"].values()):
        what = "Exchanges beside the steps"
    else:
        what += f" of {cell['elements']:,} floats" if "elements" in cell else ""
    return f"{what}, {cell['processes']} processes, {cell.get('links', cell['rate'])}"


def elsewhere(cells: list[dict[str, Any]]) -> list[str]:
    """Texts that name the results from other environments, and the differences."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        for name, method in cell["methods"].items():
            if "environment" in method:
                where = f"{name} ({cell['rate']}, {cell['processes']} processes)"
                found.setdefault(reporting.line(method["environment"]), []).append(where)
    return [f"With {other}: {'; '.join(names)}." for other, names in found.items()]


def write(folder: pathlib.Path, *, quiet: bool = False) -> None:
    jobs = {
        "mean": (MEAN, mean_record),
        "train": (TRAIN, train_record),
        "local": (LOCAL, train_record),
        "overlap": (OVERLAP, overlap_record),
        "sharded": (SHARDED, sharded_record),
        "gossip": (GOSSIP, gossip_record),
        "gossip-train": (LOCAL, train_record),
    }
    for name, (columns, record) in jobs.items():
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        book = reporting.read(path)
        cells = book["cells"]
        texts = [f"{reporting.line(book['environment'])}.", *elsewhere(cells)]
        found = [
            Table(title(cell), columns, [record(cell, *one) for one in cell["methods"].items()])
            for cell in cells
        ]
        reporting.sections([*texts, *found], path.with_suffix(".md"), quiet=quiet)


OURS, DENSE, TORCH = "#1b6ca8", "#8a8f98", "#d1495b"


SHADES = [colormaps["tab20"](n) for n in (*range(0, 20, 2), *range(1, 20, 2))]


def colour(name: str) -> str:
    return TORCH if name.startswith("torch") else DENSE if name.startswith("dense") else OURS


def bars(axes: Axes, cell: dict[str, Any]) -> None:
    """Seconds of every method, with the minimum for its bytes on the link.

    A training that did not reach the target is a frame, beside the loss at which it ends.
    """
    methods = cell["methods"]
    base = next((methods[name]["seconds"] for name in (BASE, "dense") if name in methods), None)
    for place, (name, method) in enumerate(methods.items()):
        seconds, least = statistics.median(method["seconds"]), bound(cell, method)
        reached = method.get("reached", True)
        ratio = "" if base is None else f"  {statistics.median(base) / seconds:.1f}×"
        ratio = ratio if reached else f"  ends at {method['curve'][-1][2]:.2f} bits"
        face, edge = colour(name) if reached else "white", colour(name)
        axes.barh(place, seconds, color=face, edgecolor=edge, height=0.72)
        axes.text(seconds, place, f" {seconds:.3g} s{ratio}", va="center", fontsize=7)
        if least:
            axes.plot([least] * 2, [place - 0.42, place + 0.42], color="black", linewidth=2)
    axes.set_yticks(range(len(methods)), list(methods), fontsize=7)
    axes.invert_yaxis()
    shown = [statistics.median(method["seconds"]) for method in methods.values()]
    shown += [least for method in methods.values() if (least := bound(cell, method))]
    if max(shown) < 10 * min(shown):  # A logarithm would let them seem far apart.
        axes.set_xlim(0, 1.25 * max(shown))
    else:
        axes.set_xscale("log")
        least, most = axes.get_xlim()
        axes.set_xlim(least, most * (most / least) ** 0.25)  # Room for the numbers.
        if most < 100 * least:  # With so few powers of ten, labels would overlap.
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("seconds")
    axes.set_title(f"{cell['rate']}, {cell['processes']} processes", fontsize=10)


def curves(axes: Axes, cell: dict[str, Any], names: list[str], *, sent: bool = False) -> None:
    """Bits a byte of held-out text against the seconds of training, of the median run.

    With `sent`, against the megabytes that a worker sent.

    Each method has its own colour, which depends on its place among `names`.
    """
    lines = []
    for name, method in cell["methods"].items():
        _, seconds, bits, bytes_ = zip(*method["curve"], strict=True)
        xs = [each / 1e6 for each in bytes_] if sent else seconds
        style, shade = "--" if name.startswith("torch") else "-", SHADES[names.index(name)]
        lines += axes.plot(xs, bits, style, color=shade, linewidth=1.4, label=name)
        axes.plot(xs[-1], bits[-1], "o", color=shade, markersize=4)
    axes.axhline(cell["target"], color="black", linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("megabytes sent" if sent else "seconds of training")
    axes.set_ylabel("bits a byte, held out")
    axes.set_title(f"{cell['rate']}, {cell['processes']} processes", fontsize=10)
    # They all end near the target: names are in the order of the ends, from left to right.
    lines.sort(key=lambda line: line.get_xdata()[-1])
    for rank, line in enumerate(lines):
        place = {"transform": axes.transAxes, "fontsize": 8, "va": "top"}
        axes.text(1.015, 1 - 0.075 * rank, line.get_label(), color=line.get_color(), **place)


def ends(axes: Axes, cell: dict[str, Any]) -> None:
    """Seconds and megabytes of each method up to the target; rings have not reached it.

    A star marks those that ran in another environment than the first.
    """
    for name, method in cell["methods"].items():
        seconds, sent = statistics.median(method["seconds"]), method["curve"][-1][3] / 1e6
        face = OURS if method["reached"] else "white"
        axes.plot(sent, seconds, "o", color=OURS, markerfacecolor=face, markersize=6)
        left, up = BESIDE.get(name, (1, 0))
        axes.annotate(
            f"{name} *" if "environment" in method else name,
            (sent, seconds),
            (8 * left, 8 * up),
            textcoords="offset points",
            ha="left" if left > 0 else "right",
            va="center",
            fontsize=8,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(x=0.28, y=0.12)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("seconds of training")
    axes.set_title(f"{cell['rate']}, {cell['processes']} processes: to the target", fontsize=10)
    axes.set_xlabel("megabytes sent by each worker (* on another machine)")


BESIDE = {
    "ADPSGD, 4-bit": (-1, 0.6),
    "local SGD, 4-bit": (-1, -0.4),
    "streaming DiLoCo, 4-bit, beside the steps": (-1, 0),
    "PowerSGD rank 4, second machine": (1, 0.4),
}
"""Of crowded labels: to the right (1) or left (-1) of the dot, and how far up."""

DRAWN = (
    "SparseLoCo",
    "SparseLoCo with Muon",
    "MuLoCo, 2-bit",
    "streaming DiLoCo, 4-bit",
    "PowerSGD rank 4",
    "DeMo",
    "local SGD, 4-bit",
    "DiLoCo, dense",
)
"""Of the local methods, those whose curves are drawn: one of a kind."""


def local(book: dict[str, Any], path: pathlib.Path) -> None:
    """Where all methods end, and curves of a few by their bytes, over the link most were run on."""
    cell = max(book["cells"], key=lambda cell: len(cell["methods"]))
    figure, axes = reporting.panels(1, 2, (15.5, 6))
    left, right = axes.flat
    ends(left, cell)
    few = {name: found for name, found in cell["methods"].items() if name in DRAWN}
    curves(right, {**cell, "methods": few or cell["methods"]}, list(cell["methods"]), sent=True)
    figure.suptitle("Training in rounds of local steps: rings do not reach the target", fontsize=11)
    reporting.draw(figure, path, dpi=140)


HEADINGS = {
    "mean": "One mean: the black mark is bytes ÷ link rate, × is over dense float32",
    "train": "Training to {target:g} bits a byte: the mark is bytes ÷ link rate, × is over dense",
}


def ranked(cell: dict[str, Any]) -> dict[str, Any]:
    """A training's methods from the fastest to the slowest, then those that missed the target."""

    def key(item: tuple[str, dict[str, Any]]) -> tuple[bool, float]:
        return not item[1]["reached"], statistics.median(item[1]["seconds"])

    return {**cell, "methods": dict(sorted(cell["methods"].items(), key=key))}


def picture(job: str, found: dict[str, Any], path: pathlib.Path) -> None:
    """The picture of a job, from the contents of its JSON file."""
    if job == "local":
        local(found, path)
        return
    cells = found["cells"]
    columns = min(2, len(cells))
    lines = max(len(cell["methods"]) for cell in cells)
    rows, height = math.ceil(len(cells) / columns), 1 + 0.21 * lines
    figure, axes = reporting.panels(rows, columns, (8 * columns, height * rows + 0.4))
    for place, cell in zip(axes.flat, cells, strict=False):
        bars(place, ranked(cell) if job == "train" else cell)
    for place in list(axes.flat)[len(cells) :]:
        place.remove()
    figure.suptitle(HEADINGS[job].format(**cells[0]), fontsize=11)
    reporting.draw(figure, path, dpi=140)


def draw(folder: pathlib.Path) -> None:
    for job in ("local", *HEADINGS):
        path = folder / f"{job}.json"
        if path.exists():
            picture(job, reporting.read(path), path.with_suffix(".png"))


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
    draw(pathlib.Path(sys.argv[1]))
