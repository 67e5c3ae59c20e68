"""A block of clients as one program: a scan over chunks, in which each client works and sends."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.backend import xla
from jaxcomp.exchange import collectives
from jaxcomp.federated import (
    control as control_,
    faults,
    server,
    streaming,
    turns,
    uplink as uplink_,
)
from jaxcomp.federated.method import Method
from jaxcomp.federated.server import Total
from jaxcomp.federated.uplink import Memory, Message
from jaxcomp.layout import trees
from jaxcomp.layout.trees import Layout, TreePayload
from jaxcomp.types import Array, AxisName, PyTree, Stacks


class Own(NamedTuple):
    """The memory of one client between rounds: a row of the table of clients.

    Attributes:
        inner: the state of its local optimizer.
        memory: what it keeps for its messages.
        side: what the server keeps about this client.
    """

    inner: PyTree
    memory: Memory
    side: PyTree


class Known(NamedTuple):
    """Values that all clients of a round know.

    Attributes:
        key: the round's key.
        centres: the parameters of the last rounds, the latest first, along a leading axis.
        shared: what server and clients know alike, of the way up's side information.
    """

    key: Array
    centres: PyTree
    shared: PyTree


class Clients(NamedTuple):
    """Clients of a round, along a leading axis.

    Attributes:
        numbers: `uint32`, who they are.
        weights: `float32`; zero for one whose message does not arrive.
        ages: `int32`, how many rounds old the parameters are from which they begin.
        steps: `int32`, how many of their batches they use.
    """

    numbers: Any
    weights: Any
    ages: Any
    steps: Any


class Done(NamedTuple):
    """The result of a block.

    Attributes:
        total: the sum of the messages so far.
        own: what the clients keep.
        sent: whether a message reached the server.
        accepted: whether the server accepted their messages.
        losses: the mean loss of each client over its steps.
        payloads: their messages, if they were asked for.
    """

    total: Total
    own: Own
    sent: Array
    accepted: Array
    losses: Array
    payloads: TreePayload | None


class Worked(NamedTuple):
    """The result of a block whose messages are not added yet.

    Attributes:
        read: the messages as the server reads them.
        weights: theirs; zero for one that was not accepted.
        own: what the clients keep.
        sent: whether a message reached the server.
        losses: the mean loss of each client over its steps.
        payloads: the messages, if they were asked for.
    """

    read: tuple[Stacks, Stacks]
    weights: Array
    own: Own
    sent: Array
    losses: Array
    payloads: TreePayload | None


def init(method: Method, params: PyTree) -> Own:
    """A client's memory before its first round."""
    up = method.uplink
    parts = turns.likes(method, params)
    memories: Any = tuple(uplink_.init(up, part) for part in parts)
    memory = memories[0] if method.fragments == 1 else memories
    if method.work.control:
        control_.trained(True, params)  # Raises without a control variate.
        memory = memory._replace(control=jax.tree.map(jnp.zeros_like, params.control))
    return Own(streaming.init(method, params), memory, up.side.row(params))


