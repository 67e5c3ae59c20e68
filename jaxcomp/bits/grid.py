"""The interface between a fused kernel and a quantizer."""

from typing import Any, Protocol, runtime_checkable

from jaxcomp.quantize.totals import Rows
from jaxcomp.types import Array


@runtime_checkable
class Grid(Protocol):
    """Pure functions of blocks of buckets; a kernel calls them on what it holds in registers.

    Attributes:
        bits: width of a code, an integer from 1 to 8 or 1.6.
    """

    @property
    def bits(self) -> int | float: ...

    def scale(self, x: Array, count: Array, rows: Rows) -> Array:
        """The scale of each bucket, `[n, 1]`, from `x: [n, size]` and `count: [n, 1]`."""
        ...

    def step(self, scale: Array, dtype: Any, rows: Rows) -> tuple[Array, Array]:
        """The step for each scale, and the factor that brings elements to codes."""
        ...

    def codes(self, x: Array, factor: Array, high: Array, low: Array, position: Array) -> Array:
        """The code of each element: `position` counts within the bucket with seeds `high, low`."""
        ...

    def values(self, codes: Array) -> Array:
        """The value of each code in steps, as float32."""
        ...
