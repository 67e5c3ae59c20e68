"""Payloads ↔ bytes for any channel, with checks of untrusted input."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.base import Codec
from jaxcomp.layout import trees
from jaxcomp.layout.policy import Policy
from jaxcomp.layout.trees import TreePayload
from jaxcomp.messages import arrays, fingerprint, frame
from jaxcomp.messages.reading import MessageError
from jaxcomp.types import PyTree
from jaxcomp.wire import cost as wire_cost


class Expected(NamedTuple):
    """The contents of a message for this codec and tree.

    Attributes:
        digest: the digest of codec and layout.
        likes: the shape and dtype of every array, those of the payloads first.
        widths: the widths of the codes that each array may hold.
        treedef: the structure of the payload.
    """

    digest: bytes
    likes: tuple[jax.ShapeDtypeStruct, ...]
    widths: tuple[tuple[int | float, ...], ...]
    treedef: Any


def to_bytes(
    codec: "Codec | Policy", payload: TreePayload, like: PyTree, *, secret: bytes | None = None
) -> bytes:
    """A payload as bytes, for a socket, an HTTP body or a file.

    Every array is written by the shortest of several methods: unchanged; by its bytes or packed
    codes with an entropy coder, whose table is included; or without the trailing zeros of its rows.
    `docs/messages.md` describes the format byte by byte.

    Args:
        codec: as given to `encode`.
        payload: the result of `encode`.
        like: the tree that was encoded, or its shapes and dtypes.
        secret: 16 to 64 bytes that only sender and receiver know, with which the receiver verifies
            the sender; it does not encrypt the message.

    Returns:
        At most `message_limit(codec, like)` bytes.

    Raises:
        ValueError: if `payload` does not belong to this codec and tree, or `secret` is too short or
            too long.

    Example:
        >>> import jaxcomp
        >>> codec, x = jaxcomp.qsgd_inf(bits=4), jnp.sin(jnp.arange(4096.0)) ** 9
        >>> payload = jaxcomp.encode(codec, 0, x)
        >>> data = to_bytes(codec, payload, x)
        >>> len(data) < jaxcomp.wire_bytes(codec, x) < 4096 * 4
        True
        >>> same = from_bytes(codec, data, x)
        >>> bool(jnp.all(same.batches[0].words == payload.batches[0].words))
        True

    References:
        Duda, `Asymmetric numeral systems <https://arxiv.org/abs/1311.2540>`_, 2013.
        Saarinen and Aumasson, `BLAKE2 <https://www.rfc-editor.org/rfc/rfc7693>`_, 2015.
    """
    _check_secret(secret)
    expected = _expect(codec, like)
    leaves, treedef = jax.tree.flatten(payload)
    found = [(jnp.shape(leaf), getattr(leaf, "dtype", None)) for leaf in leaves]
    if treedef != expected.treedef or found != [(x.shape, x.dtype) for x in expected.likes]:
        raise ValueError(
            "`payload` must be what `encode` returned for this codec and a tree like `like`, "
            f"{_shapes(expected.likes)}, got {_shapes(leaves)}"
        )
    parts = []
    for leaf, like_, widths in zip(leaves, expected.likes, expected.widths, strict=True):
        method, body = arrays.encode(np.asarray(leaf), widths)
        parts.append(frame.Part(np.dtype(like_.dtype), like_.shape, method, body))
    return frame.write(parts, expected.digest, secret)


def from_bytes(
    codec: "Codec | Policy",
    data: bytes | bytearray | memoryview,
    like: PyTree,
    *,
    secret: bytes | None = None,
    finite: bool = True,
) -> TreePayload:
    """The payload that `to_bytes` wrote, bit for bit.

    `data` may come from an untrusted sender. A message that is damaged, cut, forged, or made with
    another codec or tree raises an error, and so does one that decodes to NaN or Inf, which would
    spoil every mean. Reading takes at most a few times the memory of the expected payload and the
    tree. Without a `secret`, anyone can write a message of arbitrary finite values; with one, an
    old message can still be replayed: `docs/messages.md` lists the remaining duties of a receiver.

    Args:
        codec: the codec given to `to_bytes`.
        data: the bytes that `to_bytes` returned.
        like: the tree that was encoded, or its shapes and dtypes.
        secret: the secret given to `to_bytes`.
        finite: True refuses a payload that holds or decodes to NaN or Inf, at the cost of decoding
            it once. Use False if the receiver handles these itself, or needs the exact bits of a
            payload whose gradient had overflowed.

    Returns:
        The payload from `encode`, for `decode` with the same codec, key and worker.

    Raises:
        MessageError: a `ValueError`, if `data` is not a message for this codec and tree, or is not
            `finite`.

    Example:
        >>> import jaxcomp
        >>> codec, x = jaxcomp.sign(), jnp.full(64, jnp.nan)
        >>> data = to_bytes(codec, jaxcomp.encode(codec, 0, x), x)
        >>> from_bytes(codec, data, x)
        Traceback (most recent call last):
        jaxcomp.messages.reading.MessageError: `data` must hold finite values, got NaN or Inf ...
        >>> from_bytes(codec, data, x, finite=False).batches[0].steps[0]
        Array([nan], dtype=float32)
    """
    _check_secret(secret)
    expected = _expect(codec, like)
    parts = frame.read(data, expected.digest, expected.likes, secret)
    leaves = [
        jnp.asarray(arrays.decode(part.method, part.body, like_, widths))
        for part, like_, widths in zip(parts, expected.likes, expected.widths, strict=True)
    ]
    payload = jax.tree.unflatten(expected.treedef, leaves)
    if finite:
        _check_finite(codec, payload, like, leaves)
    return payload


def message_limit(codec: "Codec | Policy", like: PyTree) -> int:
    """The largest number of bytes that `to_bytes` returns, which a receiver must accept.

    Example:
        >>> import jaxcomp
        >>> like = jax.ShapeDtypeStruct((1024,), jnp.float32)
        >>> message_limit(jaxcomp.sign(), like) - jaxcomp.wire_bytes(jaxcomp.sign(), like)
        64
    """
    return frame.limit(_expect(codec, like).likes)


def _check_finite(codec: "Codec | Policy", payload: TreePayload, like: PyTree, leaves: Any) -> None:
    """Refuses NaN and Inf in the arrays, and in the decoded values."""
    for leaf in leaves:
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not np.isfinite(np.asarray(leaf)).all():
            raise MessageError(
                f"`data` must hold finite values, got NaN or Inf in {_shapes([leaf])}; pass "
                "finite=False to read it without this check"
            )
    # Narrow scales and exponents are sent as integers, and only their decoder knows which are NaN.
    # Any key will do: it changes signs and positions, not scales and codes.
    decoded = trees.decode(codec, 0, payload, like)
    if not all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(decoded)):
        raise MessageError(
            "`data` must decode to finite values, got a scale or code that decodes to NaN or Inf; "
            "pass finite=False to read it without this check"
        )


def _check_secret(secret: Any) -> None:
    least, most = frame.SECRET
    if secret is not None and not (isinstance(secret, bytes) and least <= len(secret) <= most):
        came = f"{len(secret)} bytes" if isinstance(secret, bytes) else type(secret).__name__
        raise ValueError(
            f"`secret` must be {least} to {most} bytes, as secrets.token_bytes(32) gives, or None, "
            f"got {came}"
        )


def _shapes(leaves: Any) -> str:
    return ", ".join(f"{getattr(x, 'dtype', type(x).__name__)}{list(jnp.shape(x))}" for x in leaves)


def _expect(codec: "Codec | Policy", like: PyTree) -> Expected:
    if not isinstance(codec, Codec | Policy):
        raise ValueError(
            f"`codec` must be a codec such as jaxcomp.qsgd_inf(bits=4), or a Policy, got {codec!r}"
        )
    leaves, treedef = jax.tree.flatten(like)
    leaves = [leaf if hasattr(leaf, "dtype") else np.asarray(leaf) for leaf in leaves]
    kinds = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)
    return _expect_of(codec, treedef, kinds, jax.config.read("jax_enable_x64"))


# A message may be read faster than its codec can be traced.
@functools.lru_cache(maxsize=256)
def _expect_of(
    codec: "Codec | Policy", treedef: Any, kinds: tuple[tuple[tuple[int, ...], Any], ...], x64: bool
) -> Expected:
    del x64  # The dtypes of the payload may depend on it.
    like = jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(*kind) for kind in kinds])
    layout = trees.layout(codec, like)
    dense: Any = tuple(layout.likes[number] for number in layout.dense)
    payload = TreePayload(wire_cost.payload_like(layout.batches), dense)
    likes, treedef = jax.tree.flatten(payload)
    widths = []
    for batch, part in zip(layout.batches, payload.batches, strict=True):
        widths += [fingerprint.widths(batch.codec)] * len(jax.tree.leaves(part))
    widths += [()] * len(layout.dense)
    return Expected(fingerprint.digest(codec, layout), tuple(likes), tuple(widths), treedef)
