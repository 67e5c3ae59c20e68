"""Where state lives: what differs between workers, and how a training step is laid on a mesh."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcomp import axes
from jaxcomp.protocols import AxisName, PyTree


@jax.tree_util.register_pytree_with_keys_class
class PerWorker:
    """A tree that differs between workers.

    Its arrays carry a leading axis: of length 1 inside the mapped function, of length `workers`
    outside. Everything in an optimizer state that is not inside a `PerWorker` is replicated.

    Args:
        tree: arrays with that leading axis.
        kind: what they are ("residual", "shift", "codec", "local"); `resize_workers` reads it.
    """

    def __init__(self, tree: PyTree, kind: str):
        self.tree = tree
        self.kind = kind

    @classmethod
    def wrap(cls, tree: PyTree, kind: str, axis_name: AxisName | None = None) -> "PerWorker":
        """One worker's tree, without the leading axis, as a `PerWorker`."""
        tree = jax.tree.map(lambda x: jnp.asarray(x)[None], tree)
        if axis_name is not None and axes.bound(axis_name):
            tree = axes.vary(tree, axis_name)
        return cls(tree, kind)

    def own(self) -> PyTree:
        """This worker's tree, without the leading axis.

        Raises:
            ValueError: if the leading axis is not of length 1.
        """
        for leaf in jax.tree.leaves(self.tree):
            if leaf.ndim == 0 or leaf.shape[0] != 1:
                raise ValueError(
                    "`state` holds the memory of several workers where one worker's was expected "
                    f"(a leaf of shape {leaf.shape}). Inside the mapped function the leading axis "
                    "is 1: pass the state with in_specs=jaxcomp.state_specs(state, axis_name), or "
                    "let jaxcomp.data_parallel do it."
                )
        return jax.tree.map(lambda x: x[0], self.tree)

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("tree"), self.tree),), self.kind

    @classmethod
    def tree_unflatten(cls, kind, children):
        return cls(children[0], kind)

    def __repr__(self) -> str:
        return f"PerWorker({self.tree!r}, kind={self.kind!r})"


def is_per_worker(node: Any) -> bool:
    """Whether a node of a tree is a `PerWorker`."""
    return isinstance(node, PerWorker)


def replicated(state: PyTree) -> PyTree:
    """The part of a state that is the same on every worker: all but its `PerWorker` nodes."""
    return jax.tree.map(
        lambda node: None if is_per_worker(node) else node, state, is_leaf=is_per_worker
    )


def local(params: PyTree, axis_name: AxisName) -> PyTree:
    """The parameters, typed so that their gradient is this worker's own.

    Under `shard_map` with `check_vma=True`, JAX hands the gradient of a replicated parameter out
    already summed over the axis, and there is nothing left to compress. Differentiate the loss
    here instead: `jax.grad(loss)(local(params, "data"), batch)`. Under `pmap`, `vmap` and
    `check_vma=False` this is the identity.

    Raises:
        ValueError: if the axis is not bound.
    """
    axes.require(axis_name)
    return axes.vary(params, axis_name)


def state_specs(state: PyTree, axis_name: AxisName) -> PyTree:
    """PartitionSpecs for any tree: `PerWorker` split over the axis, everything else replicated."""

    def spec(node):
        split = PartitionSpec(axis_name) if is_per_worker(node) else PartitionSpec()
        return jax.tree.map(lambda _: split, node)

    return jax.tree.map(spec, state, is_leaf=is_per_worker)


