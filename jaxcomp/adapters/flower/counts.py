"""The work of a site since its last accepted message, of which its next message has a part."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxcomp.adapters.flower.records import Instruction

_COUNTED = ("steps", "seconds", "tokens")
"""Reported numbers that add up from round to round."""


class Counts(NamedTuple):
    """The numbers since the last accepted message, after a round.

    Attributes:
        round: the round.
        told: the last round in which the server had accepted a message, as it then said.
        numbers: the sums.
    """

    round: int
    told: int
    numbers: dict[str, float]

    @classmethod
    def read(cls, text: str) -> "Counts":
        """The counts that `write` has made a text of."""
        return cls(*json.loads(text))

    def write(self) -> str:
        return json.dumps(self)


def since_accepted(
    before: Counts | None, given: Instruction, numbers: Mapping[str, Any]
) -> tuple[dict[str, Any], Counts]:
    """The numbers of a round with those of the rounds before it whose messages were refused.

    Args:
        before: after the round before; None for none.
        given: the instruction of this round.
        numbers: those of this round alone.
    """
    refused = before is not None and before.round > given.accepted == before.told
    former = before.numbers if before is not None and refused else {}
    reported = {
        name: value + former.get(name, 0) if name in _COUNTED else value
        for name, value in numbers.items()
    }
    kept = {name: reported[name] for name in _COUNTED if name in reported}
    return reported, Counts(given.round, given.accepted, kept)
