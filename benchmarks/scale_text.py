"""The text of `scale.py`: the sources of four packages, 51 MB of Python and its comments.

    python benchmarks/scale_text.py

It compares the installed files with the committed list, and says where they differ.
"""

import hashlib
import pathlib
import zlib
from importlib import metadata
from typing import NamedTuple

import numpy as np
import reporting  # It makes the examples importable, too.

import byte_lm_model  # isort: skip  # pyright: ignore[reportMissingImports]

del reporting


class Source(NamedTuple):
    """A package: its version in `constraints.txt`, its files and their bytes, and their digest."""

    version: str
    files: int
    bytes: int
    digest: str


PACKAGES = {
    "matplotlib": Source("3.11.2", 289, 8_077_571, "fee9b816a9109aed"),
    "numpy": Source("2.4.6", 486, 9_113_427, "402088220237b72a"),
    "scikit-learn": Source("1.9.1", 671, 13_444_062, "d973aa5069a188f3"),
    "scipy": Source("1.17.1", 972, 20_756_889, "a12dfa4988537b43"),
}
"""In this order; of each all `*.py` in the order of their names."""
DIFFER = {"__config__.py"}
"""Written when a wheel is built: they name its compiler and its Python."""
HELD_OUT = 40
"""One of so many files, chosen by its name, is held out."""


def files(package: str) -> dict[str, pathlib.Path]:
    """The sources of an installed package, by name, in their order.

    Raises:
        FileNotFoundError: if it is not installed, or without its sources.
    """
    try:
        listed = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        listed = []
    found = {str(path): pathlib.Path(str(path.locate())) for path in listed if path.suffix == ".py"}
    found = {name: path for name, path in sorted(found.items()) if path.name not in DIFFER}
    if not found:
        raise FileNotFoundError(f"{package} is not installed, or without its sources (*.py)")
    return found


def source_of(package: str, contents: dict[str, bytes]) -> Source:
    """The entry of `PACKAGES` that belongs to these contents of files."""
    digest = hashlib.sha256()
    for name, content in contents.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    size = sum(map(len, contents.values()))
    return Source(metadata.version(package), len(contents), size, digest.hexdigest()[:16])


def read() -> tuple[byte_lm_model.Text, list[str]]:
    """The text, and a line for each package that is not the one of the committed list."""
    parts: tuple[list[bytes], list[bytes]] = [], []
    differ, digests = [], []
    for package, wanted in PACKAGES.items():
        contents = {name: path.read_bytes() for name, path in files(package).items()}
        found = source_of(package, contents)
        digests.append(found.digest)
        if found != wanted:
            differ.append(f"{package} is {tuple(found)}, the committed list has {tuple(wanted)}")
        for name, content in contents.items():
            parts[zlib.crc32(name.encode()) % HELD_OUT == 0].append(content)
    train, validation = (np.frombuffer(b"\0".join(part), np.uint8) for part in parts)
    digest = hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16]
    return byte_lm_model.Text(train, validation, digest), differ


def main() -> None:
    text, differ = read()
    print(
        f"{len(text.train):,} bytes to train on, {len(text.validation):,} held out, {text.digest}"
    )
    print("\n".join(differ) or "all files are those of the committed list")


if __name__ == "__main__":
    main()
