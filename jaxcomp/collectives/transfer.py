"""Collectives: a static description, its run, and the collective of its backward pass."""

import abc
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jaxcomp.backend import axes
from jaxcomp.collectives.messages import Wire
from jaxcomp.layout.policy import Policy
from jaxcomp.numerics import noise
from jaxcomp.types import Array, AxisName, PyTree

_BACK = 0x6261636B
"""Folded into the key of a collective for the backward pass."""


@dataclasses.dataclass(frozen=True)
class Transfer(abc.ABC):
    """A collective of a tree, linear but for the rounding of its codec.

    Attributes:
        axis_name: the axes of the workers.
        codec: the codec of each leaf.
        back: the codec of each leaf of the cotangent.
        per_row: whether no bucket has elements of two rows of the last axis.
    """

    axis_name: AxisName
    codec: Policy
    back: Policy
    per_row: bool

    @abc.abstractmethod
    def run(self, key: Array, tree: PyTree) -> PyTree:
        """The tree that this worker receives."""

    @abc.abstractmethod
    def transposed(self, *, typed: bool) -> "Transfer":
        """The collective of the backward pass; `typed` says whether types know what is equal."""

    @abc.abstractmethod
    def link_bytes(self, like: PyTree, workers: int) -> int:
        """The bytes that one device sends for a tree like this."""

    @property
    def exact(self) -> bool:
        """Whether without types it is JAX's own collective, whose derivatives are right.

        With types JAX would add up whole gradients where a slice of their sum is enough.
        """
        return not (self.codec.codecs or self.back.codecs)

    @property
    def wire(self) -> Wire:
        """How `run` encodes a tree."""
        return Wire(self.axis_name, self.codec, self.per_row)

    @property
    def workers(self) -> int:
        return axes.size(self.axis_name)


def transfer(how: Transfer, key: Array, tree: PyTree, back: Array | None = None) -> PyTree:
    """Runs the collective; when it is differentiated, rounding counts as the identity.

    Args:
        how: the collective.
        key: the key of its messages.
        tree: this worker's tree.
        back: the key of the backward pass; None for one derived from `key`.
    """
    if how.exact and not axes.typed(how.axis_name):
        return how.run(key, tree)  # By JAX's own rules, forward mode too.
    return _transfer(how, key, noise.fold(key, _BACK) if back is None else back, tree)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _transfer(how: Transfer, key: Array, back: Array, tree: PyTree) -> PyTree:
    del back
    return how.run(key, tree)


def _forward(how: Transfer, key: Array, back: Array, tree: PyTree) -> tuple[PyTree, tuple]:
    # Not `run`, so that a second derivative counts rounding as the identity, too.
    return _transfer(how, key, back, tree), (key, back)


def _backward(how: Transfer, keys: tuple, cotangent: PyTree) -> tuple[Any, Any, PyTree]:
    key, back = keys
    # A collective, too, and so differentiable in its turn.
    transposed = how.transposed(typed=axes.typed(how.axis_name))
    nothing = np.zeros(key.shape, jax.dtypes.float0)
    return nothing, nothing, _transfer(transposed, back, noise.fold(back, _BACK), cotangent)


_transfer.defvjp(_forward, _backward)
