"""The picture of `scale.py`: the loss over tokens, and over the bytes that a worker has sent."""

import pathlib
from typing import Any

import reporting  # noqa: F401  It makes the examples importable.

# isort: split
import pictures  # pyright: ignore[reportMissingImports]

COLORS = {
    "dense": pictures.INK,
    "dense bfloat16": pictures.BASE,
    "qsgd_inf 4-bit": pictures.COLORS[0],
    "eden 1-bit": pictures.COLORS[5],
    "PowerSGD rank 8": pictures.COLORS[2],
    "SparseLoCo": pictures.COLORS[1],
    "MuLoCo 1 %": pictures.COLORS[4],
    "FSDP 8/4 bits": pictures.COLORS[3],
}


def plot(found: dict[str, Any], path: pathlib.Path) -> None:
    """A line a method in each panel, without its first point, where nothing was sent."""
    settings = found["settings"]
    done = {name: one["curve"][1:] for name, one in found["methods"].items() if one["curve"][1:]}
    if not done:
        return
    figure, ((left, right),) = pictures.page(
        f"The loss of {settings['parameters'] / 1e6:.0f} million parameters over tokens and bytes",
        f"Held-out bits per byte of Python sources; eight workers, {settings['windows']} windows "
        f"of {settings['context']} bytes each in a step, rounds of {settings['every']} steps.",
        columns=2,
        height=3.4,
        sharey=True,
    )
    for name, curve in done.items():
        _, tokens, sent, bits = zip(*curve, strict=True)
        look: Any = {"color": COLORS[name], "label": name}
        left.plot([count / 1e6 for count in tokens], bits, **look)
        right.plot([size / 1e6 for size in sent], bits, **look)
    left.set(xlabel="million tokens", ylabel="bits per byte, held out")
    right.set(xlabel="megabytes that a worker sent")
    pictures.log_axis(right, "x")
    pictures.name_ends(right, right.get_lines())
    pictures.save(figure, path)
