"""Flower's adapters refuse what is not a client's answer, and bound what a client can do."""

import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.nodes import (
    CLIENTS,
    context_of,
    grid_of,
    identity,  # noqa: F401
    method,
    params,
    sha,
    silent,
    simulated,
    strategy_of,
)

import jaxcomp
from jaxcomp import federated

pytest.importorskip("flwr")
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    RecordDict,
)

from jaxcomp.adapters import flower


def answer_with(reply, payload=None, stype="jaxcomp.payload/1", dtype="uint8", **changed):
    """A copy of an answer, with something else in it."""
    was = reply.content["jaxcomp.answer"]
    config = {**was, **changed}
    found = reply.content["jaxcomp.payload"]
    data = found["0"].data if payload is None and found else payload
    array = Array(dtype=dtype, shape=(len(data or b""),), stype=stype, data=data or b"")
    return message_of(reply.metadata.src_node_id, config, {"0": array})


def message_of(node, config, arrays):
    content = RecordDict(
        {"jaxcomp.answer": ConfigRecord(config), "jaxcomp.payload": ArrayRecord(arrays)}
    )
    return from_node(content, node)


def from_node(content, node):
    asked = Message(RecordDict(), dst_node_id=node, message_type="train")
    return Message(content, reply_to=asked)


def hostile(replies, old, count, seed):
    """So many answers of all kinds that no client gives, made of good answers of both rounds."""
    draw = np.random.default_rng(seed)
    kinds = [
        lambda r, o: answer_with(o),  # Of another round.
        lambda r, o: answer_with(r, payload=o.content["jaxcomp.payload"]["0"].data),  # Replayed.
        lambda r, o: answer_with(r, payload=bytes_flipped(r, draw)),
        lambda r, o: answer_with(r, payload=r.content["jaxcomp.payload"]["0"].data[:-5]),
        lambda r, o: answer_with(r, payload=draw.bytes(50)),
        lambda r, o: answer_with(r, payload=b"\0" * 10**5),
        lambda r, o: answer_with(r, client=int(draw.integers(-9, 2**40))),
        lambda r, o: answer_with(r, round=int(draw.integers(7, 2**62))),
        lambda r, o: answer_with(r, upon=7),
        lambda r, o: answer_with(r, round="0"),
        lambda r, o: answer_with(r, loss=[1.0]),
        lambda r, o: answer_with(r, status="won"),
        lambda r, o: answer_with(r, status="lost"),  # With a message all the same.
        lambda r, o: answer_with(r, stype="numpy.ndarray"),
        lambda r, o: answer_with(r, dtype="float32"),
        lambda r, o: from_node(RecordDict(), r.metadata.src_node_id),
        lambda r, o: from_node(r.content, 666),
        lambda r, o: from_node(Error(0, "x" * 9999), r.metadata.src_node_id),
    ]
    for _ in range(count):
        pick = draw.integers(len(kinds)), draw.integers(len(replies)), draw.integers(len(old))
        yield kinds[pick[0]](replies[pick[1]], old[pick[2]])


def memory():
    """The bytes of this process that belong to it alone."""
    text = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(text.partition("RssAnon:")[2].split()[0])


def bytes_flipped(reply, draw):
    data = bytearray(reply.content["jaxcomp.payload"]["0"].data)
    data[draw.integers(len(data))] ^= 1 << draw.integers(8)
    return bytes(data)


