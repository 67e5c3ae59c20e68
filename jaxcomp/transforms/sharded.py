"""Sharded models: every device compresses its own shard and sends nothing else.

By default, XLA gathers a leaf that is sharded over automatic axes before it compresses the leaf,
and every device then sends all of it. A second `shard_map` over those axes, within the one over the
workers, keeps each shard on its device. Inside it every gradient is local, and a step is the same
as that of a model that is not sharded.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxcomp.backend import axes, mapping, xla
from jaxcomp.base import Reducer
from jaxcomp.feedback import Link
from jaxcomp.layout import trees
from jaxcomp.mesh import axis_types, per_worker, specs as specs_
from jaxcomp.mesh.per_worker import PerShard
from jaxcomp.misuse import lookups
from jaxcomp.numerics import noise
from jaxcomp.reducers import choose
from jaxcomp.types import Array, AxisName, PyTree


class Shards(NamedTuple):
    """The axes that a model is sharded over, in the order of the mesh, and their sizes."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def wide(self) -> tuple[str, ...]:
        """The axes of several devices; along the others nothing is split, and nothing differs."""
        return tuple(name for name, size in zip(self.names, self.sizes, strict=True) if size > 1)

    @property
    def number(self) -> int:
        return math.prod(self.sizes)

    def size(self, names: Sequence[str]) -> int:
        """The number of devices along some of the axes together."""
        return math.prod(self.sizes[self.names.index(name)] for name in names)


class Cut(NamedTuple):
    """The layout of a leaf over all shards, in which no two devices hold the same elements.

    Attributes:
        shape: the shape of the leaf.
        spec: the spec used here: the axes of one device are left out of the user's, and it shards
            over the axes that the user's omits, too.
        home: the user's spec.
        local: the shape of a device's shard, with as many dimensions as the leaf.
        missing: the axes that the user's spec omits, if there is something to split.
        at: the dimension that is split over `missing`.
        split: None, or, if no dimension is divisible, the leaf's shape with one dimension split
            into two, the second of which is `at`; the specs then refer to this shape.
        padding: the number of elements added to make dimension `at` divisible.
    """

    shape: tuple[int, ...]
    spec: PartitionSpec
    home: PartitionSpec
    local: tuple[int, ...]
    missing: tuple[str, ...] = ()
    at: int = 0
    split: tuple[int, ...] | None = None
    padding: int = 0

    def lay(self, x: Array) -> Array:
        """The leaf in the shape that `spec` refers to."""
        if self.split is None:
            return x
        widths = [(0, self.padding if at == self.at else 0) for at in range(len(self.split))]
        return jnp.pad(x.reshape(self.split), widths)

    def back(self, x: Array) -> Array:
        """The leaf in its own shape."""
        if self.split is None:
            return x
        return lax.slice_in_dim(x, 0, self.split[self.at], axis=self.at).reshape(self.shape)

    def joined(self, parts: Array) -> Array:
        """Joins `[parts, …]`, the pieces of all devices along `missing`."""
        x = jnp.moveaxis(parts, 0, self.at)
        return x.reshape(*x.shape[: self.at], -1, *x.shape[self.at + 2 :])


def init(
    make: Callable[[PyTree], Any], params: PyTree, param_specs: PyTree, axis_name: AxisName
) -> Any:
    """The state for a sharded model; `make` returns the state for one device's shard.

    Raises:
        ValueError: if neither the context nor the parameters have a mesh, or the specs do not fit.
    """
    shards = _shards_of(params, axis_name)
    if shards is None:
        raise ValueError(
            "`param_specs` needs a mesh, got parameters and a context without one: make the state "
            "with "
            f"jaxcomp.init_state(tx, params, mesh, {axis_name!r}), give tx.init parameters that "
            "lie on the mesh, or call it within jax.set_mesh(mesh)"
        )
    leaves, treedef = jax.tree.flatten(params)
    likes = [
        jax.ShapeDtypeStruct(cut.local, jnp.result_type(leaf))
        for leaf, cut in zip(leaves, _cuts(params, param_specs, axis_name, shards), strict=True)
    ]
    state = make(jax.tree.unflatten(treedef, likes))

    def everyone(path, x):
        at = _place(path)
        return jnp.broadcast_to(
            jnp.expand_dims(x, at), (*x.shape[:at], shards.number, *x.shape[at:])
        )

    memory = jax.tree_util.tree_map_with_path(everyone, state.memory)
    return state._replace(memory=PerShard(memory, shards.names))


