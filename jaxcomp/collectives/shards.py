"""`all_gather` and `psum_scatter`, each of which is the backward pass of the other."""

import dataclasses
from typing import Any

from jaxcomp.backend import axes
from jaxcomp.base import Codec
from jaxcomp.collectives import arguments, messages, pieces
from jaxcomp.collectives.transfer import Transfer, transfer
from jaxcomp.layout.policy import Policy
from jaxcomp.types import Array, AxisName, PyTree


def all_gather(
    tree: PyTree,
    axis_name: AxisName,
    codec: "Codec | Policy | None",
    *,
    key: Any = None,
    site: Any = 0,
    back: "Codec | Policy | None" = None,
    axis: PyTree = 0,
    tiled: bool = True,
    per_row: bool = False,
) -> PyTree:
    """Every worker's tree, joined along a dimension; all workers have the same bits.

    `y = concat_i D(C(x_i))`. The backward pass is `psum_scatter` with the codec `back`: rounding
    counts as the identity.

    Args:
        tree: this worker's arrays, in any floating dtype; their results have the same dtype.
        axis_name: the mapped axis, or a tuple of them.
        codec: a codec without memory, for every leaf, or a `Policy`, which decides by the shape of
            this worker's leaf. None or `Identity()` sends dense, as `jax.lax.all_gather` does.
        key: the number of the step, a `jax.random.key` or a raw key, the same on all workers: with
            others, decoders of rotated and subtractive codecs would restore noise. Every step needs
            a different one, and equal keys give equal bits, as `jax.checkpoint` requires. If the
            arrays differ along other axes of the mesh, too, fold the device's number there into
            `site`, or its noise is the same along them.
        site: the number or name of this call, or a tuple of them. Different calls of a step need
            different ones, or they would draw the same noise. In a `jax.lax.scan` over layers, the
            layer's number belongs into it: `site=("mlp", layer)`.
        back: the codec of the backward pass; None for `codec`, `Identity()` to send dense.
        axis: the dimension along which to join, or at which to stack; or a tree of one for each
            leaf.
        tiled: whether to join along an existing dimension, which is the default, other than in
            `jax.lax`; False stacks along a new one.
        per_row: whether no bucket has elements of two rows of the last axis. Activations need
            True: the scale of a token must not depend on other tokens.

    Returns:
        The tree of joined leaves; its type differs between workers, as that of `jax.lax`.

    Raises:
        ValueError: outside of a mapped axis, or for axes of devices and of `jax.vmap` together; for
            a codec with memory or an agreement; for leaves that are not floating; for a key that is
            missing or differs between workers. Without types (`check_vma=False`, `jax.pmap`) that
            is known only of a key that is made from the worker's index: do not split it over
            workers.

    Example:
        >>> import jax, jax.numpy as jnp, jaxcomp
        >>> def layer(shard, x):
        ...     weight = all_gather(shard, "fsdp", jaxcomp.qsgd_inf(bits=8), key=0)
        ...     return x @ weight
        >>> run = jax.jit(jax.vmap(layer, (0, None), axis_name="fsdp"))
        >>> run(jnp.ones((2, 64, 32)), jnp.ones(128)).shape
        (2, 32)

    Note:
        Forward-mode derivatives (`jax.jvp`, `jax.jacfwd`) exist without a codec, or with
        `Identity()`, where JAX tracks no types (`check_vma=False`, `jax.pmap`, `jax.vmap`), but for
        `pvary` and `psum(..., replicated=True)`.

        Take gradients inside the mapped function, as in `jax.vmap(jax.grad(f), axis_name="fsdp")`:
        outside of `jax.vmap`, JAX runs the backward pass where the axis has no name any more.

    References:
        Markov et al., `Quantized Distributed Training of Large Models with Convergence Guarantees
        <https://arxiv.org/abs/2302.02390>`_, 2023, for weights and gradients in 8 bits.
    """
    arguments.check_tree("all_gather", tree)
    folded = arguments.key_of(axis_name, key, site)
    forward, backward = arguments.policies(codec, back)
    arguments.warn_if_gathered(axis_name, forward, backward)
    how = AllGather(axis_name, forward, backward, per_row, arguments.places(tree, axis), tiled)
    return transfer(how, folded, axes.vary(tree, axis_name))


