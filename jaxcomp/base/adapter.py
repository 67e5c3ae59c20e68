"""The interface of an adapter: what the library has to know about a framework.

The library imports no framework. An adapter takes part once the user has imported its framework.
"""

import abc
import contextlib
import sys
from collections.abc import Hashable, Sequence
from typing import Any

from jaxcomp.base.interface import Interface
from jaxcomp.types import AxisName, PyTree


class Objects(Interface, abstract=True):
    """The objects of a framework that change in place: modules, optimizers, metrics.

    Attributes:
        name: the name of the framework, in errors.
        averages: what `averaged` averages, in errors.
    """

    name: str
    averages: str

    @abc.abstractmethod
    def found(self, tree: PyTree) -> list:
        """The objects in a tree."""

    @abc.abstractmethod
    def split(self, held: tuple) -> tuple[Hashable, list[PyTree]]:
        """The structure of the objects, which may share arrays, and a tree of arrays for each."""

    @abc.abstractmethod
    def part(
        self, held: tuple, at: Sequence[int], wrt: Any
    ) -> tuple[Hashable, list[PyTree], list[PyTree], list[PyTree]]:
        """As `split`, with three trees for each object: differentiated arrays, keys and the rest.

        Args:
            held: the objects.
            at: the places of those that are differentiated.
            wrt: the framework's filter of the arrays to differentiate; None for its parameters.
        """

    @abc.abstractmethod
    def merge(self, structure: Hashable, *parts: Sequence[PyTree]) -> tuple:
        """New objects; the inverse of `split` and `part`."""

    @abc.abstractmethod
    def update(self, held: tuple, trees: Sequence[PyTree]) -> None:
        """Writes arrays into the objects."""

    @abc.abstractmethod
    def averaged(self, held: tuple, axis_name: AxisName) -> contextlib.AbstractContextManager[None]:
        """Averages over the workers, in place, the statistics that are written in this context.

        Raises:
            ValueError: for a metric whose mean over the workers may not be that of all data.
        """


class Adapter(Interface, abstract=True):
    """Knows one framework.

    Attributes:
        module: the name of the module whose import brings the adapter into play.
        complete: a name that this module has when its import is complete.
        objects: the framework's objects that change in place, if it has any.
        modules: types of nodes in which Python numbers are settings; elsewhere they are values.
        hints: advice about errors of the framework in a step, by parts of the error's text.
        of_leaves: advice about leaves of a tree that are not parameters.
    """

    module: str
    complete: str
    objects: Objects | None = None
    modules: tuple[type, ...] = ()
    hints: dict[str | tuple[str, ...], str] = {}
    of_leaves: str = ""

    def boxed(self, tree: PyTree, *, add: bool) -> PyTree:
        """The tree, whose boxes of arrays name a leading axis of workers too, or no longer."""
        del add
        return tree

    def plain(self, tree: PyTree) -> PyTree:
        """The tree with arrays in place of boxes that differ between parameters and states."""
        return tree

    def store(self, cls: Any) -> None:
        """Registers a class of memory, a `Stored`, for the framework's checkpoints."""


_KNOWN: list[Adapter] = []


def register(adapter: Adapter) -> None:
    """Adds an adapter, which takes part once its framework is imported."""
    _KNOWN.append(adapter)


def present() -> list[Adapter]:
    """The adapters of the frameworks that are imported."""
    return [one for one in _KNOWN if hasattr(sys.modules.get(one.module), one.complete)]


def objects_of(tree: PyTree) -> Objects | None:
    """Who knows the objects in a tree; None if it has none."""
    kinds = (one.objects for one in present() if one.objects is not None)
    return next((kind for kind in kinds if kind.found(tree)), None)


class Stored(type):
    """The type of a class of memory, which is registered for checkpoints of every framework.

    A framework may be imported after the class is made. It looks classes up in a dict, so it asks
    for the hash of the class first. A node has its memory as `tree`, and as `stored` the name of
    that memory in a checkpoint.
    """

    stored: str

    def __hash__(cls) -> int:
        for one in present():
            one.store(cls)
        return super().__hash__()
