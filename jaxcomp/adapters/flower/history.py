"""The server's last messages, from which clients that return catch up."""

import collections

from jaxcomp.federated.ledger import KEPT


class History:
    """Keeps the server's messages of the last rounds.

    Args:
        whole: the bytes of the whole centre.

    Example:
        >>> history = History(whole=100)
        >>> history.add(b"twelve bytes")
        >>> history.needed(has=0, number=1)
        (b'twelve bytes',)
        >>> history.needed(has=-1, number=1) is None
        True
    """

    def __init__(self, whole: int):
        self.whole = whole
        self._messages: collections.deque[bytes | None] = collections.deque(maxlen=KEPT)

    def add(self, message: bytes | None) -> None:
        """Keeps the message after a round; None if the round has none, but a new centre."""
        self._messages.append(message)
        while self._messages and sum(len(kept or b"") for kept in self._messages) >= self.whole:
            self._messages.popleft()  # With it, the whole centre is fewer bytes.

    def needed(self, has: int, number: int) -> tuple[bytes, ...] | None:
        """The messages with which a client that has the centre of one round gets that of another.

        Returns:
            None if it needs the whole centre: it has none, or one that is too old, or the whole is
            fewer bytes.
        """
        missed = number - has
        if has < 0 or missed > len(self._messages):
            return None
        messages = list(self._messages)[len(self._messages) - missed :]
        found = tuple(message for message in messages if message is not None)
        fewer = sum(map(len, found)) < self.whole
        return found if len(found) == missed and fewer else None
