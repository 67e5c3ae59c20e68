"""Block floating-point formats, as data."""

from typing import NamedTuple

from jaxcomp import checks
from jaxcomp.quantize import levels, rounding, steps


class Format(NamedTuple):
    """Elements of few bits in blocks that share a step.

    Attributes:
        positive: values above zero.
        mantissa: bits behind the point.
        block: elements that share a step.
        two_level: whether steps are FP8 multiples of one float32 per bucket, not powers of two.
    """

    positive: int
    mantissa: int
    block: int = 32
    two_level: bool = False


FORMATS = {
    "mxfp4": Format(7, 1),
    "mxfp6": Format(31, 3),
    "mxfp6_e3m2": Format(31, 2),
    "mxfp8": Format(126, 3),
    "mxfp8_e5m2": Format(123, 2),
    "nvfp4": Format(7, 1, block=16, two_level=True),
}
"""Elements E2M1, E2M3, E3M2, E4M3, E5M2 and E2M1."""

_ROUNDINGS = {
    "even": ("even", rounding.Nearest()),
    "away": ("away", rounding.Nearest()),
    "stochastic": ("away", rounding.Stochastic()),
}


def levels_and_rounding(format: str, to: str) -> tuple[levels.Float, rounding.Rounding]:
    """The levels and the rounding for the elements of a format.

    Raises:
        ValueError: for another `format` or `rounding`.

    Example:
        >>> levels_and_rounding("mxfp4", "even")
        (Float(positive=7, mantissa=1, ties='even'), Nearest())
    """
    checks.choice("format", format, tuple(FORMATS))
    checks.choice("rounding", to, tuple(_ROUNDINGS))
    ties, found = _ROUNDINGS[to]
    return levels.Float(FORMATS[format].positive, FORMATS[format].mantissa, ties), found


def block_steps(format: str, rule: str) -> steps.Steps:
    """The steps of a format's blocks.

    Raises:
        ValueError: for another `format` or `rule`, or a rule for two-level steps.

    Example:
        >>> block_steps("mxfp4", "floor")
        PowerOfTwo(rule='floor')
    """
    checks.choice("format", format, tuple(FORMATS))
    if not FORMATS[format].two_level:
        return steps.PowerOfTwo(rule)
    if rule != "floor":
        raise ValueError(
            f"`rule` must be left out for {format!r}, whose steps are not powers of two, got "
            f"{rule!r}; a format such as 'mxfp4' has one"
        )
    return steps.TwoLevel()
