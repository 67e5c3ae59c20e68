"""Small integers ↔ packed words: the innermost loop of every codec."""

from jaxcomp.bits.dispatch import (
    IMPLEMENTATIONS as IMPLEMENTATIONS,
    decode_sum as decode_sum,
    encode as encode,
    encode_fitted as encode_fitted,
    pack as pack,
    unpack as unpack,
)
from jaxcomp.bits.grid import Grid as Grid
from jaxcomp.bits.planes import planes as planes, words as words
