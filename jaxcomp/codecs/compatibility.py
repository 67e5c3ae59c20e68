"""Checks that the parts of a quantizer can be combined."""

from typing import Any

from jaxcomp import checks
from jaxcomp.quantize.levels import MidRise, Uniform
from jaxcomp.quantize.rounding import Subtractive
from jaxcomp.quantize.steps import Exact


def check(quantizer: Any, *, kernels: bool) -> None:
    """Raises a `ValueError` for settings that do not fit together.

    Args:
        quantizer: the quantizer, whose settings are of the right kinds.
        kernels: whether one kernel does its whole encoding.
    """
    if quantizer.fit and (quantizer.shared or not isinstance(quantizer.steps, Exact)):
        raise ValueError(
            f"`fit={quantizer.fit!r}` requires shared=False and steps=Exact(), got {quantizer!r}"
        )
    if isinstance(quantizer.rounding, Subtractive) and not isinstance(
        quantizer.levels, Uniform | MidRise
    ):
        raise ValueError(
            "`rounding=Subtractive()` requires evenly spaced levels, Uniform or MidRise, got "
            f"{quantizer.levels!r}"
        )
    if quantizer.shared and quantizer.block:
        raise ValueError(f"`shared=True` requires block=None, got block={quantizer.block}")
    if quantizer.sum_bits is not None:
        checks.integer("sum_bits", quantizer.sum_bits, 2, 16)
        if (
            not (quantizer.shared and isinstance(quantizer.levels, Uniform))
            or quantizer.scale.covers
        ):
            raise ValueError(
                "`sum_bits` requires shared=True, levels Uniform, and a scale that clips "
                f"elements, such as RootMeanSquare, got {quantizer!r}"
            )
    kernels = kernels and not isinstance(quantizer.rounding, Subtractive)
    if quantizer.implementation not in (None, "reference") and not kernels:
        raise ValueError(
            f"`implementation={quantizer.implementation!r}` requires steps=Exact(), block=None, "
            f"fit=None and no subtractive dither, got {quantizer!r}; None uses XLA for these"
        )
