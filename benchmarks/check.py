"""Checks the committed results: bounds that the documentation states, tables, and commands.

    python benchmarks/check.py

It reads files and measures nothing.
"""

import fnmatch
import pathlib
import re
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import check_sites
import mutations
import redraw
import reporting
from claims import registry
from reporting import HERE, RESULTS

sys.path.append(str(HERE / "network"))
import model
import tables

Found = Iterator[tuple[str, bool]]
"""Claims, and whether they hold."""


def commands() -> Found:
    """README.md names the command of every file, and every command's program exists."""
    text = (HERE / "README.md").read_text()
    patterns = re.findall(r"`([\w/*.-]+)`", text)
    for path in sorted(RESULTS.rglob("*.*")):
        name = str(path.relative_to(RESULTS))
        known = any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        yield f"README.md has a command for {name}", known
    for program in sorted(set(re.findall(r"(?:benchmarks|examples)/[\w/]+\.py", text))):
        yield f"{program} exists", (HERE.parent / program).is_file()


def pictures() -> Found:
    """README.md has a row for every picture of docs/, and `redraw.py` draws no other."""
    text = (HERE / "README.md").read_text()
    drawn = {f"{name}.png" for name in redraw.PICTURES}
    names = {path.name for path in redraw.DOCS.glob("*.png")}
    yield f"redraw.py draws pictures of docs/ alone {sorted(drawn - names) or ''}", drawn <= names
    for name in sorted(names):
        yield f"README.md has a row for {name}", f"`{name}`" in text


def settings() -> Found:
    """The commands of results that hold their settings have these, and claims repeat a command."""
    import byte_lm
    import federated_digits
    import train_digits

    parsers = {
        "byte_lm": lambda words: byte_lm.parse(words)[1],
        "federated_digits": federated_digits.parse,
        "train_digits": lambda words: train_digits.parse(words)[1],
    }
    text = (HERE / "README.md").read_text()
    example = r"`python examples/(\w+)\.py ?([^`]*)`"
    rows = re.findall(rf"^\| `([\w/]+\.json)`[^|]*\| {example}", text, re.MULTILINE)
    for name, program, words in rows:
        path = RESULTS / name
        held = reporting.read(path).get("settings") if path.is_file() else None
        if held:
            given = parsers[program](shlex.split(words))
            said = {key: str(value) for key, value in vars(given).items()}
            differ = [key for key in said.keys() & held if said[key] != str(held[key])]
            yield f"the command of {name} has its settings {sorted(differ) or ''}", not differ
    for claim in registry.every().values():
        for command in claim.command.splitlines():
            if "examples/" in command:
                yield f"README.md has the command of {claim.name}", f"`{command}`" in text


def environments() -> Found:
    for path in sorted(RESULTS.rglob("*.json")):
        found = reporting.read(path)
        if isinstance(found, list):  # The list of mutations was not measured.
            continue
        where = found.get("environment", found)
        yield f"{path.relative_to(RESULTS)} names its version of JAX", "jax" in where


def cells(job: str) -> dict[tuple[str, int], dict[str, Any]]:
    found = reporting.read(RESULTS / "network" / f"{job}.json")["cells"]
    return {(cell["rate"], cell["processes"]): cell for cell in found}


def medians(methods: dict[str, Any]) -> dict[str, float]:
    return {name: statistics.median(method["seconds"]) for name, method in methods.items()}


