"""Checks of a codec inside another one, and of its guesses."""

from typing import Any

from jaxcomp.base import Codec


def has_guesses(state: Any) -> bool:
    """Whether the state of a guided codec has guesses: an array, and neither None nor `()`."""
    return state is not None and not isinstance(state, tuple)


def check(
    name: str, codec: Any, *, agreement: bool = True, sums: bool = False, guesses: bool = False
) -> None:
    """Raises a `ValueError` unless `codec` may be used inside another codec.

    Args:
        name: the name of the argument.
        codec: the codec.
        agreement: whether the codec may need agreement between workers.
        sums: whether decoding may need agreed levels, for payloads that are added.
        guesses: whether the codec may be guided by guesses of its input.
    """
    if not isinstance(codec, Codec):
        raise ValueError(
            f"`{name}` must be a codec such as jaxcomp.qsgd_inf(bits=4), got {codec!r}"
        )
    facts = codec.facts
    if facts.guided and not facts.sided:
        raise ValueError(
            f"`{name}` must be a codec that needs nothing beside its input, got {codec!r}, which "
            "compares it with parameters; use it alone, in jaxcomp.federated.pulseloco"
        )
    if facts.guided and not guesses:
        raise ValueError(
            f"`{name}` must be a codec that decodes from its payload alone, got {codec!r}, which "
            "is guided by guesses of its input; jaxcomp.codecs.Rotated passes them on"
        )
    if facts.sided and not facts.guided and not (sums and codec.linear):
        raise ValueError(
            f"`{name}` must be a codec that decodes from its payload alone, got {codec!r}, which "
            "needs levels that the workers agree on. Use fixed levels, such as jaxcomp.nuqsgd()"
        )
    if facts.agrees and not agreement:
        raise ValueError(
            f"`{name}` must not need agreement between workers before its input is known, got "
            f"{codec!r}; use shared=False"
        )


def check_mixed(codec: Codec, block: int) -> None:
    """Raises a `ValueError` if the codec needs more elements mixed than a rotation mixes."""
    if codec.facts.mixed > block:
        raise ValueError(
            "`codec` must not use one fitted step, or one part, for more elements than are rotated "
            f"together, block={block}: small blocks beside large ones would decode to values that "
            f"are too large, or to zero. Got {codec!r}; set block={block} in its parts, or a "
            "bucket size of at most that"
        )
