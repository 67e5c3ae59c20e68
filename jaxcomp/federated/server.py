"""The server: adds clients' messages one by one, and moves the parameters once a round."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp import aggregates
from jaxcomp.backend import xla
from jaxcomp.base import Feedback
from jaxcomp.exchange import gating, guarding, send
from jaxcomp.federated import control as control_, uplink as uplink_
from jaxcomp.federated.method import Method
from jaxcomp.feedback import Link
from jaxcomp.layout import trees
from jaxcomp.layout.trees import Layout, TreePayload
from jaxcomp.numerics import addition, exact, noise
from jaxcomp.types import Array, PyTree, Stacks

_DOWN = 0x646F776E
"""Folded into a round's key for the server's own message."""


class ServerState(NamedTuple):
    """Everything that the server keeps between rounds, beside its memory of single clients.

    Attributes:
        round: the number of rounds so far.
        params: the parameters, as all clients know them after this round's message.
        optimizer: the state of the server's optimizer.
        mirror: the server's part of the clients' feedback, of the compressed leaves and of those
            that are sent dense.
        shared: what server and clients know alike, of the way up's side information.
        down: the memory of the way down: its feedback, and the state of its codecs.
        aggregate: the aggregate's state, with a row for each client.
    """

    round: Array
    params: PyTree
    optimizer: PyTree
    mirror: tuple[PyTree, PyTree]
    shared: PyTree
    down: PyTree
    aggregate: PyTree


class Total(NamedTuple):
    """The messages of a round that were added so far.

    Attributes:
        stacks: their weighted sum, an array for each batch.
        dense: that of the leaves that are sent dense.
        weight: the sum of their weights.
        count: their number.
        senders: for a mean over senders, the weights of those that sent each element, an array for
            each batch; else `()`.
    """

    stacks: Stacks
    dense: Stacks
    weight: Array
    count: Array
    senders: Stacks = ()


def init(method: Method, params: PyTree, clients: int) -> ServerState:
    """The server before the first round of so many clients."""
    params = jax.tree.map(jnp.array, params)  # Its own copy: a round may donate it.
    plan = method.uplink.plan(params)
    likes = tuple(addition.accumulator(batch.like) for batch in plan.batches)
    wide = tuple(map(addition.accumulator, plan.dense_likes))
    uplink = method.uplink
    return ServerState(
        jnp.zeros((), jnp.int32),
        params,
        method.server.init(control_.trained(method.work.control, params)),
        (uplink.feedback.init((), likes), uplink.dense_feedback.init((), wide)),
        uplink.side.shared(params),
        () if method.downlink is None else _down_init(method.downlink, params),
        method.aggregate.init((likes, plan.dense_likes), clients),
    )


class Weights(NamedTuple):
    """Sums of clients' weights, by which a sum of messages is divided.

    Attributes:
        drawn: the expected sum of the weights of the clients that take part in a round.
        whole: the sum of the weights of all clients.
        each: the mean weight of a client.
    """

    drawn: Array
    whole: Array
    each: Array | float = 1.0


def weights_of(method: Method, weights: np.ndarray) -> Weights:
    """The sums of these clients' weights."""
    clients, mean = len(weights), float(weights.mean())
    drawn = method.sampling.expected(clients) * mean
    return Weights(jnp.float32(drawn), jnp.float32(clients * mean), jnp.float32(mean))


def round_key(key: Array, number: Array | int) -> Array:
    """The key of a round, from which every draw of the round follows."""
    return noise.fold(key, number)


def nothing(method: Method, like: PyTree) -> Total:
    """The total before the first message."""
    plan = method.uplink.plan(like)
    stacks = tuple(addition.zeros(batch.like) for batch in plan.batches)
    zero = jnp.zeros((), jnp.float32)
    return Total(
        stacks,
        tuple(map(addition.zeros, plan.dense_likes)),
        zero,
        jnp.zeros((), jnp.int32),
        jax.tree.map(jnp.zeros_like, stacks) if method.mean == "senders" else (),
    )


def add(
    method: Method,
    plan: Layout,
    key: Array,
    total: Total,
    number: Array | int,
    weight: Array,
    payload: TreePayload,
    guesses: PyTree | None = None,
) -> tuple[Total, Array, PyTree]:
    """Adds one client's message, unless it decodes to something that is not finite.

    A sum that is taken in the order of the clients has the same bits however they are grouped.

    Args:
        method: the method.
        plan: that of the messages.
        key: the round's key.
        total: the sum so far.
        number: the client's number.
        weight: its weight; zero for a message that did not arrive.
        payload: its message.
        guesses: the server's side information.

    Returns:
        The new sum, whether the message was accepted, and the decoded message.
    """
    read = uplink_.read(plan, key, number, payload, guesses)
    weight = admit(read, weight)
    return plus(method, total, read, weight), weight > 0, read


