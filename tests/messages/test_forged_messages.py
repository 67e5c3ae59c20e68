"""Forged messages are refused, by any author, and at a low cost."""

import collections
import dataclasses
import os
import re
import struct
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.posted import CODEC, FIXED, MATRIX, draws, message, sealed
from helpers.suite import slow

import jaxcomp
from jaxcomp.messages import arrays, fingerprint, frame, payloads, zstd
from jaxcomp.messages.reading import number

SECRET = bytes(range(32))


@pytest.fixture(scope="module")
def good():
    """A message in which words are coded, and steps are not."""
    return message(CODEC, draws(MATRIX.shape))[1]


def refused(data, says, codec=CODEC, like=MATRIX, secret=None):
    with pytest.raises(jaxcomp.MessageError, match=says) as caught:
        jaxcomp.from_bytes(codec, data, like, secret=secret)
    assert isinstance(caught.value, ValueError)
    assert "`data` must" in str(caught.value)


@pytest.mark.wrong_types
def test_what_is_damaged_is_refused(good):
    refused(b"", "at least 52 bytes, got 0")
    refused(good[:51], "at least 52 bytes, got 51")
    refused(good[:-1], r"got .*; it was truncated")
    refused(good + b"\0", "bytes, as its header says")
    refused(b"HTTP" + good[4:], "must begin with")
    for place in range(5, len(good), 7):
        flipped = bytearray(good)
        flipped[place] ^= 1 << place % 8
        refused(bytes(flipped), "must")
    refused(os.urandom(2_000), "must begin with")
    refused("text", "must be bytes, got str")
    newer = bytearray(good)
    newer[4] = 3
    refused(bytes(newer), "format version 2, got 3; use a newer jaxcomp")
    newer[4] = 0
    refused(bytes(newer), "format version 2, got 0$")


def test_what_is_meant_for_others_is_refused(good):
    refused(good, "same codec", codec=jaxcomp.qsgd(bits=4))
    refused(good, "same codec", like=jax.ShapeDtypeStruct((29, 37), jnp.float32))
    refused(good, "same codec", like=jax.ShapeDtypeStruct((37, 29), jnp.bfloat16))
    refused(good, "at most", like=jax.ShapeDtypeStruct((7, 9), jnp.float32))
    forced = dataclasses.replace(CODEC, implementation="reference")
    jaxcomp.from_bytes(forced, good, MATRIX)  # All implementations give the same bits.


@pytest.mark.wrong_types
def test_a_secret_is_needed_where_there_is_one(good):
    kept = message(CODEC, draws(MATRIX.shape), secret=SECRET)[1]
    jaxcomp.from_bytes(CODEC, kept, MATRIX, secret=SECRET)
    assert sealed(kept, SECRET) == kept
    refused(kept, "`secret` is None")
    refused(kept, "`secret` is another one", secret=SECRET[::-1])
    refused(sealed(kept), "`secret` is another one", secret=SECRET)
    refused(good, "must be a message with a secret", secret=SECRET)
    for secret in (b"short", bytes(65), "x" * 32):
        with pytest.raises(ValueError, match="`secret` must be 16 to 64 bytes"):
            jaxcomp.from_bytes(CODEC, kept, MATRIX, secret=secret)


@pytest.mark.wrong_types
def test_what_is_not_a_payload_is_refused():
    payload = jaxcomp.encode(CODEC, 0, draws(MATRIX.shape))
    for wrong in (None, payload.batches, jaxcomp.encode(CODEC, 0, jnp.ones(5))):
        with pytest.raises(ValueError, match="`payload` must be what `encode` returned"):
            jaxcomp.to_bytes(CODEC, wrong, MATRIX)

    with pytest.raises(ValueError, match="repr is the same in every process"):
        fingerprint.text((object(),))


def replaced(data, **fields):
    """The message with parts of its fixed fields as given, sealed."""
    places = {"flags": (5, "<B"), "zero": (6, "<H"), "count": (8, "<I")}
    data = bytearray(data)
    for name, value in fields.items():
        place, kind = places[name]
        data[place : place + struct.calcsize(kind)] = struct.pack(kind, value)
    return sealed(data)


ROW, ROW_STEPS = (3, 64), (3, 12)
"""Shape of the words, and shape and size of the steps of CODEC for MATRIX."""


