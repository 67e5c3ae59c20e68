"""The choice of elements that change the bfloat16 values of parameters."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Float32, UInt32

from jaxcomp import checks
from jaxcomp.backend import xla
from jaxcomp.sparsify import bitmap
from jaxcomp.sparsify.choices import Choice, Chosen, as_many_as_fit, share
from jaxcomp.sparsify.competitors import INF, Parts, size_bits
from jaxcomp.types import Array

_NORMAL = 0x00800000
"""`size_bits` of the smallest normal float32."""


@dataclasses.dataclass(frozen=True)
class Visible(Choice):
    """All `x` with `bf16(φ − x) ≠ bf16(φ)`, and non-finite elements, up to the capacity.

    The state is `φ`, the parameters that `x` is subtracted from, as `[1, n, size]`: those that
    `jaxcomp.federated.GlobalModel` gives. Without them `φ` is zero, and every element is visible
    that is not zero itself.

    Args:
        fraction: the capacity as a fraction of the elements, in (0, 1]. If more are visible, a run
            of them with a random start is not sent.

    Example:
        >>> from jaxcomp.sparsify.competitors import Row
        >>> x, ones = jnp.array([[0.25, 0.001, -0.001, -0.003]]), jnp.ones((1, 1, 4))
        >>> start = jnp.zeros((1, 1), jnp.uint32)
        >>> found = Visible(fraction=1.0).choose(x, start, ones, Row(4))
        >>> int(found.number[0, 0]), found.places[0, :1]
        (1, Array([0], dtype=uint32))

    References:
        Miahi and Belilovsky, `Understanding and exploiting weight update sparsity for
        communication-efficient distributed RL <https://arxiv.org/abs/2602.03839>`_, 2026.

    Note:
        Rounding is to nearest, ties to even, on every platform. Numbers below 1.2e-38, which a CPU
        flushes, count as zero; zeros of both signs are equal. float64 is compared as float32.
    """

    fraction: int | float
    fills = False
    homogeneous = False
    guided = True

    def __post_init__(self):
        checks.fraction(self.fraction)

    def room(self, size: int) -> int:
        return share(self.fraction, size)

    def choose(self, x: Array, start: UInt32[Array, "n parts"], state: Any, parts: Parts) -> Chosen:
        params = jnp.zeros_like(x) if isinstance(state, tuple | None) else state[0]
        hits = _finder()(x, params)
        return Chosen(*as_many_as_fit(x, hits, self._rooms(parts), start, parts), state)


@functools.cache
def _finder() -> Callable[[Array, Array], Array]:
    """The bitmap of visible elements, as one function of a program."""

    def find(x: Array, params: Array) -> Array:
        before = _flush(params)
        seen = _bfloat16_bits(before - _flush(x)) != _bfloat16_bits(before)
        return bitmap.of(seen | (size_bits(x) >= INF))

    return xla.compile_separately(find)


def _flush(x: Array) -> Float32[Array, "n size"]:
    """`x` in float32, with a positive zero for what is below its normal numbers."""
    return jnp.where(size_bits(x) < _NORMAL, 0, x.astype(jnp.float32))


def _bfloat16_bits(x: Float32[Array, "n size"]) -> UInt32[Array, "n size"]:
    """The bits of `x` as bfloat16, for numbers that are no NaN."""
    bits = lax.bitcast_convert_type(_flush(x), jnp.uint32)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