def slow_wire() -> Found:
    """At 100 Mbit/s over four workers: means of 25 million elements, training to a target loss."""
    methods = cells("mean")["100mbit", 4]["methods"]
    times, repeats = medians(methods), min(len(one["seconds"]) for one in methods.values())
    dense = times["dense float32"]
    yield "each mean was repeated five times", repeats >= 5
    for name, faster in {
        "two shots, 4-bit": 6.5,
        "two shots, 1-bit": 15,
        "threshold 1 %": 20,
    }.items():
        yield f"{name} is {faster} times faster than dense", dense / times[name] >= faster
    least = methods["two shots, 4-bit"]["link_bytes"] / 12.5e6
    yield (
        "two shots of 4 bits take 1.25 times their bytes",
        times["two shots, 4-bit"] <= (1.25 * least),
    )
    times = medians(cells("train")["100mbit", 4]["methods"])
    four, torch = times["two shots, 4-bit"], {n: t for n, t in times.items() if "torch" in n}
    ours = min(times[name] for name in times if name not in torch)
    yield "training with two shots of 4 bits is 5 times faster", times["dense"] / four >= 5
    for name in ("torch DDP", "torch DDP, fp16_compress_hook"):
        yield f"training with two shots of 4 bits is faster than {name}", four < torch[name]
    yield "the fastest training is faster than the fastest of torch", ours < min(torch.values())


def local_steps() -> Found:
    """In rounds of local steps: bytes to the target, time on slow links, and hidden exchanges."""
    methods = cells("local")["100mbit", 4]["methods"]
    sparse = methods["SparseLoCo"]
    bits = 8 * sparse["collective_bytes"]["all-gather"] / 3 / sparse["parameters"]
    yield "SparseLoCo sends at most 0.162 bits a parameter and round", bits <= 0.162
    rounds = sparse["curve"][-1][0] / 60
    counted = sparse["curve"][-1][3] / rounds / sparse["collective_bytes"]["all-gather"]
    yield "the interface counts these bytes, and up to 5 % of headers", 1 <= counted <= 1.05
    for name in ("SparseLoCo", "SparseLoCo with Muon"):
        reached, sent = methods[name]["reached"], methods[name]["curve"][-1][3]
        yield f"{name} reaches the target with at most 2.6 MB", reached and sent <= 2.6e6
    slow, free = (
        medians(cells("local")[rate, 4]["methods"])["SparseLoCo"] for rate in ("10mbit", "unshaped")
    )
    yield "SparseLoCo is at most 1.2 times slower at 10 Mbit/s than unshaped", slow <= 1.2 * free
    for name, case in cells("overlap")["100mbit", 4]["methods"].items():
        if case["idle"]:
            yield f"{name}: 95 % of an exchange is hidden", case["hidden"] >= 0.95
        if case["delay"] <= case["every"] / 2:
            least = 1.005 * case["bits_alone"]
            yield f"{name}: the delay costs at most 0.5 %", case["bits"] <= least
        stalls = case["predicted"] / case["round"]
        yield f"{name}: the round is predicted within 15 %", 1 / 1.15 <= stalls <= 1.15


def few_bits() -> Found:
    """Over five seeds: few bits in rounds of local steps, and rounds that adapt."""
    found = reporting.read(RESULTS / "local" / "local.json")
    scores = {name: statistics.fmean(one["score"]) for name, one in found["bits"].items()}
    for name, base, more in (
        ("SparseLoCo", "DiLoCo, dense", 1.005),
        ("MuLoCo, 2-bit", "MuLoCo, dense", 1.01),
    ):
        yield f"{name} ends within {more:g} of dense", scores[name] <= more * scores[base]
        yield f"{name} was trained from five seeds", len(found["bits"][name]["score"]) >= 5
    tuned = found["tuned"]
    rates = {float(name.rpartition(" ")[2]) for name in tuned["grid"]}
    inside = min(rates) < tuned["outer"] < max(rates)
    yield "the best outer rate of DiLoCo is inside the grid", inside
    yield (
        "tuned DiLoCo ends below the published rates, SparseLoCo between",
        statistics.fmean(tuned["score"]) < scores["SparseLoCo"] < scores["DiLoCo, dense"],
    )
    rounds = found["adaptive"]
    adaptive, twelve = rounds["ADPSGD"], rounds["rounds of 12"]
    yield (
        "ADPSGD keeps the models closer together than rounds of 12",
        statistics.median(adaptive["variance"]) < 0.5 * statistics.median(twelve["variance"]),
    )


