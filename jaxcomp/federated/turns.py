"""Fragments in turn: a round exchanges one of them, and the server has a state for each."""

from typing import Any

import jax

from jaxcomp.codecs import Identity
from jaxcomp.federated import server
from jaxcomp.federated.method import Method
from jaxcomp.federated.server import ServerState
from jaxcomp.numerics import noise
from jaxcomp.transforms import fragments as fragments_, leaves
from jaxcomp.types import Array, PyTree

_OWN = ("optimizer", "mirror", "down", "aggregate")
"""The server's memory for each fragment."""


def of(method: Method, like: PyTree, number: int) -> int:
    """The fragment whose turn a round is."""
    return number % fragments_.count(method.fragments, like)


def key(method: Method, like: PyTree, key: Array, number: int) -> Array:
    """The key of a round: of a fragment's so-manieth exchange, as in `local_updates`."""
    turn, fragments = of(method, like, number), fragments_.count(method.fragments, like)
    key = noise.fold(key, turn) if turn else key
    return server.round_key(key, number // fragments)


def part(method: Method, tree: PyTree, turn: int) -> PyTree:
    """The leaves of a fragment; None in place of all others."""
    return fragments_.split(method.fragments, tree, tree)[turn]


def whole(method: Method, tree: PyTree, turn: int, part: PyTree) -> PyTree:
    """The tree with other leaves of one fragment."""
    parts = fragments_.split(method.fragments, tree, tree)
    return fragments_.merge((*parts[:turn], part, *parts[turn + 1 :]))


def one(method: Method, held: Any, turn: int) -> Any:
    """A fragment's own, of what is held for each."""
    return held if method.fragments == 1 else held[turn]


def put(method: Method, held: Any, turn: int, new: Any) -> Any:
    """The memory of all fragments, with another one's own."""
    return new if method.fragments == 1 else (*held[:turn], new, *held[turn + 1 :])


def init(method: Method, params: PyTree, clients: int) -> ServerState:
    """The server before the first round of so many clients; warns if no leaf is compressed."""
    if any(codec != Identity() for codec in method.uplink.policy.codecs):
        leaves.warn_of(method.uplink.plan(params), "the federated method")
    if method.fragments == 1:
        return server.init(method, params, clients)
    parts = fragments_.split(method.fragments, params, params)
    lanes = [server.init(method, part, clients) for part in parts]
    state = lanes[0]._replace(params=fragments_.merge(tuple(lane.params for lane in lanes)))
    return state._replace(**{name: tuple(getattr(lane, name) for lane in lanes) for name in _OWN})


def lane(method: Method, state: ServerState, turn: int) -> ServerState:
    """The server of one fragment alone."""
    own = {name: one(method, getattr(state, name), turn) for name in _OWN}
    return state._replace(params=part(method, state.params, turn), **own)


def join(method: Method, state: ServerState, turn: int, lane: ServerState) -> ServerState:
    """The server after a round of one fragment."""
    own = {name: put(method, getattr(state, name), turn, getattr(lane, name)) for name in _OWN}
    params = whole(method, state.params, turn, lane.params)
    return lane._replace(params=params, **own)


def likes(method: Method, params: PyTree) -> tuple[PyTree, ...]:
    """The shapes and dtypes of each fragment."""
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    return fragments_.split(method.fragments, like, like)
