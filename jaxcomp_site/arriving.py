"""Messages of Flower whose arrays are written to a file piece by piece, as they come."""

import struct
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any

from flwr.app import Array, Message

_PLACE = struct.Struct("<2Q")
"""Where a piece begins in the file, and its length."""


class Arrived(Array):
    """An array whose bytes are in a file.

    Args:
        described: Flower's array, whose data are the places of its pieces.
        file: has the pieces.

    Attributes:
        length: how many bytes it has.
    """

    def __init__(self, described: Any, file: IO[bytes]):
        self.dtype, self.shape, self.stype = described.dtype, described.shape, described.stype
        self._places, self._file = list(_PLACE.iter_unpack(described.data)), file
        self.length = sum(size for _, size in self._places)

    @property
    def data(self) -> bytes:  # pyright: ignore[reportIncompatibleVariableOverride]
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """The bytes, a piece at a time."""
        for begin, size in self._places:
            self._file.seek(begin)
            yield self._file.read(size)


def receive(
    tree: Any,
    pull: Callable[[str], bytes],
    confirm: Callable[[str], None],
    file: IO[bytes],
    pauses: tuple[float, float],
) -> Any:
    """The message whose objects have the ids in `tree`; its arrays are in the file.

    Args:
        tree: the ids.
        pull: gets the content of an object.
        confirm: says that all objects are here.
        file: to write to, and to read from as long as the message is used.
        pauses: the first and the longest pause before an object is asked for again, in seconds.
    """
    from flwr.app.message.arraychunk import ArrayChunk
    from flwr.supercore.inflatable import inflatable_object, inflatable_utils

    writing = threading.Lock()

    def place_of(id_: str) -> bytes:
        """The object; of a piece, an object with its place in the file."""
        content = pull(id_)
        kind, _, size = inflatable_object.get_object_head_values_from_object_content(content)
        if kind != ArrayChunk.__qualname__:
            return content
        with writing:
            begin = file.tell()
            file.write(memoryview(content)[len(content) - size :])
        return ArrayChunk(memoryview(_PLACE.pack(begin, size))).deflate()

    message = inflatable_utils.pull_and_inflate_object_from_tree(
        tree,
        place_of,
        confirm,
        return_type=Message,
        initial_backoff=pauses[0],
        backoff_cap=pauses[1],
    )
    for record in message.content.array_records.values():
        for name, array in list(record.items()):
            record[name] = Arrived(array, file)
    return message
