"""Quantizers with an entropy coder behind them."""

from jaxcomp import checks
from jaxcomp.codecs import gaussian, rates
from jaxcomp.codecs.coded import Coded
from jaxcomp.codecs.rotated import Rotated
from jaxcomp.entropy.elias import Elias
from jaxcomp.entropy.huffman import Huffman
from jaxcomp.entropy.rans import Rans
from jaxcomp.quantize import tables
from jaxcomp.recipes.floats import nuqsgd
from jaxcomp.recipes.quantizers import qsgd
from jaxcomp.recipes.rotations import BLOCK


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
    checks.multiple("bucket_size", bucket_size, BLOCK)
    coder = Rans(symbols_a_lane=2**14)  # Its 48 bits a lane are then 0.003 bits an element.
    capacity, entropy = rates.budget(bits, coder, bucket_size, BLOCK)
    table = tables.UniformThreshold(entropy=entropy)
    quantizer = gaussian.quantizer(table, scale, bucket_size, BLOCK)
    codec = Coded(codec=quantizer, coder=coder, capacity=capacity)
    times = gaussian.rotations(table, rotations)
    return Rotated(codec=codec, times=times, unbiased_on_average=scale == "unbiased")


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
