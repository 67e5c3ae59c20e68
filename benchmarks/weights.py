"""Bytes and seconds of a version of weights: patches, snapshots, and what others send.

    python benchmarks/weights.py                    # four million weights a row
    python benchmarks/weights.py --speed 100000000  # the speed of the first row, too

Normal weights of standard deviation 0.02 move by rate · rms · normal; compared are their roundings
to bfloat16. Dense bytes are divided by the bytes of each way. Zstandard runs at level 3 on one
thread, as XLA's programs take what cores there are; ZipNN runs where it is installed.
"""

import gc
import hashlib
import io
import statistics
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import reporting
import zstandard

from jaxcomp.weights import encoding
from jaxcomp_weights import drafts, patterns, selections, stores
from jaxcomp_weights.layouts import Layout, Leaf, Tile

ROWS = ((1e-6, 0.2), (3e-6, 0.2), (3e-6, 1.0), (1e-5, 0.5), (3e-4, 0.2))
PIECE = 1 << 20
CODINGS = ("fast", "small")

COLUMNS = (
    "rate {rate:g} | rms {rms:g} | changed {changed:.2%} | index + value {pairs:.1f} | "
    "gaps and values, zstd {gaps:.1f} | XOR, zstd {xor:.1f} | entropy given class {entropy:.1f} | "
    "fast {fast:.1f} | small {small:.1f} | snapshot {snapshot:.3f} | its bound {bound:.3f} | "
    "ZipNN {zipnn}"
)
SPEEDS = (
    "way {way} | encode, s {encode:.2f} | speed, XOR + zstd is 1 {relative:.2f} | "
    "read and apply, s {read:.2f} | speed {read_relative:.2f} | peak memory of reading, MB {peak}"
)


def pair(size: int, rate: float, rms: float) -> tuple[np.ndarray, np.ndarray]:
    """The bits of weights before and after a step."""
    draw = np.random.default_rng(0)
    exact = draw.standard_normal(size, np.float32) * np.float32(0.02)
    moved = exact - np.float32(rate * rms) * draw.standard_normal(size, np.float32)
    old, new = (x.astype(ml_dtypes.bfloat16).view("<u2") for x in (exact, moved))
    return old, new


def entropy(old: np.ndarray, new: np.ndarray) -> float:
    """Bytes of positions and steps, given the exponents of the old weights."""
    before, after = (patterns.order(x, "bfloat16").astype(np.int64) for x in (old, new))
    exponent, step, bits = (old >> 7) & 0xFF, after - before, 0.0
    for one in np.unique(exponent):
        _, counts = np.unique(step[exponent == one], return_counts=True)
        bits -= float(np.sum(counts * np.log2(counts / counts.sum())))
    return bits / 8


