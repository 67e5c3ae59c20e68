"""Small integers ↔ packed words: the innermost loop of every codec."""

from jaxcomp.bits.reference import pack as pack, planes as planes, unpack as unpack, words as words
