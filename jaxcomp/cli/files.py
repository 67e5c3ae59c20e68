"""Files that a user names: read whole, or refused in one line."""

import pathlib
import zipfile

import numpy as np


def arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The arrays of floating numbers of a file that `numpy.savez` wrote, by their names.

    Raises:
        ValueError: for a file that cannot be read, is not of arrays, or holds other arrays.
    """
    wanted = "a gradient must be a file of arrays, as numpy.savez writes it"
    try:
        with path.open("rb") as opened, np.load(opened) as file:
            found = {name: file[name] for name in file.files}
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # A broken file reaches zipfile, zlib, tokenize and ast.
        if zipfile.is_zipfile(path):
            kind = type(error).__name__
            raise ValueError(f"{wanted}, got {str(path)!r}: {kind}: {error}") from None
        raise ValueError(
            f"{wanted}, got {str(path)!r}, which is none: save an array for each parameter, as in "
            'numpy.savez("early.npz", **{"block/kernel": gradient})'
        ) from None
    kinds = {name: leaf.dtype.name for name, leaf in found.items() if leaf.dtype.kind != "f"}
    if kinds or not any(leaf.size for leaf in found.values()):
        had = f"{next(iter(kinds.values()))} in {next(iter(kinds))}" if kinds else "no element"
        raise ValueError(f"{wanted}, of float16, float32 or float64, got {had} of {str(path)!r}")
    return found