def varints(numbers: np.ndarray) -> bytes:
    """Numbers of seven bits a byte, from the lowest."""
    parts = np.stack([numbers >> (7 * k) & 127 for k in range(5)], axis=1).astype(np.uint8)
    lengths = np.maximum(1, -(-np.ceil(np.log2(numbers + 1)).astype(int) // 7))
    place = np.arange(5)
    parts |= np.where(place < lengths[:, None] - 1, 128, 0).astype(np.uint8)
    return parts[place < lengths[:, None]].tobytes()


def gaps(old: np.ndarray, new: np.ndarray) -> bytes:
    """Varints of the gaps between changed weights and their new values, by Zstandard."""
    where = np.flatnonzero(old != new)
    body = varints(np.diff(where, prepend=-1) - 1) + new[where].tobytes()
    return zstandard.ZstdCompressor(level=3).compress(body)


def xor(old: np.ndarray, new: np.ndarray) -> bytes:
    """The XOR of all weights, by Zstandard."""
    return zstandard.ZstdCompressor(level=3).compress((old ^ new).data)


def read_xor(old: np.ndarray, data: bytes) -> np.ndarray:
    found = np.frombuffer(zstandard.ZstdDecompressor().decompress(data), "<u2")
    return np.bitwise_xor(found, old)


def zipnn(bits: np.ndarray) -> str:
    """Bytes a weight of the package zipnn, if it is installed."""
    try:
        import zipnn as package  # pyright: ignore[reportMissingImports]
    except ImportError:
        return ""
    coder = package.ZipNN(bytearray_dtype="bfloat16")
    return f"{len(coder.compress(bits.tobytes())) / bits.size:.3f}"


def layout_of(size: int) -> Layout:
    leaf, tile = Leaf("w", "bfloat16", (size,)), Tile(0, (0,), (size,))
    return Layout((leaf,), ((tile,),), PIECE)


def on_device(bits: np.ndarray) -> list[jax.Array]:
    return [jnp.asarray(bits.view(ml_dtypes.bfloat16))]


def applied(layout: Layout, data: bytes, before: drafts.Draft | None) -> drafts.Draft:
    """A file that is read, as a reader does it: with both checksums."""
    selection = selections.select(layout, None)
    draft = drafts.Draft(layout, selection)
    if before is not None:
        draft = drafts.Draft(layout, selection, before.arrays, before.sums)
    summed = hashlib.sha256(data).hexdigest()
    stream = stores.Stream("file", io.BytesIO(data), len(data), summed)
    draft.apply(stream, 0, snapshot=before is None)
    return draft


def sizes(size: int, rate: float, rms: float) -> dict[str, Any]:
    """A row of the table: dense bytes divided by those of each way."""
    return {"rate": rate, "rms": rms, **compared(*pair(size, rate, rms))}


def compared(old: np.ndarray, new: np.ndarray) -> dict[str, Any]:
    """Dense bytes divided by those of each way, for the bits of weights before and after a step."""
    size = old.size
    layout, dense = layout_of(size), 2 * size
    changed = np.count_nonzero(old != new)
    sums: list[Any] = []
    snapshot = b"".join(encoding.snapshot(on_device(old), layout, 0, sums))
    draft = applied(layout, snapshot, None)
    found = {}
    for coding in CODINGS:
        after = list(sums)
        parts = encoding.patch(on_device(old), on_device(new), layout, 0, coding, after)
        data = b"".join(parts)
        if applied(layout, data, draft).arrays[0].tobytes() != new.tobytes():
            raise AssertionError(f"{coding} is not lossless")
        found[coding] = dense / len(data)
    exponents = np.bincount((old >> 7) & 0xFF)
    exponents = exponents[exponents > 0] / size
    return {
        "changed": changed / size,
        "pairs": dense / (6 * changed),
        "gaps": dense / len(gaps(old, new)),
        "xor": dense / len(xor(old, new)),
        "entropy": dense / entropy(old, new),
        **found,
        "snapshot": len(snapshot) / size,
        "bound": (8 - float(np.sum(exponents * np.log2(exponents)))) / 8,
        "zipnn": zipnn(old),
    }


class Peak:
    """The most memory of the process above that at the begin, in bytes."""

    def __enter__(self) -> "Peak":
        gc.collect()
        self._begin, self.most, self._going = resident(), 0, True
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._going = False
        self._thread.join()

    def _watch(self) -> None:
        while self._going:
            self.most = max(self.most, resident() - self._begin)
            time.sleep(0.002)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def speeds(size: int, turns: int) -> list[dict[str, Any]]:
    """Seconds of encoding and of reading, of all ways in turns."""
    old, new = pair(size, *ROWS[0])
    layout = layout_of(size)
    before, after = on_device(old), on_device(new)
    sums: list[Any] = []
    draft = applied(layout, b"".join(encoding.snapshot(before, layout, 0, sums)), None)

    def encode(coding: str) -> bytes:
        if coding == "XOR + zstd 3":
            return xor(old, new)
        parts = encoding.patch(before, after, layout, 0, coding, list(sums))
        return b"".join(parts)

    def read(coding: str, data: bytes) -> Any:
        return read_xor(old, data) if coding == "XOR + zstd 3" else applied(layout, data, draft)

    ways = ("XOR + zstd 3", *CODINGS)
    took: dict[str, tuple[list[float], list[float]]] = {way: ([], []) for way in ways}
    peaks = dict.fromkeys(ways, 0)
    for turn in range(turns + 1):
        for way in ways:
            start = time.perf_counter()
            data = encode(way)
            middle = time.perf_counter()
            with Peak() as peak:
                begin = time.perf_counter()
                found = read(way, data)
                end = time.perf_counter()
            del found
            peaks[way] = max(peaks[way], peak.most)
            if turn:  # The first one compiles.
                took[way][0].append(middle - start)
                took[way][1].append(end - begin)
    base = tuple(map(statistics.median, took[ways[0]]))
    rows = []
    for way in ways:
        encoding_, reading = map(statistics.median, took[way])
        rows.append(
            {
                "way": way,
                "encode": encoding_,
                "relative": base[0] / encoding_,
                "read": reading,
                "read_relative": base[1] / reading,
                "peak": round(peaks[way] / 1e6),
            }
        )
    return rows


def main() -> None:
    given = reporting.options(
        __doc__,
        reporting.HERE / "results" / "weights",
        size=(1 << 22, "weights of a row"),
        speed=(0, "weights to time, none by default"),
        turns=(5, "of timing"),
    )
    rows = [sizes(given.size, *row) for row in ROWS]
    table = reporting.Table("Weights: dense bytes over bytes", COLUMNS, rows)
    reporting.show(table, {"size": given.size, "rows": rows}, given.out / "bytes.md")
    if given.speed:
        timed = speeds(given.speed, given.turns)
        title = f"Weights: {given.speed:,} of them, rate {ROWS[0][0]:g}, rms {ROWS[0][1]:g}"
        table = reporting.Table(title, SPEEDS, timed)
        reporting.show(table, {"size": given.speed, "ways": timed}, given.out / "speeds.md")


if __name__ == "__main__":
    main()
