"""The interface between a fused kernel and a quantizer."""

from typing import Any, Protocol, runtime_checkable

from jaxcomp.quantize.totals import Rows
from jaxcomp.types import Array


@runtime_checkable
class Grid(Protocol):
    """Pure functions of blocks of buckets; a kernel calls them on what it holds in registers.

    Attributes:
        bits: width of a code, an integer from 1 to 8 or 1.6.
        fit: how the step that is sent depends on the codes; None for the one of the scale.
    """

    @property
    def bits(self) -> int | float: ...

    @property
    def fit(self) -> str | None: ...

    def scale(self, x: Array, count: Array, rows: Rows) -> Array:
        """The scale of each bucket, `[n, 1]`, from `x: [n, size]` and `count: [n, 1]`."""
        ...

    def step(self, scale: Array, dtype: Any, rows: Rows) -> tuple[Array, Array]:
        """The step for each scale, and the factor that brings elements to codes."""
        ...

    def codes(self, x: Array, factor: Array, high: Array, low: Array, position: Array) -> Array:
        """The code of each element: `position` counts within the bucket with seeds `high, low`."""
        ...

    def fitted(self, x: Array, codes: Array, count: Array, rows: Rows) -> Array:
        """The step that is sent, `[n, 1]`, if it is fitted to the codes `[n, size]`."""
        ...

    def values(self, codes: Array) -> Array:
        """The value of each code in steps, as float32."""
        ...
