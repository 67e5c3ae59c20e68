"""Checks of a codec that another one is made of."""

from typing import Any

from jaxcomp.base import Codec


def check(name: str, codec: Any, *, agreement: bool = True, sums: bool = False) -> None:
    """Raises a `ValueError` unless this is a codec that another may be made of.

    Args:
        name: of the argument.
        codec: the codec.
        agreement: whether the codec may ask the workers to agree on something first.
        sums: whether decoders may need agreed levels, for payloads that are added.
    """
    if not isinstance(codec, Codec):
        raise ValueError(
            f"`{name}` must be a codec such as jaxcomp.qsgd_inf(bits=4), got {codec!r}"
        )
    if codec.sided and not (sums and codec.linear):
        raise ValueError(
            f"`{name}` cannot be {codec!r}: its decoders need levels that the workers agree on. "
            "Take fixed levels, such as jaxcomp.nuqsgd()"
        )
    if codec.agrees and not agreement:
        raise ValueError(
            f"`{name}` must not ask the workers to agree before its input is known, got "
            f"{codec!r}; take shared=False"
        )


def check_mixed(codec: Codec, block: int) -> None:
    """Raises a `ValueError` for a codec that needs more elements mixed than a rotation mixes."""
    if codec.mixed > block:
        raise ValueError(
            "`codec` must not let one fitted step, or one part, stand for more elements than are "
            f"rotated together, block={block}: small blocks beside large ones would come back too "
            f"large, or never. Got {codec!r}; set block={block} in its parts, or a bucket size of "
            "at most that"
        )