def run(
    method: Method,
    known: Known,
    total: Total,
    clients: Clients,
    batches: Any,
    own: Own,
    *,
    turn: int,
    chunk: int,
    axis_name: AxisName | None = None,
    together: bool = False,
    keep_payloads: bool = False,
) -> Done:
    """The work and the messages of a block of clients, added to the total in their order.

    Args:
        method: the method.
        known: what all clients know.
        total: the sum of the messages before.
        clients: `[chunks * chunk]` of them on this device.
        batches: their data, `[chunks * chunk, steps, …]`.
        own: what they keep.
        turn: the fragment of this round.
        chunk: how many of them are in memory at once on this device.
        axis_name: the mapped axis over which clients are spread, chunk by chunk: the first chunk of
            every device comes before the second of any.
        together: whether the clients of a chunk work in one vectorized program. That is for
            accelerators; the last bits of a product of matrices may then depend on `chunk`.
        keep_payloads: whether to return the messages, too.
    """
    size = jax.tree.leaves(clients)[0].shape[0]
    assert size % chunk == 0, (size, chunk)
    centre = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), known.centres)
    plan = method.uplink.plan(turns.part(method, centre, turn))

    def cut(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x.reshape(-1, chunk, *x.shape[1:]), tree)

    def one_chunk(total: Total, given: Any) -> tuple[Total, Any]:
        clients, batches, own = given
        work = functools.partial(run_client, method, turn)
        if together:
            spread = jax.vmap(work, in_axes=(None, 0, 0, 0))
            message, inner, losses = spread(known, clients, batches, own)
        else:
            each = (clients, batches, own)
            message, inner, losses = lax.map(lambda one: work(known, *one), each)
        weights = jnp.where(message.sound, clients.weights, 0)
        everyone = (clients._replace(weights=weights), message.payload, own.side)
        who, payloads, sides = _gathered(everyone, axis_name)

        def add(total: Total, one: Any) -> tuple[Total, Any]:
            client, payload, side = one
            guesses = method.uplink.side.at_server(known.shared, side, like_of(client.ages))
            total, accepted, read = server.add(
                method, plan, known.key, total, client.numbers, client.weights, payload, guesses
            )
            return total, (accepted, update_side(method, plan, side, read, accepted))

        def like_of(age: Array) -> PyTree:
            return jax.tree.map(lambda c: c[age], known.centres)

        total, (accepted, sides) = lax.scan(add, total, (who, payloads, sides))
        accepted, sides = _own_part((accepted, sides), axis_name, chunk)
        memory = _chosen(accepted, message)
        kept = payloads if keep_payloads else None
        return total, (Own(inner, memory, sides), weights > 0, accepted, losses, kept)

    total, (own, sent, accepted, losses, payloads) = lax.scan(
        one_chunk, total, cut((clients, batches, own))
    )

    def whole(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)

    return Done(total, *whole((own, sent, accepted, losses, payloads)))


def work(
    method: Method,
    known: Known,
    clients: Clients,
    batches: Any,
    own: Own,
    *,
    turn: int,
    keep_payloads: bool = False,
) -> Worked:
    """The work and the messages of a block of clients, one after another on one device.

    Nothing in it depends on the sum, so that the next block can be worked on beside it.

    Args:
        method: the method.
        known: what all clients know.
        clients: the clients.
        batches: their data, `[clients, steps, …]`.
        own: what they keep.
        turn: the fragment of this round.
        keep_payloads: whether to return the messages, too.
    """
    centre = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), known.centres)
    plan = method.uplink.plan(turns.part(method, centre, turn))

    def one(given: Any) -> Worked:
        who, batches, own = given
        message, inner, loss = run_client(method, turn, known, who, batches, own)
        weight = jnp.where(message.sound, who.weights, 0)
        read = message.sent
        if method.uplink.guessed:
            start = jax.tree.map(lambda c: c[who.ages], known.centres)
            guesses = method.uplink.side.at_server(known.shared, own.side, start)
            read = uplink_.read(plan, known.key, who.numbers, message.payload, guesses)
        admitted = server.admit(read, weight)
        accepted = admitted > 0
        kept = Own(
            inner,
            jax.tree.map(functools.partial(jnp.where, accepted), message.accepted, message.refused),
            update_side(method, plan, own.side, read, accepted),
        )
        payload = message.payload if keep_payloads else None
        return Worked(read, admitted, kept, weight > 0, loss, payload)

    return lax.map(one, (clients, batches, own))


def add(method: Method, total: Total, read: tuple[Stacks, Stacks], weights: Array) -> Total:
    """The sum with the messages of a block, one by one in their order."""

    def one(total: Total, given: Any) -> tuple[Total, None]:
        return server.plus(method, total, *given), None

    return lax.scan(one, total, (read, weights), unroll=_UNROLL)[0]


_UNROLL = 4
"""Messages that one pass over the sum adds."""


