"""A client on Flower: the work of the simulation's clients, or that of an app of one's own."""

import functools
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp import checks
from jaxcomp.adapters.flower import extra, files, integers, memory as memory_, raw, records
from jaxcomp.adapters.flower.memory import Centre, Kept
from jaxcomp.adapters.flower.records import Answer, Instruction
from jaxcomp.federated import block, server, turns, uplink
from jaxcomp.federated.block import Clients, Known, Own
from jaxcomp.federated.faults import Faults
from jaxcomp.federated.method import Method
from jaxcomp.federated.work import LocalSteps
from jaxcomp.messages import from_bytes, to_bytes
from jaxcomp.types import Array, PyTree

Batches = Callable[[Any, int, int], Any]
"""`batches(context, number, round)`: arrays `[steps, …]`, a client's data for a round."""

Metrics = Callable[[Any, int, int], Mapping[str, Any]]
"""`metrics(context, number, round)`: numbers that a client reports beside its message."""

Secret = Callable[[Any], bytes]
"""`secret(context)`: the client's own secret, 16 to 64 bytes."""

Published = Callable[[int], PyTree | None]
"""`published(round)`: the parameters of a round where they are published; None if they are not."""

Memory = Callable[[Any], "str | os.PathLike[str]"]
"""`memory(context)`: the folder in which a client keeps its memory."""


def client_app(
    method: Method,
    like: PyTree,
    batches: Batches,
    *,
    secret: Secret | None = None,
    memory: Memory | None = None,
    metrics: Metrics | None = None,
    faults: Faults = Faults(),
) -> Any:
    """A `flwr.clientapp.ClientApp` that does a client's part of a round.

    It runs the very program of the simulation's clients, and its messages have the same bits. The
    parameters and the client's memory are in Flower's context or in a file, so every message may
    meet a new process.

    Args:
        method: the method, as on the server.
        like: the parameters, or their shapes and dtypes.
        batches: `batches(context, number, round)` gives the client's data: arrays `[steps, …]`.
            `number` is the client's number on the server, and `context` is Flower's, whose
            `node_config` says which data a node has.
        secret: `secret(context)` gives the client's own secret; None for none.
        memory: `memory(context)` gives a folder of the node's own, in which the client's memory
            outlives the SuperNode and the run. None keeps it in Flower's context, which ends with
            either, and passes through Flower with every message.
        metrics: `metrics(context, number, round)` gives what the client reports after its steps,
            such as `{"num-examples": 600}`, which is its weight for a strategy with
            `weighted_by_key`; None for the loss alone.
        faults: for experiments: which messages are lost. A client whose message is lost says so,
            instead of sending it.

    Raises:
        ImportError: without Flower.
        ValueError: for settings of another kind, or faults with old parameters.
    """
    counters = integers.among(like)
    if counters:
        raise ValueError(
            f"`like` must have no integers, which cannot be trained, got some at {counters}; an "
            "app of your own may have them, behind jaxcomp.adapters.flower.compress_mod"
        )
    shapes = raw.like(like)
    work = _in_context(work_of(method, like, secret, faults), memory)
    app = extra.ClientApp()

    @app.train()
    def train(message: Any, context: Any) -> Any:
        def run(known: Known, given: Instruction, own: Own) -> Worked:
            data = batches(context, given.client, given.round)
            turn = turns.of(method, shapes, given.round)
            parts = (known, who(given, steps_of(data)), data, own)
            sent, inner, loss = one_round(method, turn, *parts)
            reported = {}
            if metrics is not None:
                numbers = dict(metrics(context, given.client, given.round))
                reported["metrics"] = extra.MetricRecord(numbers)
            return Worked(sent, inner, float(loss), reported)

        return extra.Message(content=work(message, context, run), reply_to=message)

    return app


