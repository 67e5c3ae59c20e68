"""Packing: every width, any size, and the stated place of every field."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxcomp import bits


@pytest.mark.full
@settings(max_examples=24, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    width=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 20]),
    size=st.sampled_from([1, 31, 64, 100]),
)
def test_unpack_inverts_pack(seed, width, size):
    codes = np.random.default_rng(seed).integers(0, 2**width, (3, size)).astype(np.uint32)
    words = jax.jit(bits.pack, static_argnames="bits")(jnp.asarray(codes), bits=width)
    assert words.shape == (3, bits.words(size, width))
    unpack = jax.jit(bits.unpack, static_argnames=("bits", "size"))
    np.testing.assert_array_equal(unpack(words, bits=width, size=size), codes)


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


def test_five_trits_share_a_byte():
    """Byte b of a word is Σ 3^i · code[5b + i]: 640 codes below 3 take 32 words, 1.6 bits each."""
    codes = np.random.default_rng(0).integers(0, 3, (2, 640)).astype(np.uint32)
    pack = jax.jit(functools.partial(bits.pack, bits=1.6))
    unpack = jax.jit(functools.partial(bits.unpack, bits=1.6), static_argnames="size")
    words = np.asarray(pack(codes))
    assert words.shape == (2, 32)
    fields = codes.reshape(2, 4, 5, 32)
    want = (fields * np.array([1, 3, 9, 27, 81])[None, None, :, None]).sum(2)
    np.testing.assert_array_equal(words.view(np.uint8).reshape(2, 32, 4), want.transpose(0, 2, 1))
    assert words.view(np.uint8).max() < 243
    for size in (1, 19, 20, 21, 640):
        packed = pack(codes[:, :size])
        np.testing.assert_array_equal(unpack(packed, size=size), codes[:, :size])


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
    with pytest.raises(
        ValueError, match=r"`bits` must be an integer from 1 to 32, or 1\.6 .* got 0"
    ):
        bits.pack(jnp.zeros((1, 8), jnp.uint32), bits=0)
    with pytest.raises(ValueError, match="`packed` must have 1 words a row for 8 codes of 4 bits"):
        bits.unpack(jnp.zeros((1, 2), jnp.uint32), bits=4, size=8)
