"""Real gradients as input of codecs, as `examples/byte_lm.py --save-gradients` saves them.

    python examples/byte_lm.py --codec dense --save-gradients
    gradient = gradients.load("out/byte_lm/gradients/early.npz")

A file is one worker's gradient before the mean: one float32 array a parameter, in its own shape and
under its path in the tree, such as `params/block_0/query/kernel`.
"""

import os
from collections.abc import Mapping

import numpy as np


def load(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """One gradient by the names of its leaves, in the order of the tree.

    Raises:
        ValueError: if the file has none, or arrays of another dtype than float32.
    """
    with np.load(path) as file:
        found = {name: file[name] for name in file.files}
    dtypes = {leaf.dtype.name for leaf in found.values()}
    if dtypes != {"float32"}:
        raise ValueError(
            f"`path` must be a file of float32 arrays, got {sorted(dtypes) or 'none'} in {path}"
        )
    return found


def flat(gradient: Mapping[str, np.ndarray]) -> np.ndarray:
    """The whole gradient as one float32 vector."""
    return np.concatenate([leaf.ravel() for leaf in gradient.values()])
