"""Memory that differs between workers, as marked nodes of an optimizer state."""

from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxcomp.backend import axes
from jaxcomp.base import Mirrored, adapter
from jaxcomp.mesh import kinds
from jaxcomp.types import AxisName, PyTree


class _Mark(str):
    """The name of the child of a node of this module, in the paths of its leaves.

    Some frameworks turn nodes into plain mappings, but keep the keys. A key of this
    type marks our memory there, and no name in a user's tree has this type.
    """

    __slots__ = ()


_MARK = _Mark("per_worker")
"""Marks leaves that differ between workers."""

_ORDER = "_of_"
"""Begins the end of the mark of memory whose leaves have an order that its shapes do not tell."""

_SHARD = "per_shard:"
"""Begins the mark of what differs between shards of the model; the names of their axes follow."""

SLICE = _Mark("per_worker_share")
"""Marks rows that are shared out: each worker has some of them, and none has all."""


def _boxed(tree: PyTree, *, add: bool) -> PyTree:
    """The tree, whose boxes of arrays name the workers' axis too, or no longer."""
    for one in adapter.present():
        tree = one.boxed(tree, add=add)
    return tree


@jax.tree_util.register_pytree_with_keys_class
class PerWorker(metaclass=adapter.Stored):
    """A tree that differs between workers.

    Its arrays carry a leading axis: of length 1 inside the mapped function, of length `workers`
    outside. Everything in an optimizer state that is not inside a `PerWorker` is replicated.

    Args:
        tree: arrays with that leading axis.
        kind: the kind of memory, which tells `resize_workers` how to move it. "slice" is rows that
            are split over the workers, "codec" the state of a codec, "codec slice" the state of a
            codec that encodes a worker's slice of rows. All others ("residual", "momentum",
            "shift", "local", …) are averaged.
        order: names which parameters are where in the memory of a link, if rules of its policy say
            that. It is part of every path, hence of a checkpoint: memory of the same shapes in
            another order is not restored in silence.
    """

    def __init__(self, tree: PyTree, kind: str, order: str = ""):
        self.tree = tree
        self.kind = kind
        self.order = order

    @property
    def stored(self) -> str:
        """The name of the memory in a checkpoint."""
        return f"{_MARK}{_ORDER}{self.order}" if self.order else str(_MARK)

    @classmethod
    def wrap(
        cls, tree: PyTree, kind: str, axis_name: AxisName | None = None, order: str = ""
    ) -> "PerWorker":
        """One worker's tree, without the leading axis, as a `PerWorker`."""
        tree = _boxed(jax.tree.map(lambda x: jnp.asarray(x)[None], tree), add=True)
        if axis_name is not None and axes.bound(axis_name):
            tree = axes.vary(tree, axis_name)
        return cls(tree, kind, order)

    def own(self) -> PyTree:
        """This worker's tree, without the leading axis.

        Raises:
            ValueError: if the leading axis is not of length 1.
        """
        for leaf in jax.tree.leaves(self.tree):
            if leaf.ndim == 0 or leaf.shape[0] != 1:
                raise ValueError(
                    "`state` must hold one worker's memory inside the mapped function, with a "
                    f"leading axis of 1, got a leaf of shape {leaf.shape}. Pass the state with "
                    "in_specs=jaxcomp.state_specs(state, axis_name), or use "
                    "jaxcomp.data_parallel, which does it. Under jax.pmap, make the state with "
                    "jax.pmap(tx.init, axis_name=axis_name), not with jaxcomp.init_state."
                )
        return _boxed(jax.tree.map(lambda x: x[0], self.tree), add=False)

    def tree_flatten_with_keys(self):
        mark = SLICE if self.kind == "slice" else _Mark(self.stored)
        return ((jax.tree_util.GetAttrKey(mark), self.tree),), (self.kind, self.order)

    @classmethod
    def tree_unflatten(cls, known, children):
        return cls(children[0], *known)

    def __repr__(self) -> str:
        order = f", order={self.order!r}" if self.order else ""
        return f"PerWorker({self.tree!r}, kind={self.kind!r}{order})"


