"""Quantizers with an entropy coder behind them."""

import math

from jaxcomp import checks
from jaxcomp.codecs.coded import Coded
from jaxcomp.codecs.quantizer import Quantizer
from jaxcomp.codecs.rotated import Rotated
from jaxcomp.entropy.elias import Elias
from jaxcomp.entropy.huffman import Huffman
from jaxcomp.entropy.rans import Rans
from jaxcomp.quantize import rounding, scales, tables
from jaxcomp.recipes.floats import nuqsgd
from jaxcomp.recipes.quantizers import qsgd
from jaxcomp.recipes.rotations import BLOCK, FITS

_SYMBOLS_A_LANE = 2**14
"""A lane's 48 bits are then three thousandths of a bit an element."""


def ecsq(
    bits: int | float = 2.0,
    bucket_size: int = 2**17,
    *,
    scale: str = "minimum_error",
    rotations: int | None = None,
) -> Rotated:
    """Entropy-coded scalar quantisation of a rotated bucket: closest to what any codec can reach.

    A rotation makes every bucket Gaussian; evenly spaced thresholds with a wider cell for zero and
    values at the centroids of the cells, then rANS, are a quarter of a bit from the rate–distortion
    function `4^−R`, where `eden`, whose codes are all as long, is at 0.27 to 0.64.

    Args:
        bits: bits an element of a full bucket on the wire, with all that is not codes; 0.1 to 5.
        bucket_size: elements that share a stream, a multiple of 4,096, each 4,096 of which have a
            rotation and a step of their own; shorter buckets leave more room for chance, and of
            shorter leaves more elements do not fit.
        scale: "minimum_error", a contraction, for use with a residual; "unbiased"; or "norm".
        rotations: 1, or 2 for an unbiased codec, as for `eden`; None for 1, or 2 below 1.3 bits.
            There, elements up to their root mean square become zero, which is all of a single
            element that is rotated once: it would never be sent.

    Raises:
        ValueError: for other rates or scales, shorter buckets, or one rotation at so low a rate.

    Example:
        >>> ecsq(bits=2).bits_per_element
        2.0

    References:
        Gish and Pierce, Asymptotically efficient quantizing, 1968, for the quantizer; Vargaftik et
        al., `EDEN <https://arxiv.org/abs/2108.08842>`_, 2022, for the rotation and the scale.

    Note:
        A stream has a fixed length. Of buckets that are as Gaussian as a rotation makes them, one
        in some hundred is longer, by a few elements in a hundred thousand: they decode to zero, and
        are counted (`Stats.lost`). "unbiased" leaves that much of a bias.
    """
    checks.number("bits", bits, 0.1, 5.0)
    checks.integer("bucket_size", bucket_size, BLOCK)
    if bucket_size % BLOCK:
        raise ValueError(f"`bucket_size` must be a multiple of {BLOCK}, got {bucket_size}")
    checks.choice("scale", scale, tuple(FITS))
    lanes = 1 << max((bucket_size // _SYMBOLS_A_LANE).bit_length() - 1, 0)
    # Of each bucket: its steps, the count of its elements, and the heads of the lanes. Lengths vary
    # by 0.1 to 0.65 bits over the root of the size, and frequencies of twelve bits are not exact.
    capacity = bits - 32 / BLOCK - (16 if bucket_size < 2**16 else 32) / bucket_size
    entropy = capacity - 48 * lanes / bucket_size - 1.5 / math.sqrt(bucket_size) - 5e-4 * 2**bits
    grid = tables.UniformThreshold(entropy=round(entropy, 4))
    least = 1 if grid.dead < 1 else 2
    rotations = least if rotations is None else rotations
    checks.choice("rotations", rotations, (1, 2))
    if rotations < least:
        raise ValueError(
            f"`rotations` must be 2, or None, at bits={bits}: elements up to their root mean "
            "square become zero, and rotated once, a single element would never be sent"
        )
    quantizer = Quantizer(
        levels=grid,
        scale=scales.RootMeanSquare(times=grid.reach),
        rounding=rounding.Nearest(),
        bucket_size=bucket_size,
        block=None if bucket_size == BLOCK else BLOCK,
        fit=FITS[scale],
    )
    coded = Coded(codec=quantizer, coder=Rans(symbols_a_lane=_SYMBOLS_A_LANE), capacity=capacity)
    return Rotated(codec=coded, times=rotations, unbiased_on_average=scale == "unbiased")


def elias_qsgd(
    bits: int = 4,
    bucket_size: int | None = 512,
    *,
    sparse: bool = False,
    capacity: int | float | None = None,
) -> Coded:
    """QSGD in the code of its paper: Elias' ω of the levels, or of the gaps between non-zeros.

    Args:
        bits: width of a code before it is coded, 2 to 8.
        bucket_size: elements that share a norm; None for one norm a leaf.
        sparse: code the gaps from each non-zero to the next, signs and levels, which is short where
            most are zero (`s` far below `√d`); else each level plus one, and signs of non-zeros.
        capacity: as for `Coded`.

    Raises:
        ValueError: for other widths, bucket sizes or capacities.

    Example:
        >>> import jaxcomp
        >>> elias_qsgd(bits=4).unbiased
        True

    References:
        Alistarh et al., `QSGD: communication-efficient SGD via gradient quantization and encoding
        <https://arxiv.org/abs/1610.02132>`_, 2017, whose `2.8 n + 32` bits for `s = √n` hold for
        long vectors only, and for an adaptive arithmetic coder: with Elias' codes as they are,
        Gaussian gradients take 2.94 bits an element and flat ones 4; `Rans` takes at most 2.58.
    """
    coder = Elias("omega", sparse=sparse)
    return Coded(codec=qsgd(bits, bucket_size), coder=coder, capacity=capacity)


def huffman_nuqsgd(
    bits: int = 4, bucket_size: int | None = 512, *, capacity: int | float | None = None
) -> Coded:
    """NUQSGD in the code of its paper: Huffman's, for the levels and their signs.

    Args:
        bits: width of a code before it is coded, 2 to 8.
        bucket_size: elements that share a norm; None for one norm a leaf.
        capacity: as for `Coded`.

    Raises:
        ValueError: for other widths, bucket sizes or capacities.

    Example:
        >>> import jaxcomp
        >>> huffman_nuqsgd(bits=4).unbiased
        True

    References:
        Ramezani-Kebrya et al., `NUQSGD: provably communication-efficient data-parallel SGD via
        nonuniform quantization <https://arxiv.org/abs/1908.06077>`_, 2021.

    Note:
        The code is fixed, for Gaussian buckets; `Coded(..., memory=0.9)` follows what is sent.
    """
    return Coded(codec=nuqsgd(bits, bucket_size), coder=Huffman(), capacity=capacity)
