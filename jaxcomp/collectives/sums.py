"""`psum`, `pmean` and `pvary`: the two ends of a block that is split over workers."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.backend import axes, mapping
from jaxcomp.base import Codec
from jaxcomp.collectives import arguments, messages
from jaxcomp.collectives.messages import Wire
from jaxcomp.collectives.transfer import Transfer, transfer
from jaxcomp.layout import trees
from jaxcomp.layout.policy import Policy
from jaxcomp.numerics import noise
from jaxcomp.types import Array, ArrayLike, AxisName, PyTree
from jaxcomp.wire import cost as wire_cost

_DOWN = 0x646F776E
"""Folded into the key for the second shot."""


def psum(
    tree: PyTree,
    axis_name: AxisName,
    codec: "Codec | Policy | None",
    *,
    key: Any = None,
    site: Any = 0,
    back: "Codec | Policy | None" = None,
    down: "Codec | Policy | None" = None,
    replicated: bool = False,
) -> PyTree:
    """The sum of all workers' trees, as at the exit of a tensor-parallel block.

    `y = Σ_j D(C(x_j))` where every worker sends all of its rows to every other one, or in two
    shots, `psum_scatter` of the rows and `all_gather` of the sums with the codec `down`, if that
    is fewer bytes: from three workers on, and as many rows. No bucket has elements of two rows of
    the last axis.

    The backward pass is that of `jax.lax.psum`: nothing is sent where types know that the sum is
    the same on all workers, as in `jax.shard_map`; elsewhere it is a `psum` with the codec `back`,
    unless `replicated=True`.

    Args:
        tree: this worker's arrays, such as activations `[tokens, features]`.
        axis_name: the mapped axis, or a tuple of them.
        codec: as for `all_gather`; a `Policy` decides by the path and shape of the leaf.
        key: as for `all_gather`.
        site: as for `all_gather`.
        back: the codec of the backward pass; None for `codec`, `Identity()` to send dense.
        down: the codec of the second shot; None for `codec`.
        replicated: whether all workers compute the same from the sum, their loss too, so that each
            has its whole gradient: then nothing is sent in the backward pass without types either
            (`check_vma=False`, `jax.pmap`, `jax.vmap`).

    Returns:
        The sum, the same bits on all workers.

    Raises:
        ValueError: as `all_gather`, and for a tree that is the same on all workers already.

    Example:
        >>> import jax, jax.numpy as jnp, jaxcomp
        >>> def block(x, into, out):
        ...     hidden = jax.nn.relu(pvary(x, "model", jaxcomp.qsgd_inf(bits=8), key=0) @ into)
        ...     return psum(hidden @ out, "model", jaxcomp.qsgd_inf(bits=8), key=0, site="exit")
        >>> into, out = jnp.ones((2, 64, 32)), jnp.ones((2, 32, 64))
        >>> run = jax.jit(jax.vmap(block, (None, 0, 0), axis_name="model"))
        >>> run(jnp.ones((16, 64)), into, out).shape
        (2, 16, 64)

    References:
        Shoeybi et al., `Megatron-LM <https://arxiv.org/abs/1909.08053>`_, 2019, for both ends of a
        block; Li et al., `Flash Communication <https://arxiv.org/abs/2412.04964>`_, 2024, for two
        shots of quantised activations.
    """
    arguments.check_tree("psum", tree)
    folded = arguments.key_of(axis_name, key, site)
    forward, backward = arguments.policies(codec, back)
    arguments.warn_if_gathered(axis_name, forward, backward)
    second = forward if down is None else arguments.policy("down", down)
    if axes.typed(axis_name):
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if not set(axes.names(axis_name)) & axes.varying_axes(x):
                raise ValueError(
                    f"`tree` must differ between the workers of {axis_name!r}, got "
                    f"'{trees.path_name(path)}', which is the same on all of them: it is a sum "
                    "already, or was never split. For copies, multiply it by the number of workers"
                )
    how = Psum(axis_name, forward, backward, True, second, replicated)
    return transfer(how, folded, axes.vary(tree, axis_name))


def pmean(
    tree: PyTree,
    axis_name: AxisName,
    codec: "Codec | Policy | None",
    *,
    key: Any = None,
    site: Any = 0,
    back: "Codec | Policy | None" = None,
    down: "Codec | Policy | None" = None,
) -> PyTree:
    """The mean of all workers' trees: `psum` divided by the number of workers.

    For gradients take `jaxcomp.compressed_mean`, or `jaxcomp.pmean` without optax: they average
    buckets of any leaves, keep memory, and find gradients that are averaged already.

    Args:
        tree: this worker's arrays; all arguments are those of `psum`.
        axis_name: the mapped axis, or a tuple of them.
        codec: the codec.
        key: the key of the step.
        site: the number or name of the call.
        back: the codec of the backward pass.
        down: the codec of the second shot.

    Raises:
        ValueError: as `psum`.

    Example:
        >>> import jax, jax.numpy as jnp, jaxcomp
        >>> codec = jaxcomp.qsgd_inf(bits=8)
        >>> mean = jax.vmap(lambda x: pmean(x, "data", codec, key=0), axis_name="data")
        >>> jax.jit(mean)(jnp.ones((2, 32, 64)))[0, 0, 0].round(3)
        Array(1., dtype=float32)
    """
    found = psum(tree, axis_name, codec, key=key, site=site, back=back, down=down)
    return jax.tree.map(lambda x: x / axes.size(axis_name), found)


def pvary(
    tree: PyTree,
    axis_name: AxisName,
    back: "Codec | Policy | None",
    *,
    key: Any = None,
    site: Any = 0,
) -> PyTree:
    """The same tree on all workers, each of which makes something else of it.

    Nothing is sent forward. The backward pass is `psum` of what the workers made of it, with the
    codec `back`: the entry of a tensor-parallel block.

    Args:
        tree: arrays that are the same on all workers.
        axis_name: the mapped axis, or a tuple of them.
        back: the codec of the backward pass; None or `Identity()` to send dense.
        key: as for `all_gather`.
        site: as for `all_gather`.

    Raises:
        ValueError: as `all_gather`, and for a tree that differs between workers.

    Example: see `psum`.

    Note:
        Where types do not know what is the same on all workers (`check_vma=False`, `jax.pmap`,
        `jax.vmap`), take gradients inside the mapped function, and write `psum(...,
        replicated=True)` at the exit of a block. The backward pass of any other sum is again a sum
        there, and each block would multiply gradients by the number of workers.
    """
    arguments.check_tree("pcast", tree)
    folded = arguments.key_of(axis_name, key, site)
    codec = arguments.policy("back", back)
    arguments.warn_if_gathered(axis_name, codec)
    if axes.typed(axis_name):
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if set(axes.names(axis_name)) & axes.varying_axes(x):
                raise ValueError(
                    f"`tree` must be the same on all workers of {axis_name!r}, got "
                    f"'{trees.path_name(path)}', which differs between them already"
                )
    return transfer(Pvary(axis_name, codec, codec, True), folded, tree)


@dataclasses.dataclass(frozen=True)
class Psum(Transfer):
    """The sum of all workers' trees on all workers."""

    down: Policy
    replicated: bool = False

    @property
    def exact(self) -> bool:
        return super().exact and not (self.down.codecs or self.replicated)

    def run(self, key: Array, tree: PyTree) -> PyTree:
        wires, numbers = self._wires(tree, self.workers)
        dense, coded = _apart(tree, numbers)
        if len(wires) == 1:
            sums = messages.sum_of_all(wires[0], key, coded)
        else:
            rows = jax.tree.map(functools.partial(_rows, self.workers), coded)
            parts = messages.sum_of_each(wires[0], key, rows)
            everyones = messages.to_all(wires[1], noise.fold(key, _DOWN), parts)
            sums = jax.tree.map(_whole, everyones, coded)
        dense = lax.psum(dense, self.axis_name)
        return jax.tree.map(
            lambda x, y: y if x is None else x, dense, sums, is_leaf=lambda x: x is None
        )

    def _wires(self, like: PyTree, workers: int) -> tuple[tuple[Wire, ...], set[int]]:
        """The wires of one shot, or of two, and the numbers of the leaves that are sent dense."""
        # By the leaves of the caller, not by the rows into which two shots reshape them.
        wires = self.wire.for_leaves(like), Wire(self.axis_name, self.down, True).for_leaves(like)
        first, second = (set(wire.layout(like)[0].dense) for wire in wires)
        both = first & second
        sent = [x for number, x in enumerate(jax.tree.leaves(like)) if number not in both]
        # A device sends n − 1 times as many elements, or twice n − 1 times those of a part.
        if _elements(sent) > 2 * _elements([_part(x, workers) for x in sent]):
            return wires, both
        return wires[:1], first

    def transposed(self, *, typed: bool) -> Transfer:
        if typed or (self.replicated and not mapping.is_transposing(self.axis_name)):
            return Pvary(self.axis_name, self.back, self.codec, True)
        return Psum(self.axis_name, self.back, self.codec, True, self.back, self.replicated)

    def link_bytes(self, like: PyTree, workers: int) -> int:
        wires, numbers = self._wires(like, workers)
        dense, coded = _apart(like, numbers)
        if len(wires) == 2:
            coded = jax.tree.map(lambda x: _part(x, workers), coded)
        sent = (workers - 1) * sum(sum(messages.bytes_of(wire, coded)) for wire in wires)
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(dense))
        return sent + wire_cost.ring_bytes(size, workers)


