"""Packing: every width, any size, and the stated place of every field."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxcomp import bits


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    width=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 20]),
    size=st.sampled_from([1, 31, 64, 100]),
)
def test_unpack_inverts_pack(seed, width, size):
    codes = np.random.default_rng(seed).integers(0, 2**width, (3, size)).astype(np.uint32)
    words = bits.pack(jnp.asarray(codes), bits=width)
    assert words.shape == (3, bits.words(size, width))
    np.testing.assert_array_equal(bits.unpack(words, bits=width, size=size), codes)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_words_are_planar(width):
    """Field p of word w is element p * words + w."""
    size = 512
    codes = np.random.default_rng(0).integers(0, 2**width, size).astype(np.uint32)
    words = np.asarray(bits.pack(jnp.asarray(codes)[None], bits=width))[0]
    lanes = size * width // 32
    for element in (0, 1, lanes - 1, lanes, size - 1):
        field, word = divmod(element, lanes)
        assert (words[word] >> (width * field)) & (2**width - 1) == codes[element]


@pytest.mark.parametrize("width", range(1, 9))
def test_no_width_wastes_a_bit(width):
    assert bits.words(512, width) * 32 == 512 * width


def test_pack_reads_the_codes_once():
    """Quantising and packing is one fused loop: no array of codes exists."""
    x = jnp.ones((64, 512))
    text = jax.jit(lambda x: bits.pack((x > 0).astype(jnp.uint32), bits=1)).lower(x).compile()
    entry = text.as_text().split("ENTRY")[1]
    assert "u32[64,512]" not in entry


def test_wrong_width_and_shape_say_so():
    with pytest.raises(ValueError, match="`bits` must be an integer from 1 to 32, got 0"):
        bits.pack(jnp.zeros((1, 8), jnp.uint32), bits=0)
    with pytest.raises(ValueError, match="`packed` must have 1 words a row for 8 codes of 4 bits"):
        bits.unpack(jnp.zeros((1, 2), jnp.uint32), bits=4, size=8)