def admit(read: PyTree, weight: Array) -> Array:
    """The weight of a message; zero if it decodes to something that is not finite."""
    return jnp.where(guarding.all_finite(read), jnp.asarray(weight, jnp.float32), 0)


def plus(method: Method, total: Total, read: tuple[Stacks, Stacks], weight: Array) -> Total:
    """The sum with one more message, of a weight that is zero if it is not accepted."""
    given = method.aggregate.prepare(read)

    def add(total: Array, x: Array) -> Array:
        x = addition.widen(x)
        # Whether a product is rounded before it is added must not depend on the program. One times
        # a message is that message to the last bit: with its residual it is what the client gave.
        times = xla.block_fma(addition.weigh(x, weight))
        return total + jnp.where(weight == 1, x, times)

    stacks, dense = jax.tree.map(add, (total.stacks, total.dense), given)
    senders = total.senders
    if method.mean == "senders":
        pairs = zip(senders, given[0], strict=True)
        senders = tuple(n + jnp.where(x != 0, weight.astype(n.dtype), 0) for n, x in pairs)
    return Total(stacks, dense, total.weight + weight, total.count + (weight > 0), senders)


class Held(NamedTuple):
    """The messages of a round, for an aggregate that needs all of them at once.

    Attributes:
        numbers: `uint32[rows]`, the drawn clients in their order; then numbers beyond all clients.
        weights: `float32[rows]`; zero for a client whose message was not accepted.
        payloads: the messages, with a leading axis of rows.
    """

    numbers: Any
    weights: Any
    payloads: TreePayload


