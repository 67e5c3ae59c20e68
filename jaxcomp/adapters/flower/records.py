"""Instructions of the server and answers of clients, as records of Flower's messages."""

import hashlib
import hmac
import json
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxcomp.adapters.flower import arrays as arrays_, extra
from jaxcomp.types import PyTree

PAYLOAD, CENTRE, MEMORY = "jaxcomp.payload/1", "jaxcomp.centre/1", "jaxcomp.memory/1"
"""Flower's `stype` of arrays that are compressed messages, whole trees, and clients' memory."""

CUT = "jaxcomp.cut/1"
"""That of an array that stands for one that was too large to be taken into memory."""

_INSTRUCTION, _PARTS = "jaxcomp.instruction", "jaxcomp.parts"
_ANSWER, _PAYLOAD = "jaxcomp.answer", "jaxcomp.payload"

STATUSES = ("sent", "lost", "broken", "behind")
"""The outcome of a client's round: its message is in the answer; it was lost, by an injected fault;
its update was not finite; or the client could not follow the server's parameters."""

WHOLE, PUBLISHED = -1, -2
"""The `base` of an instruction with the whole centre, and of one for a client that reads it."""

_LONGEST = 2**31 - 1


class Instruction(NamedTuple):
    """The server's instruction to a client in a round.

    Attributes:
        run: 8 random bytes of this training; a client's memory of another one is of no use.
        round: the round's number, from 0.
        client: the client's number.
        base: the round of the first of `parts`; -1 if the only part is the whole centre; -2 if
            there are none, since the client reads the centre where it is published.
        accepted: the last round in which the server accepted a message of this client, or -1.
        seed: the run's key, `uint32[2]` as 8 bytes.
        digest: that of the centre of this round.
        since: when this server began or went on, in nanoseconds; of two instructions of a training
            the one with the larger pair of `since` and `round` is the later one.
        node: the node that is asked, `uint64` as 8 bytes.
        parts: the server's messages of the rounds from `base` on, or the whole centre.
    """

    run: bytes
    round: int
    client: int
    base: int
    accepted: int
    seed: bytes
    digest: bytes
    since: int
    node: bytes
    parts: tuple[bytes, ...]


class Answer(NamedTuple):
    """A client's answer to the server.

    Attributes:
        round: the round that it answers.
        client: its number.
        status: one of `STATUSES`.
        upon: the round of the last accepted message that its memory goes on from; -1 for a new one.
        loss: the mean loss of its local steps.
        payload: its message; empty unless it was "sent".
    """

    round: int
    client: int
    status: str
    upon: int
    loss: float
    payload: bytes


class Refused(ValueError):  # noqa: N818
    """An answer that the server does not use, with its kind, under which it is counted."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


def array(data: bytes, stype: str) -> Any:
    """Bytes as one of Flower's arrays."""
    return extra.Array(dtype="uint8", shape=(len(data),), stype=stype, data=data)


def bytes_of(given: Any, stype: str, limit: int | None = None) -> bytes:
    """The bytes in one of Flower's arrays, which may come from anybody.

    Raises:
        Refused: if it is not such an array, or has more bytes than the limit.
    """
    if limit is not None and (max((len(given.data), *given.shape)) > limit or given.stype == CUT):
        raise Refused("oversize", f"its message has more than {limit:,} bytes")
    if given.dtype != "uint8" or given.stype != stype or given.shape != (len(given.data),):
        came = f"{str(given.dtype)[:20]}{list(given.shape[:4])} of {str(given.stype)[:40]!r}"
        raise Refused("malformed", f"its array is {came}, not uint8 of {stype!r}")
    return given.data


def write_instruction(given: Instruction, secret: bytes | None, whole: Any = None) -> Any:
    """An instruction as Flower's records; `whole` may be the array of the only part."""
    stype = CENTRE if given.base < 0 else PAYLOAD
    parts = {str(i): array(part, stype) for i, part in enumerate(given.parts)}
    if whole is not None:
        parts = {"0": whole}
    config = {name: value for name, value in given._asdict().items() if name != "parts"}
    config["mac"] = b"" if secret is None else _mac(given, secret)
    return extra.RecordDict(
        {_INSTRUCTION: extra.ConfigRecord(config), _PARTS: extra.ArrayRecord(parts)}
    )


