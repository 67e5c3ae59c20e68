"""How often Flower's SuperLink is asked for messages.

A question costs the SuperLink ten milliseconds of a processor, and every site and the server ask.
"""

SOONEST, LATEST, SHARE, SURE = 0.2, 3.0, 0.1, 0.7
"""Seconds between two questions, of which the longest is Flower's own; the part of the time waited;
and the part of the last wait in which nothing is asked."""


class Pace:
    """The pauses between questions of someone who waits again and again for about as long.

    A message then lies for at most a tenth of the time in which it was waited for, and whoever
    waits for long asks as rarely as Flower's SuperNode.
    """

    def __init__(self):
        self._last = 0.0

    def pause(self, waited: float) -> float:
        """Seconds until the next question, after so many without a message."""
        rest = SURE * self._last - waited
        return min(max(SOONEST, SHARE * waited, rest), LATEST)

    def came(self, waited: float) -> None:
        """Says that a message came after so many seconds."""
        self._last = waited
