"""QSGD in planners of federated rounds: its published variance, and the bits of a message."""

import math

from jaxcomp import checks


def qsgd_variance(size: int, levels: float) -> float:
    """`q = min(D/s², √D/s)`, the published bound of QSGD's relative variance with `s` levels.

    Args:
        size: `D`, the number of elements with one scale.
        levels: `s`, levels per side besides zero. Planners also take numbers that are no integers.

    Raises:
        ValueError: for numbers that are not positive.

    Example:
        >>> qsgd_variance(10_000, 50)
        2.0

    References:
        Alistarh et al., `QSGD <https://arxiv.org/abs/1610.02132>`_, 2017.

    Note:
        `jaxcomp.theory.worst_case.omega_l2` is sharper; planners use the bound of their papers.
    """
    checks.integer("size", size, 1)
    checks.positive("levels", levels)
    return min(size / levels**2, math.sqrt(size) / levels)


def qsgd_bits(size: int, levels: float) -> float:
    """`32 + D + D log₂ s`, the bits of a message: a scale, and a sign and a level an element.

    Args:
        size: `D`, the number of elements.
        levels: `s`, at least 1.

    Raises:
        ValueError: for numbers that are not positive, or fewer levels than 1.

    Example:
        >>> qsgd_bits(1000, 4)
        3032.0

    References:
        Alistarh et al., `QSGD <https://arxiv.org/abs/1610.02132>`_, 2017; the formula is that of
        Li, Cui and Lau, `Optimization-based GenQSGD <https://arxiv.org/abs/2111.00526>`_, 2021.

    Note:
        The level zero is not counted; `jaxcomp.wire_bytes` has the bytes of our payloads.
    """
    checks.integer("size", size, 1)
    checks.number("levels", levels, 1.0)
    return 32 + size + size * math.log2(levels)
