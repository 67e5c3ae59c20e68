"""Levels as symbols for an entropy coder, numbered by magnitude."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxcomp.backend import xla


class Numbers(NamedTuple):
    """The symbol of each code, a code of each symbol, and the symbol of zero, if there is one."""

    symbols: np.ndarray
    codes: np.ndarray
    zero: int | None


@functools.lru_cache
def number_levels(levels: Any) -> Numbers:
    """Numbers levels by magnitude: zero, the smallest above zero, the smallest below, and so on."""
    number = 3 if levels.bits < 2 and levels.bits > 1 else 2 ** int(levels.bits)
    with xla.constants():
        values = np.asarray(levels.values(jnp.arange(number, dtype=jnp.uint32)))
    sizes = np.unique(np.abs(values))
    zero = 0 if sizes[0] == 0 else None
    rank = np.searchsorted(sizes, np.abs(values)) * 2 + (values < 0)
    symbols = np.where(values == 0, 0, rank - (1 if zero == 0 else 0)).astype(np.uint32)
    codes = np.zeros(symbols.max() + 1, np.uint32)
    codes[symbols[::-1]] = np.arange(number, dtype=np.uint32)[::-1]
    return Numbers(symbols, codes, zero)
