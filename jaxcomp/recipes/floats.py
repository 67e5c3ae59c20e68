"""Quantizers with float-like levels, which are denser near zero."""

from jaxcomp import checks
from jaxcomp.codecs.adaptive import AdaptiveQuantizer
from jaxcomp.codecs.natural import Natural
from jaxcomp.codecs.quantizer import Quantizer
from jaxcomp.quantize import formats, levels, rounding as rounding_, scales, steps


def nuqsgd(bits: int = 4, bucket_size: int | None = 512) -> Quantizer:
    """Levels `0, 2⁻ˢ, …, ½, 1` of the Euclidean bucket norm, unbiased rounding.

    `s = 2^(bits−1) − 2`. With `d` elements the relative variance is at most
    `1/8 + (2/9)·d·4⁻ˢ` for `d ≤ (81/16)·4ˢ`, else `2⁻ˢ√d − 1`.

    Args:
        bits: width of a code, 2 to 7.
        bucket_size: elements that share a norm; None for one norm a leaf.

    Raises:
        ValueError: for other widths or a bucket size that is not positive.

    Example:
        >>> nuqsgd(bits=4).levels.magnitude
        64

    References:
        Ramezani-Kebrya et al., `NUQSGD: provably communication-efficient data-parallel SGD via
        nonuniform quantization <https://arxiv.org/abs/1908.06077>`_, 2021.

    Note:
        Codes have fixed width instead of Elias codes. The published bound, as we remember it, does
        not hold at its threshold on `d`; the bound above is ours, and tight. At four bits
        `qsgd_inf` is better for Gaussian input in buckets of 512, and `nuqsgd` is better for very
        heavy tails and large buckets. At three bits `nuqsgd` has a large error.
    """
    checks.integer("bits", bits, 2, 7)
    return natural_dithering(bits, p=2, bucket_size=bucket_size)


def alq(
    bits: int = 4, bucket_size: int | None = 512, *, every: int = 100, pooled: bool = False
) -> AdaptiveQuantizer:
    """Adaptive levels (ALQ), each optimised separately for the gradients' magnitudes.

    The levels minimise the variance `Σⱼ ∫ (r − lⱼ)(lⱼ₊₁ − r) dF` for the magnitudes
    `r = |x| / ‖x‖` of all workers, by coordinate descent: each level is optimal between its
    neighbours.

    Args:
        bits: width of a code, 2 to 8.
        bucket_size: elements that share a norm; None for one norm a leaf.
        every: the number of steps between updates of the levels; the first comes after one step.
        pooled: weight all buckets equally (ALQ-N) instead of by their squared norm.

    Raises:
        ValueError: for other widths, or a schedule or bucket size that is not positive.

    Example:
        >>> alq(bits=3).facts.bits_per_element
        3.0625

    References:
        Faghri et al., `Adaptive gradient quantization for data-parallel SGD
        <https://arxiv.org/abs/2010.12460>`_, 2020.

    Note:
        `F` is the histogram of the magnitudes instead of the paper's truncated normal distribution,
        and updates come at fixed intervals instead of at learning-rate drops.
    """
    return AdaptiveQuantizer(
        width=bits, rule="alq", every=every, pooled=pooled, bucket_size=bucket_size
    )


def amq(
    bits: int = 4, bucket_size: int | None = 512, *, every: int = 100, pooled: bool = False
) -> AdaptiveQuantizer:
    """Adaptive levels `0, …, p², p, 1` of the norm (AMQ), with `p` optimised for the gradients.

    Args:
        bits: width of a code, 2 to 8.
        bucket_size: elements that share a norm; None for one norm a leaf.
        every: the number of steps between updates of the levels; the first comes after one step.
        pooled: weight all buckets equally instead of by their squared norm.

    Raises:
        ValueError: for other widths, or a schedule or bucket size that is not positive.

    Example:
        >>> amq(bits=4).rule
        'amq'

    References:
        Faghri et al., `Adaptive gradient quantization for data-parallel SGD
        <https://arxiv.org/abs/2010.12460>`_, 2020.

    Note:
        `p` is searched on a grid instead of by the paper's gradient descent from several starts;
        there is a zero level, which the authors' code does not have.
    """
    return AdaptiveQuantizer(
        width=bits, rule="amq", every=every, pooled=pooled, bucket_size=bucket_size
    )


def natural(bits: int = 9, bucket_size: int | None = 512) -> Natural:
    """Rounds each element to one of the two nearest powers of two, unbiased.

    A mantissa `1 + m` is rounded up with probability `m`: the relative variance is at most 1/8.

    Args:
        bits: 9 for a sign and a full exponent, or 8 for a sign and one of the 127 exponents up to
            the largest of the bucket.
        bucket_size: elements in a bucket; it matters only for `bits=8`.

    Raises:
        ValueError: for other widths or a bucket size that is not positive.

    Example:
        >>> natural().facts.bits_per_element
        9.0

    References:
        Horváth et al., `Natural compression for distributed deep learning
        <https://arxiv.org/abs/1905.10988>`_, 2019.

    Note:
        An element below 2⁻¹²⁶ becomes zero, and one above 2¹²⁷ becomes 2¹²⁷; these two cases are
        biased. The authors' 8 bits cover 2⁻¹⁰⁹ to 2¹⁷ or 2¹⁸, by version; here the range is set
        by the bucket's largest exponent.
    """
    return Natural(bits=bits, bucket_size=bucket_size)