@jax.tree_util.register_pytree_with_keys_class
class PerShard(metaclass=adapter.Stored):
    """A tree that differs between the shards of a model.

    Its arrays carry an axis of length `shards`: after that of the workers in a `PerWorker`, and
    before all others elsewhere.

    Args:
        tree: arrays with that axis.
        axes: the names of the mesh axes that the model is sharded over.
    """

    stored = _SHARD

    def __init__(self, tree: PyTree, axes: tuple[str, ...]):
        self.tree = tree
        self.axes = axes

    def tree_flatten_with_keys(self):
        mark = _Mark(_SHARD + ",".join(self.axes))
        return ((jax.tree_util.GetAttrKey(mark), self.tree),), self.axes

    @classmethod
    def tree_unflatten(cls, axes, children):
        return cls(children[0], axes)

    def __repr__(self) -> str:
        return f"PerShard({self.tree!r}, axes={self.axes!r})"


def is_per_worker(node: Any) -> bool:
    """Whether a node of a tree is a `PerWorker`."""
    return isinstance(node, PerWorker)


def marked(path: tuple) -> bool:
    """Whether the leaf at this path differs between workers."""
    return any(name.startswith(_MARK) for name in _marks(path))


def shared_out(path: tuple) -> bool:
    """Whether the leaf at this path is a worker's slice of rows."""
    return SLICE in _marks(path)


def _marks(path: tuple) -> list[_Mark]:
    """The marks in a path."""
    names = [getattr(key, "name", getattr(key, "key", None)) for key in path]
    return [name for name in names if isinstance(name, _Mark)]


def below(path: tuple) -> tuple:
    """The path from the mark of the memory on."""
    return next(path[at:] for at in range(len(path)) if marked(path[at : at + 1]))


def shard_axes(path: tuple) -> tuple[str, ...] | None:
    """The axes of shards over which the leaf at this path differs; None if there are none."""
    for name in _marks(path):
        if name.startswith(_SHARD):
            return tuple(filter(None, name.removeprefix(_SHARD).split(",")))
    return None


def stored_as_memory(name: str) -> bool:
    """Whether memory has this name in a checkpoint that was restored without types."""
    return stored_as_workers(name) or name.startswith(_SHARD)


def stored_as_workers(name: str) -> bool:
    """Whether arrays of this name in such a checkpoint begin with an axis of workers."""
    return name in (_MARK, SLICE) or name.startswith(_MARK + _ORDER)


def spec(path: tuple, axis_name: AxisName) -> PartitionSpec:
    """The spec of the memory at this path: split over workers, shards, both or neither."""
    shards = shard_axes(path)
    over = [axis_name] if marked(path) else []
    return PartitionSpec(*over, *([shards or None] if shards is not None else []))


def wrap(
    memory: PyTree,
    kind: str,
    axis_name: AxisName,
    *,
    splits: bool = False,
    alike: bool = True,
    order: str = "",
) -> PyTree:
    """A feedback's memory as a state stores it: the sender's memory differs between workers.

    A mirror is the same on all workers, unless each has a slice of it (`splits`), or hears other
    workers (not `alike`).
    """
    if not isinstance(memory, Mirrored):
        return PerWorker.wrap(memory, kind, axis_name, order)
    mirror = memory.mirror
    if splits or not alike:
        mirror = PerWorker.wrap(mirror, "slice" if splits else kind, axis_name, order)
    return Mirrored(PerWorker.wrap(memory.own, kind, axis_name, order), mirror)


def unwrap(state: PyTree) -> PyTree:
    """The inverse of `wrap`: this worker's memory."""
    return jax.tree.map(
        lambda node: node.own() if is_per_worker(node) else node, state, is_leaf=is_per_worker
    )


