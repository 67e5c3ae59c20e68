"""`all_to_all` and `ppermute`: what one worker sends to another, as tokens and stages do."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxcomp.backend import axes
from jaxcomp.base import Codec
from jaxcomp.collectives import arguments, messages, pieces
from jaxcomp.collectives.transfer import Transfer, transfer
from jaxcomp.layout.policy import Policy
from jaxcomp.types import Array, AxisName, PyTree


def all_to_all(
    tree: PyTree,
    axis_name: AxisName,
    codec: "Codec | Policy | None",
    *,
    split_axis: int,
    concat_axis: int,
    key: Any = None,
    site: Any = 0,
    back: "Codec | Policy | None" = None,
    tiled: bool = True,
    per_row: bool = True,
) -> PyTree:
    """Sends piece `j` of every leaf to worker `j`, as a mixture of experts sends its tokens.

    `y_i[j] = D(C(x_j[i]))`. The backward pass is the inverse `all_to_all` with the codec `back`.

    Args:
        tree: this worker's arrays, such as tokens `[workers · capacity, features]`. Tokens of
            zeros, as those that fill up a capacity, arrive as zeros with every codec if `per_row`.
        axis_name: the mapped axis, or a tuple of them.
        codec: as for `all_gather`; a `Policy` decides by the shape of one piece.
        split_axis: the dimension that is cut into pieces.
        concat_axis: the dimension along which arrived pieces are joined.
        key: as for `all_gather`.
        site: as for `all_gather`.
        back: the codec of the backward pass; None for `codec`, `Identity()` to send dense.
        tiled: whether pieces keep the dimension, which is the default, other than in `jax.lax`;
            False removes `split_axis` and inserts `concat_axis`.
        per_row: whether no bucket has elements of two rows of the last axis, such as two tokens.

    Raises:
        ValueError: as `all_gather`, and for a dimension that the workers do not divide.

    Example:
        >>> import jax, jax.numpy as jnp, jaxcomp
        >>> def dispatch(tokens):
        ...     return all_to_all(
        ...         tokens, "experts", jaxcomp.mx("mxfp8"), split_axis=0, concat_axis=0, key=0
        ...     )
        >>> run = jax.jit(jax.vmap(dispatch, axis_name="experts"))
        >>> run(jnp.ones((2, 64, 128))).shape
        (2, 64, 128)
    """
    arguments.check_tree("all_to_all", tree)
    folded = arguments.key_of(axis_name, key, site)
    forward, backward = arguments.policies(codec, back)
    arguments.warn_if_gathered(axis_name, forward, backward)
    how = AllToAll(axis_name, forward, backward, per_row, split_axis, concat_axis, tiled)
    return transfer(how, folded, axes.vary(tree, axis_name))


def ppermute(
    tree: PyTree,
    axis_name: AxisName,
    codec: "Codec | Policy | None",
    *,
    perm: Sequence[tuple[int, int]],
    key: Any = None,
    site: Any = 0,
    back: "Codec | Policy | None" = None,
    per_row: bool = True,
) -> PyTree:
    """Sends every worker's tree to another worker, as the stages of a pipeline do.

    `y_π(i) = D(C(x_i))`, and zeros where no worker sends. The backward pass is the inverse
    permutation with the codec `back`.

    Args:
        tree: this worker's arrays.
        axis_name: the mapped axis, or a tuple of them.
        codec: as for `all_gather`.
        perm: pairs of a sender and its receiver; each worker is at most once a sender and at most
            once a receiver.
        key: as for `all_gather`.
        site: as for `all_gather`.
        back: the codec of the backward pass; None for `codec`, `Identity()` to send dense.
        per_row: whether no bucket has elements of two rows of the last axis, such as two tokens.

    Raises:
        ValueError: as `all_gather`, and for pairs that are no partial permutation.

    Example:
        >>> import jax, jax.numpy as jnp, jaxcomp
        >>> def to_next(x):
        ...     return ppermute(x, "stages", jaxcomp.qsgd_inf(bits=8), perm=[(0, 1)], key=0)
        >>> run = jax.jit(jax.vmap(to_next, axis_name="stages"))
        >>> run(jnp.ones((2, 64, 64)))[:, 0, 0].round(3)
        Array([0., 1.], dtype=float32)
    """
    arguments.check_tree("ppermute", tree)
    folded = arguments.key_of(axis_name, key, site)
    forward, backward = arguments.policies(codec, back)
    arguments.warn_if_gathered(axis_name, forward, backward)
    pairs: Any = tuple(tuple(map(int, pair)) for pair in perm)
    n = axes.size(axis_name)
    two = all(len(pair) == 2 for pair in pairs)
    for ends in zip(*pairs, strict=True) if two else [()]:
        if not two or len(set(ends)) < len(ends) or not all(0 <= i < n for i in ends):
            raise ValueError(
                f"`perm` must be pairs of a sender and its receiver among {n} workers, each at "
                f"most once in each place, got {pairs}"
            )
    how = Ppermute(axis_name, forward, backward, per_row, pairs)
    return transfer(how, folded, axes.vary(tree, axis_name))


@dataclasses.dataclass(frozen=True)
class AllToAll(Transfer):
    """A piece of every leaf from each worker to each."""

    split_axis: int
    concat_axis: int
    tiled: bool

    def run(self, key: Array, tree: PyTree) -> PyTree:
        at, tiled = self.split_axis, self.tiled
        cuts = pieces.split(tree, "split_axis", at, self.workers, tiled=tiled)
        arrived = messages.to_each(self.wire, key, cuts)
        found = pieces.join(arrived, "concat_axis", self.concat_axis, tiled=tiled)
        return axes.vary(found, self.axis_name)

    def transposed(self, *, typed: bool) -> Transfer:
        del typed
        given = self.axis_name, self.back, self.codec, self.per_row
        return AllToAll(*given, self.concat_axis, self.split_axis, self.tiled)

    def link_bytes(self, like: PyTree, workers: int) -> int:
        part = pieces.likes(like, "split_axis", self.split_axis, workers, tiled=self.tiled)
        return (workers - 1) * sum(messages.bytes_of(self.wire, part))


@dataclasses.dataclass(frozen=True)
class Ppermute(Transfer):
    """Each worker's tree on another worker."""

    perm: tuple[tuple[int, int], ...]

    def run(self, key: Array, tree: PyTree) -> PyTree:
        found = messages.to_one(self.wire, key, tree, self.perm)
        return axes.vary(found, self.axis_name)

    def transposed(self, *, typed: bool) -> Transfer:
        del typed
        given = self.axis_name, self.back, self.codec, self.per_row
        return Ppermute(*given, tuple((receiver, source) for source, receiver in self.perm))

    def link_bytes(self, like: PyTree, workers: int) -> int:
        return sum(messages.bytes_of(self.wire, like)) if self.perm else 0
