"""Worst cases: the relative variance `ω` that no input exceeds, `E‖C(x) − x‖² ≤ ω‖x‖²`."""

import math

from jaxcomp import checks

NATURAL_COMPRESSION = 1 / 8
"""ω of unbiased rounding to powers of two: the largest `m(1 − m)/(1 + m)²`, met at 4/3 of a power.

Horvath et al., `Natural compression <https://arxiv.org/abs/1905.10988>`_, 2019.
"""


def omega_l2(size: int, steps: int) -> float:
    """The worst ω of even levels, stochastic rounding and a Euclidean scale.

    `√d/s − 1` if `d ≥ 4s²`, attained by equal elements; else at most `d/4s²`, attained where all
    elements can lie half way between levels, as (5, 3, 1, 1)/6 does for s = 3.

    Args:
        size: elements that share a scale, `d`.
        steps: levels per side besides zero, `s`.

    Raises:
        ValueError: for numbers that are not positive integers.

    Example:
        >>> round(omega_l2(512, 7), 3)
        2.232

    References:
        Alistarh et al., `QSGD: communication-efficient SGD via gradient quantization and encoding
        <https://arxiv.org/abs/1610.02132>`_, 2017.

    Note:
        Sharper than the paper's `min(d/s², √d/s)`.
    """
    checks.integer("size", size, 1)
    checks.integer("steps", steps, 1)
    return math.sqrt(size) / steps - 1 if size >= 4 * steps**2 else size / (4 * steps**2)


def omega_max(size: int, steps: int) -> float:
    """The worst ω of even levels, stochastic rounding and the largest element as scale.

    `½(√(1 + (d − 1)/s²) − 1)`, attained by one element 1 and `d − 1` elements
    `(√(1 + (d − 1)/s²) − 1) s/(d − 1)`.

    Args:
        size: elements that share a scale, `d`.
        steps: levels per side besides zero, `s`.

    Raises:
        ValueError: for numbers that are not positive integers.

    Example:
        >>> round(omega_max(512, 7), 3)
        1.19

    References:
        Alistarh et al., `QSGD <https://arxiv.org/abs/1610.02132>`_, 2017.

    Note:
        The paper uses this scale without a bound. Usual input is far from the worst: a Gaussian
        bucket of 512 has 0.04 for s = 7.
    """
    checks.integer("size", size, 1)
    checks.integer("steps", steps, 1)
    return (math.sqrt(1 + (size - 1) / steps**2) - 1) / 2


def omega_exponential_l2(size: int, nonzero: int) -> float:
    """A bound on ω for powers of two as levels, stochastic rounding and a Euclidean scale.

    With levels 0, 2^−s, …, ½, 1: `2^−s √d − 1` if `d > (81/16) 4^s`, attained by equal elements;
    else `1/8 + (2/9) d 4^−s`.

    Args:
        size: elements that share a scale, `d`.
        nonzero: levels per side besides zero, `s + 1`.

    Raises:
        ValueError: for numbers that are not positive integers.

    Example:
        >>> round(omega_exponential_l2(512, 7), 3)
        0.153

    References:
        Ramezani-Kebrya et al., `NUQSGD: provably communication-efficient data-parallel SGD via
        nonuniform quantization <https://arxiv.org/abs/1908.06077>`_, 2021.

    Note:
        Not the paper's bound: elements below 2^−s, of energy t², cost at most `2^−s √d t − t²`, the
        others an eighth of theirs, and the worst t gives the formula.
    """
    checks.integer("size", size, 1)
    checks.integer("nonzero", nonzero, 1)
    reach = math.sqrt(size) * 2.0 ** (1 - nonzero)
    return reach - 1 if reach > 9 / 4 else NATURAL_COMPRESSION + 2 / 9 * reach**2


def omega_natural(size: int, nonzero: int, p: float = math.inf) -> float:
    """The published bound on ω for powers of two as levels and a p-norm as scale.

    With levels 0, 2^(1−s), …, ½, 1: `1/8 + a min(1, a)`, where `a = d^(1/r) 2^(1−s)` and
    `r = min(p, 2)`. Not sharp: for p = 2, and above, `omega_exponential_l2` is smaller and holds.

    Args:
        size: elements that share a scale, `d`.
        nonzero: levels per side besides zero, `s`.
        p: which norm, at least 1; infinity for the largest element.

    Raises:
        ValueError: for numbers that are not positive integers, or p below 1.

    Example:
        >>> round(omega_natural(512, 7), 3)
        0.25

    References:
        Horvath et al., `Natural compression <https://arxiv.org/abs/1905.10988>`_, 2019.
    """
    checks.integer("size", size, 1)
    checks.integer("nonzero", nonzero, 1)
    checks.number("p", min(p, 2), 1.0)
    reach = size ** (1 / min(p, 2)) * 2.0 ** (1 - nonzero)
    return NATURAL_COMPRESSION + reach * min(1, reach)


def omega_both(first: float, second: float) -> float:
    """The ω of two unbiased codecs in sequence: `(1 + ω₁)(1 + ω₂) − 1`.

    Args:
        first: `ω₁`.
        second: `ω₂`, of a codec with independent noise.

    Raises:
        ValueError: for negative numbers.

    Example:
        >>> omega_both(0.5, NATURAL_COMPRESSION)
        0.6875

    References:
        Horvath et al., `Natural compression <https://arxiv.org/abs/1905.10988>`_, 2019.
    """
    checks.number("first", first, 0.0)
    checks.number("second", second, 0.0)
    return (1 + first) * (1 + second) - 1


def rotated_peak(block: int) -> float:
    """A bound on the mean fraction of a rotated block's energy in its largest element.

    With random signs before the Hadamard transform every element is sub-Gaussian with `1/B` of the
    energy, so `E max zᵢ² ≤ 2(log(2B) + 1)/B · ‖x‖²`.

    Args:
        block: elements that are rotated together, `B`.

    Raises:
        ValueError: for a number that is not a positive integer.

    Example:
        >>> round(rotated_peak(4096), 4)
        0.0049

    References:
        Suresh et al., `Distributed mean estimation with limited communication
        <https://arxiv.org/abs/1611.00429>`_, 2017, whose lemma this is with its constant.
    """
    checks.integer("block", block, 1)
    return min(1.0, 2 * (math.log(2 * block) + 1) / block)
