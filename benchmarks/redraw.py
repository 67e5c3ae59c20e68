"""Draws the pictures of the documentation again, from the committed results.

    python benchmarks/redraw.py
    python benchmarks/redraw.py --picture algorithms local

It measures nothing. `byte_lm.png`, `byte_lm_sparse.png`, `digits.png`, `digits_sparse.png` and
`federated.png` are pictures of the examples, which draw them at the end of a run; `codecs.py` and
`network/beyond.py` draw `codecs.png` and `break_even.png`.
"""

import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import reporting
from reporting import HERE, RESULTS

sys.path.append(str(HERE / "network"))

DOCS = HERE.parent / "docs"


def algorithms(path: pathlib.Path) -> None:
    import methods

    methods.draw(_read("convergence/methods.json")["curves"], path)


def algorithms_networks(path: pathlib.Path) -> None:
    import networks

    networks.draw(_read("convergence/networks.json")["curves"], path)


def feedback(path: pathlib.Path) -> None:
    import feedback as found

    found.draw(_read("feedback/feedback.json")["errors"], path)


def gossip(path: pathlib.Path) -> None:
    import gossip as found

    found.picture(_read("gossip/gossip.json"), path)


def federated_methods(path: pathlib.Path) -> None:
    import federated_methods_plot

    federated_methods_plot.plot(_read("federated/methods.json"), path)


def ceo(path: pathlib.Path) -> None:
    import ceo as found

    found.plot(_read("rate_distortion/ceo.json")["codecs"], path)


def rate_distortion(path: pathlib.Path) -> None:
    import rate_distortion as found

    found.plot(_read("rate_distortion/codecs.json")["codecs"], path)


def rate_distortion_gradients(path: pathlib.Path) -> None:
    import rate_distortion as found

    found.plot(_read("rate_distortion/codecs.json")["codecs"], path, "middle")


def fit(path: pathlib.Path) -> None:
    import laws

    laws.draw(_read("fit/fit.json"), path)


def _network(job: str) -> Callable[[pathlib.Path], None]:
    def make(path: pathlib.Path) -> None:
        import tables  # pyright: ignore[reportMissingImports]

        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(RESULTS / "network" / f"{job}.json", folder)
            tables.draw(pathlib.Path(folder))
            shutil.copy(pathlib.Path(folder) / f"{job}.png", path)

    return make


def _read(name: str) -> Any:
    return reporting.read(RESULTS / name)


def lower_bounds(path: pathlib.Path) -> None:
    import bounds

    bounds.draw(_read("reproductions/lower-bounds.json")["numbers"], path)


PICTURES: dict[str, Callable[[pathlib.Path], None]] = {
    "algorithms": algorithms,
    "algorithms_networks": algorithms_networks,
    "ceo": ceo,
    "federated_methods": federated_methods,
    "feedback": feedback,
    "fit": fit,
    "gossip": gossip,
    "local": _network("local"),
    "lower_bounds": lower_bounds,
    "network": _network("mean"),
    "network_training": _network("train"),
    "rate_distortion": rate_distortion,
    "rate_distortion_gradients": rate_distortion_gradients,
}


def main() -> None:
    options = reporting.options(__doc__, DOCS, picture=(PICTURES, "some of them"))
    for name in options.picture:
        PICTURES[name](options.out / f"{name}.png")


if __name__ == "__main__":
    main()
