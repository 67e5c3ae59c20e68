"""The sum of a round's messages on the server, one by one, and the message after it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.adapters.flower import raw
from jaxcomp.adapters.flower.memory import Centre
from jaxcomp.exchange import guarding
from jaxcomp.federated import block, server
from jaxcomp.federated.method import Method
from jaxcomp.federated.server import ServerState, Total
from jaxcomp.messages import to_bytes
from jaxcomp.types import Array, PyTree


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
