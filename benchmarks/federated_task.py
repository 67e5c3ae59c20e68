"""Handwritten digits over federated clients, for `federated_methods.py` and its parts."""

import hashlib
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import reporting

# isort: split
import federated_model as model  # pyright: ignore[reportMissingImports]

CLIENTS, IMAGES, BATCH = 30, 40, 10
SEEDS = 5
DATA = model.load()
LOSS = model.loss_of


def shards(mixed: bool, clients: int = CLIENTS, images: int = IMAGES) -> tuple[Any, Any]:
    """Images and digits of each client: a random part of all, or of few digits."""
    x, y = DATA.train
    first = np.random.default_rng(0).permutation(len(y))[: clients * images]
    if not mixed:
        first = first[np.argsort(y[first], kind="stable")]
        pieces = first.reshape(2 * clients, -1)
        dealt = np.random.default_rng(1).permutation(len(pieces)).reshape(clients, 2)
        first = pieces[dealt].reshape(-1)
    own = first.reshape(clients, images)
    return x[own], y[own]


def batches(mixed: bool, steps: int, seed: int, **sizes: int) -> Callable[..., Any]:
    x, y = shards(mixed, **sizes)

    def given(numbers: Any, round: int) -> Any:
        draw = np.random.default_rng((seed, round))
        chosen = draw.integers(0, x.shape[1], (len(x), steps, BATCH))[numbers]
        rows = numbers[:, None, None]
        return x[rows, chosen], y[rows, chosen]

    return given


class Cases:
    """Results of single cases in a folder: a run that was stopped goes on from them."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def __call__(self, name: str, make: Callable[[], Any]) -> Any:
        """What the case had, or has now."""
        file = self.folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
        if not file.exists():
            reporting.keep(file, {"name": name, "found": make()})
            print(f"done: {name}", flush=True)
        return reporting.read(file)["found"]


def medians(
    seeds: Sequence[Sequence[dict[str, Any]]], fixed: Sequence[str]
) -> list[dict[str, Any]]:
    """One record for those of all seeds: medians, and the least and the most as `ranges`.

    Args:
        seeds: the same records for each seed.
        fixed: the keys that name a record.

    What a seed lacks, such as the bytes to a loss that it does not reach, no seed has.
    """
    found = []
    for rows in zip(*seeds, strict=True):
        row = {key: rows[0][key] for key in fixed if key in rows[0]}
        measured = [key for key in rows[0] if key not in row and all(key in one for one in rows)]
        values = {key: [one[key] for one in rows] for key in measured}
        row |= {key: statistics.median(each) for key, each in values.items()}
        found.append(row | {"ranges": {key: [min(v), max(v)] for key, v in values.items()}})
    return found
