"""Tables of the results over the slow wire; `plots.py` draws them.

python benchmarks/network/tables.py out/network
"""

import pathlib
import statistics
import sys
from typing import Any

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import reporting
from namespaces import bytes_a_second
from reporting import Table

BASE = "dense float32"
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


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
