"""Codecs that rotate a bucket at random before quantisation."""

from jaxcomp import checks
from jaxcomp.base import Codec
from jaxcomp.codecs import gaussian, rates
from jaxcomp.codecs.embedded import Embedded
from jaxcomp.codecs.quantizer import Quantizer
from jaxcomp.codecs.rotated import Rotated
from jaxcomp.quantize import levels, rounding, scales, tables

BLOCK = 4096
"""Elements that are rotated together."""


def rotated_uniform(bits: int = 4, bucket_size: int | None = 4096) -> Rotated:
    """A shared rotation, then evenly spaced levels with unbiased rounding.

    The relative variance, averaged over rotations, is at most `2(ln(2d) + 1) / (2^bits − 1)²` for
    every input, and about half of that for most. A sum over workers is rotated back once.

    Args:
        bits: width of a code, 1 to 8.
        bucket_size: elements that share a scale; None for one scale per leaf.

    Raises:
        ValueError: for other widths or a bucket size that is not positive.

    Example:
        >>> rotated_uniform(bits=4).unbiased
        True

    References:
        Suresh et al., `Distributed mean estimation with limited communication
        <https://arxiv.org/abs/1611.00429>`_, 2017.

    Note:
        Levels span `±max|z|`; in the paper they span the smallest to the largest element. This
        saves one number per bucket (0.008 bits per element in buckets of 4,096), and increases the
        error by 14 % in buckets of 512, 10 % in 4,096 and 8 % in 131,072. Blocks of 4,096 are
        rotated instead of the whole vector.
    """
    checks.integer("bits", bits, 1, 8)
    return Rotated(codec=_even(bits, bucket_size), shared=True)


def eden(
    bits: int | float = 4,
    bucket_size: int | None = 4096,
    *,
    scale: str = "unbiased",
    rotations: int = 1,
) -> Rotated:
    """A separate rotation on each worker, Lloyd–Max levels for Gaussian elements, a fitted scale.

    With the mean squared error `D` of Lloyd–Max quantisation, the relative error for every input is
    `D/(1 − D)` for "unbiased" (0.571, 0.133, 0.036, 0.0096 at 1 to 4 bits) and `D` for
    "minimum_error". For a rate between two whole widths, part of the rotated bucket has one width
    and the rest the other. Below one bit, only part of it is sent, and the error is
    `(π/2)/bits − 1`.

    Args:
        bits: bits per element, above 0, at most 8.
        bucket_size: elements in a bucket; None for one bucket per leaf. Each block of 4,096 in it
            has its own rotation and scale.
        scale: "unbiased"; "minimum_error", a contraction that is smaller by `1 − D`, for use with a
            residual; or "norm", which keeps the length.
        rotations: 1, or 2 for an unbiased codec: with one, it is unbiased for dense input, but an
            input of one or two large elements can decode to values larger by a third.

    Raises:
        ValueError: for other rates or scales, or a bucket size that is not positive.

    Example:
        >>> eden(bits=2).facts.bits_per_element
        2.0078125

    References:
        Vargaftik et al., `EDEN: communication-efficient and robust distributed mean estimation for
        federated learning <https://arxiv.org/abs/2108.08842>`_, 2022.

    Note:
        The elements with wider codes, or those that are sent at all, are not drawn at random,
        because the rotation makes all elements statistically alike. Blocks of 4,096 are rotated,
        not the vector padded to a power of two. With one rotation the codec is declared neither
        unbiased nor contractive, so it gets no residual; the authors call it unbiased, which holds
        for uniformly random rotations.
    """

    def make(width: int, block: int | None) -> Quantizer:
        return gaussian.quantizer(tables.LloydMax(width), scale, bucket_size, block)

    power = gaussian.power(scale)
    codec = rates.at_rate(bits, make, power=power, bucket_size=bucket_size, block=BLOCK)
    return Rotated(codec=codec, times=rotations, unbiased_on_average=scale == "unbiased")


def drive(
    bucket_size: int | None = 4096, *, scale: str = "unbiased", rotations: int = 1
) -> Rotated:
    """One bit per element: the signs of the rotated bucket, and a fitted scale.

    `x̂ = S · R⁻¹ sign(R x)`; `S = ‖x‖² / ‖R x‖₁` is unbiased, with relative error `π/2 − 1`.

    Args:
        bucket_size: as for `eden`.
        scale: "unbiased", "minimum_error" (`‖R x‖₁ / d`) or "norm" (`‖x‖ / √d`).
        rotations: as for `eden`.

    Raises:
        ValueError: for another scale, or a bucket size that is not positive.

    Example:
        >>> drive().facts.bits_per_element
        1.0078125

    References:
        Vargaftik et al., `DRIVE: one-bit distributed mean estimation
        <https://arxiv.org/abs/2105.08339>`_, 2021.
    """
    return eden(1, bucket_size, scale=scale, rotations=rotations)


