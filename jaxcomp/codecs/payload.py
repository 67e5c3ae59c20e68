"""The payload of a quantizer, and the scale that its workers agree on."""

from typing import NamedTuple

from jaxtyping import Float32, UInt32

from jaxcomp.types import Array


class QuantizedPayload(NamedTuple):
    """Packed codes, and what says what one step of each bucket, or of each block, is worth."""

    words: UInt32[Array, "n words"]
    steps: tuple[Array, ...]


class AgreedScale(NamedTuple):
    """The bucket scales that all workers use in this step."""

    scale: Float32[Array, " n"]
