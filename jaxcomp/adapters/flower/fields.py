"""Small integers of several clients as fields of words that can be added modulo 2³²."""

import dataclasses
import functools
from typing import Any

import numpy as np

from jaxcomp import checks

WORD = 32
"""Bits of a word. Flower sends a word as an int64, whatever its modulus is."""


@dataclasses.dataclass(frozen=True)
class Fields:
    """Several integers in a word, so wide that no sum over the clients leaves its field.

    `word = Σₚ qₚ · 2^(w·p)` with `|qₚ| ≤ limit` and `2 · limit · clients < 2^w`. So the sum of `n`
    words, as of `n` factors of `2 · largest`, is below 2³² in a modulus of 2³²: no sum wraps.

    Args:
        limit: the largest integer of a client.
        clients: the most clients in a sum, at least 2.

    Raises:
        ValueError: if a sum has no room in a word.

    Example:
        >>> fields = Fields(limit=7, clients=10)
        >>> words = fields.pack(np.array([7, -7, 1, 0, -3]))
        >>> len(words), fields.unpack(10 * words, 5).tolist()
        (2, [70, -70, 10, 0, -30])
    """

    limit: int
    clients: int

    def __post_init__(self):
        checks.integer("limit", self.limit, 1)
        checks.integer("clients", self.clients, 2, (2**WORD - 1) // (2 * self.limit))

    @property
    def width(self) -> int:
        """Bits of a field."""
        return (2 * self.limit * self.clients).bit_length()

    @property
    def number(self) -> int:
        """Fields of a word."""
        return WORD // self.width

    @property
    def largest(self) -> int:
        """The largest word of a client."""
        return self.limit * int(self._places.sum())

    @property
    def ranges(self) -> dict[str, Any]:
        """The settings with which Flower's SecAgg+ leaves words as they are.

        A weight of one of at most one multiplies by 1.0, and a step of
        `2 · clipping_range / quantization_range = 1.0` rounds no whole number.
        """
        return {
            "max_weight": 1.0,
            "clipping_range": float(self.largest),
            "quantization_range": 2 * self.largest,
            "modulus_range": 2**WORD,
        }

    def pack(self, integers: np.ndarray) -> np.ndarray:
        """The words of a client's integers, `int64[size] → int64[words]`.

        Raises:
            ValueError: if one is beyond the limit.
        """
        top = int(np.max(np.abs(integers), initial=0))
        if top > self.limit:
            raise ValueError(
                f"`integers` must be at most {self.limit}, for sums of {self.clients} clients in "
                f"{self.width} bits, got {top}"
            )
        rows = np.zeros((self.number, -(-integers.size // self.number)), np.int64)
        rows.reshape(-1)[: integers.size] = integers
        return self._places @ rows

    def unpack(self, words: np.ndarray, size: int) -> np.ndarray:
        """The sums of so many integers, from the sum of words.

        Raises:
            ValueError: if it is no sum of so many words of clients.
        """
        most = self.limit * self.clients
        lifted = words + most * self._places.sum()
        fields = lifted // self._places[:, None] & (2**self.width - 1)
        fits = words.shape == (-(-size // self.number),) and np.all(lifted >> WORD == 0)
        if not fits or np.any(fields > 2 * most) or np.any(self._places @ fields != lifted):
            raise ValueError(
                f"`words` must be a sum of words of {self.clients} clients with {size} integers up "
                f"to {self.limit}, got {words.size} words up to {np.max(np.abs(words), initial=0)}"
            )
        return fields.reshape(-1)[:size] - most

    @functools.cached_property
    def _places(self) -> np.ndarray:
        return np.int64(2) ** (self.width * np.arange(self.number, dtype=np.int64))
