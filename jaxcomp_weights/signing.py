"""Signatures of documents: ed25519, of the package cryptography."""

from collections.abc import Callable
from typing import Any, NamedTuple

Sign = Callable[[bytes], bytes]
Verify = Callable[[bytes, bytes], bool]


class Key(NamedTuple):
    """How a publisher signs, and accepts what it has signed before."""

    sign: Sign
    verify: Verify

    @classmethod
    def private(cls, key: Any) -> "Key":
        """Of a private key: its 32 bytes, or a key of the package cryptography.

        Raises:
            ValueError: for anything else.
        """
        ed25519 = _module()
        if isinstance(key, bytes) and len(key) == 32:
            key = ed25519.Ed25519PrivateKey.from_private_bytes(key)
        if isinstance(key, bytes) or not isinstance(key, ed25519.Ed25519PrivateKey):
            raise ValueError(
                "`sign` must be the 32 bytes of an ed25519 private key or an Ed25519PrivateKey of "
                f"the package cryptography, got {type(key).__name__}"
            )
        return cls(key.sign, verifier(key.public_key()))


def verifier(key: Any) -> Verify:
    """Verifies with a public key: its 32 bytes, or a key of the package cryptography.

    Raises:
        ValueError: for anything else.
    """
    ed25519 = _module()
    from cryptography.exceptions import InvalidSignature

    if isinstance(key, bytes) and len(key) == 32:
        key = ed25519.Ed25519PublicKey.from_public_bytes(key)
    if isinstance(key, bytes) or not isinstance(key, ed25519.Ed25519PublicKey):
        raise ValueError(
            "`verify` must be the 32 bytes of an ed25519 public key or an Ed25519PublicKey of the "
            f"package cryptography, got {type(key).__name__}"
        )

    def verify(body: bytes, signature: bytes) -> bool:
        try:
            key.verify(signature, body)
        except InvalidSignature:
            return False
        return True

    return verify


def _module() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise ValueError(
            "signatures need the package cryptography: pip install cryptography"
        ) from None
    return ed25519