def update(
    step: Callable[[PyTree, Any, PyTree, tuple[str, ...]], tuple[PyTree, Any]],
    grads: PyTree,
    state: Any,
    params: PyTree,
    param_specs: PyTree,
    axis_name: AxisName,
) -> tuple[PyTree, Any]:
    """Runs `step(grads, state, params, shard_axes)` on each device's own shard.

    Args:
        step: the step of a device.
        grads: the gradients.
        state: the state.
        params: the parameters, or `()` for a step that does not use them.
        param_specs: how gradients and parameters are sharded.
        axis_name: the axes of the workers.

    Raises:
        ValueError: outside of a `shard_map` that leaves the axes of the shards automatic, or for
            a state or specs that do not fit.
    """
    shards = _shards_here(axis_name)
    cuts = _cuts(grads, param_specs, axis_name, shards)
    lookups.warn(grads, [cut.home for cut in cuts], axis_name, shards.wide)
    memory, names, wide = _memory(state, shards, axis_name), shards.names, shards.wide
    leaves, treedef = jax.tree.flatten(grads)
    weights = jax.tree.leaves(params)
    common = state._replace(memory=())

    def shard(leaves: list[Array]) -> PyTree:
        if not leaves and treedef.num_leaves:
            return None
        own = [x.reshape(cut.local) for x, cut in zip(leaves, cuts, strict=True)]
        return jax.tree.unflatten(treedef, own)

    def body(
        leaves: list[Array], weights: list[Array], memory: PyTree, common: Any
    ) -> tuple[list[Array], PyTree, Any]:
        memory = jax.tree_util.tree_map_with_path(lambda p, x: x.squeeze(_place(p)), memory)
        # Otherwise all shards would draw the same noise.
        key = noise.fold(common.key, lax.axis_index(wide) if wide else 0)
        own = common._replace(key=key, memory=memory)
        mean, new = step(shard(leaves), own, shard(weights), wide)
        memory = jax.tree_util.tree_map_with_path(
            lambda p, x: jnp.expand_dims(x, _place(p)), new.memory
        )
        means = [m.reshape(x.shape) for m, x in zip(jax.tree.leaves(mean), leaves, strict=True)]
        return (
            _gathered(means, cuts),
            memory,
            _alike(new._replace(key=common.key, memory=()), wide),
        )

    if names:
        specs = [cut.spec for cut in cuts]
        of_memory = jax.tree_util.tree_map_with_path(
            lambda p, _: PartitionSpec(*[None] * _place(p), wide or None), memory
        )
        body = mapping.shard_map(
            body,
            in_specs=(specs, specs if weights else [], of_memory, PartitionSpec()),
            out_specs=([cut.home for cut in cuts], of_memory, PartitionSpec()),
            axis_names=set(names),  # All: a kernel refuses automatic axes, even of one device.
            check_vma=axes.typed(axis_name),
        )
    laid = [cut.lay(x) for x, cut in zip(leaves, cuts, strict=True)]
    of_params = [cut.lay(x) for x, cut in zip(weights, cuts, strict=True)] if weights else []
    means, memory, common = body(laid, of_params, memory, common)
    means = [cut.back(x) for x, cut in zip(means, cuts, strict=True)]
    return jax.tree.unflatten(treedef, means), common._replace(memory=PerShard(memory, names))


