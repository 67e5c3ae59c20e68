"""The parameters of rounds where they are published, in place of messages with all of them."""

import time
from typing import Any

import jax

from jaxcomp.adapters.flower import records
from jaxcomp.adapters.flower.server_round import log
from jaxcomp.types import PyTree
from jaxcomp.weights import Publisher
from jaxcomp_weights import Reader, WeightsError

PATIENCE = 60.0
"""Seconds for which a site waits for a version that the server has announced."""


class Published:
    """The server's side: publishes the parameters of each round, and knows which are on their way.

    An error of the publisher is logged, and that round's sites get the parameters by message.

    Args:
        publisher: where to; None for nowhere.

    Attributes:
        round: the last round whose parameters were given to the publisher; -1 for none.
    """

    def __init__(self, publisher: Publisher | None):
        self._publisher, self.round = publisher, -1

    def publish(self, params: PyTree, round_: int) -> None:
        """Publishes the parameters of a round, with its number as their step."""
        if self._publisher is None:
            return
        named = dict(zip(records.names(params), jax.tree.leaves(params), strict=True))
        try:
            self._publisher.publish(named, round_)
            self.round = round_
        except (OSError, ValueError) as error:
            log.warning("\t> round %d is not published: %s", round_, error)


def read(reader: Reader, like: PyTree, round_: int) -> PyTree | None:
    """The parameters of a round, as soon as they are there; None if they never are."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            named, _ = reader.update(wait=min(1.0, PATIENCE))
            if reader.step == round_:
                return _tree(named, like)
            why = f"the newest are those of round {reader.step}"
        except (OSError, WeightsError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
        later = reader.step is not None and reader.step > round_
        if later or time.monotonic() >= until:
            log.warning("parameters of round %d are not published: %s", round_, why)
            return None


def _tree(named: dict[str, Any], like: PyTree) -> PyTree:
    """Arrays by name as a tree like this.

    Raises:
        ValueError: if it has other names, shapes or dtypes.
    """
    leaves, names = jax.tree.leaves(like), records.names(like)
    found = [(name, named[name].shape, named[name].dtype) for name in sorted(named)]
    wanted = sorted(
        (name, leaf.shape, leaf.dtype) for name, leaf in zip(names, leaves, strict=True)
    )
    if found != wanted:
        other = next(iter({*map(str, found)} ^ {*map(str, wanted)}))
        raise ValueError(f"published parameters must be those of the method, {other} differs")
    return jax.tree.unflatten(jax.tree.structure(like), [named[name] for name in names])
