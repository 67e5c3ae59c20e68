"""The unread rest of a message: a read beyond its end raises."""

from typing import Any

LARGEST = 2**63 - 1
"""The largest number that a message may hold."""


class MessageError(ValueError):
    """A damaged or forged message, or one for another codec or tree.

    `from_bytes` raises it for every problem with its `data`.
    """


class Reader:
    """Reads bytes and numbers one after another, and refuses to read beyond their end."""

    def __init__(self, data: Any):
        self._data = memoryview(data)
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes that are still to be read."""
        return len(self._data) - self._at

    def take(self, size: int, what: str) -> memoryview:
        """The next so many bytes, which are not copied."""
        if size > self.left:
            raise MessageError(
                f"`data` must hold {size:,} bytes of {what}, got only {self.left:,}: it is damaged"
            )
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, what: str) -> int:
        """The next number: seven bits per byte, lowest first; every byte but the last has 128."""
        value, shift = 0, 0
        while True:
            byte = self.take(1, what)[0]
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
            if shift > 56:
                raise MessageError(f"`data` must hold numbers below 2^63, got more in {what}")
        if byte == 0 and shift > 7:
            raise MessageError(
                f"`data` must hold numbers in their fewest bytes, got more in {what}"
            )
        return value

    def end(self, what: str) -> None:
        """Nothing may be left."""
        if self.left:
            raise MessageError(f"`data` must end after {what}, got {self.left:,} bytes more")


def number(value: int) -> bytes:
    """A number as `Reader.number` reads it.

    Example:
        >>> number(5), number(300)
        (b'\\x05', b'\\xac\\x02')
    """
    written = bytearray()
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    return bytes([*written, value])