def warn_if_gathered(source: Link | Reducer, axis_name: AxisName) -> None:
    """Warns if XLA would gather sharded leaves to compress them."""
    left = axis_types.beside(axis_name)
    if left and choose.uplink(source) is not None:
        warnings.warn(
            f"the mesh has automatic axes {left} beside {axis_name!r}: leaves that are "
            "sharded over them are gathered before they are compressed, and every device sends "
            "all of them. With `param_specs=specs` of compressed_mean each sends its own shard; "
            "param_specs=jax.sharding.PartitionSpec() is for parameters that are all replicated.",
            stacklevel=4,
        )


def check_specs(param_specs: PyTree, axis_name: AxisName) -> None:
    """Raises a `ValueError` unless these are PartitionSpecs that leave the workers' axis alone."""
    for leaf in jax.tree.leaves(param_specs, is_leaf=specs_.is_spec):
        if not specs_.is_spec(leaf):
            raise ValueError(
                "`param_specs` must be a tree of jax.sharding.PartitionSpec, with None for "
                f"replicated leaves, got {leaf!r} in it"
            )
        for name in specs_.named_axes(specs_.spec(leaf)):
            if name in axes.names(axis_name):
                raise ValueError(
                    f"`param_specs` must leave out the axis of the workers, {axis_name!r}, over "
                    f"which parameters are replicated, got {leaf!r}"
                )


def _shards_here(axis_name: AxisName) -> Shards:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not _manual(mesh, axis_name):
        raise ValueError(
            f"`param_specs` needs a surrounding jax.shard_map that is manual over {axis_name!r} "
            "and leaves the axes of the shards automatic, as jaxcomp.data_parallel makes it; "
            "within jax.vmap there are no shards, so leave it out"
        )
    explicit = [n for n in _rest(mesh, axis_name) if _types(mesh)[n] == AxisType.Explicit]
    if explicit:
        raise ValueError(
            f"`param_specs` needs automatic axes for the shards, got the explicit axis "
            f"{explicit[0]!r}: use jaxcomp.data_parallel, or a mesh with "
            "axis_types=(AxisType.Auto, ...)"
        )
    return _shards(mesh, axis_name)


def _shards_of(params: PyTree, axis_name: AxisName) -> Shards | None:
    """The shards of the surrounding mesh, or else of the parameters' mesh."""
    found = [jax.sharding.get_abstract_mesh()]
    found += [getattr(_sharding(leaf), "mesh", None) for leaf in jax.tree.leaves(params)]
    for mesh in found:
        if mesh is not None and set(axes.names(axis_name)) <= set(mesh.axis_names):
            return _shards(mesh, axis_name)
    return None


def _sharding(leaf: Any) -> Any:
    known = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    return getattr(known, "sharding", None)


def _shards(mesh: Any, axis_name: AxisName) -> Shards:
    names = _rest(mesh, axis_name)
    return Shards(names, tuple(mesh.shape[name] for name in names))


def _rest(mesh: Any, axis_name: AxisName) -> tuple[str, ...]:
    """The axes that are neither the workers' nor manual for another reason."""
    return tuple(
        name
        for name, kind in _types(mesh).items()
        if name not in axes.names(axis_name) and kind != AxisType.Manual
    )


def _manual(mesh: Any, axis_name: AxisName) -> bool:
    return all(_types(mesh).get(name) == AxisType.Manual for name in axes.names(axis_name))


def _types(mesh: Any) -> dict[str, AxisType]:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def _memory(state: Any, shards: Shards, axis_name: AxisName) -> PyTree:
    memory = state.memory
    fits = isinstance(memory, PerShard) and memory.axes == shards.names
    flat = jax.tree_util.tree_leaves_with_path(memory.tree) if fits else []
    if not fits or any(x.shape[_place(p) : _place(p) + 1] != (shards.number,) for p, x in flat):
        raise ValueError(
            f"`state` must hold the memory of the {shards.number} shards over {shards.names}: "
            f"make it with jaxcomp.init_state(tx, params, mesh, {axis_name!r}) on this mesh"
        )
    return memory.tree