def fill_table(
    cohort: np.ndarray, clients: int, weights: np.ndarray, rows: np.ndarray, payloads: TreePayload
) -> Held:
    """The messages of these rows of the cohort, in a table that depends on the cohort alone.

    Sums over its rows then have the same bits however clients were grouped, and whether or not the
    messages that were not accepted are there. Few numbers of rows, at most a quarter above that of
    the drawn clients, mean few compilations where it differs from round to round.

    Args:
        cohort: the clients that were drawn.
        clients: the number of all clients.
        weights: the weights of the messages.
        rows: which clients of the cohort they come from.
        payloads: the messages.
    """
    step = 1 << max(len(cohort).bit_length() - 3, 0)
    size = min(clients, -(-len(cohort) // step) * step)

    def placed(x: Any) -> np.ndarray:
        x = np.asarray(x)
        table = np.zeros((size, *x.shape[1:]), x.dtype)
        table[rows] = x
        return table

    numbers = np.full(size, clients, np.uint32)
    numbers[: len(cohort)] = cohort
    return Held(numbers, placed(weights), jax.tree.map(placed, payloads))


@functools.partial(jax.jit, static_argnums=0)
def combine(
    method: Method, key: Array, state: ServerState, given: Held
) -> tuple[ServerState, Total]:
    """The messages of a round by an aggregate that needs all of them at once.

    Args:
        method: the method.
        key: the round's key.
        state: the server, with the aggregate's state.
        given: the messages.

    Returns:
        The server with the aggregate's new state, and a total for `step`. It counts no message if
        the aggregate has no sound result.
    """
    plan = method.uplink.plan(state.params)
    numbers, weights, payloads = given
    messages = jax.lax.map(lambda one: uplink_.read(plan, key, *one), (numbers, payloads))
    rows = jax.tree.map(lambda x: x.at[numbers].get(mode="clip"), state.aggregate)
    found = aggregates.combine(method.aggregate, messages, weights, rows)
    after = jax.tree.map(
        lambda x, new: x.at[numbers].set(new, mode="drop"), state.aggregate, found.state
    )
    stacks, dense = jax.tree.map(addition.widen, found.value)
    count = jnp.where(guarding.all_finite(found.value), jnp.sum(weights > 0, dtype=jnp.int32), 0)
    return state._replace(aggregate=after), Total(stacks, dense, jnp.float32(1), count)


def moves(method: Method, total: Total) -> bool:
    """Whether a round changes the parameters: a mean over those who sent does not if none did."""
    return method.mean == "all" or int(total.count) > 0


@functools.partial(jax.jit, static_argnums=0)
def step(
    method: Method, key: Array, state: ServerState, total: Total, weights: Weights
) -> tuple[ServerState, TreePayload | None]:
    """Moves the parameters by the mean of the messages; without any message they stay.

    Args:
        method: the method.
        key: the round's key.
        state: the server before.
        total: the sum of the accepted messages.
        weights: the sums of the clients' weights.

    Returns:
        The server after the round, and its message to the clients: None if it sends the parameters
        as they are.
    """
    uplink, (main, of_dense) = method.uplink, state.mirror
    if method.mean == "senders":
        stacks = tuple(map(_over_senders, total.stacks, total.senders))
    else:
        stacks, main = _estimate(method, uplink.feedback, total, total.stacks, weights, main)
    given = total, total.dense, weights, of_dense
    dense, of_dense = _estimate(method, uplink.dense_feedback, *given)
    mean = trees.assemble(uplink.plan(state.params), stacks, dense)
    mean = jax.tree.map(lambda x, p: x.astype(p.dtype), mean, state.params)
    # Separately, so that it rounds as the outer optimizer of `local_updates` does.
    given = mean, state.optimizer, state.params
    if method.work.control:
        update = functools.partial(control_.server_update, method.server)
        given = *given, _divisor(method, total, weights) / weights.whole
    else:
        update = method.server.update
    updates, optimizer = xla.compile_separately(lambda *given: update(*given))(*given)
    payload, down = None, state.down
    if method.downlink is None:
        params = optax.apply_updates(state.params, updates)
    else:
        payload, down = _down(method.downlink, key, updates, state.down)
        params = follow(method, key, state.params, payload)
    shared = uplink.side.learn(state.shared, state.params, params)
    after = ServerState(
        state.round, params, optimizer, (main, of_dense), shared, down, state.aggregate
    )
    moved = (total.count > 0) | (method.mean == "all")
    after = jax.tree.map(lambda new, old: jnp.where(moved, new, old), after, state)
    return after._replace(round=state.round + 1), payload


def _estimate(
    method: Method, feedback: Feedback, total: Total, sums: Stacks, weights: Weights, mirror: PyTree
) -> tuple[Stacks, PyTree]:
    """The estimate of the clients' mean, and the mirror after the round.

    A mirror is `Σ wᵢ·hᵢ / W` over all clients, whose weights sum to `W`. As each participant has
    moved by its own message, the mirror moves by `Σ wᵢ·cᵢ / W`. The estimate counts the messages
    `W/drawn` times, so that its expectation is `Σ wᵢ·(hᵢ + E cᵢ) / W`.
    """
    divisor = _divisor(method, total, weights)
    divisor = weights.whole if feedback.facts.mirrors else divisor
    share = jnp.where(total.count > 0, 1 / jnp.where(divisor > 0, divisor, 1), 0)
    part = tuple(x * share.astype(x.dtype) for x in sums)
    estimate, mirror = feedback.update((), (), part, share, None, mirror)
    if feedback.facts.mirrors and not gating.counted_once(
        method.uplink.feedback, method.uplink.policy
    ):
        more = weights.whole / weights.drawn - 1

        def add(e: Array, x: Array) -> Array:
            return e + xla.block_fma(x * more.astype(x.dtype))

        estimate = jax.tree.map(add, estimate, part)
    return tuple(estimate), mirror


def _divisor(method: Method, total: Total, weights: Weights) -> Array:
    """The weight by which a sum of messages is divided."""
    if method.mean == "all":
        return weights.drawn
    if method.mean == "messages":
        return total.count.astype(jnp.float32) * weights.each
    return total.weight


def _over_senders(total: Array, weight: Array) -> Array:
    """The mean of each element over those that sent it; zero where none did."""
    sent = weight > 0
    weight = jnp.where(sent, weight, 1)
    if total.dtype == jnp.float64:
        return jnp.where(sent, total / weight, 0)
    return jnp.where(sent, total * exact.reciprocal(weight), 0)


def follow(method: Method, key: Array, params: PyTree, payload: TreePayload) -> PyTree:
    """The parameters after the server's message of a round, for the server as for every client."""
    link = method.downlink
    assert link is not None
    plan = uplink_.plan(link, params)
    nothing = (None,) * len(plan.batches)
    sent = send.decode(_down_key(key), plan.batches, payload.batches, nothing, jnp.uint32(0))
    return optax.apply_updates(params, trees.assemble(plan, sent, payload.dense))


def _down_key(key: Array) -> Array:
    """The key of the server's own message in the round of this key."""
    return noise.fold(key, _DOWN)


def _down_init(link: Link, params: PyTree) -> send.Memory:
    """The memory of the way down."""
    plan = uplink_.plan(link, params)
    likes = tuple(batch.like for batch in plan.batches)
    return send.Memory(link.feedback.init(likes, ()), send.init(plan.batches))


def _down(
    link: Link, key: Array, updates: PyTree, memory: send.Memory
) -> tuple[TreePayload, send.Memory]:
    """The server's message, and its memory."""
    plan, feedback = uplink_.plan(link, updates), link.feedback
    stacks, dense = trees.stacks(plan, updates)
    key, server = _down_key(key), jnp.uint32(0)
    own = send.send(key, plan.batches, stacks, memory, server, feedback=feedback)
    kept = feedback.update(own.message, own.sent, (), 1.0, None, own.memory.feedback)[1]
    # Clients add what they get; here it must not be a product that is fused with that sum.
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in dense]
    dense = tuple(xla.block_fma(x) if f else x for x, f in zip(dense, floats, strict=True))
    return TreePayload(own.payloads, dense), send.Memory(kept, own.memory.codecs)
