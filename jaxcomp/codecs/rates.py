"""Codecs of any rate: widths between whole numbers of bits, and streams of a given rate."""

import math
from collections.abc import Callable
from typing import NamedTuple

from jaxcomp import checks
from jaxcomp.base import Codec
from jaxcomp.codecs.parts import Part, Split
from jaxcomp.entropy.rans import Rans


def at_rate(
    bits: int | float,
    make: Callable[[int, int | None], Codec],
    *,
    power: int | float,
    bucket_size: int | None,
    block: int,
) -> Codec:
    """A codec of any rate for rotated buckets, from codecs of whole widths.

    Between two whole widths, the first elements of each rotated block get the larger width and the
    rest the smaller one. Below one bit, only the first elements are sent, with one bit each.

    Args:
        bits: bits per element, above 0, at most 8.
        make: `make(width, block)` returns a codec of `width` bits, in which `block` elements share
            a step (None for the whole bucket). Parts of different sizes need separate steps.
        power: the power of the factor on the elements that are sent, as for `Part`.
        bucket_size: elements in a bucket; None for one bucket per leaf.
        block: elements that are rotated together.

    Raises:
        ValueError: for a rate out of range.

    Example:
        >>> from jaxcomp.recipes.quantizers import qsgd_inf
        >>> def make(width, block):
        ...     return qsgd_inf(width, levels="midrise")
        >>> at_rate(2.5, make, power=1, bucket_size=512, block=4096).first.bits
        3
    """
    checks.number("bits", bits, 0.0, 8.0)
    checks.positive("bits", bits)
    checks.bucket_size(bucket_size)
    whole = int(bits)
    one_block = bucket_size is not None and bucket_size <= block
    rotated = None if one_block else block
    if whole == bits:
        return make(whole, rotated)
    sent = bits if bits < 1 else bits - whole
    k = math.ceil(sent * block) if bits < 1 else round(sent * block)
    wide = make(whole + 1, None if one_block else max(k, 1))
    if bits < 1:
        return Part(codec=wide, fraction=bits, power=power, block=rotated)
    narrow = make(whole, None if one_block else max(block - k, 1))
    return Split(first=wide, second=narrow, fraction=sent, block=rotated)


class Budget(NamedTuple):
    """The division of a rate among the parts of a coded payload.

    Attributes:
        capacity: bits per element of a stream, for `Coded`.
        entropy: bits per element of the codes, for `UniformThreshold`.
    """

    capacity: float
    entropy: float


def budget(bits: int | float, coder: Rans, bucket_size: int, block: int) -> Budget:
    """The capacity and the entropy at which a coded bucket has a given rate on the wire.

    Beside its stream, a bucket sends one float32 step for each block and the count of its elements.
    Beside its symbols, a stream has the headers of its lanes and a reserve. The reserve is needed
    because lengths vary by 0.1 to 0.65 bits over the root of the size, and because frequencies of
    twelve bits are not exact. About one bucket in a hundred then exceeds the capacity.

    Args:
        bits: bits per element of a full bucket on the wire.
        coder: the coder of the stream.
        bucket_size: elements in a bucket.
        block: elements that share a step.

    Example:
        >>> budget(2, Rans(symbols_a_lane=2**14), bucket_size=2**17, block=4096)
        Budget(capacity=1.991943359375, entropy=1.9829)
    """
    counts = 16 if bucket_size < 2**16 else 32
    capacity = bits - 32 / block - counts / bucket_size
    reserve = 1.5 / math.sqrt(bucket_size) + 5e-4 * 2**bits
    entropy = capacity - coder.head_bits(bucket_size) / bucket_size - reserve
    return Budget(capacity, round(entropy, 4))
