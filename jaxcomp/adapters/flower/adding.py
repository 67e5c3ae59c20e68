"""The sum of a round's messages on the server, one by one, and the message after it."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.adapters.flower import raw
from jaxcomp.adapters.flower.memory import Centre
from jaxcomp.adapters.flower.server_round import Heard, Round, Taken, log
from jaxcomp.exchange import guarding
from jaxcomp.federated import block, server, turns
from jaxcomp.federated.method import Method
from jaxcomp.federated.server import ServerState, Total
from jaxcomp.federated.table import OnHost
from jaxcomp.messages import to_bytes
from jaxcomp.types import Array, PyTree


class Summed(NamedTuple):
    """The messages of a round, added up.

    Attributes:
        state: the server of this round's fragment alone, with the aggregate's new state.
        total: the sum of the fragment's messages.
        taken: what is kept of each message that was added, by its client.
        pending: the late messages of other fragments.
    """

    state: ServerState
    total: Total
    taken: dict[int, Taken]
    pending: tuple[Total, ...]


class Adder:
    """Adds the messages that were heard to the sum of their fragment.

    A late message of another fragment than the round's is accepted, and kept in the sum with which
    the next round of its fragment begins.

    Args:
        method: the method.
        state: the server before the first round.
        clients: how many clients there are.
        largest: refuses messages with a larger element; None for any finite ones.
        late: whether there may be late messages.

    Attributes:
        sides: what the server keeps of each client.
        pending: for late messages, the sum with which the next round of each fragment begins; `()`
            if there are none, or no fragments.
    """

    def __init__(
        self, method: Method, state: ServerState, clients: int, largest: float | None, *, late: bool
    ):
        self._method, self._clients, self._like = method, clients, raw.like(state.params)
        self._largest = np.float32(np.finfo(np.float32).max if largest is None else largest)
        side = jax.tree.map(np.asarray, method.uplink.side.row(state.params))
        self.sides = OnHost(side, clients)
        self._likes = turns.likes(method, self._like)
        late = late and len(self._likes) > 1
        self.pending: tuple[Total, ...] = tuple(map(self._nothing, self._likes)) if late else ()

    def sum(self, state: ServerState, rounds: Sequence[Round]) -> Summed:
        """The messages that were heard in these rounds, of which the last one ends."""
        method, now, taken, held = self._method, rounds[-1], {}, []
        totals = dict(enumerate(self.pending))
        for round_, client in ((one, client) for one in rounds for client in sorted(one.heard)):
            turn, heard = turns.of(method, self._like, round_.number), round_.heard.pop(client)
            centre = Centre(turns.part(method, state.params, turn), state.shared)
            total = totals[turn] if turn in totals else self._nothing(centre.params)
            totals[turn], accepted, side = self._add(round_, centre, total, client, heard)
            if not accepted:
                text = "its message decodes to NaN, Inf or larger elements than allowed"
                round_.refuse(round_.nodes[client], client, "not finite", text)
                continue
            given = (heard.answer.loss, float(heard.weight), heard.metrics, side, round_.number)
            taken[client] = Taken(*given)
            if heard.fresh:
                log.info("\t> client %d has begun with a new memory", client)
            if not method.aggregate.streams:
                held.append((client, heard.weight, heard.payload))
        turn = turns.of(method, self._like, now.number)
        nothing, lane = self._nothing(self._likes[turn]), turns.lane(method, state, turn)
        total = totals.pop(turn, nothing)
        pending = tuple((totals | {turn: nothing})[n] for n in range(len(self.pending)))
        if held:
            numbers, weights, payloads = jax.tree.map(lambda *rows: np.stack(rows), *held)
            rows = np.searchsorted(now.cohort, numbers)
            given = server.fill_table(now.cohort, self._clients, weights, rows, payloads)
            lane, total = server.combine(method, now.key, lane, given)
        return Summed(lane, total, taken, pending)

    def _add(
        self, round_: Round, centre: Centre, total: Total, client: int, heard: Heard
    ) -> tuple[Total, Array, PyTree]:
        side = jax.tree.map(lambda x: x[0], self.sides.read(np.array([client])))
        side = self._method.uplink.side.row(centre.params) if heard.fresh else side
        given = (jnp.float32(heard.weight), heard.payload, centre, side, self._largest)
        return add(self._method, round_.key, total, jnp.uint32(client), *given)

    def _nothing(self, like: PyTree) -> Total:
        return server.nothing(self._method, like)


@functools.partial(jax.jit, static_argnums=0)
def add(
    method: Method,
    key: Array,
    total: Total,
    number: Array,
    weight: Array,
    payload: Any,
    centre: Centre,
    side: PyTree,
    largest: Array,
) -> tuple[Total, Array, PyTree]:
    """The sum with one more message, unless it is not finite or too large, or the sum would be."""
    plan = method.uplink.plan(centre.params)
    guesses = method.uplink.side.at_server(centre.shared, side, centre.params)
    after, accepted, read = server.add(method, plan, key, total, number, weight, payload, guesses)
    sums, leaves = jax.tree.leaves((after.stacks, after.dense)), jax.tree.leaves(read)
    accepted &= guarding.all_finite(sums)
    accepted &= jnp.all(jnp.stack([jnp.all(jnp.abs(x) <= largest) for x in leaves]))
    total = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), after, total)
    return total, accepted, block.update_side(method, plan, side, read, accepted)


def step(
    method: Method, key: Array, state: ServerState, total: Total, weights: np.ndarray
) -> tuple[ServerState, bytes | None]:
    """The server after the round, and its message: None if it sends the whole parameters."""
    moves = server.moves(method, total)
    sums = server.weights_of(method, weights)
    state, payload = server.step(method, key, state, total, sums)
    return state, message(method, state, payload, moves)


def message(method: Method, state: ServerState, payload: Any, moves: bool) -> bytes | None:
    """The server's message after a round: empty if nothing moved, None for the whole centre."""
    if payload is not None and method.downlink is not None:
        like = raw.like(state.params)
        return to_bytes(method.downlink.policy, payload, like) if moves else b""
    # Clients compute the shared state from the parameters; and other fragments have not moved.
    if jax.tree.leaves(state.shared) or method.fragments != 1:
        return raw.write(state.params) if moves else b""
    return None
