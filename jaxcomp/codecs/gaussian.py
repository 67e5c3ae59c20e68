"""Quantizers for rotated buckets: a table of values for the distribution, and a fitted step."""

from jaxcomp import checks
from jaxcomp.codecs.quantizer import Quantizer
from jaxcomp.quantize import rounding, scales
from jaxcomp.quantize.tables import LloydMax, UniformThreshold

SCALES = {
    "unbiased": ("unbiased", 1),
    "minimum_error": ("least_squares", 0),
    "norm": ("norm", 0.5),
}
"""For each goal of a scale: the `fit` of a `Quantizer`, and the `power` of a `Part`."""


def quantizer(
    table: LloydMax | UniformThreshold, scale: str, bucket_size: int | None, block: int | None
) -> Quantizer:
    """Rounds to the nearest value of a table, in units of each block's root mean square.

    Args:
        table: the values.
        scale: the goal of the fitted step: "unbiased", "minimum_error" or "norm".
        bucket_size: elements in a bucket; None for one bucket per leaf.
        block: elements that share a step; None for the whole bucket.

    Raises:
        ValueError: for another scale, or sizes that are not positive.

    Example:
        >>> quantizer(LloydMax(2), "minimum_error", 4096, block=None).fit
        'least_squares'
    """
    checks.choice("scale", scale, tuple(SCALES))
    return Quantizer(
        levels=table,
        scale=scales.RootMeanSquare(times=table.reach),
        rounding=rounding.Nearest(),
        bucket_size=bucket_size,
        block=None if block == bucket_size else block,
        fit=SCALES[scale][0],
    )


def power(scale: str) -> int | float:
    """The power of the factor for a part of a block, as for `Part`."""
    checks.choice("scale", scale, tuple(SCALES))
    return SCALES[scale][1]


def rotations(table: UniformThreshold, given: int | None) -> int:
    """The number of rotations before these levels: `given`, or the number that they need.

    One rotation of a single nonzero element gives a block of elements of equal magnitude. If the
    zero cell reaches their root mean square, all of them become zero.

    Raises:
        ValueError: for numbers other than 1 and 2, or for one rotation if two are needed.

    Example:
        >>> rotations(UniformThreshold(entropy=2.0), None)
        1
        >>> rotations(UniformThreshold(entropy=0.5), None)
        2
    """
    checks.choice("rotations", given, (None, 1, 2))
    least = 1 if table.dead < 1 else 2
    if given is not None and given < least:
        raise ValueError(
            f"`rotations` must be 2, or None, at an entropy of {table.entropy} bits, at which "
            f"elements up to their root mean square become zero, got {given}: after one rotation, "
            "a bucket with a single nonzero element would never be sent"
        )
    return least if given is None else given