def natural_dithering(
    bits: int = 4,
    *,
    p: int | float = float("inf"),
    bucket_size: int | None = 512,
    natural_norm: bool = False,
) -> Quantizer:
    """Levels `0, 2^(1−s), …, ½, 1` of the bucket's p-norm, unbiased rounding.

    `s = 2^(bits−1) − 1`; relative variance at most `1/8 + a · min(1, a)` with
    `a = d^(1/min(p, 2)) 2^(1−s)`.

    Args:
        bits: width of a code, 2 to 7.
        p: the exponent of the norm, at least 1; infinity for the largest element.
        bucket_size: elements that share a norm; None for one norm a leaf.
        natural_norm: send the norm as a power of two in eight bits, rounded at random too, which
            changes the variance to `9ω/8 + 1/8`.

    Raises:
        ValueError: for other widths, a `p` below 1, or a bucket size that is not positive.

    Example:
        >>> natural_dithering(bits=4, natural_norm=True).facts.bits_per_element
        4.015625

    References:
        Horváth et al., `Natural compression for distributed deep learning
        <https://arxiv.org/abs/1905.10988>`_, 2019.

    Note:
        Fixed-width codes. With `p = 2` this is NUQSGD.
    """
    checks.integer("bits", bits, 2, 7)
    norms = {2: scales.L2(), float("inf"): scales.MaxAbs()}
    return Quantizer(
        levels=levels.Float(positive=2 ** (bits - 1) - 1),
        scale=norms[p] if isinstance(p, int | float) and p in norms else scales.PNorm(p),
        rounding=rounding_.Stochastic(),
        steps=steps.PowerOfTwo("stochastic") if natural_norm else steps.Exact(),
        bucket_size=bucket_size,
    )


def mx(
    format: str = "mxfp4",
    *,
    rule: str = "floor",
    rounding: str = "even",
    bucket_size: int | None = 512,
) -> Quantizer:
    """Microscaling floats: elements of 4, 6 or 8 bits, and a power of two for each block of 32.

    Args:
        format: "mxfp4", "mxfp6" (E2M3), "mxfp6_e3m2", "mxfp8" (E4M3), "mxfp8_e5m2", or "nvfp4",
            blocks of 16 whose steps are FP8 multiples of one float32 per bucket.
        rule: the rule for the power of two: "floor" keeps the exponent of the largest element, and
            clips that element if its mantissa exceeds the format's; "even" rounds the mantissa
            first; "ceil" never clips. "nvfp4" has no such rule.
        rounding: the rounding of elements: to nearest with ties to "even" or "away" from zero, or
            "stochastic", which is unbiased with `rule="ceil"`.
        bucket_size: elements that are packed together; None for the whole leaf.

    Raises:
        ValueError: for another format, rule or rounding, a rule for "nvfp4", or a bucket size that
            is not positive.

    Example:
        >>> mx("mxfp4").facts.bits_per_element, mx("nvfp4").facts.bits_per_element
        (4.25, 4.5625)

    References:
        Rouhani et al., `Microscaling data formats for deep learning
        <https://arxiv.org/abs/2310.10537>`_, 2023; Open Compute Project, OCP microscaling formats
        specification 1.0, 2023; NVIDIA, Pretraining large language models with NVFP4, 2025.

    Note:
        Steps, which are the smallest elements of blocks, are at least 2⁻¹²⁶, the smallest float32
        that a CPU does not flush to zero. So blocks follow the specification if their largest
        element is at least 2⁻¹²³ (MXFP4), 2⁻¹²¹ (E2M3), 2⁻¹¹⁸ (E3M2), 2⁻¹⁰⁹ (E4M3) or 2⁻⁹⁵ (E5M2).
        In smaller blocks, where the specification's smallest elements are not normal floats,
        elements near 2⁻¹²⁶ are rounded to multiples of it, and the largest are not clipped. "ceil"
        is the smallest power of two that covers the block, not the power above its largest element.
        The float32 of NVFP4 belongs to a bucket here, and to a tensor in the original. Elements are
        packed field by field, not in the order that matrix units expect.
    """
    grid, found = formats.levels_and_rounding(format, rounding)
    return Quantizer(
        levels=grid,
        scale=scales.MaxAbs(),
        rounding=found,
        steps=formats.block_steps(format, rule),
        bucket_size=bucket_size,
        block=formats.FORMATS[format].block,
    )