def replicated_part(state: PyTree) -> PyTree:
    """The part of a state that is the same on every worker; None in place of the rest."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: None if marked(path) else leaf, state
    )


def check_order(tree: PyTree) -> None:
    """Refuses a chain's state whose order shows a mistake.

    Before the mean over the workers, optax's transformations see each worker's own gradients, but
    their state is not marked as different between workers. After a part that takes the descent step
    itself, an optimizer would turn the step round. A tree without tuples, such as a flattened one,
    cannot be checked.
    """
    for node in jax.tree.leaves(tree, is_leaf=_is_sequence):
        parts = _parts(node)
        for part in parts:
            check_order(part)
        if not all(map(_is_state, parts)):
            continue  # Not a chain, for instance a pair of parameters and state.
        steps = [at for at, part in enumerate(parts) if _takes_step(part)]
        if steps and any(map(_has_chain, parts[steps[0] + 1 :])):
            raise ValueError(
                "`state` must not have an optimizer after a method that takes the descent step "
                "itself, with its own `learning_rate`: the optimizer would turn the step round, so "
                "the loss would rise. Use the method alone, or give the optimizer a mean, as in "
                "optax.chain(jaxcomp.compressed_mean(...), opt), or a method that returns one, "
                "such as jaxcomp.algorithms.ef21(...)."
            )
        means = [at for at, part in enumerate(parts) if _averages(part)]
        for part in parts[: means[0]] if means else ():
            found = jax.tree.leaves(part, is_leaf=lambda n: _is_optax(n) or is_per_worker(n))
            for state in found:
                if _is_optax(state) and _has_arrays(state):
                    raise ValueError(
                        f"`state` must not have optax's {type(state).__name__} before the mean of "
                        "the gradients: there it differs between the workers without being "
                        "marked so. Wrap its transformation with "
                        "jaxcomp.per_worker, or chain it after compressed_mean."
                    )


def _takes_step(part: PyTree) -> bool:
    """Whether a part of a chain averages, and then has an optimizer in a chain of its own."""
    for node in jax.tree.leaves(part, is_leaf=lambda n: _is_sequence(n) or kinds.STEPS.has(n)):
        parts = _parts(node)
        means = [at for at, one in enumerate(parts) if _averages(one)]
        after = parts[means[0] + 1 :] if means else []
        if kinds.STEPS.has(node) or any(map(_takes_step, parts)) or any(map(_has_chain, after)):
            return True
    return False


def _has_chain(part: PyTree) -> bool:
    """Whether a state has that of a chain, as those of optimizers of optax have."""
    nodes = jax.tree.leaves(part, is_leaf=_is_sequence)
    return any(_parts(node) and all(map(_is_state, _parts(node))) for node in nodes)


def _is_sequence(node: Any) -> bool:
    return type(node) is tuple or isinstance(node, OrderedDict)


def _parts(node: Any) -> list[Any]:
    """The state of each transformation of a chain, with or without names."""
    if not _is_sequence(node):
        return []
    return list(node.values()) if isinstance(node, OrderedDict) else list(node)


def _is_state(part: Any) -> bool:
    if _is_sequence(part):
        return all(map(_is_state, _parts(part)))
    return is_per_worker(part) or hasattr(part, "_fields")


def _is_optax(node: Any) -> bool:
    return hasattr(node, "_fields") and type(node).__module__.split(".", 1)[0] == "optax"


def _averages(part: PyTree) -> bool:
    return any(map(kinds.MEANS.has, jax.tree.leaves(part, is_leaf=kinds.MEANS.has)))


def _has_arrays(state: PyTree) -> bool:
    """Whether a state has replicated arrays of floating numbers, other than scalars."""
    return any(
        jnp.ndim(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if not marked(path)
    )


def state_specs(state: PyTree, axis_name: AxisName) -> PyTree:
    """PartitionSpecs for any tree: `PerWorker` split over the axis, everything else replicated.

    `jax.shard_map` accepts them directly. For `nnx.shard_map`, wrap those of an optimizer:
    `nnx.StateSharding(jaxcomp.state_specs(nnx.state(optimizer), axis_name))`.

    Args:
        state: the tree.
        axis_name: the axis or axes of the workers. In a `shard_map` that is manual over the axes of
            a model's shards too, name all manual axes, as in `("dcn", "fsdp")`: each device has
            memory of its own. With the workers' axis alone, JAX refuses the specs of results under
            `check_vma=True`; with `check_vma=False` nothing can detect it, and a checkpoint has the
            memory of one shard in place of all.

    Raises:
        ValueError: if a state holds arrays of gradients before the mean outside of `PerWorker`.
    """
    check_order(state)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: PartitionSpec(axis_name) if marked(path) else PartitionSpec(), state
    )
