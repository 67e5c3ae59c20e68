"""The bytes of a federated training, up and down, with those of clients that return."""

from typing import Any

import jax
import numpy as np

from jaxcomp.federated import turns
from jaxcomp.federated.method import Method
from jaxcomp.layout.trees import TreePayload
from jaxcomp.messages import to_bytes
from jaxcomp.reducers import choose
from jaxcomp.types import PyTree

KEPT = 32
"""How many messages the server keeps for clients that missed them."""


class Ledger:
    """Counts the bytes that clients send and receive.

    A client that has missed rounds gets the messages that it missed, or the whole parameters if
    these are fewer bytes, or if the server no longer has the messages.

    Args:
        method: the method.
        params: the parameters.
        clients: the number of clients.
        messages: how many messages of a block to write with `to_bytes`; their mean stands for the
            rest. With 0, the arrays of the payloads are counted.

    Attributes:
        up: all bytes that clients sent.
        down: all bytes that clients received.
    """

    def __init__(self, method: Method, params: PyTree, clients: int, messages: int):
        self.method, self.messages = method, messages
        self.up = self.down = 0
        shared = jax.eval_shape(method.uplink.side.shared, params)
        self._params = _bytes(params)
        self._whole = self._params + _bytes(shared)
        self._parts = turns.likes(method, params)
        self._uploads = [choose.wire_bytes(method.uplink.policy, part) for part in self._parts]
        down = method.downlink
        self._downloads = [
            _bytes(part) if down is None else choose.wire_bytes(down.policy, part)
            for part in self._parts
        ]
        # The round whose parameters a client has; -1 for a client that has none.
        self._has = np.full(clients, -1)
        self._sizes: list[int] = []

    def fetched(self, numbers: np.ndarray, number: int) -> int:
        """The bytes with which these clients get the parameters of a round."""
        missed = np.where(self._has[numbers] < 0, KEPT + 1, number - self._has[numbers])
        recent = np.cumsum([0, *self._sizes[: -KEPT - 1 : -1]])
        known = missed < len(recent)
        caught_up = recent[np.minimum(missed, len(recent) - 1)]
        bytes_ = np.where(known, np.minimum(caught_up, self._whole), self._whole)
        self._has[numbers] = number
        self.down += int(bytes_.sum())
        return int(bytes_.sum())

    def received(self, came: np.ndarray, payloads: Any, turn: int = 0) -> int:
        """The bytes of the messages that `came`, of these payloads of a fragment."""
        arrived = np.flatnonzero(came)
        sent = self._uploads[turn] * len(arrived)
        if self.messages and len(arrived):
            payloads = jax.tree.map(np.asarray, payloads)
            written = 0
            for row in arrived[: self.messages]:
                payload = jax.tree.map(lambda x, row=row: x[row], payloads)
                written += len(to_bytes(self.method.uplink.policy, payload, self._parts[turn]))
            sent = round(written * len(arrived) / len(arrived[: self.messages]))
        self.up += sent
        return sent

    def announced(self, payload: TreePayload | None, moved: bool, turn: int = 0) -> None:
        """Notes the server's message of a round; it is empty if no message had moved the server."""
        link, part, size = self.method.downlink, self._parts[turn], self._downloads[turn]
        whole = self._whole == self._params and self.method.fragments == 1
        if not (moved or (link is None and whole)):
            size = 0
        elif link is not None and payload is not None and self.messages:
            size = len(to_bytes(link.policy, payload, part))
        self._sizes.append(size)
        del self._sizes[:-KEPT]

    def kept(self) -> tuple[np.ndarray, ...]:
        """What a checkpoint holds; its shapes never change."""
        sizes = np.full(KEPT, -1, np.int64)
        sizes[: len(self._sizes)] = self._sizes
        return self._has, sizes, np.array([self.up, self.down], np.int64)

    def take(self, has: np.ndarray, sizes: np.ndarray, sums: np.ndarray) -> None:
        """Goes on from what `kept` returned."""
        self._has, self._sizes = has.copy(), [int(size) for size in sizes if size >= 0]
        self.up, self.down = (int(total) for total in sums)


def _bytes(tree: PyTree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