def data_parallel(
    step: Callable[..., Any],
    mesh: Mesh,
    axis_name: AxisName,
    *,
    batch_argnums: int | tuple[int, ...] = -1,
    donate_argnums: int | tuple[int, ...] = (),
    check_vma: bool = True,
) -> Callable[..., Any]:
    """A compiled training step, one worker a device of the mesh axis.

    Each batch is split along its leading dimension, every other argument is replicated but for
    the `PerWorker` memory in it. What the step returns must be the same on all workers, again but
    for `PerWorker` memory: average the loss with `jax.lax.pmean`.

    Args:
        step: for instance `step(params, state, batch) -> (params, state, loss)`; collectives and
            `compressed_mean` inside it use `axis_name`.
        mesh: a device mesh that has the axis.
        axis_name: the axis or axes that the workers are on.
        batch_argnums: which positional arguments are batches; the last one by default.
        donate_argnums: arguments whose buffers the step may reuse.
        check_vma: let JAX check the types of replication.

    Returns:
        A function of the same arguments, with a `lower` method like `jax.jit`'s.

    Raises:
        ValueError: if the mesh has no such axis, a batch does not divide by the number of
            workers, or a result differs between workers.

    Example:
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> mean = data_parallel(lambda x: jax.lax.pmean(x.sum(), "data"), mesh, "data")
        >>> mean(jnp.arange(4.0))
        Array(6., dtype=float32)
    """
    missing = [name for name in axes.names(axis_name) if name not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"`axis_name` must name axes of the mesh {mesh.axis_names}, got {missing[0]!r}"
        )
    mesh = _automatic(mesh)
    batches = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
    workers = _workers(mesh, axis_name)
    split = PartitionSpec(axis_name)

    @functools.wraps(step)
    def mapped(*args):
        which = {number % len(args) for number in batches} if args else set()
        for number in which:
            _check_divides(args[number], number, workers)
        _check_accumulators(args)
        leaves, treedef = jax.tree.flatten(args)
        marks = jax.tree.leaves(
            [_marks(arg, everything=number in which) for number, arg in enumerate(args)]
        )
        out = {}

        def body(replicated, per_worker):
            merged = _merge(marks, replicated, per_worker)
            results = step(*jax.tree.unflatten(treedef, merged))
            flat, out["treedef"] = jax.tree.flatten(results)
            out["marks"] = jax.tree.leaves(_marks(results))
            if check_vma:
                _check_replicated(results, axis_name)
            return _part(flat, out["marks"])

        parts = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(PartitionSpec(), split),
            out_specs=(PartitionSpec(), split),
            axis_names=set(axes.names(axis_name)),
            check_vma=check_vma,
        )(*_part(leaves, marks))
        return jax.tree.unflatten(out["treedef"], _merge(out["marks"], *parts))

    return jax.jit(mapped, donate_argnums=donate_argnums)


def init_state(tx: Any, params: PyTree, mesh: Mesh, axis_name: AxisName) -> PyTree:
    """The state of an optax transformation on a mesh, each worker's memory on its own device.

    Args:
        tx: any optax transformation that holds a `compressed_mean`, say.
        params: the parameters, replicated.
        mesh: the device mesh.
        axis_name: the axis or axes that the workers are on.
    """
    mesh = _automatic(mesh)
    init = data_parallel(lambda p, _: tx.init(p), mesh, axis_name)
    state = init(params, ())
    # Everything has a place on the mesh, so that a step with donated buffers compiles once.
    place = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        state_specs(state, axis_name),
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )
    return jax.device_put(state, place)