def many_clients() -> Found:
    """Ten thousand clients with a residual each: time, memory, the same bits, nothing lost."""
    found = reporting.read(RESULTS / "federated" / "federated.json")["records"]
    for one in found.values():
        name = "{codec}, chunks of {chunk}, {devices} devices".format(**one)
        yield (
            f"{name}: 10,000 clients, 100,000 parameters",
            (one["clients"] == 10_000 and one["parameters"] >= 100_000),
        )
        yield f"{name}: at most 2 GB beside the table", one["memory"] <= 2
        if one["codec"] == "integers":
            yield f"{name}: nothing is lost", one["missing"] == 0 < one["held"]
        else:
            yield f"{name}: a round takes at most a minute", one["seconds"] <= 60
    for codec in ("blockwise", "top_k"):
        digests = {one["digest"] for one in found.values() if one["codec"] == codec}
        yield f"{codec}: the same parameters in all cases", len(digests) == 1
    cases = {
        (one["chunk"], one["devices"]) for one in found.values() if one["codec"] == "blockwise"
    }
    yield (
        "chunks of 1, 16 and 64, and 1, 2 and 8 devices",
        ({(1, 1), (16, 1), (64, 1), (16, 2), (16, 8)} <= cases),
    )


def federated_drift() -> Found:
    """What control variates and adaptive servers save, and a server that does not wait."""
    found = reporting.read(RESULTS / "federated" / "drift.json")
    rows = {(r["name"], r["way"]): r for r in found["drift"]["records"]}
    for way in sorted({way for _, way in rows}):
        base = rows["FedAvg", way]
        for name in ("SCAFFOLD", "FedAdam", "FedYogi"):
            fewer = rows[name, way]["rounds"] < base["rounds"]
            yield f"{name} needs fewer rounds than FedAvg, {way}", fewer
        more = rows["SCAFFOLD", way]["up"] > base["up"]
        yield f"SCAFFOLD sends more bytes than FedAvg, {way}", more
        same = abs(rows["FedProx", way]["rounds"] - base["rounds"]) <= 1
        yield f"FedProx needs as many rounds as FedAvg, {way}", same
    late = {r["name"]: r for r in found["late"]["records"]}
    alike, buffered = late["FedBuff, all ages alike"]["seconds"], late["FedBuff"]["end"]
    waits = late["FedAvg"]["seconds"]
    yield "FedBuff takes all rounds before FedAvg reaches the loss", buffered < waits
    yield "FedBuff with all ages alike reaches the loss", alike < buffered


def federated_methods() -> Found:
    """Guesses at equal bits, the best number of local steps, and hostile voters."""
    found = reporting.read(RESULTS / "federated" / "methods.json")
    if "guesses" in found:
        rows = {(r["width"], r["name"]): r["exact"] for r in found["guesses"]["records"]}
        for bits in (2, 4):
            ziv, shift = (
                rows[bits, name]
                for name in ("Wyner-Ziv, own last message", "Shift, contracted rotated uniform")
            )
            plain = min(rows[bits, n] for n in ("QSGD", "QSGD by the maximum", "rotated uniform"))
            yield f"guesses of {bits} bits: 1000 times nearer than quantizers", ziv < plain / 1000
            yield f"guesses of {bits} bits: a shift is as near", shift <= 1.5 * ziv
    if "steps" in found:
        times = {
            row["tau"]: row["seconds"]
            for row in found["steps"]["records"]
            if row["name"] != "FedAvg" and "seconds" in row
        }
        best = min(times, key=lambda tau: times[tau])
        yield "FedPAQ's best number of local steps is inside", min(times) < best < max(times)
    if "votes" in found:
        credible = [r for r in found["votes"]["records"] if r["rule"] == "credible"]
        rows = {r["attackers"]: r for r in credible if r["start"] == "random"}
        for hostile in (0, 5):
            row = rows[hostile]
            least = row["ranges"]["trained"][0]
            yield f"FedVote: {hostile} of 31 hostile, every seed trains to 90 %", least > 90
            near = row["ternary"] >= row["trained"] - 10  # As in the claim of deployed networks.
            yield f"FedVote: {hostile} of 31 hostile, ternary networks can be deployed", near
        for hostile in (10, 14):
            most = rows[hostile]["ranges"]["trained"][1]
            yield f"FedVote: {hostile} of 31 hostile break it in every seed", most < 15
        later = [r["ranges"]["trained"][0] for r in credible if r["start"] == "trained"]
        yield "FedVote: from trained parameters up to 14 of 31 do not", min(later) > 90
    if "bytes" in found:
        saved = found["bytes"]["records"][-1]
        less = saved["than_dense"] > 99 and saved["than_paq"] > 90
        yield "predictive coding: 99 and 90 % fewer than FedAvg and FedPAQ", less
        stc = next(r for r in found["bytes"]["records"] if r["name"] == "STC, 1 %")
        yield "STC does not reach a loss of 0.8 in every seed", "high" not in stc


