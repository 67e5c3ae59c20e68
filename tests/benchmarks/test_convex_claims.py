"""Judges of the claims on small problems: clearly worse numbers do not hold."""

import copy
import importlib

import pytest
from helpers.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"
ONES, NEVER = [1.0] * 3, [None] * 3


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")  # As `reporting`, perhaps imported before.
    monkeypatch.syspath_prepend(BENCHMARKS)


def inexact(numbers):
    numbers["silent"] = dict.fromkeys(numbers["silent"], ONES)


def above_diana(numbers):
    for found in numbers["floors"].values():
        worse = [[9 * x for x in row] for row in found["diana"]]
        found.update(dict.fromkeys(("mcm", "rand_mcm"), worse), artemis=found["diana"])


def as_diana(numbers):
    for found in numbers["numbers"]["floors"].values():
        found.update(dict.fromkeys(("artemis", "dore", "dore, qsgd down"), found["diana"]))


def last_iterates(numbers):
    numbers["tail"] = {name: [9 * x for x in row] for name, row in numbers["floors"].items()}


def never(kind):
    def spoil(numbers):
        for row in (row for name, row in numbers["methods"].items() if name.startswith(kind)):
            row["bits"] = NEVER

    return spoil


def no_marina(numbers):
    for rows in numbers["problems"].values():
        for found in (rows["methods"], rows["theory"], rows["authors"]):
            found["marina"]["bits"] = NEVER


def all_messages(numbers):
    for rows in numbers["problems"].values():
        rows["censored heavy ball"]["messages"] = None


def large(group, name):
    def spoil(numbers):
        for rows in numbers[group].values():
            rows[name]["error"] = ONES

    return spoil


def no_momentum(numbers):
    numbers["equal rate"] = dict.fromkeys(numbers["equal rate"], ONES)
    numbers["tuned"] = {name: row | {"error": ONES} for name, row in numbers["tuned"].items()}


def slow_both_ways(found):
    for curves in found["curves"].values():
        if "neolithic, 4 signs" in curves:
            errors = curves["neolithic, 4 signs"]["errors"]
            errors[:] = [1e9] * len(errors)


def slow_stages(numbers):
    for rows in numbers["problems"].values():
        for name in (name for name in rows if name.startswith("contractive")):
            rows[name]["gradient"] = [1e9] * 3


def no_slope(numbers):
    for row in numbers["rows"]:
        row |= {"slope": 0.0, "gap": [9.0 if row["bits"] in (0.5, 0.25) else 1.0] * 3}


def far_from_bounds(numbers):
    for rows in numbers["problems"].values():
        for curve in rows["curves"].values():
            curve[-1] = [1e9] * 3


def without_descent(numbers):
    for row in numbers["rows"]:
        row["factor"] = ONES


def no_embedding(numbers):
    for row in numbers["rows"]:
        row["embedded"] = row["alone"]


def dense_models(numbers):
    for title in ("QCMD", "QRDA"):
        numbers["methods"][f"{title}, threshold"] |= {"nonzero": [1e9] * 3, "objective": [9.0] * 3}


def no_gain(numbers):
    for title in ("QCMD", "QRDA"):
        numbers["methods"][f"{title}, dense"]["objective"] = [9.0] * 3


def badly_trained(kind):
    """Methods whose names begin so, on one task or on each."""

    def spoil(numbers):
        numbers = numbers.get("numbers", numbers)
        for found in [numbers] if "methods" in numbers else numbers.values():
            for name in (name for name in found["methods"] if name.startswith(kind)):
                scores = found["methods"][name]["score"]
                scores[:] = [0.0 if found["better"] > 0 else 9.0] * len(scores)

    return spoil


def risen(name):
    def spoil(numbers):
        found = numbers.get("numbers", numbers)["scores"]
        found[name] = [9.0] * len(found[name])

    return spoil


def slow_and_badly_trained(numbers):
    badly_trained("natural")(numbers["trained"])
    for row in numbers["seconds"].values():
        row["natural"] = 1e9


def values_alone(numbers):
    for row in numbers["rows"]:
        row |= {"near-democratic": row["alone"], "democratic": row["alone"]}


def no_feedback(numbers):
    for rows in numbers.values():
        rows["error feedback"] |= {"error": ONES, "gradient": [1e9] * 3}


def far_away(numbers):
    numbers.update(dict.fromkeys(numbers, 1.0))


def no_majority(numbers):
    for row in (row for rows in numbers.values() for row in rows):
        row["square"] = [1e9] * 3


def rows_with(**worse):
    def spoil(numbers):
        for row in numbers["rows"]:
            row |= worse

    return spoil


def worse_with_size(numbers):
    for row in numbers["rows"]:
        row["error"] = row["size"]


def high_floors(numbers):
    numbers["floors"] = {
        name: row if name == "sgd" else [1e9] * 3 for name, row in numbers["floors"].items()
    }