def resize_workers(tx: Any, state: PyTree, params: PyTree, workers: int) -> PyTree:
    """Moves a state to another number of workers.

    Replicated state stays. Of the memory of `n` workers, each of the new ones gets the mean, so
    that the mean residual, and the mean shift that the mirror must equal, stay what they were;
    counters, which are equal on all workers, are kept.

    Args:
        tx: the transformation that the state belongs to.
        state: its state, outside of the mapped function (leading axis `n`).
        params: the parameters.
        workers: the new number of workers.

    Raises:
        ValueError: if `workers` is not positive or `state` is not a state of `tx`.

    Returns:
        The state with leading axis `workers`; place it with `jax.device_put` and `state_specs`.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"`workers` must be a positive integer, got {workers!r}")
    expected = jax.tree.structure(jax.eval_shape(tx.init, params))
    if jax.tree.structure(state) != expected:
        raise ValueError(
            f"`state` must be a state of `tx`: expected {expected}, got {jax.tree.structure(state)}"
        )

    def move(x):
        if jnp.issubdtype(x.dtype, jnp.floating):
            wide = jnp.promote_types(x.dtype, jnp.float32)
            kept = jnp.mean(x, axis=0, dtype=wide).astype(x.dtype)
        else:
            kept = x[0]
        return jnp.broadcast_to(kept, (workers, *x.shape[1:]))

    def resize(node):
        return jax.tree.map(move, node) if is_per_worker(node) else node

    return jax.tree.map(resize, state, is_leaf=is_per_worker)


def _automatic(mesh: Mesh) -> Mesh:
    """The same devices with automatic axes: explicit ones, `jax.make_mesh`'s default, would
    reject every array that is not yet placed on the mesh.
    """
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _workers(mesh: Mesh, axis_name: AxisName) -> int:
    total = 1
    for name in axes.names(axis_name):
        total *= mesh.shape[name]
    return total


def _marks(tree: PyTree, everything: bool = False) -> PyTree:
    """For each leaf, whether it is split over the workers."""
    return jax.tree.map(
        lambda node: jax.tree.map(lambda _: everything or is_per_worker(node), node),
        tree,
        is_leaf=is_per_worker,
    )


def _part(leaves: list, marks: list[bool]) -> tuple[list, list]:
    replicated = [leaf for leaf, split in zip(leaves, marks, strict=True) if not split]
    return replicated, [leaf for leaf, split in zip(leaves, marks, strict=True) if split]


def _merge(marks: list[bool], replicated: list, per_worker: list) -> list:
    sources = {False: iter(replicated), True: iter(per_worker)}
    return [next(sources[split]) for split in marks]


def _check_divides(batch: PyTree, number: int, workers: int) -> None:
    for leaf in jax.tree.leaves(batch):
        shape = jnp.shape(leaf)
        if not shape or shape[0] % workers:
            raise ValueError(
                f"argument {number} is a batch, and the leading dimension of each of its arrays "
                f"must be a multiple of the {workers} workers, got shape {shape}"
            )


def _check_accumulators(args: PyTree) -> None:
    def accumulates(node):
        return isinstance(node, optax.MultiStepsState)

    nodes = jax.tree.leaves(args, is_leaf=lambda n: accumulates(n) or is_per_worker(n))
    for node in filter(accumulates, nodes):
        inner = jax.tree.leaves(node.inner_opt_state, is_leaf=is_per_worker)
        if any(map(is_per_worker, inner)):
            raise ValueError(
                "optax.MultiSteps must not wrap compressed_mean: its accumulator would hold each "
                "worker's own gradients as if they were replicated. Accumulate after the mean, "
                "optax.chain(compressed_mean(...), optax.MultiSteps(opt, k)), or before it, "
                "optax.chain(jaxcomp.per_worker(optax.MultiSteps(optax.identity(), k)), "
                "compressed_mean(...), opt)."
            )


def _check_replicated(results: PyTree, axis_name: AxisName) -> None:
    flat, _ = jax.tree_util.tree_flatten_with_path(results, is_leaf=is_per_worker)
    for path, leaf in flat:
        if not is_per_worker(leaf) and axes.varies(jnp.asarray(leaf), axis_name):
            raise ValueError(
                f"result{jax.tree_util.keystr(path)} differs between the workers of "
                f"{axis_name!r}. A loss or metric: average it with jax.lax.pmean. Optimizer state "
                "that sees gradients before the mean (local momentum, clipping statistics, "
                "optax.MultiSteps): wrap that transformation with jaxcomp.per_worker, or chain it "
                "after compressed_mean. Parameters: let compressed_mean see their gradient."
            )