def run_client(
    method: Method, turn: int, known: Known, who: Clients, batches: Any, own: Own
) -> tuple[Message, PyTree, Array]:
    """All of a client's round, with the steps of the delay."""
    message, inner, loss = worker(method, turn)(known, who, batches, own)
    if method.delay:
        late = streaming.last(method, batches, who.steps)
        after = rester(method)(inner, late, who.steps)
        inner = jax.tree.map(lambda new, old: jnp.where(message.sound, new, old), after, inner)
    return message, inner, loss


@functools.lru_cache(maxsize=64)
def worker(method: Method, turn: int = 0) -> Callable[..., tuple[Message, PyTree, Array]]:
    """The work of one client, compiled alike in every program that it is part of."""
    return xla.compile_separately(functools.partial(client, method, turn))


@functools.lru_cache(maxsize=64)
def rester(method: Method) -> Callable[..., PyTree]:
    """The steps of the delay, compiled alike in every program that they are part of."""
    return xla.compile_separately(functools.partial(streaming.rest, method))


def client(
    method: Method, turn: int, known: Known, who: Clients, batches: Any, own: Own
) -> tuple[Message, PyTree, Array]:
    """One client's message, the state of its local optimizer, and its mean loss."""
    start = jax.tree.map(lambda c: c[who.ages], known.centres)
    given = (start, own.inner, batches, who.steps)
    if method.streams:
        update, inner, losses = streaming.update(method, turn, *given)
    else:
        variate = own.memory.control if method.work.control else ()
        update, inner, losses = method.work.update(method.signal, *given, variate)
    rounds = jax.tree.leaves(known.centres)[0].shape[0]
    times = jnp.asarray(faults.stale(np.arange(rounds), method.staleness), jnp.float32)[who.ages]
    memory, part = turns.one(method, own.memory, turn), turns.part(method, start, turn)
    up, plan = method.uplink, method.uplink.plan(part)
    if method.work.control:
        update = control_.without_unsent(update, uplink_.unsent(up, plan, memory))
    message = uplink_.message(
        up, plan, known.key, who.numbers, times, update, memory, known.shared, part
    )
    if method.work.control:
        message = _move_control(plan, message, times)
    accepted, refused = (
        turns.put(method, own.memory, turn, after) for after in (message.accepted, message.refused)
    )
    message = message._replace(accepted=accepted, refused=refused)
    inner = jax.tree.map(lambda new, old: jnp.where(message.sound, new, old), inner, own.inner)
    return message, inner, jnp.nanmean(losses)


def _move_control(plan: Layout, message: Message, weight: Array) -> Message:
    """The message, whose client moves its control variate if the message is accepted."""
    variate = message.refused.control
    moved = control_.move(variate, trees.assemble(plan, *message.sent), weight)
    moved = jax.tree.map(lambda new, old: jnp.where(message.sound, new, old), moved, variate)
    return message._replace(accepted=message.accepted._replace(control=moved))


def _chosen(accepted: Array, message: Message) -> Memory:
    """The memory of each client: that of an accepted message, or of a refused one."""

    def pick(yes: Array, no: Array) -> Array:
        return jnp.where(accepted.reshape(-1, *[1] * (yes.ndim - 1)), yes, no)

    return jax.tree.map(pick, message.accepted, message.refused)


def update_side(method: Method, plan: Layout, row: PyTree, read: Any, accepted: Array) -> PyTree:
    """The server's knowledge of a client after its message."""
    if not jax.tree.leaves(row):
        return row
    after = method.uplink.side.heard(row, trees.assemble(plan, *read))
    return jax.tree.map(lambda new, old: jnp.where(accepted, new, old), after, row)


def _gathered(tree: PyTree, axis_name: AxisName | None) -> PyTree:
    """The messages of a chunk on all devices, in the order of the clients."""
    if axis_name is None:
        return tree
    every = collectives.all_gather(tree, axis_name)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), every)


def _own_part(tree: PyTree, axis_name: AxisName | None, chunk: int) -> PyTree:
    if axis_name is None:
        return tree
    begin = lax.axis_index(axis_name) * chunk
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, begin, chunk), tree)