def made(*entries, tail=b""):
    """A sealed message for CODEC and MATRIX with these entries of arrays, and this after them."""
    head = message(CODEC, draws(MATRIX.shape))[1][:FIXED]
    body = b"".join(bytes(kind) + b"".join(map(number, sizes)) for kind, sizes in entries)
    return replaced(head + body + tail, count=len(entries))


def written(method, body, step=0):
    """The same with these written words, and with steps of zero."""
    words = ((5, method, 2), (*ROW, len(body)))
    return made(words, ((11, step, 1), ROW_STEPS), tail=body + bytes(12))


FRAME = zstd.encode(np.zeros(768, np.uint8))


def zeros(size):
    """A frame that states 768 bytes, and whose block makes so many."""
    return b"\x28\xb5\x2f\xfd\x60\0\2" + (size << 3 | 3).to_bytes(3, "little") + b"\0"


def refused_cheaply(data, says):
    tracemalloc.start()
    refused(data, says)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200_000, says


def test_hostile_sizes_are_refused_before_they_cost_anything(good):
    """An attacker can compute a checksum; every length is compared with the expected one."""
    words, step = (5, 0, 2), ((11, 0, 1), ROW_STEPS)
    cases = {
        "no flags but 1": replaced(good, flags=2),
        "no flags": replaced(good, zero=7),
        "hold 2 arrays, got 3": replaced(good, count=3),
        "hold 2 arrays, got 4294967295": replaced(good, count=2**32 - 1),
        "what an array is": replaced(made(), count=2),
        "got dtype 200": made(((200, 0, 2), (*ROW, 0)), step),
        "of 255 dimensions": made(((5, 0, 255), (*ROW, 0)), step),
        r"got shape \[4611686018427387904, 64\]": made((words, (2**62, 64, 0)), step),
        "no more bytes than it has": made((words, (*ROW, 2**62)), step),
        "bytes of an array, got only": made((words, (*ROW, 768)), step, tail=bytes(700)),
        "end after its arrays": made((words, (*ROW, 0)), step, tail=bytes(13)),
        "in their fewest bytes": sealed(good[:55] + b"\x83\0" + good[56:-1]),
        "below 2\\^63": sealed(good[:55] + b"\xff" * 20),
    }
    for says, data in cases.items():
        refused_cheaply(data, says)


def test_hostile_arrays_are_refused_before_they_cost_anything(good):
    """The written form of an array is checked too: coded rows must be valid output of the coder."""
    jaxcomp.from_bytes(CODEC, good, MATRIX)  # Compiling takes memory, too.
    table = b"\1" + number(4095) + number(1)
    rest = b"\1\0" + bytes(4)
    cases = {
        "bytes of an array, got only 0": written(0, b""),
        "must end after an array, got 1": written(1, b"\1\7" * 4 + b"\0"),
        "a method from 0 to 4": written(5, b""),
        "a method from 0 to 2, got 9": written(1, b"\x09"),
        "hold 192 bytes of a stream": written(1, b"\0\0"),
        "the width of codes": written(3, b""),
        "got codes of 17 bits": written(3, b"\x11"),
        "codes below 16, got 16": written(3, b"\4\1\x10"),
        "got codes of 1.6 bits": written(3, b"\0\1\3"),  # Of which there would be many more.
        "got codes of 1 bits": written(3, b"\1\1\0"),
        "bytes of lengths of rows": written(2, b"\0\0"),
        "at most the 64 elements": written(2, b"\xff\0\0"),
        "bytes of trimmed rows": written(2, b"\5\0\0"),
        "only arrays that have rows": written(0, bytes(768), step=2),
        "only packed words as codes": written(0, bytes(768), step=3),
        "bytes of a table": written(3, b"\4\2\xff" + b"\1" * 200),
        "sum to 4096 .* got sum 4095": written(3, b"\4\2\1" + number(4094) + number(1) + rest),
        "frequencies below 4096": written(3, b"\4\2\1\0" + number(4096) + rest),
        "do not end in zero": written(3, b"\4\2\2" + table[1:] + b"\0" + rest),
        "bytes of lengths of coded rows": written(3, b"\4\2" + table + b"\1"),
        "at most .* words": written(3, b"\4\2" + table + b"\xff\xff"),
        "bytes of coded rows, got only": written(3, b"\4\2" + table + b"\2\0" + bytes(4)),
        "the initial state of the coder": written(3, b"\4\2" + table + rest),
        "a frame of Zstandard: error when": written(4, b"\x28"),
        "1 bytes of unused data": written(4, FRAME + b"\0"),
        "did not decompress full frame": written(4, FRAME[:-1]),
        "a frame of 768 bytes, got 767": written(4, zstd.encode(np.zeros(767, np.uint8))),
        "got 1,099,511,627,776": written(
            4, b"\x28\xb5\x2f\xfd\xe0" + (2**40).to_bytes(8, "little")
        ),
        "buffer is too small": written(4, zeros(2**17)),
        "corruption": written(4, zeros(10)),
    }
    for says, data in cases.items():
        refused_cheaply(data, says)
    for place in range(FIXED + 20, len(good) - 12):  # Whatever of a coded row is another bit.
        flipped = bytearray(good)
        flipped[place] ^= 1 << place % 8
        refused(sealed(flipped), "must")