def ndsc(
    bits: int | float = 4, bucket_size: int | None = 4096, *, dithered: bool = True
) -> Rotated:
    """Near-democratic source coding: a rotation, and even levels up to the largest element.

    `‖z‖∞ ≤ 2√(log(2N)/N) ‖x‖` with high probability, so the error does not grow with the size. With
    `dithered`, rounding is unbiased, to `2^bits` levels that include both ends; otherwise the
    levels are the middles of `2^bits` cells. Below one bit, `⌈B · bits⌉` elements of each rotated
    block of `B` are sent, with one bit each.

    Args:
        bits: bits per element, above 0, at most 8.
        bucket_size: elements that share a scale; None for one scale per leaf.
        dithered: True for unbiased rounding; False rounds to nearest, which is neither unbiased nor
            contractive.

    Raises:
        ValueError: for other rates or a bucket size that is not positive.

    Example:
        >>> ndsc(bits=4).unbiased
        True

    References:
        Saha, Pilanci and Goldsmith, `Efficient randomized subspace embeddings for distributed
        optimization under a communication budget <https://arxiv.org/abs/2103.07578>`_, 2022.

    Note:
        Bits are those on the wire: the published scripts do not count the sign bit of the dithered
        quantizer, so their `R` bits are about `R + 1`. Elements are padded with zeros instead of
        the paper's random slots. Below one bit, the sent elements are not drawn at random, because
        the rotation makes all elements statistically alike.
    """
    return Rotated(codec=_even_at_rate(bits, bucket_size, dithered), unbiased_on_average=dithered)


def dsc(
    bits: int | float = 4,
    bucket_size: int | None = 4096,
    *,
    redundancy: int | float = 1.5,
    dithered: bool = True,
) -> Embedded:
    """Democratic source coding: redundant coordinates, each coarser, of which none is large.

    With `λ` coordinates per element, each coordinate has `bits / λ` bits. The largest coordinate is
    `K‖x‖/√N`, without the logarithm of near-democratic coding; the cost is an iteration, and `λ`
    times the coordinates.

    Args:
        bits: bits per element, above 0, at most 8.
        bucket_size: coordinates that share a scale: `bucket_size / redundancy` elements; None for
            one scale per leaf.
        redundancy: `λ`, from 1 to 4.
        dithered: True for unbiased rounding; False rounds to nearest.

    Raises:
        ValueError: for other rates or a redundancy, or a bucket size that is not positive.

    Example:
        >>> dsc(bits=3, redundancy=1.5).codec.bits
        2

    References:
        Saha, Pilanci and Goldsmith, `Efficient randomized subspace embeddings for distributed
        optimization under a communication budget <https://arxiv.org/abs/2103.07578>`_, 2022.

    Note:
        The iteration has fewer steps, whose number was found by experiment; its remainder is kept.
        Elements are at evenly spread positions, not drawn at random. Bits are counted as for
        `ndsc`, which has a smaller error at two, three and four bits per element: there the gain
        in the constant is smaller than the cost of `λ` times the coordinates.
    """
    checks.positive("bits", bits)
    checks.number("redundancy", redundancy, 1.0)
    codec = _even_at_rate(bits / redundancy, bucket_size, dithered)
    return Embedded(codec=codec, redundancy=redundancy)


def _even_at_rate(bits: int | float, bucket_size: int | None, dithered: bool) -> Codec:
    def make(width: int, block: int | None) -> Quantizer:
        del block  # The step is not fitted, so one step for the whole bucket is enough.
        return _even(width, bucket_size, dithered)

    power = 1 if dithered else 0
    return rates.at_rate(bits, make, power=power, bucket_size=bucket_size, block=BLOCK)


def _even(width: int, bucket_size: int | None, dithered: bool = True) -> Quantizer:
    return Quantizer(
        levels=levels.MidRise(width, cells=not dithered),
        scale=scales.MaxAbs(),
        rounding=rounding.Stochastic() if dithered else rounding.Nearest(),
        bucket_size=bucket_size,
    )