@pytest.mark.full
@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_hostile_answers_change_no_bit_of_the_result(count):
    given, rounds = method(), 4
    grid, strategy = grid_of(given), strategy_of(given)
    first, used = [], []

    def spoil(replies):
        if not first:
            first.extend(replies)
            return replies
        bad = hostile(replies, first, count // (rounds - 1), len(strategy.reports))
        used.append(memory())
        return itertools.chain(bad, replies, replies)  # And every answer twice.

    grid.spoil = spoil
    strategy.start(grid, num_rounds=rounds)
    used.append(memory())
    assert used[-1] - used[0] < 50e6
    expected = simulated(given, rounds)
    assert sha(strategy.state) == sha(expected.state)
    assert (strategy.up, strategy.down) == (expected.ledger.up, expected.ledger.down)
    assert strategy.refused.total() >= count - rounds
    kinds = {"wrong round", "wrong client", "malformed", "oversize", "wrong memory", "not asked"}
    assert kinds | {"repeated", "failed"} == set(strategy.refused)


def test_a_client_that_sends_what_is_not_finite_is_as_good_as_silent():
    given = method(up=jaxcomp.qsgd_inf(bits=4))
    grid, strategy = grid_of(given), strategy_of(given, largest=1e6)

    def spoil(replies):
        evil = {1: jnp.nan, 3: 1e7}
        return [spoiled(strategy, r, evil.get(r.metadata.src_node_id - 100)) for r in replies]

    grid.spoil = spoil
    strategy.start(grid, num_rounds=3)
    assert sha(strategy.params) == sha(simulated(given, 3, silent(1, 3)).params)
    assert strategy.refused == {"not finite": 6}


def test_the_influence_of_a_client_is_bounded_by_norm_and_weight():
    """It sends a huge update, and says that it is worth many clients."""
    norm = 0.05
    given = method(
        up=jaxcomp.qsgd_inf(bits=4), down=None, aggregate=jaxcomp.aggregates.ClippedMean(norm)
    )

    def ended(value):
        grid, strategy = grid_of(given), strategy_of(given)

        def spoil(replies):
            evil = {1: value}
            return [
                answer_with(
                    spoiled(strategy, r, evil.get(r.metadata.src_node_id - 100)),
                    **{"weight": 1e9, "num-examples": 10**9},
                )
                for r in replies
            ]

        grid.spoil = spoil
        strategy.start(grid, num_rounds=1)
        assert strategy.reports[0].accepted == CLIENTS
        return strategy.params

    honest, moved = ended(None), ended(1e7)
    assert sha(honest) == sha(simulated(given, 1).params)
    difference = optax.tree.norm(jax.tree.map(jnp.subtract, honest, moved))
    assert 0.1 * norm / CLIENTS < difference <= 2 * norm / CLIENTS * 1.001


def spoiled(strategy, reply, value):
    """The answer of a client that knows everything, with a message of this value."""
    if value is None:
        return reply
    like = jax.tree.map(lambda x: jnp.full(x.shape, value), params())
    up, config = strategy.method.uplink.policy, reply.content["jaxcomp.answer"]
    secret = flower.records.secret_of(None, strategy._run, config["round"], config["client"])
    payload = jaxcomp.to_bytes(up, jaxcomp.encode(up, 0, like), like, secret=secret)
    return answer_with(reply, payload=payload)


WRONG = {
    "faults": lambda: grid_of(method(), federated.Faults(old=0.5, longest=2)).apps[100](),
    "method": lambda: flower.CompressedFedAvg(None, params(), 2),
    "clients": lambda: flower.CompressedFedAvg(method(), params(), 0),
    "min_available_nodes": lambda: strategy_of(method(), min_available_nodes=9),
    "largest": lambda: strategy_of(method(), largest=-1.0),
    "numbers": lambda: strategy_of(method(), secrets=lambda number: b"0" * 16),
    "weights": lambda: strategy_of(method(), weights=[1, 2]),
    "fraction_train": lambda: strategy_of(method(), fraction_train=0.5),
    "min_train_nodes": lambda: strategy_of(method(), min_train_nodes=3),
    "weighted_by_key": lambda: strategy_of(method(mean="all"), weighted_by_key="num-examples"),
    "checkpoint": lambda: strategy_of(method(), checkpoint=3),
    "r": lambda: strategy_of(method(sampling=federated.Exactly(9))),
    "initial_arrays": lambda: strategy_of(method()).start(
        grid_of(method()), flower.arrays_of(jax.tree.map(jnp.zeros_like, params()))
    ),
    "replies": lambda: strategy_of(method()).aggregate_train(1, []),
    "arrays": lambda: flower.params_of(flower.arrays_of(params()), {"w": params()["w"]}),
    "data": lambda: flower.raw.read(b"123", params()),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_an_error_that_names_the_argument(name):
    with pytest.raises(ValueError, match=f"`{name}` must"):
        WRONG[name]()


def test_a_file_that_is_no_memory_is_named(tmp_path):
    (tmp_path / "memory").write_bytes(b"something else")
    grid = grid_of(method(), memory=lambda context: tmp_path / "memory")
    said = []
    grid.spoil = lambda replies: said.extend(r.error.reason for r in replies) or replies
    strategy = strategy_of(method())
    strategy.start(grid, num_rounds=1)
    assert strategy.refused == {"failed": CLIENTS}
    assert all(text.startswith("`memory` must be new, empty, or a folder") for text in said)
    assert (tmp_path / "memory").read_bytes() == b"something else"


def test_what_a_server_sends_is_checked():
    app = grid_of(method()).apps[100]()
    with pytest.raises(ValueError, match="must come from jaxcomp"):
        app(Message(RecordDict(), dst_node_id=100, message_type="train"), context_of(100))