def link_model() -> Found:
    """Nine of ten predictions are within a fifth; the plan is within a tenth of the best mean."""
    found = list(cells("mean").values())
    _, errors = model.compare(found)
    good = sum(error <= model.WITHIN for error in errors)
    yield "60 means over shaped links are predicted", len(errors) == 60
    yield "nine of ten predictions are within a fifth", good >= 0.9 * len(errors)
    for row in model.advise(found):
        where = f"{row['rate']} and {row['processes']} processes"
        if row["rate"] != "unshaped":
            yield f"the plan is within a tenth of the best at {where}", row["ratio"] <= 1.1
        elif row["best"].startswith("dense"):
            yield f"the plan takes the best at {where}", row["taken"] == row["best"]


def same_tables() -> Found:
    """The tables of the slow network match their JSON files."""
    source = RESULTS / "network"
    jobs = ("mean", "train", "local", "overlap", "gossip", "gossip-train", "sharded")
    yield from _written(source, jobs, (*jobs, "model"))
    for folder, job in (
        *(("seeds", "local"), ("hour", "local"), ("bfloat16", "mean")),
        *((f"delayed{part}", "gossip-train") for part in ("", "/leaves", "/none")),
    ):
        yield from _written(source / folder, (job,), (job,))


def _written(source: pathlib.Path, jobs: Sequence[str], names: Sequence[str]) -> Found:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for job in jobs:
            (folder / f"{job}.json").write_text((source / f"{job}.json").read_text())
        tables.write(folder, quiet=True)
        if "model" in names:
            model.write(folder, quiet=True)
        for name in names:
            same = (folder / f"{name}.md").read_text() == (source / f"{name}.md").read_text()
            yield f"{source.relative_to(RESULTS)}/{name}.md agrees with its JSON", same


def gossip() -> Found:
    """Decentralised methods: variance reduction, and the step sizes of CHOCO."""
    found = reporting.read(RESULTS / "gossip" / "gossip.json")
    for row in found["reduction"]["table"]:
        name = row["name"]
        yield f"{name}: DPSVRG falls with a slope of -0.9 or less", row["dpsvrg_slope"] <= -0.9
        settled = -0.7 <= row["settled"] <= -0.45
        yield f"{name}: DSPG falls with a slope near -0.5 once the start is forgotten", settled
        for cost, times in (("gradients", 50), ("bytes", 2)):
            better = row[f"dspg_{cost}"] >= times * row[f"dpsvrg_{cost}"]
            yield f"{name}: DPSVRG is {times} times closer at equal {cost}", better
    ends = {row["mixing"]: row["variance"] for row in found["choco"]}
    yield "CHOCO converges with 0.05, 0.2 and 0.34", max(ends[m] for m in (0.05, 0.2, 0.34)) < 1e-7
    yield "CHOCO diverges with 0.5", ends[0.5] > 1e6
    moved = max(row["moved"] for row in found["choco"] if row["mixing"] < 0.5)
    yield "CHOCO keeps the mean to 1e-12", moved < 1e-12


