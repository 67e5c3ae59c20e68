"""The bytes of a patch before there is one: for normal weights and a normal step."""

from typing import NamedTuple

import numpy as np

from jaxcomp import checks, tables
from jaxcomp.tables import Column
from jaxcomp.theory import units
from jaxcomp.theory.cost import Network
from jaxcomp.weights import fast
from jaxcomp_weights import patterns

_SIGMA = 0.02
_SAMPLE = 1 << 20
_OVER = 1.05
"""Bytes of the small coding over the entropy: 1.02 to 1.07 in `results/weights/bytes.md`."""


class Sent(NamedTuple):
    """A way to send a version.

    Attributes:
        way: its name.
        size: bytes.
        ratio: dense bytes divided by these.
        seconds: the time on the link.
    """

    way: str
    size: float
    ratio: float
    seconds: float


class Forecast(NamedTuple):
    """The bytes and seconds of a version on a link.

    Attributes:
        changed: the fraction of numbers that change.
        one: the fraction of them that move by one unit in the last place.
        ways: dense, and the two codings of patches.
    """

    changed: float
    one: float
    ways: tuple[Sent, ...]

    def __str__(self) -> str:
        about = f"{self.changed:.3%} of the weights change, {self.one:.0%} of them by one unit."
        columns = (
            Column("way", "way"),
            Column("bytes", "size", ",.0f", right=True),
            Column("times less", "ratio", ".1f", right=True),
            Column("seconds", "seconds", units.duration, right=True),
        )
        return f"{about}\n\n{tables.text(columns, self.ways)}"


def forecast(
    weights: float,
    network: Network,
    *,
    rate: float,
    rms: float = 0.2,
    dtype: str = "bfloat16",
) -> Forecast:
    """Forecasts the bytes of a patch for normal weights, whose steps are normal too.

    A weight of standard deviation 0.02 moves by `rate · rms · z` in higher precision, with normal
    `z`; compared are its roundings to `dtype`. Real weights differ: `jaxcomp weights URL` shows the
    bytes of published versions.

    Args:
        weights: the number of weights.
        network: the link of a reader.
        rate: the learning rate.
        rms: the root mean square of Adam's step at rate 1: about 0.2 in training, up to 1.
        dtype: the dtype of the receivers.

    Raises:
        ValueError: for numbers that are not positive, or another dtype.

    Example:
        >>> found = forecast(7e9, Network(12.5e6), rate=3e-6)
        >>> [(one.way, round(one.ratio)) for one in found.ways]
        [('dense', 1), ('fast', 75), ('small', 113)]
    """
    for name, value in (("weights", weights), ("rate", rate), ("rms", rms)):
        checks.positive(name, value)
    checks.part("network", network, Network)
    checks.choice("dtype", dtype, tuple(n for n, f in patterns.FORMATS.items() if f.exponent))
    draw = np.random.default_rng(0)
    exact = _SIGMA * draw.standard_normal(_SAMPLE)
    moved = exact + rate * rms * draw.standard_normal(_SAMPLE)
    kind, bits = patterns.dtype(dtype), patterns.unsigned(dtype)
    old, new = (x.astype(np.float32).astype(kind).view(bits) for x in (exact, moved))
    before, after = (patterns.order(x, dtype).astype(np.int64) for x in (old, new))
    steps = after - before
    hits = steps != 0
    count = int(hits.sum())
    size = patterns.itemsize(dtype)
    fewest = _OVER * _entropy(steps, patterns.classes(old, dtype)) if count else 0.0
    ways = {"dense": 8.0 * size, "fast": _fast(steps, count), "small": fewest}
    sent = (
        Sent(way, weights * bits / 8, 8 * size / max(bits, 1e-12), 0.0)
        for way, bits in ways.items()
    )
    return Forecast(
        count / _SAMPLE,
        float(np.mean(np.abs(steps[hits]) == 1)) if count else 0.0,
        tuple(one._replace(seconds=network.latency + one.size / network.bandwidth) for one in sent),
    )


def _entropy(steps: np.ndarray, classes: np.ndarray) -> float:
    """Bits of a number's step given its class."""
    total = 0.0
    for one in np.unique(classes):
        _, counts = np.unique(steps[classes == one], return_counts=True)
        total -= float(np.sum(counts * np.log2(counts / counts.sum())))
    return total / steps.size


def _fast(steps: np.ndarray, count: int) -> float:
    """Bits of a number in the fast coding."""
    if not count:
        return 0.0
    low = fast.low_bits(count, steps.size)
    positions = count * (1 + low) + (steps.size >> low)
    lengths = np.floor(np.log2(np.abs(steps[steps != 0]))) + 1
    return float(positions + np.sum(2 * lengths)) / steps.size
