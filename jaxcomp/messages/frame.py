"""The frame of a message around its arrays: header, entries and checksum.

`docs/messages.md` describes every byte. A reader checks cheap properties first: the length, then
the checksum, and only then the contents.
"""

import hashlib
import hmac
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxcomp.messages.fingerprint import DIGEST, VERSION
from jaxcomp.messages.reading import MessageError, Reader, number
from jaxcomp.types import ArrayLike

MAGIC = b"\x8bJXC"
_KEYED = 1
_PERSON = b"jaxcomp message"
_FIXED = struct.Struct(f"<4sBBHIQ{DIGEST}s{DIGEST}s")
"""Magic, version, flags, zero, arrays, length, digest of codec and layout, checksum."""
_CHECKSUM = _FIXED.size - DIGEST
SECRET = (16, 64)
"""The fewest and the most bytes of a secret."""

_NAMES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e3m4", "float8_e8m0fnu"),
    *("float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
DTYPES = tuple(np.dtype(getattr(jnp, name)) for name in _NAMES)
"""The dtypes of arrays; a message holds the place in this list."""


class Part(NamedTuple):
    """One array of a message: its dtype, shape, method and bytes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    method: int
    body: Any


def write(parts: Sequence[Part], digest: bytes, secret: bytes | None) -> bytes:
    """The message of these arrays."""
    table = b"".join(_entry(part.dtype, part.shape, part.method, len(part.body)) for part in parts)
    body = table + b"".join(part.body for part in parts)
    flags = 0 if secret is None else _KEYED
    length = _FIXED.size + len(body)
    blank = (MAGIC, VERSION, flags, 0, len(parts), length, digest)
    checksum = _checksum(_FIXED.pack(*blank, bytes(DIGEST)), body, secret)
    return _FIXED.pack(*blank, checksum) + body


def read(data: Any, digest: bytes, likes: Sequence[ArrayLike], secret: bytes | None) -> list[Part]:
    """The still encoded arrays of a message, checked against the expected ones.

    Args:
        data: the message.
        digest: the digest of codec and layout.
        likes: shape and dtype of every expected array.
        secret: the secret shared by sender and receiver.

    Raises:
        MessageError: for any other message.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise MessageError(f"`data` must be bytes, got {type(data).__name__}")
    whole = memoryview(data.tobytes() if isinstance(data, memoryview) else data)
    count, found, checksum = _open(whole, limit(likes), secret)
    blank = bytes(whole[:_CHECKSUM]) + bytes(DIGEST)
    if not hmac.compare_digest(_checksum(blank, whole[_FIXED.size :], secret), checksum):
        way = "the `secret` is another one" if secret else "it was damaged on the way"
        raise MessageError(f"`data` must have the checksum of what it holds, got another: {way}")
    if found != digest:
        raise MessageError(
            "`data` must come from `to_bytes` with the same codec and a tree like `like`, got "
            f"fingerprint {found.hex()}, expected {digest.hex()}"
        )
    if count != len(likes):
        raise MessageError(f"`data` must hold {len(likes)} arrays, got {count}")
    reader = Reader(whole[_FIXED.size :])
    entries = [_read_entry(reader, like) for like in likes]
    parts = [
        Part(np.dtype(like.dtype), tuple(like.shape), method, reader.take(size, "an array"))
        for like, (method, size) in zip(likes, entries, strict=True)
    ]
    reader.end("its arrays")
    return parts


def limit(likes: Sequence[ArrayLike]) -> int:
    """The largest number of bytes of a message of such arrays."""
    sizes = [math.prod(like.shape) * np.dtype(like.dtype).itemsize for like in likes]
    entries = [
        _entry(np.dtype(like.dtype), like.shape, 0, size)
        for like, size in zip(likes, sizes, strict=True)
    ]
    return _FIXED.size + sum(map(len, entries)) + sum(sizes)


def _open(whole: memoryview, most: int, secret: bytes | None) -> tuple[int, bytes, bytes]:
    """The number of arrays, the digest and the checksum, after the first checks."""
    if len(whole) < _FIXED.size:
        raise MessageError(
            f"`data` must hold a message, of at least {_FIXED.size} bytes, got {len(whole)}"
        )
    magic, version, flags, zero, count, length, identity, checksum = _FIXED.unpack_from(whole)
    if magic != MAGIC:
        raise MessageError(
            f"`data` must begin with {MAGIC!r}, the start of a message, got {magic!r}"
        )
    if version != VERSION:
        newer = "; use a newer jaxcomp" if version > VERSION else ""
        raise MessageError(f"`data` must be of format version {VERSION}, got {version}{newer}")
    if flags & ~_KEYED or zero:
        raise MessageError(f"`data` must have no flags but {_KEYED}, got {flags} and {zero}")
    if bool(flags & _KEYED) != (secret is not None):
        came = "one without" if secret else "one with a secret, and `secret` is None"
        must = "with" if secret else "without"
        raise MessageError(f"`data` must be a message {must} a secret, got {came}")
    if length != len(whole):
        cut = "; it was truncated" if length > len(whole) else ""
        raise MessageError(
            f"`data` must have {length:,} bytes, as its header says, got {len(whole):,}{cut}"
        )
    if length > most:
        raise MessageError(
            f"`data` must have at most {most:,} bytes for this codec and a tree like `like`, got "
            f"{length:,}"
        )
    return count, identity, checksum


def _checksum(fixed: bytes, body: Any, secret: bytes | None) -> bytes:
    """The checksum of the whole message, with zeros in the checksum's own place."""
    digest = hashlib.blake2b(fixed, digest_size=DIGEST, key=secret or b"", person=_PERSON)
    digest.update(body)
    return digest.digest()


def _entry(dtype: np.dtype, shape: Sequence[int], method: int, size: int) -> bytes:
    if dtype not in DTYPES:
        raise ValueError(f"`payload` must hold arrays of {', '.join(_NAMES)}, got {dtype.name}")
    head = bytes([DTYPES.index(dtype), method, len(shape)])
    return head + b"".join(number(n) for n in (*shape, size))


def _read_entry(reader: Reader, like: ArrayLike) -> tuple[int, int]:
    """The method and the number of bytes of an array, if it is the expected one."""
    code, method, dimensions = reader.take(3, "what an array is")
    dtype = DTYPES[code].name if code < len(DTYPES) else f"dtype {code}"
    must = f"{np.dtype(like.dtype).name}{list(like.shape)}"
    if dtype != np.dtype(like.dtype).name or dimensions != len(like.shape):
        raise MessageError(f"`data` must hold {must}, got {dtype} of {dimensions} dimensions")
    shape = [reader.number("a shape") for _ in range(dimensions)]
    if shape != list(like.shape):
        raise MessageError(f"`data` must hold {must}, got shape {shape}")
    size = reader.number("the size of an array")
    if size > math.prod(like.shape) * np.dtype(like.dtype).itemsize:
        raise MessageError(f"`data` must write {must} in no more bytes than it has, got {size:,}")
    return method, size