def compress_mod(
    method: Method,
    like: PyTree,
    *,
    secret: Secret | None = None,
    memory: Memory | None = None,
    arrays: str = "arrays",
) -> Callable[[Any, Any, Callable[[Any, Any], Any]], Any]:
    """A mod for a Flower app's own training: `@app.train(mods=[compress_mod(method, like)])`.

    The app finds the whole parameters in the message, trains in any framework, and returns the new
    parameters, as with `flwr`'s `FedAvg`. The mod sends the method's compressed message instead.
    The method's `work` is not used: `ELSEWHERE` stands for it.

    Integers among the parameters, such as a counter of batch norm, are sent as they are, in four
    bytes, and become the nearest integers to the clients' mean, whatever the server's optimizer is.

    Args:
        method: the method, as on the server.
        like: the parameters, or their shapes and dtypes. In the app's records they are named by
            their paths, such as `dense/bias`.
        secret: `secret(context)` gives the client's own secret; None for none.
        memory: `memory(context)` gives the folder of the client's memory, as for `client_app`.
        arrays: the key of the parameters in the app's records.

    Raises:
        ImportError: without Flower.
        ValueError: for settings of another kind; on use, if the app returns other parameters, or
            integers above 2²⁴.
    """
    extra.require()
    checks.part("method", method, Method)
    if method.streams:
        raise ValueError(
            "`method` must have no fragments, delay or mix behind compress_mod, whose app begins "
            f"each round from the server's parameters, got {method.fragments!r}, {method.delay} "
            f"and {method.mix}; use client_app or Site"
        )
    whole = raw.like(like)
    if method.work.control:
        raise ValueError(
            "`method` must have no control variates behind compress_mod, whose app's steps they "
            "would have to correct, got LocalSteps(control=True); use client_app or Site"
        )
    method = integers.apart(method, whole)
    work = _in_context(work_of(method, integers.as_floats(whole), secret), memory)

    def mod(message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
        def run(known: Known, given: Instruction, own: Own) -> Worked:
            start = jax.tree.map(lambda c: np.asarray(c[0]), known.centres)
            start = integers.restore_integers(start, whole)
            message.content[arrays] = records.arrays_of(start)
            reply = call_next(message, context)
            if reply.has_error():
                raise ValueError(f"the app's own training must succeed, it said {reply.error!r}")
            end = integers.as_floats(records.params_of(reply.content[arrays], start))
            sent = _message(method, known, who(given, 1), end, own)
            reported = dict(reply.content.metric_records)
            return Worked(sent, own.inner, _loss_of(reply.content), reported)

        return extra.Message(content=work(message, context, run), reply_to=message)

    return mod


def _elsewhere(params: PyTree, batch: Any) -> Array:
    raise ValueError(
        "`work` of this method must be LocalSteps(loss, optimizer) to train with it, it is "
        "ELSEWHERE, which stands for the training of an app of your own behind compress_mod"
    )


ELSEWHERE = LocalSteps(_elsewhere, optax.identity())
"""The `work` of a method whose clients train in an app of their own, behind `compress_mod`."""


class _Place(NamedTuple):
    """Where a client is: at the centre of this round, with this memory of which accepted round."""

    centre: Centre
    own: Own
    upon: int


class Worked(NamedTuple):
    """A client's round: its message, the state of its optimizer, its loss and what it reports."""

    sent: uplink.Message
    inner: PyTree
    loss: float
    reported: Mapping[str, Any]


def _in_context(work: Callable[..., Any], folder_of: Memory | None) -> Callable[..., Any]:
    """The round of a client whose memory is in Flower's context, or in a folder of its own."""

    def in_context(message: Any, context: Any, run: Callable[..., Any]) -> Any:
        if folder_of is None:
            return work(message.content, context.state, run, context)
        kept = files.folder_of(folder_of(context))
        kept.own()  # Until the end of this function.
        state = files.read(kept)
        content = work(message.content, state, run, context)
        files.write(kept, state)
        return content

    return in_context


def work_of(
    method: Method,
    like: PyTree,
    secret: Secret | None,
    faults: Faults = Faults(),
    published: Published = lambda round: None,
) -> Callable[..., Any]:
    """The round of a client around its training.

    Returns:
        `work(content, state, run, context=None)`: the answer to the server's message, for a client
        whose memory is in `state`, where it is afterwards. `run(known, given, own)` trains.
    """
    extra.require()
    checks.part("method", method, Method)
    checks.part("faults", faults, Faults)
    if faults.old:
        raise ValueError(
            "`faults` must not have old parameters: a client begins with those of the server's "
            f"message, got {faults!r}"
        )
    like = raw.like(like)

    def work(message: Any, state: Any, run: Callable[..., Any], context: Any = None) -> Any:
        own_secret = None if secret is None else secret(context)
        given = records.read_instruction(message, own_secret)
        key = jnp.asarray(np.frombuffer(given.seed, np.uint32))
        kept = memory_.read(state, method, like, given)
        said = memory_.repeat_answer(state, kept, given)
        if said is not None:
            # The server asks again, since it has lost the answer. To work again would count twice.
            return said
        place = _find_place(method, like, key, given, kept, published)
        if place is None:
            answer = Answer(given.round, given.client, "behind", -1, math.nan, b"")
            return records.write_answer(answer, given.run, own_secret)
        known = Known(
            turns.key(method, like, key, given.round),
            jax.tree.map(lambda x: np.asarray(x)[None], place.centre.params),
            place.centre.shared,
        )
        sent, inner, loss, reported = run(known, given, place.own)
        arrives, _ = faults.draw(known.key, np.array([given.client]), 1)
        status = "sent" if arrives[0] else "lost"
        status = status if sent.sound else "broken"
        data = b""
        if status == "sent":
            of_message = records.secret_of(own_secret, *given[:3])
            part = turns.part(method, like, turns.of(method, like, given.round))
            data = to_bytes(method.uplink.policy, sent.payload, part, secret=of_message)
        answer = Answer(given.round, given.client, status, place.upon, loss, data)
        content = records.write_answer(answer, given.run, own_secret, reported)
        of_round = (given.run, given.since, given.round, given.client, given.accepted, place.upon)
        after = (given.node, place.centre, inner, sent.accepted, sent.refused)
        memory_.write(state, Kept(*of_round, *after), content)
        return content

    return work


def _find_place(
    method: Method,
    like: PyTree,
    key: Array,
    given: Instruction,
    kept: Kept | None,
    published: Published,
) -> _Place | None:
    """The client at the centre of the round, or None if it cannot get there."""
    if given.base == records.PUBLISHED:
        params = published(given.round)
        if params is None:
            return None
        centre = memory_.centre_of(method, params)
    elif given.base == records.WHOLE:
        shapes = jax.eval_shape(lambda params: memory_.centre_of(method, params), like)
        centre = raw.read(given.parts[0], shapes)
    elif kept is None or not given.base <= kept.round <= given.round:
        return None
    else:
        centre = kept.centre
        for number in range(kept.round, given.round):
            part = given.parts[number - given.base]
            if part:  # Without any message from clients, the server stays where it is.
                centre = _follow(method, key, number, centre, part, like)
    if raw.digest(centre) != given.digest:
        return None
    return _Place(centre, *memory_.resume(method, given, kept, centre.params))


def _follow(
    method: Method, key: Array, number: int, centre: Centre, part: bytes, like: PyTree
) -> Centre:
    """The centre after the server's message of a round."""
    turn = turns.of(method, like, number)
    like = turns.part(method, like, turn)
    if method.downlink is None:
        params = turns.whole(method, centre.params, turn, raw.read(part, like))
        return _learn(method, centre, params)
    payload = from_bytes(method.downlink.policy, part, like)
    return _advance(method, turn, turns.key(method, centre.params, key, number), centre, payload)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _advance(method: Method, turn: int, key: Array, centre: Centre, payload: Any) -> Centre:
    before = turns.part(method, centre.params, turn)
    after = server.follow(method, key, before, payload)
    return _learn(method, centre, turns.whole(method, centre.params, turn, after))


@functools.partial(jax.jit, static_argnums=0)
def _learn(method: Method, centre: Centre, params: PyTree) -> Centre:
    return Centre(params, method.uplink.side.learn(centre.shared, centre.params, params))


@functools.partial(jax.jit, static_argnums=(0, 1))
def one_round(
    method: Method, turn: int, known: Known, who: Clients, batches: Any, own: Own
) -> tuple[uplink.Message, PyTree, Array]:
    """The work of one client, compiled as the simulation compiles it."""
    return unread(block.run_client(method, turn, known, who, batches, own))


def unread(
    worked: tuple[uplink.Message, PyTree, Array],
) -> tuple[uplink.Message, PyTree, Array]:
    """A client's round without its message as the server reads it: parameters that it can spare."""
    message, inner, loss = worked
    return message._replace(sent=((), ())), inner, loss


@functools.partial(jax.jit, static_argnums=0)
def _message(method: Method, known: Known, who: Clients, end: PyTree, own: Own) -> uplink.Message:
    """The message of a client that was trained elsewhere."""
    start = jax.tree.map(lambda c: c[0], known.centres)
    update = method.signal(start, end)
    up, plan = method.uplink, method.uplink.plan(update)
    return uplink.message(
        up, plan, known.key, who.numbers, 1.0, update, own.memory, known.shared, start
    )


def who(given: Instruction, steps: int) -> Clients:
    """The client of an instruction."""
    return Clients(jnp.uint32(given.client), jnp.float32(1), jnp.int32(0), jnp.int32(steps))


def steps_of(batches: Any) -> int:
    """The number of steps for which there are batches."""
    shapes = [np.shape(x) for x in jax.tree.leaves(batches)]
    if not shapes or any(s[:1] != shapes[0][:1] or not s for s in shapes):
        raise ValueError(f"`batches` must give arrays [steps, …], got shapes {shapes}")
    return shapes[0][0]


def _loss_of(content: Any) -> float:
    """The loss that an app reports, if it does."""
    for metrics in content.metric_records.values():
        for name in ("loss", "train_loss", "train-loss"):
            if isinstance(metrics.get(name), float):
                return metrics[name]
    return math.nan