def _place(path: tuple) -> int:
    """The index of the shards' axis in an array of the memory."""
    return 1 if per_worker.marked(path) else 0


def _gathered(means: list[Array], cuts: list[Cut]) -> list[Array]:
    """Gathers the leaves that were split over `missing` axes, with one collective for each kind."""
    means, groups = list(means), {}
    for number, cut in enumerate(cuts):
        if cut.missing:
            groups.setdefault((cut.missing, means[number].dtype), []).append(number)
    for (missing, _), numbers in groups.items():
        flat = xla.join([means[number] for number in numbers])
        everyone, begin = axes.gather(flat, missing), 0
        for number in numbers:
            own = means[number]
            parts = lax.slice_in_dim(everyone, begin, begin + own.size, axis=1)
            means[number] = cuts[number].joined(parts.reshape(-1, *own.shape))
            begin += own.size
    return means


def _alike(tree: PyTree, names: tuple[str, ...]) -> PyTree:
    """Types values that are equal in all shards, such as counts, as replicated over the shards."""

    def one(x: Array) -> Array:
        over = tuple(name for name in names if axes.varies(x, name))
        return lax.pmax(x, over) if over else x

    return jax.tree.map(one, tree)


def _cuts(tree: PyTree, param_specs: PyTree, axis_name: AxisName, shards: Shards) -> list[Cut]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    specs = jax.tree.leaves(
        specs_.spread("param_specs", param_specs, tree),
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )
    return [
        _cut(trees.path_name(path), jnp.shape(leaf), spec, shards)
        for (path, leaf), spec in zip(flat, specs, strict=True)
    ]


def _cut(path: str, shape: tuple[int, ...], home: PartitionSpec, shards: Shards) -> Cut:
    """A leaf over all shards: by the first dimension that divides, or else by the longest."""
    for name in specs_.named_axes(home):
        if name not in shards.names:
            raise ValueError(
                f"`param_specs` must name automatic axes of the surrounding mesh, which are "
                f"{shards.names}, got {home} for '{path}'. If all axes are manual, "
                "gradients are local already: leave param_specs out"
            )
    entries = [specs_.names(entry) for entry in specs_.of_axes(shards.wide, home)]
    parts = [shards.size(entry) for entry in entries]
    if len(entries) > len(shape) or any(n % k for n, k in zip(shape, parts, strict=False)):
        raise ValueError(
            f"`param_specs` must divide the dimensions of every leaf evenly, got {home} for "
            f"'{path}' of shape {shape}: shard another dimension, or use None"
        )
    more = max(len(shape), 1) - len(entries)
    entries, parts = entries + [()] * more, parts + [1] * more
    inside = [n // k for n, k in zip(shape or (1,), parts, strict=True)]
    missing = tuple(name for name in shards.wide if name not in specs_.named_axes(home))
    among = shards.size(missing)
    if among == 1 or 0 in shape:
        return Cut(shape, _joined(entries[: len(home)]), home, tuple(inside[: len(shape)]))
    for at, size in enumerate(inside):
        if size % among == 0:
            entries[at] += missing
            inside[at] //= among
            return Cut(shape, _joined(entries), home, tuple(inside), missing, at)
    at = inside.index(max(inside))
    split = (*shape[:at], parts[at], inside[at], *shape[at + 1 :])
    laid, apart = entries[: at + 1], entries[at + 1 :]
    padding = -inside[at] % among
    inside[at] = (inside[at] + padding) // among
    return Cut(
        shape=shape,
        spec=_joined([*laid, missing, *apart]),
        home=_joined([*laid, (), *apart]),
        local=tuple(inside[: len(shape)]),
        missing=missing,
        at=at + 1,
        split=split,
        padding=padding,
    )


def _joined(entries: Sequence[tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(entry or None for entry in entries))
