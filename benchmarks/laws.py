"""Fits the laws that SIDCo assumes to a transformer's gradients, early, in the middle and late.

    python examples/byte_lm.py --codec dense --save-gradients
    python benchmarks/laws.py

It keeps what `jaxcomp fit` draws and prints, and draws it.
"""

import pathlib

import reporting

from jaxcomp.cli import files, fit
from jaxcomp.planning import plots

MOMENTS = ("early", "middle", "late")


def draw(told: dict, path: pathlib.Path) -> None:
    figure = plots.figure_class()(figsize=(10, 6.6), layout="constrained")
    fit.draw(figure, told)
    reporting.draw(figure, path, dpi=120)


def main() -> None:
    folder = pathlib.Path("out/byte_lm/gradients")
    options = reporting.options(
        __doc__,
        "out/fit",
        gradients=(folder, "of the example"),
        share=(0.01, "that a threshold should keep"),
    )
    found = {
        name: fit.fitted(files.arrays(options.gradients / f"{name}.npz"), options.share)
        for name in MOMENTS
    }
    told = {"share": options.share, "gradients": found}
    results = {"environment": reporting.environment(), **told}
    reporting.keep(options.out / "fit.json", results)
    draw(told, options.out / "fit.png")


if __name__ == "__main__":
    main()