@dataclasses.dataclass(frozen=True)
class Pvary(Transfer):
    """The same tree on all workers, typed as one that differs."""

    @property
    def exact(self) -> bool:
        return False  # Its backward pass is a sum, where JAX knows of none.

    def run(self, key: Array, tree: PyTree) -> PyTree:
        del key
        return axes.vary(tree, self.axis_name)

    def transposed(self, *, typed: bool) -> Transfer:
        if not typed and mapping.is_transposing(self.axis_name):
            raise ValueError(
                f"`tree` must be typed where a gradient is taken outside of the mapped function, "
                f"since JAX would add up the sum over {self.axis_name!r} of a backward pass once "
                "more: take the gradient inside, as in jax.shard_map(jax.grad(loss), ...), or "
                "leave check_vma=True"
            )
        return Psum(self.axis_name, self.back, self.codec, True, self.back, replicated=True)

    def link_bytes(self, like: PyTree, workers: int) -> int:
        del like, workers
        return 0


def _apart(tree: PyTree, numbers: set[int]) -> tuple[PyTree, PyTree]:
    """The leaves of these numbers and the others, with None in place of those of the other kind.

    None has no leaves, and leaves the paths of the rest as they are.
    """
    leaves, treedef = jax.tree.flatten(tree)
    found = [x if i in numbers else None for i, x in enumerate(leaves)]
    rest = [None if i in numbers else x for i, x in enumerate(leaves)]
    return jax.tree.unflatten(treedef, found), jax.tree.unflatten(treedef, rest)


def _elements(likes: Sequence[ArrayLike]) -> int:
    return sum(math.prod(x.shape) for x in likes)


def _part(x: ArrayLike, workers: int) -> jax.ShapeDtypeStruct:
    """The rows of a leaf that one of the workers adds."""
    rows = math.prod(x.shape[:-1])
    width = x.shape[-1] if x.shape else 1
    return jax.ShapeDtypeStruct((-(-rows // workers), width), x.dtype)


def _rows(workers: int, x: Array) -> Array:
    """The rows of a leaf as `[workers, rows, features]`; rows of zeros pad the last ones."""
    part = _part(x, workers)
    flat = x.reshape(-1, part.shape[1])
    flat = jnp.pad(flat, ((0, workers * part.shape[0] - flat.shape[0]), (0, 0)))
    return flat.reshape(workers, *part.shape)


def _whole(rows: Array, like: Array) -> Array:
    """The inverse of `_rows`."""
    flat = rows.reshape(-1, rows.shape[-1])
    return flat[: math.prod(like.shape[:-1])].reshape(like.shape)
