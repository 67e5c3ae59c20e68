"""Arrays of many shapes as one vector for each dtype, and back."""

import functools

import jax
import numpy as np

from jaxcomp.exchange import packing

ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.arange(4, dtype=np.int32),
    np.float32(7).reshape(()),
    np.zeros((0, 3), np.float32),
    np.arange(2, dtype=np.float16),
]
FEWER = [np.arange(9, dtype=np.float32), np.arange(3, dtype=np.int8)]


def likes(arrays):
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]


def test_there_is_room_for_the_longest_set_of_each_dtype():
    rooms = packing.rooms([likes(ARRAYS), likes(FEWER)])
    assert {room.dtype.name: room.shape for room in rooms} == {
        "float32": (9,), "int32": (4,), "float16": (2,), "int8": (3,)
    }  # fmt: skip
    assert packing.rooms([]) == ()


def test_what_is_packed_is_unpacked():
    """Padded with zeros, also where a set has nothing of a dtype."""
    rooms = packing.rooms([likes(ARRAYS), likes(FEWER)])
    for arrays in (ARRAYS, FEWER):
        vectors = jax.jit(functools.partial(packing.pack, rooms))(arrays)
        assert likes(vectors) == list(rooms)
        held = sum(x.size for x in arrays)
        assert sum(np.count_nonzero(x) for x in vectors) <= held < sum(x.size for x in vectors)
        found = jax.jit(functools.partial(packing.unpack, likes=likes(arrays)))(vectors)
        for got, want in zip(found, arrays, strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)