def damaged(draw, data, other):
    """Damaged bytes."""
    data = bytearray(data)
    place = int(draw.integers(len(data) + 1))
    length = int(min(draw.geometric(0.1), len(data) - place))
    kind = draw.integers(10)
    if kind == 0 and length:
        data[place] ^= 1 << int(draw.integers(8))
    elif kind == 1:
        data[place : place + length] = draw.bytes(length)
    elif kind == 2:
        del data[place:]
    elif kind == 3:
        del data[place : place + length]
    elif kind == 4:
        data[place:place] = data[place : place + length]
    elif kind == 5:
        data[place:] = other[place:]
    elif kind == 6:
        data[place : place + 1] = number(int(draw.integers(2**62)) >> int(draw.integers(62)))
    elif kind == 7:
        data[place : place + length] = bytes(length)
    elif kind == 8:
        data[place : place + length] = b"\xff" * length
    else:
        data[:] = draw.bytes(len(data))
    return bytes(data)


def mutated(draw, data, other, expected):
    """A message that is damaged, or forged with knowledge of the format."""
    way = draw.integers(4)
    if way == 0:
        return damaged(draw, data, other)
    if way == 1:
        return sealed(damaged(draw, data, other))
    if way == 2:  # Past its fixed fields, which say what they should.
        return sealed(data[:FIXED] + damaged(draw, data[FIXED:], other[FIXED:]))
    parts = frame.read(data, expected.digest, expected.likes, None)
    which = int(draw.integers(len(parts)))
    part, method = parts[which], parts[which].method
    body = bytes(part.body)
    if draw.random() < 0.3:
        method = int(draw.integers(5))
    if method == arrays.ZSTD:
        like, widths = expected.likes[which], expected.widths[which]
        body = zstd.encode(arrays.decode(part.method, part.body, like, widths))
    body = damaged(draw, body, other)
    parts[which] = parts[which]._replace(method=method, body=body)
    return frame.write(parts, expected.digest, None)


@pytest.mark.full
@pytest.mark.parametrize("attempts", [4_000, slow(150_000)])
def test_no_message_does_more_than_raise(attempts):
    """Any modified message is refused, or is a payload of the right shapes."""
    codecs = [CODEC, jaxcomp.sidco(fraction=0.02), jaxcomp.terngrad(), jaxcomp.natural()]
    x = draws(MATRIX.shape)
    wants, messages = zip(*(message(codec, x) for codec in codecs), strict=True)
    structures = [jax.tree.structure(want) for want in wants]
    expected = [payloads._expect(codec, MATRIX) for codec in codecs]
    draw, outcomes = np.random.default_rng(11), collections.Counter()
    for attempt in range(attempts):
        which = attempt % len(codecs)
        other = messages[draw.integers(len(messages))]
        data = mutated(draw, messages[which], other, expected[which])
        try:
            got = jaxcomp.from_bytes(codecs[which], data, MATRIX)
        except jaxcomp.MessageError as error:
            outcomes[re.sub(r"\d[\d,]*", "#", str(error).split(", got")[0])] += 1
            continue
        assert sealed(data) == data, "a wrong checksum was taken"
        outcomes["read"] += data != messages[which]
        if attempt % 5 == 0:  # Whatever the places are.
            jaxcomp.decode(codecs[which], 5, got, MATRIX, worker=3)
        assert jax.tree.structure(got) == structures[which]
        found = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(got)]
        assert found == [(like.shape, like.dtype) for like in expected[which].likes]
    assert outcomes["read"] > 100
    assert sum(outcomes.values()) > 0.95 * attempts
    assert len(outcomes) > 20, outcomes
