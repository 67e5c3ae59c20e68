"""The payload of a quantizer, and its agreed scale."""

from typing import NamedTuple

from jaxtyping import Float32, UInt32

from jaxcomp.types import Array


class QuantizedPayload(NamedTuple):
    """Packed codes, and the steps of each bucket or block in their encoding."""

    words: UInt32[Array, "n words"]
    steps: tuple[Array, ...]


class AgreedScale(NamedTuple):
    """The bucket scales that all workers use in this step."""

    scale: Float32[Array, "..."]
