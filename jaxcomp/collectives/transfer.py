"""What every collective is: a static description, its run, and its transposed collective."""

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
        """What this worker receives."""

    @abc.abstractmethod
    def transposed(self, *, typed: bool) -> "Transfer":
        """The collective of the backward pass; `typed` says whether types know what is equal."""

    @abc.abstractmethod
    def link_bytes(self, like: PyTree, workers: int) -> int:
        """The bytes that one device sends for a tree like this."""

    @property
    def wire(self) -> Wire:
        """How `run` encodes a tree."""
        return Wire(self.axis_name, self.codec, self.per_row)

    @property
    def workers(self) -> int:
        return axes.size(self.axis_name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def transfer(how: Transfer, key: Array, tree: PyTree) -> PyTree:
    """Runs the collective; when it is differentiated, rounding counts as the identity."""
    return how.run(key, tree)


def _forward(how: Transfer, key: Array, tree: PyTree) -> tuple[PyTree, Array]:
    # Not `run`, so that a second derivative counts rounding as the identity, too.
    return transfer(how, key, tree), key


def _backward(how: Transfer, key: Array, cotangent: PyTree) -> tuple[Any, PyTree]:
    # A collective, too, and so differentiable in its turn.
    back = how.transposed(typed=axes.typed(how.axis_name))
    found = transfer(back, noise.fold(key, _BACK), cotangent)
    return np.zeros(key.shape, jax.dtypes.float0), found


transfer.defvjp(_forward, _backward)