def read_instruction(content: Any, secret: bytes | None) -> Instruction:
    """An instruction from Flower's records, which may hold anything.

    Raises:
        ValueError: if it is none, is not whole, or was not written with the secret.
    """
    config, parts = content.get(_INSTRUCTION), content.get(_PARTS)
    if not isinstance(config, extra.ConfigRecord) or not isinstance(parts, extra.ArrayRecord):
        raise ValueError(
            "a message to train must come from jaxcomp.adapters.flower.CompressedFedAvg, got the "
            f"records {sorted(content)}"
        )
    fields = {name: config.get(name) for name in _FIELDS}
    given = Instruction(**fields, parts=())
    wrong = next((name for name, is_whole in _FIELDS.items() if not is_whole(fields[name])), None)
    if secret is not None:
        mac = config.get("mac")
        signed = wrong is None and isinstance(mac, bytes)
        if not signed or not hmac.compare_digest(mac, _mac(given, secret)):
            raise ValueError("an instruction must be written with the client's secret, it was not")
    if wrong is not None:
        raise ValueError(
            f"an instruction must be whole, got one whose {wrong} is {str(fields[wrong])[:40]}"
        )
    count = {WHOLE: 1, PUBLISHED: 0}.get(given.base, given.round - given.base)
    if list(parts) != [str(i) for i in range(count)]:
        raise ValueError(
            f"an instruction must be whole, got one of round {given.round} from {given.base} on "
            f"with {len(parts)} parts"
        )
    stype = CENTRE if given.base < 0 else PAYLOAD
    return given._replace(parts=tuple(bytes_of(part, stype) for part in parts.values()))


