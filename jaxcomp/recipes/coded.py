"""Quantizers followed by an entropy coder."""

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
    """Entropy-coded scalar quantisation of a rotated bucket, near the rate–distortion limit.

    A rotation makes every bucket Gaussian. Evenly spaced thresholds with a wider zero cell, values
    at the centroids of the cells, and rANS come within a quarter of a bit of the rate–distortion
    function `4^−R`; `eden`, with codes of fixed width, is 0.27 to 0.64 bits from it.

    Args:
        bits: bits per element of a full bucket on the wire, with all overhead; 0.1 to 5.
        bucket_size: elements that share a stream, a multiple of 4,096; each block of 4,096 has its
            own rotation and step. Shorter buckets vary more in length, so more elements do not
            fit; the same holds for short leaves.
        scale: "minimum_error", a contraction, for use with a residual; "unbiased"; or "norm".
        rotations: 1, or 2 for an unbiased codec, as for `eden`; None for 1, or 2 below 1.3 bits. At
            such rates, elements up to their root mean square become zero. A single nonzero element
            that is rotated once has only such elements, and would never be sent.

    Raises:
        ValueError: for other rates or scales, shorter buckets, or one rotation at such low rates.

    Example:
        >>> ecsq(bits=2).facts.bits_per_element
        2.0

    References:
        Gish and Pierce, Asymptotically efficient quantizing, 1968, for the quantizer; Vargaftik et
        al., `EDEN <https://arxiv.org/abs/2108.08842>`_, 2022, for the rotation and the scale.

    Note:
        A stream has a fixed length. About one rotated bucket in a hundred needs more, by a few
        elements in a hundred thousand: these decode to zero, and are counted (`Stats.lost`). So
        "unbiased" has a bias of this size.
    """
    checks.number("bits", bits, 0.1, 5.0)
    checks.multiple("bucket_size", bucket_size, BLOCK)
    coder = Rans(symbols_a_lane=2**14)  # Its 48 bits per lane are 0.003 bits per element.
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
    """QSGD with the Elias code of its paper, for levels or for gaps between nonzero elements.

    Args:
        bits: the width of a code before entropy coding, 2 to 8.
        bucket_size: elements that share a norm; None for one norm a leaf.
        sparse: True codes the gaps between nonzero elements, their signs and levels, which is short
            if most elements are zero (`s` far below `√d`); False codes each level plus one, and the
            signs of nonzero elements.
        capacity: as for `Coded`.

    Raises:
        ValueError: for other widths, bucket sizes or capacities.

    Example:
        >>> import jaxcomp
        >>> elias_qsgd(bits=4).unbiased
        True

    References:
        Alistarh et al., `QSGD: communication-efficient SGD via gradient quantization and encoding
        <https://arxiv.org/abs/1610.02132>`_, 2017, whose `2.8 n + 32` bits for `s = √n` hold only
        for long vectors with an adaptive arithmetic coder: with plain Elias codes, Gaussian
        gradients take 2.94 bits per element and flat ones 4; `Rans` takes at most 2.58.
    """
    coder = Elias("omega", sparse=sparse)
    return Coded(codec=qsgd(bits, bucket_size), coder=coder, capacity=capacity)


def huffman_nuqsgd(
    bits: int = 4, bucket_size: int | None = 512, *, capacity: int | float | None = None
) -> Coded:
    """NUQSGD with the Huffman code of its paper, for levels and signs.

    Args:
        bits: the width of a code before entropy coding, 2 to 8.
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
        The code is fixed, for Gaussian buckets; `Coded(..., memory=0.9)` adapts to the gradients.
    """
    return Coded(codec=nuqsgd(bits, bucket_size), coder=Huffman(), capacity=capacity)
