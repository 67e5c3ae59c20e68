"""Draws the pictures of the documentation again, from the committed results.

    python benchmarks/redraw.py
    python benchmarks/redraw.py --picture algorithms local --out out/redrawn

It measures nothing, and overwrites pictures in docs/ unless `--out` names another folder.
"""

import importlib
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import reporting
from reporting import HERE, RESULTS

DOCS = HERE.parent / "docs"


def algorithms(path: pathlib.Path) -> None:
    import methods_plot

    methods_plot.draw(_read("convergence/methods.json")["curves"], path)


def algorithms_networks(path: pathlib.Path) -> None:
    import networks

    networks.draw(_read("convergence/networks.json")["curves"], path)


def feedback(path: pathlib.Path) -> None:
    import feedback as found

    found.draw(_read("feedback/feedback.json")["errors"], path)


def gossip(path: pathlib.Path) -> None:
    import gossip as found

    found.picture(_read("gossip/gossip.json"), path)


def federated(path: pathlib.Path) -> None:
    import federated_digits as example
    import pictures

    found = _read("federated/digits.json")
    runs = [
        example.Run(**{**run, "curve": [example.Point(**point) for point in run["curve"]]})
        for run in found["runs"]
    ]
    pictures.save(example.picture(runs, found["settings"]["rounds"]), path)


def federated_methods(path: pathlib.Path) -> None:
    import federated_methods_plot

    federated_methods_plot.plot(_read("federated/methods.json"), path)


def ceo(path: pathlib.Path) -> None:
    import ceo_plot

    ceo_plot.plot(_read("rate_distortion/ceo.json")["codecs"], path)


def rate_distortion(path: pathlib.Path) -> None:
    import rate_distortion as found

    found.plot(_read("rate_distortion/codecs.json")["codecs"], path)


def rate_distortion_gradients(path: pathlib.Path) -> None:
    import rate_distortion as found

    found.plot(_read("rate_distortion/codecs.json")["codecs"], path, "middle")


def fit(path: pathlib.Path) -> None:
    import laws

    laws.draw(_read("fit/fit.json"), path)


def codecs(path: pathlib.Path) -> None:
    import codecs_plot

    codecs_plot.plot(_read("cpu/codecs.json")["laws"], "25000000", path)


def gpu(path: pathlib.Path) -> None:
    import gpu_plot

    gpu_plot.plot(_read("gpu/kernels.json"), path)


def break_even(path: pathlib.Path) -> None:
    beyond = _of_network("beyond")
    import pictures

    found = _read("network/beyond.json")
    pictures.save(beyond.picture(beyond.read(found["rows"]), found["elements"]), path)


def lower_bounds(path: pathlib.Path) -> None:
    import bounds

    bounds.draw(_read("reproductions/lower-bounds.json")["numbers"], path)


def sharded_training(path: pathlib.Path) -> None:
    import who_sends

    who_sends.draw(path)


def sites(path: pathlib.Path) -> None:
    import sites as example

    example.draw(_read("sites/example.json"), path)


def weights(path: pathlib.Path) -> None:
    import weights_report

    weights_report.draw(_read("weights/example.json"), path)


def _of_network(name: str) -> Any:
    """A module of the network's folder."""
    if str(HERE / "network") not in sys.path:
        sys.path.append(str(HERE / "network"))
    return importlib.import_module(name)


def _network(job: str) -> Callable[[pathlib.Path], None]:
    def make(path: pathlib.Path) -> None:
        plots = _of_network("plots")
        book = _read(f"network/{job}.json")
        if job == "mean":
            _add_bfloat16(book, _read("network/bfloat16/mean.json"))
        plots.JOBS[job](book, path)

    return make


def _add_bfloat16(book: Any, later: Any) -> None:
    """Adds the dense means in bfloat16, which were measured later."""
    at = {(cell["rate"], cell["processes"]): cell["methods"] for cell in later["cells"]}
    for cell in book["cells"]:
        name, methods = "dense bfloat16", at.get((cell["rate"], cell["processes"]), {})
        if name in methods:
            cell["methods"][name] = methods[name] | {"environment": later["environment"]}


def _diagram(name: str) -> Callable[[pathlib.Path], None]:
    def make(path: pathlib.Path) -> None:
        import diagrams

        getattr(diagrams, name)(path)

    return make


def reproductions(path: pathlib.Path) -> None:
    import claims_plot

    claims_plot.plot(path)


def _example(kind: str, result: str) -> Callable[[pathlib.Path], None]:
    """The picture of the results of an example."""

    def make(path: pathlib.Path) -> None:
        import pictures
        import report

        drawn = importlib.import_module(f"{kind}_report")
        figure = drawn.picture(*report.read(RESULTS / "convergence" / result, drawn.METRIC))
        pictures.save(figure, path)

    return make


def _read(name: str) -> Any:
    return reporting.read(RESULTS / name)


PICTURES: dict[str, Callable[[pathlib.Path], None]] = {
    "algorithms": algorithms,
    "algorithms_networks": algorithms_networks,
    "break_even": break_even,
    "byte_lm": _example("byte_lm", "byte_lm_adam.json"),
    "byte_lm_sparse": _example("byte_lm", "byte_lm.json"),
    "ceo": ceo,
    "codecs": codecs,
    "diagram_error_feedback": _diagram("error_feedback"),
    "diagram_fsdp_dcn": _diagram("fsdp_dcn"),
    "diagram_two_shot": _diagram("two_shot"),
    "digits": _example("digits", "digits_demo.json"),
    "digits_sparse": _example("digits", "digits.json"),
    "federated": federated,
    "federated_methods": federated_methods,
    "feedback": feedback,
    "fit": fit,
    "gossip": gossip,
    "gpu": gpu,
    "local": _network("local"),
    "lower_bounds": lower_bounds,
    "network": _network("mean"),
    "network_training": _network("train"),
    "rate_distortion": rate_distortion,
    "rate_distortion_gradients": rate_distortion_gradients,
    "reproductions": reproductions,
    "sharded_training": sharded_training,
    "sites": sites,
    "weights": weights,
}


def main() -> None:
    options = reporting.options(__doc__, DOCS, picture=(PICTURES, "some of them"))
    for name in options.picture:
        PICTURES[name](options.out / f"{name}.png")


if __name__ == "__main__":
    main()
