"""The sum of a round's messages on the server, one by one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.federated import block, server
from jaxcomp.federated.flower import raw
from jaxcomp.federated.flower.memory import Centre
from jaxcomp.federated.method import Method
from jaxcomp.federated.server import Total
from jaxcomp.types import Array, PyTree


@functools.partial(jax.jit, static_argnums=0)
def added(
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
    like = raw.like(centre.params)
    guesses = method.uplink.side.at_server(centre.shared, side, centre.params)
    after, accepted, read = server.add(method, key, total, number, weight, payload, like, guesses)
    sums, leaves = jax.tree.leaves((after.stacks, after.dense)), jax.tree.leaves(read)
    accepted &= jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in sums]))
    accepted &= jnp.all(jnp.stack([jnp.all(jnp.abs(x) <= largest) for x in leaves]))
    total = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), after, total)
    return total, accepted, block.heard(method, like, side, read, accepted)