def _is_number(low: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value < 2**63


def _is_bytes(size: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, bytes) and len(value) == size


_FIELDS = {
    "run": _is_bytes(8),
    "round": _is_number(0),
    "client": _is_number(0),
    "base": _is_number(PUBLISHED),
    "accepted": _is_number(-1),
    "seed": _is_bytes(8),
    "digest": _is_bytes(16),
    "since": _is_number(0),
    "node": _is_bytes(8),
}
"""The fields of an instruction beside its parts, and whether a value is one."""


def _mac(given: Instruction, secret: bytes) -> bytes:
    """A keyed hash of all but the parts, of which it has the digest of the result."""
    numbers = struct.pack("<4q", *given[1:5])
    keyed = hashlib.blake2b(key=secret, digest_size=16, person=b"jaxcomp down")
    keyed.update(numbers + b"".join(part[:16].ljust(16) for part in (given.run, given.seed)))
    keyed.update(given.digest + struct.pack("<q", given.since) + given.node)
    return keyed.digest()


def secret_of(secret: bytes | None, run: bytes, round_: int, client: int) -> bytes:
    """The secret of one client's message of one round.

    Without a secret it keeps nobody out, but a message of another round or client is refused.
    """
    keyed = hashlib.blake2b(key=secret or b"", digest_size=32, person=b"jaxcomp up")
    keyed.update(struct.pack("<2q", round_, client) + run)
    return keyed.digest()


def write_answer(
    given: Answer, run: bytes, secret: bytes | None, reported: Mapping[str, Any] | None = None
) -> Any:
    """An answer as Flower's records, beside the metric records that the client reports."""
    config = {name: value for name, value in given._asdict().items() if name != "payload"}
    parts = {"0": array(given.payload, PAYLOAD)} if given.payload else {}
    content = extra.RecordDict(dict(reported or {}))
    content[_PAYLOAD] = extra.ArrayRecord(parts)
    mac = b"" if secret is None else _answer_mac(config, content, run, secret)
    content[_ANSWER] = extra.ConfigRecord({**config, "mac": mac})
    return content


def _answer_mac(config: Mapping[str, Any], content: Any, run: bytes, secret: bytes) -> bytes:
    """A keyed hash of what an answer says beside its message, which has one of its own."""
    reported = {name: dict(record) for name, record in content.metric_records.items()}
    text = json.dumps([run.hex(), dict(config), reported], sort_keys=True)
    keyed = hashlib.blake2b(key=secret, digest_size=16, person=b"jaxcomp answer")
    keyed.update(text.encode())
    return keyed.digest()


def read_answer(
    content: Any, round_: int, client: int, limit: int, run: bytes, secret: bytes | None
) -> Answer:
    """An answer of this client in this round, from records that may hold anything.

    Raises:
        Refused: if it is none, is of another round or client, is too long, or was not written with
            the client's secret.
    """
    config, parts = content.get(_ANSWER), content.get(_PAYLOAD)
    if not isinstance(config, extra.ConfigRecord) or not isinstance(parts, extra.ArrayRecord):
        raise Refused("malformed", "it has no answer of a client of jaxcomp")
    found = {name: config.get(name) for name in Answer._fields if name != "payload"}
    for name, kind in (("round", int), ("client", int), ("upon", int), ("loss", float)):
        if type(found[name]) is not kind or abs(found[name]) > _LONGEST:
            # A loss of NaN passes, and is left out of the mean.
            raise Refused("malformed", f"its {name} is {str(found[name])[:40]}")
    if found["status"] not in STATUSES or not isinstance(found["status"], str):
        raise Refused("malformed", f"its status is {str(found['status'])[:40]}")
    if found["round"] != round_:
        raise Refused("wrong round", f"it answers round {found['round']}, not {round_}")
    if found["client"] != client:
        raise Refused("wrong client", f"it answers as client {found['client']}, not {client}")
    if secret is not None:
        mac = config.get("mac")
        expected = _answer_mac(found, content, run, secret)
        if not isinstance(mac, bytes) or not hmac.compare_digest(mac, expected):
            raise Refused("malformed", "it was not written with the client's secret")
    sent = found["status"] == "sent"
    if list(parts) != (["0"] if sent else []):
        raise Refused("malformed", f"it has {len(parts)} arrays with the status {found['status']}")
    payload = bytes_of(parts["0"], PAYLOAD, limit) if sent else b""
    return Answer(**found, payload=payload)


def mean_loss(losses: Mapping[int, float]) -> float:
    """The mean of the losses that are finite; NaN without any."""
    finite = [loss for loss in losses.values() if math.isfinite(loss)]
    return float(np.mean(finite)) if finite else math.nan


def arrays_of(params: PyTree) -> Any:
    """Parameters as Flower's `ArrayRecord`, an array for each leaf, named by its path.

    Example:
        >>> record = arrays_of({"dense": {"bias": np.zeros(2)}})  # doctest: +SKIP
        >>> list(record)  # doctest: +SKIP
        ['dense/bias']
    """
    extra.require()
    named = zip(names(params), jax.tree.leaves(params), strict=True)
    return extra.ArrayRecord({name: extra.Array(np.asarray(leaf)) for name, leaf in named})


def late_arrays_of(params: PyTree) -> Any:
    """As `arrays_of`, with bytes that are made when somebody reads them."""
    record = extra.ArrayRecord()
    for name, leaf in zip(names(params), jax.tree.leaves(params), strict=True):
        record[name] = arrays_.Leaf(leaf)
    return record


def params_of(arrays: Any, like: PyTree) -> Any:
    """The parameters in Flower's `ArrayRecord`, as a tree like `like`.

    Raises:
        ValueError: if an array is missing, or has another shape or dtype.
    """
    extra.require()
    leaves, treedef = jax.tree.flatten(like)
    expected = dict(zip(names(like), leaves, strict=True))
    if set(arrays) != set(expected):
        raise ValueError(f"`arrays` must be named {sorted(expected)}, got {sorted(arrays)}")
    read = {name: arrays[name].numpy() for name in expected}
    for name, leaf in expected.items():
        came = read[name]
        if came.dtype.kind == "V":  # Files of numpy do not know bfloat16 by its name.
            came = read[name] = came.view(leaf.dtype)
        if {came.dtype.kind, np.dtype(leaf.dtype).kind} <= {"i", "u"}:
            narrowed = came.astype(leaf.dtype)
            if np.array_equal(narrowed, came):  # Frameworks have counters of their own width.
                came = read[name] = narrowed
        if came.shape != leaf.shape or came.dtype != leaf.dtype:
            raise ValueError(
                f"`arrays` must have {name!r} as {leaf.dtype}{list(leaf.shape)}, "
                f"got {came.dtype}{list(came.shape)}"
            )
    return jax.tree.unflatten(treedef, list(read.values()))


def names(tree: PyTree) -> list[str]:
    """The name of each leaf: its path."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return [jax.tree_util.keystr(path, simple=True, separator="/") or "params" for path in paths]
