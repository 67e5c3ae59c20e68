"""A client's memory between rounds, as Flower's records."""

from typing import Any, NamedTuple

import jax

from jaxcomp.adapters.flower import arrays, extra, raw, records
from jaxcomp.federated import block, uplink
from jaxcomp.federated.block import Own
from jaxcomp.federated.method import Method
from jaxcomp.types import PyTree

_STATE, _TREES = "jaxcomp.state", "jaxcomp.memory"
_SAID = "jaxcomp.said."
_NUMBERS = ("run", "since", "round", "client", "told", "upon", "node")


class Centre(NamedTuple):
    """The parameters and side information that the server and all clients share.

    Attributes:
        params: the parameters.
        shared: the side information of the way up.
    """

    params: PyTree
    shared: PyTree


class Kept(NamedTuple):
    """A client's memory after the round in which it worked last.

    It has two memories for its messages, since it does not know whether the server has accepted the
    last one. The next instruction tells.

    Attributes:
        run: the training that it belongs to.
        since: when the server of that round began or went on.
        round: that round.
        client: its number.
        told: what the server then said: the last round in which it had accepted a message.
        upon: the last accepted message that the memory goes on from; -1 for a new memory.
        node: the node that was asked.
        centre: the parameters of that round.
        inner: the state of the local optimizer.
        accepted: the memory if the server has accepted the message of that round.
        refused: the memory if it has not.
    """

    run: bytes
    since: int
    round: int
    client: int
    told: int
    upon: int
    node: bytes
    centre: Centre
    inner: PyTree
    accepted: uplink.Memory
    refused: uplink.Memory


def centre_of(method: Method, params: PyTree) -> Centre:
    """The centre before the first round."""
    return Centre(params, method.uplink.side.shared(params))


def write(state: Any, kept: Kept, answer: Any) -> None:
    """Puts the memory and the answer of a round into the state of a context, or of a file."""
    config = {name: getattr(kept, name) for name in _NUMBERS}
    state[_STATE] = extra.ConfigRecord(config)
    trees = {name: getattr(kept, name) for name in ("centre", "inner", "accepted", "refused")}
    state[_TREES] = record = extra.ArrayRecord()
    for name, tree in trees.items():
        record[name] = arrays.Tree(tree, records.MEMORY)
    for name in [name for name in state if name.startswith(_SAID)]:
        del state[name]
    for name, record in answer.items():
        state[_SAID + name] = record


def read(state: Any, method: Method, like: PyTree, given: records.Instruction) -> Kept | None:
    """The memory in a state; None if there is none, or that of another training.

    Raises:
        ValueError: for a memory that is not whole, and for an instruction that is older than the
            memory, or for another node.
    """
    if _STATE not in state or _TREES not in state:
        return None
    config, trees = state[_STATE], state[_TREES]
    if config.get("run") != given.run:
        return None
    if missing := [name for name in _NUMBERS if name not in config]:
        raise ValueError(f"a memory must be whole, got one without {missing}: remove it")
    if config["client"] != given.client and config["node"] != given.node:
        # A node may get another number, and a number another node. Two nodes of one memory would
        # each lose what the other keeps in it.
        nodes = [int.from_bytes(node, "little") for node in (config["node"], given.node)]
        raise ValueError(
            f"a memory must be of one node, got that of client {config['client']}, node "
            f"{nodes[0]}, and an instruction for client {given.client}, node {nodes[1]}: give each "
            f"node a folder of its own, or remove the memory if node {nodes[0]} is gone for good"
        )
    if (given.since, given.round) < (config["since"], config["round"]):
        # It was delayed or sent again: to follow it would destroy the memory of later rounds.
        raise ValueError(
            "an instruction must not be older than the last one that was followed, of round "
            f"{config['round']}, got round {given.round}"
        )
    own = jax.eval_shape(lambda params: block.init(method, params), like)
    centre = jax.eval_shape(lambda params: centre_of(method, params), like)
    likes = {"centre": centre, "inner": own.inner, "accepted": own.memory, "refused": own.memory}
    try:
        read = {name: _tree(trees[name], like) for name, like in likes.items()}
    except (KeyError, ValueError):
        return None
    return Kept(*(config[name] for name in _NUMBERS), **read)


def _tree(given: Any, like: PyTree) -> PyTree:
    if isinstance(given, arrays.Tree):
        return given.tree
    return raw.read(records.bytes_of(given, records.MEMORY), like)


def repeat_answer(state: Any, kept: Kept | None, given: records.Instruction) -> Any:
    """The answer to this very instruction, if it is the last one that the client has answered."""
    if kept is None:
        return None
    same = (kept.round, kept.client, kept.told) == (given.round, given.client, given.accepted)
    if not same or raw.digest(kept.centre) != given.digest:
        return None
    found = state.items()
    answer = {name.removeprefix(_SAID): one for name, one in found if name.startswith(_SAID)}
    return extra.RecordDict(answer) if answer else None


def resume(
    method: Method, given: records.Instruction, kept: Kept | None, params: PyTree
) -> tuple[Own, int]:
    """The memory with which a client works, and the last accepted message that it goes on from.

    A client whose memory is gone, or does not fit what the server says, begins with a new one.
    """
    if kept is not None and kept.client == given.client:
        side = method.uplink.side.row(params)
        if kept.round == given.accepted:
            return Own(kept.inner, kept.accepted, side), given.accepted
        if kept.told == given.accepted and kept.round > given.accepted:
            return Own(kept.inner, kept.refused, side), kept.upon
    return block.init(method, params), -1
