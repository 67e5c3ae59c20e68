"""Sides that need nothing but what was sent before: parameters, messages, and the last step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp import checks
from jaxcomp.federated.side import Side
from jaxcomp.types import Array, PyTree


@dataclasses.dataclass(frozen=True)
class History(Side):
    """The guess is the client's last message that the server accepted, zero before the first.

    The server keeps a message of every client, and so does the client unless `server_only`.

    Args:
        server_only: whether clients keep nothing, so that they encode without a guess: for codecs
            with a distance that need none, such as `jaxcomp.wyner_ziv(distance=0.1, blind=True)`.

    Example:
        >>> import jaxcomp
        >>> up = jaxcomp.federated.Uplink(jaxcomp.wyner_ziv(levels=8), History())

    References:
        Liang et al., Wyner–Ziv gradient compression for federated learning, 2021, whose rule for
        historical gradients could not be read: this is the plainest.
    """

    server_only: bool = False
    of_round = False

    def __post_init__(self):
        checks.choice("server_only", self.server_only, (False, True))

    def own(self, params: PyTree) -> PyTree:
        return () if self.server_only else _zeros(params)

    def row(self, params: PyTree) -> PyTree:
        return _zeros(params)

    def at_client(self, shared: PyTree, own: PyTree, params: PyTree) -> PyTree | None:
        del shared, params
        return None if self.server_only else _one(own)

    def at_server(self, shared: PyTree, row: PyTree, params: PyTree) -> PyTree | None:
        del shared, params
        return _one(row)

    def sent(self, own: PyTree, message: PyTree) -> PyTree:
        return own if self.server_only else _like(own, message)

    def heard(self, row: PyTree, message: PyTree) -> PyTree:
        return _like(row, message)


@dataclasses.dataclass(frozen=True)
class LastMean(Side):
    """The guess is the server's last step, `φ − φ⁺`: with `optax.sgd(1.0)`, the last mean.

    It takes no memory for each client, and does for clients that take part once.

    Args:
        server_only: whether clients do not know it, as a new client does not that gets the
            parameters alone: for codecs with a distance, as in `History`. If they do know it, a
            client that missed the last round is sent it with the parameters.

    Example:
        >>> import jaxcomp
        >>> codec = jaxcomp.wyner_ziv(levels=8, distance=0.5, relative=True, blind=True)
        >>> up = jaxcomp.federated.Uplink(codec, LastMean(server_only=True))

    References:
        Mayekar, Suresh and Tyagi, `Wyner–Ziv estimators: efficient distributed mean estimation with
        side information <https://arxiv.org/abs/2011.12160>`_, 2021, for side information at the
        decoder alone.
    """

    server_only: bool = False

    def __post_init__(self):
        checks.choice("server_only", self.server_only, (False, True))

    def shared(self, params: PyTree) -> PyTree:
        return _zeros(params)

    def at_client(self, shared: PyTree, own: PyTree, params: PyTree) -> PyTree | None:
        del own, params
        return None if self.server_only else _one(shared)

    def at_server(self, shared: PyTree, row: PyTree, params: PyTree) -> PyTree | None:
        del row, params
        return _one(shared)

    def learn(self, shared: PyTree, before: PyTree, after: PyTree) -> PyTree:
        del shared
        return jax.tree.map(jnp.subtract, before, after)


@dataclasses.dataclass(frozen=True)
class GlobalModel(Side):
    """A client encodes with the global model from which it began; the server needs no guess.

    It takes no memory, and is for codecs that compare an update with the parameters that it
    changes, such as `jaxcomp.visible()`. Messages are decoded from themselves: they may be late,
    be of a fragment, or meet an aggregate that needs all of them at once.

    Example:
        >>> import jaxcomp
        >>> up = jaxcomp.federated.Uplink(jaxcomp.visible(fraction=0.1), GlobalModel())
    """

    decodes = False
    of_round = False

    def at_client(self, shared: PyTree, own: PyTree, params: PyTree) -> PyTree | None:
        del shared, own
        return _one(params)


def _zeros(params: PyTree) -> PyTree:
    return jax.tree.map(jnp.zeros_like, params)


def _one(tree: PyTree) -> PyTree:
    """One guess: a leading axis of one alternative."""
    return jax.tree.map(lambda x: x[None], tree)


def _like(kept: PyTree, message: PyTree) -> PyTree:
    """The message in the dtypes of what it replaces."""

    def cast(old: Any, new: Any) -> Array:
        return jnp.asarray(new, old.dtype)

    return jax.tree.map(cast, kept, message)