def sharded() -> Found:
    """Over five seeds: which codecs leave the loss of sharded training within 0.5 % of dense."""
    import sharded_training

    folder = RESULTS / "sharded"
    runs = reporting.read(folder / "sharded.json")["runs"]
    records = sharded_training.summary(runs)
    table = reporting.Table("", sharded_training.COLUMNS, records).markdown()
    yield "sharded/sharded.md agrees with its JSON", table in (folder / "sharded.md").read_text()
    groups: dict[tuple, set[int]] = {}
    for run in runs:
        groups.setdefault((run["task"], run["way"], run["codecs"]), set()).add(run["seed"])
    yield "sharded training has five seeds of each case", min(map(len, groups.values())) >= 5
    above = {
        (r["way"], r["codecs"]): r["above"]
        for r in records
        if "above" in r and r["task"] == "bytes"
    }
    for way, codecs in (
        ("fully sharded", "8-bit weights, 4-bit gradients"),
        ("sharded optimizer", "4-bit up, 4-bit down, Residual"),
        ("tensor parallel", "8-bit"),
        ("experts", "mxfp8 dispatch, 8-bit combine"),
        ("pipeline", "8-bit"),
    ):
        yield f"{way}, {codecs}: at most 0.5 % above dense", above[way, codecs] <= 0.5
    experts = next(r for r in records if r["codecs"] == "mxfp8 dispatch, dense combine")
    yield "mxfp8 dispatch alone is not above 0.5 % for certain", experts["verdict"] != "no"
    [wire] = reporting.read(RESULTS / "network" / "sharded.json")["cells"]
    dense, coded = (
        statistics.median(wire["methods"][name]["seconds"])
        for name in ("FSDP, dense", "FSDP, 8-bit weights, 4-bit gradients")
    )
    yield "fully sharded steps are 3.5 times faster at 100 Mbit/s", dense >= 3.5 * coded
    worse = above["fully sharded", "4-bit weights, 4-bit gradients"]
    yield "4-bit weights are more than 0.5 % above dense", worse > 0.5


def gpu() -> Found:
    """Kernels give the bits of the reference, and none is slower than XLA beyond noise."""
    found = reporting.read(RESULTS / "gpu/kernels.json")
    yield f"no operation on a GPU differs or fails {found['faults'] or ''}", not found["faults"]
    for name, each in found["kernels"].items():
        took = each["seconds"]
        yield f"the kernel of {name} is as fast as XLA", took["kernel"] < 1.05 * took["xla"]


def others() -> Found:
    streams = reporting.read(RESULTS / "noise" / "dieharder.json")["streams"]
    for name, stream in streams.items():
        verdict = "fails, as it must" if name.startswith("control") else "passed"
        yield f"dieharder: {name} {verdict}", stream["verdict"] == verdict
    for target in ("gpu", "tpu"):
        programs = reporting.read(RESULTS / "aot" / f"{target}.json")["programs"]
        spilled = sum(one.get("spilled bytes", 0) for one in programs)
        yield f"nothing spills on a {target.upper()}", spilled == 0
        kernels = min(one["kernels"] for one in programs)
        yield f"every program has a kernel on a {target.upper()}", kernels > 0


def failures() -> list[str]:
    """What does not hold."""
    every = (
        commands,
        pictures,
        settings,
        environments,
        slow_wire,
        local_steps,
        few_bits,
        many_clients,
        federated_methods,
        federated_drift,
        link_model,
        same_tables,
        gossip,
        sharded,
        check_sites.between_sites,
        gpu,
        others,
        mutations.applicable,
        mutations.results,
    )
    return [claim for check in every for claim, holds in check() if not holds]


def main() -> None:
    wrong = failures()
    right = "all committed results meet the bounds that the documentation states"
    print("\n".join(f"does not hold: {claim}" for claim in wrong) or right)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
