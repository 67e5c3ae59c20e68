"""Sorting the few values that workers have for each of many elements."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxcomp.types import Array

NETWORK = 64
"""The most rows that are sorted by a network, whose program grows with `n log² n`."""


def sort_columns(rows: Array) -> Array | Sequence[Array]:
    """The rows with the values of each column in ascending order.

    XLA sorts columns one by one on a CPU. A network of minima and maxima of whole rows takes a
    hundredth of the time: 0.6 ms against 140 ms for eight rows of half a million values, 11 ms
    against 890 ms for 31.

    Args:
        rows: `[n, ...]`, without NaN.

    Example:
        >>> [row.tolist() for row in sort_columns(jnp.array([[3.0, 1.0], [2.0, 5.0], [1.0, 9.0]]))]
        [[1.0, 1.0], [2.0, 5.0], [3.0, 9.0]]
    """
    if len(rows) > NETWORK:
        return jnp.sort(rows, axis=0)
    values = [rows[i] for i in range(len(rows))]
    for a, b in _pairs(len(values)):
        values[a], values[b] = jnp.minimum(values[a], values[b]), jnp.maximum(values[a], values[b])
    return values


def at(rows: "Array | Sequence[Array]", index: Array) -> Array:
    """The row at a traced index."""
    if isinstance(rows, jax.Array):
        return jnp.take(rows, index, axis=0)
    found = rows[0]
    for number, row in enumerate(rows[1:], 1):
        found = jnp.where(index == number, row, found)
    return found


def _pairs(n: int) -> list[tuple[int, int]]:
    """The comparisons of Batcher's odd-even merge sort of `n` values."""
    found, span = [], 1
    while span < n:
        step = span
        while step:
            for start in range(step % span, n - step, 2 * step):
                for i in range(start, min(start + step, n - step)):
                    if i // (2 * span) == (i + step) // (2 * span):
                        found.append((i, i + step))
            step //= 2
        span *= 2
    return found
