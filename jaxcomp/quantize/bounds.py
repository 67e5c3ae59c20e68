"""Worst-case variances for combinations of levels, scales, roundings and steps."""

from jaxcomp.quantize.levels import Float, Levels, MidRise, Uniform
from jaxcomp.quantize.rounding import Rounding, Subtractive
from jaxcomp.quantize.scales import L2, MaxAbs, PNorm, Scale
from jaxcomp.quantize.steps import Exact, PowerOfTwo, Steps
from jaxcomp.theory import worst_case


def variance(
    levels: Levels, scale: Scale, rounding: Rounding, steps: Steps, size: int
) -> float | None:
    """The smallest known `ω` of unbiased parts for buckets of `size` elements, None for none.

    Example:
        >>> from jaxcomp.quantize.rounding import Stochastic
        >>> round(variance(Uniform(7), MaxAbs(), Stochastic(), Exact(), 512), 3)
        1.19
    """
    if isinstance(levels, Float):
        omega = None if levels.mantissa else _powers(levels, scale, size)
    elif not isinstance(levels, Uniform | MidRise) or not isinstance(scale, L2 | MaxAbs):
        omega = None
    elif isinstance(levels, MidRise) or isinstance(rounding, Subtractive):
        omega = even(levels, rounding, size)
    else:
        worst = worst_case.omega_l2 if isinstance(scale, L2) else worst_case.omega_max
        omega = worst(size, levels.steps)
    if omega is None or isinstance(steps, Exact):
        return omega
    natural = isinstance(steps, PowerOfTwo) and steps.rule == "stochastic"
    return worst_case.omega_both(omega, worst_case.NATURAL_COMPRESSION) if natural else None


def even(levels: Uniform | MidRise, rounding: Rounding, size: int) -> float:
    """The worst-case error of a bucket with evenly spaced levels, in squared scales.

    It is a quarter of a squared spacing for every element; with subtractive dither, always a
    twelfth.

    Example:
        >>> from jaxcomp.quantize.rounding import Subtractive
        >>> even(Uniform(1), Subtractive(), 12)
        1.0
    """
    spacing = 2 if isinstance(levels, MidRise) else 1
    part = (spacing / levels.magnitude) ** 2
    return size * part / (12 if isinstance(rounding, Subtractive) else 4)


def _powers(levels: Float, scale: Scale, size: int) -> float | None:
    """The bound for levels that are powers of two."""
    if isinstance(scale, PNorm) and scale.p < 2:
        return worst_case.omega_natural(size, levels.positive, float(scale.p))
    if isinstance(scale, L2 | MaxAbs | PNorm):
        return worst_case.omega_exponential_l2(size, levels.positive)
    return None
