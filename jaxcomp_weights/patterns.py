"""Numbers as the unsigned integers of their bits, and the order of these integers.

Versions are compared bit for bit: −0 and 0 differ, and a NaN keeps its payload. The integers are
put in the order of the numbers, so a weight that moves by a unit in the last place moves by one.
"""

from typing import NamedTuple

import numpy as np

CLASSES = 16
"""Contexts of a weight: its exponent modulo 16."""


class Format(NamedTuple):
    """How a dtype uses its bits.

    Attributes:
        bits: bits of a number; numbers of 64 bits are pairs of 32.
        mantissa: bits below the exponent, for floats.
        exponent: bits of the exponent; zero for integers.
        signed: whether the highest bit is a sign.
    """

    bits: int
    mantissa: int = 0
    exponent: int = 0
    signed: bool = True


FORMATS = {
    "bfloat16": Format(16, 7, 8),
    "float16": Format(16, 10, 5),
    "float32": Format(32, 23, 8),
    "float8_e4m3fn": Format(8, 3, 4),
    "float8_e5m2": Format(8, 2, 5),
    "bool": Format(8, signed=False),
    **{f"int{bits}": Format(bits) for bits in (8, 16, 32)},
    **{f"uint{bits}": Format(bits, signed=False) for bits in (8, 16, 32)},
    **{name: Format(32, signed=False) for name in ("int64", "uint64", "float64")},
}
"""The dtypes that can be published, by their names."""

PAIRS = ("int64", "uint64", "float64")
"""Dtypes of 64 bits, which are coded as pairs of 32."""

_OWN = frozenset(name for name in FORMATS if hasattr(np, name.removesuffix("_")))


def dtype(name: str) -> np.dtype:
    """The numpy dtype of this name.

    Without the package ml_dtypes, numpy has no bfloat16 and no float8: their arrays are then the
    unsigned integers of their bits.
    """
    if name in _OWN:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        return unsigned(name)
    return np.dtype(getattr(ml_dtypes, name))


def unsigned(name: str) -> np.dtype:
    """The dtype of the bits of a number, or of half of one with 64 bits."""
    return np.dtype(f"<u{FORMATS[name].bits // 8}")


def itemsize(name: str) -> int:
    """Bytes of a number."""
    return FORMATS[name].bits // 8 * (2 if name in PAIRS else 1)


def order(bits: np.ndarray, name: str) -> np.ndarray:
    """The bits as integers in the order of the numbers, as unsigned integers of the same width.

    Example:
        >>> order(np.array([0x3F80, 0x3F81, 0xBF80], "<u2"), "bfloat16").tolist()
        [49024, 49025, 16511]
    """
    return _order(bits, FORMATS[name])


def unorder(ordered: np.ndarray, name: str) -> np.ndarray:
    """The bits of ordered integers: the inverse of `order`."""
    form, top = FORMATS[name], _top(ordered.dtype)
    if not form.signed:
        return ordered
    if not form.exponent:
        return ordered ^ top
    return ordered ^ np.where(ordered & top, top, ~ordered.dtype.type(0))


def classes(bits: np.ndarray, name: str) -> np.ndarray:
    """The context of each number, `uint8`: small exponents change more often than large ones."""
    form = FORMATS[name]
    if not form.exponent:
        return np.zeros(bits.shape, np.uint8)
    mask = min((1 << form.exponent) - 1, CLASSES - 1)
    return ((bits >> form.mantissa) & mask).astype(np.uint8)


def _order(bits: np.ndarray, form: Format) -> np.ndarray:
    top = _top(bits.dtype)
    if not form.signed:
        return bits
    if not form.exponent:
        return bits ^ top
    return bits ^ np.where(bits & top, ~bits.dtype.type(0), top)


def _top(kind: np.dtype) -> np.unsignedinteger:
    return kind.type(1 << (8 * kind.itemsize - 1))
