"""Bytes ↔ a frame of Zstandard: several times faster than our coder, and for codes nearly as short.

References:
    Collet and Kucherawy, `Zstandard <https://www.rfc-editor.org/rfc/rfc8878>`_, 2021.
"""

import numpy as np

from jaxcomp.lazy import Lazy
from jaxcomp.messages.reading import MessageError

zstandard = Lazy("zstandard")
_LEVEL = 1


def encode(items: np.ndarray) -> bytes:
    """A frame of the bytes of an array, which states their number."""
    return zstandard.ZstdCompressor(level=_LEVEL).compress(items.tobytes())


def decode(frame: memoryview, size: int) -> bytes:
    """The bytes of a frame. It must state that there are `size`, before any are allocated.

    Raises:
        MessageError: for anything but one whole frame of so many bytes.
    """
    try:
        stated = zstandard.frame_content_size(frame)
        if stated != size:
            raise MessageError(f"`data` must hold a frame of {size:,} bytes, got {stated:,}")
        found = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise MessageError(f"`data` must hold a frame of Zstandard: {error}") from None
    if len(found) != size:
        raise MessageError(f"`data` must hold a frame of {size:,} bytes, got {len(found):,}")
    return found