def linear_regret(numbers):
    for name, row in numbers["found"].items():
        if not name.endswith("whole"):
            row |= {"slope": 1.0, "regret": [9 * x for x in row["regret"]]}


def no_law(numbers):
    for row in numbers["rows"]:
        row["distances"] = dict.fromkeys(row["distances"], 1.0)


def above_bound(numbers):
    for row in numbers["rows"]:
        row["workers"] = 9 * row["bound"]


def large_memory(numbers):
    for row in numbers["rows"].values():
        row["kept"] = 9.0


def slow_codes(found):
    for cell in found["cells"]:
        cell["methods"]["two shots, 4-bit"]["seconds"] = [1e9]


def slow_sidco(numbers):
    numbers["encode"]["SIDCo"] = 1e9


def no_memory(numbers):
    for row in numbers["rows"]:
        row["errors"]["last message"] = 1e9


def cubic(numbers):
    for row in numbers["rows"]:
        for name in ("democratic", "near-democratic"):
            row[name]["operations"] = row["block"] ** 3


SPOILT = {
    "artemis-noise-floor": inexact,
    "diana-noise-floor": inexact,
    "dore-savings": inexact,
    "mcm-down-compression": above_diana,
    "degraded-downlinks": as_diana,
    "rand-mcm-averages": above_diana,
    "mcm-partial-participation": inexact,
    "polyak-ruppert-averages": last_iterates,
    "ef21-against-ef": never("ef21"),
    "ef21-both-ways": never("ef21_bc, sign"),
    "marina-against-diana": no_marina,
    "clag-against-ef21-and-lag": never("clag"),
    "censored-heavy-ball": all_messages,
    "cd-adam-against-amsgrad": large("found", "CD-Adam"),
    "ef21-sgdm-noise": no_momentum,
    "double-squeeze-as-sgd": large("workers", "DoubleSqueeze"),
    "neolithic-both-ways": slow_both_ways,
    "neolithic-stochastic": slow_stages,
    "lower-bounds": far_from_bounds,
    "dgd-def-threshold": without_descent,
    "dq-psgd-bits": no_slope,
    "democratic-sparsifiers": no_embedding,
    "qcmd-qrda-threshold": dense_models,
    "adagrad-rare-features": no_gain,
    "cd-adam-networks": badly_trained("CD-Adam"),
    "democratic-values": values_alone,
    "powersgd-wide": badly_trained("PowerSGD, rank 2"),
    "dgc-wide": badly_trained("DGC, 0.1 %"),
    "diloco-trained-start": risen("DiLoCo, 4 bits"),
    "streaming-trained-start": risen("streaming DiLoCo, 4 bits"),
    "error-feedback-one-worker": no_feedback,
    "residuals-same-data": far_away,
    "majority-vote-bound": no_majority,
    "natural-variance": rows_with(error=1e9),
    "natural-composition": rows_with(bias=1e9),
    "qsgd-trade-off": rows_with(bits=1),
    "democratic-dimensions": worse_with_size,
    "artemis-levels": high_floors,
    "adagrad-regret": linear_regret,
    "sidco-laws": no_law,
    "ceo-real-gradients": rows_with(distortion=1.0, saved=0.0),
    "fedpaq-rate": rows_with(power=0.0),
    "qsgd-end-to-end": slow_codes,
    "sidco-end-to-end": slow_sidco,
    "wyner-ziv-gradients": no_memory,
    "democratic-cost": cubic,
    "terngrad-deep": badly_trained("TernGrad"),
    "qsgd-asynchrony": badly_trained("4 bits, delays"),
    "genqsgd-bound": above_bound,
    "memory-footprint": large_memory,
    "adpsgd-half-the-bits": badly_trained("ADPSGD"),
    "fastsgd-convergence": badly_trained("FastSGD"),
    "natural-run-time": slow_and_badly_trained,
}
FAMILIES = (
    "adaptive",
    "bidirectional",
    "bounds",
    "censored",
    "contractive",
    "democratic",
    "end_to_end",
    "federated_rates",
    "footprints",
    "harder",
    "noisy",
    "operations",
    "premises",
    "preserved",
    "real_gradients",
    "side_information",
    "sparse_models",
    "theorems",
    "traffic",
    "trained_start",
    "wide",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_clearly_worse_numbers_do_not_hold(family):
    import reporting
    from claims.claim import FAILS

    for claim in importlib.import_module(f"claims.{family}").CLAIMS:
        found = reporting.read(reporting.RESULTS / claim.files[0])
        numbers = found if claim.results else found["numbers"]
        assert claim.judge(numbers).words
        worse = copy.deepcopy(numbers)
        SPOILT[claim.name](worse)
        assert claim.judge(worse)[1] == FAILS, claim.name
