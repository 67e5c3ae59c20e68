"""Calls of a step whose arguments were checked and laid out before."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import core

Moves = dict[int, Callable[[Any], Any]]
"""How leaves of a call are put on the mesh, by their number; all others are there."""

_PLAIN = (np.ndarray, np.generic, bool, int, float, complex)
"""Leaves, beside arrays of JAX, whose shape and dtype say all that a check reads."""

_MOST = 4
"""Kinds that are kept: a training loop has one, with a short last batch and a validation three."""


class Kind(NamedTuple):
    """All that checks and layouts read of the arguments of a call; they read no values.

    Attributes:
        treedef: the tree of the arguments.
        keywords: the names of the last arguments.
        types: of each leaf.
        traits: the abstract value of each leaf, or its shape and dtype.
        shardings: of each leaf; None for those of numpy and Python.
    """

    treedef: Any
    keywords: tuple[str, ...]
    types: list[type]
    traits: list[Any]
    shardings: list[Any]


def kind(leaves: list[Any], treedef: Any, keywords: tuple[str, ...]) -> Kind:
    """The kind of a call: compared by identity first, and a step returns the same objects again."""
    try:
        traits, shardings = [x.aval for x in leaves], [x.sharding for x in leaves]
    except AttributeError:  # Of what is no array of JAX; asking first costs as much as all else.
        traits = [getattr(x, "aval", None) or _traits(x) for x in leaves]
        shardings = [getattr(x, "sharding", None) for x in leaves]
    return Kind(treedef, keywords, list(map(type, leaves)), traits, shardings)


def _traits(leaf: Any) -> tuple:
    return getattr(leaf, "shape", None), getattr(leaf, "dtype", None)


class Call(NamedTuple):
    """A way to run calls of a kind.

    Attributes:
        moves: of the leaves that are not on the mesh.
        step: the compiled step.
    """

    moves: Moves
    step: Callable[..., Any]

    def run(self, args: tuple, leaves: list[Any], treedef: Any) -> Any:
        """The results of the step for these arguments, whose leaves are in this tree."""
        if self.moves:
            leaves = [self.moves[n](x) if n in self.moves else x for n, x in enumerate(leaves)]
            args = jax.tree.unflatten(treedef, leaves)
        return self.step(*args)


class Calls:
    """The latest kinds of calls of a step."""

    def __init__(self):
        self._known: list[tuple[Kind, Call]] = []

    def find(self, wanted: Kind) -> Call | None:
        """The way to run a call of this kind, if there was one."""
        return next((call for kind, call in self._known if kind == wanted), None)

    def add(self, kind: Kind, leaves: list[Any], call: Call) -> None:
        """Keeps a call, if its leaves are concrete arrays or numbers, which are no objects."""
        concrete = (
            isinstance(x, (jax.Array, *_PLAIN)) and not isinstance(x, core.Tracer) for x in leaves
        )
        if all(concrete):
            self._known = [(kind, call), *self._known[: _MOST - 1]]