def psum_scatter(
    tree: PyTree,
    axis_name: AxisName,
    codec: "Codec | Policy | None",
    *,
    key: Any = None,
    site: Any = 0,
    back: "Codec | Policy | None" = None,
    scatter_dimension: PyTree = 0,
    tiled: bool = True,
    per_row: bool = False,
) -> PyTree:
    """This worker's piece of the sum of all workers' trees.

    `y_i = Σ_j D(C(x_j[i]))`, added in the order of the workers, in float32 or wider. The backward
    pass is `all_gather` with the codec `back`: rounding counts as the identity.

    Args:
        tree: this worker's arrays.
        axis_name: the mapped axis, or a tuple of them.
        codec: as for `all_gather`; a `Policy` decides by the shape of a piece.
        key: as for `all_gather`.
        site: as for `all_gather`.
        back: the codec of the backward pass; None for `codec`, `Identity()` to send dense.
        scatter_dimension: the dimension that is cut into pieces; or a tree of one for each leaf.
        tiled: whether pieces keep the dimension, which is the default, other than in `jax.lax`;
            False removes it, and it must be as long as there are workers.
        per_row: whether no bucket has elements of two rows of the last axis.

    Raises:
        ValueError: as `all_gather`, and for a dimension that the workers do not divide.

    Example:
        >>> import jax, jax.numpy as jnp, jaxcomp
        >>> codec = jaxcomp.qsgd_inf(bits=8)
        >>> own = jax.vmap(lambda x: psum_scatter(x, "data", codec, key=0), axis_name="data")
        >>> jax.jit(own)(jnp.ones((2, 128, 32))).shape
        (2, 64, 32)

    References:
        Wang et al., `ZeRO++ <https://arxiv.org/abs/2306.10209>`_, 2023, whose gradients are sent
        by an all-to-all, so that each is rounded once.
    """
    arguments.check_tree("psum_scatter", tree)
    folded = arguments.key_of(axis_name, key, site)
    forward, backward = arguments.policies(codec, back)
    arguments.warn_if_gathered(axis_name, forward, backward)
    places = arguments.places(tree, scatter_dimension)
    how = PsumScatter(axis_name, forward, backward, per_row, places, tiled)
    return transfer(how, folded, axes.vary(tree, axis_name))


@dataclasses.dataclass(frozen=True)
class AllGather(Transfer):
    """Every worker's tree on all workers."""

    axis: pieces.Places
    tiled: bool

    def run(self, key: Array, tree: PyTree) -> PyTree:
        everyones = messages.to_all(self.wire, key, tree)
        found = pieces.join(everyones, "axis", self.axis, tiled=self.tiled)
        return axes.vary(found, self.axis_name)

    def transposed(self, *, typed: bool) -> Transfer:
        del typed
        given = self.axis_name, self.back, self.codec, self.per_row
        return PsumScatter(*given, self.axis, self.tiled)

    def link_bytes(self, like: PyTree, workers: int) -> int:
        return (workers - 1) * sum(messages.bytes_of(self.wire, like))


@dataclasses.dataclass(frozen=True)
class PsumScatter(Transfer):
    """Each worker's piece of the sum of all workers' trees."""

    scatter_dimension: pieces.Places
    tiled: bool

    def run(self, key: Array, tree: PyTree) -> PyTree:
        at, tiled = self.scatter_dimension, self.tiled
        cuts = pieces.split(tree, "scatter_dimension", at, self.workers, tiled=tiled)
        return axes.vary(messages.sum_of_each(self.wire, key, cuts), self.axis_name)

    def transposed(self, *, typed: bool) -> Transfer:
        del typed
        given = self.axis_name, self.back, self.codec, self.per_row
        return AllGather(*given, self.scatter_dimension, self.tiled)

    def link_bytes(self, like: PyTree, workers: int) -> int:
        part = pieces.likes(
            like, "scatter_dimension", self.scatter_dimension, workers, tiled=self.tiled
        )
        return (workers - 1) * sum(messages.bytes_of(self.wire, part))
