"""How a training step and its state are laid on a mesh."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import core
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcomp import axes, workers as workers_
from jaxcomp.protocols import AxisName, PyTree


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


def place(tree: PyTree, mesh: Mesh, axis_name: AxisName) -> PyTree:
    """Puts a tree on a mesh: `PerWorker` memory split over the axis, everything else replicated.

    Memory of one worker, as `tx.init` makes it outside of a mapped function, is given to each.

    Args:
        tree: any tree, such as a flax `TrainState` or the state of an `nnx.Optimizer`.
        mesh: the device mesh.
        axis_name: the axis or axes that the workers are on.

    Raises:
        ValueError: if `PerWorker` memory is for another number of workers.

    Example:
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> place({"w": jnp.ones(2)}, mesh, "data")["w"].sharding.spec
        P()
    """
    mesh, workers = _automatic(mesh), _workers(mesh, axis_name)

    def put(path, leaf):
        if not workers_.marked(path):
            return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))
        if leaf.shape[0] == 1 and workers > 1:
            leaf = jnp.broadcast_to(leaf, (workers, *leaf.shape[1:]))
        _check_workers(leaf, workers)
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(axis_name)))

    return jax.tree_util.tree_map_with_path(put, tree)


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
    for `PerWorker` memory: average the loss with `jax.lax.pmean`. Arguments are placed on the mesh
    as needed.

    Args:
        step: for instance `step(params, state, batch) -> (params, state, loss)`; collectives and
            `compressed_mean` inside it use `axis_name`.
        mesh: a device mesh that has the axis.
        axis_name: the axis or axes that the workers are on.
        batch_argnums: which positional arguments are batches; the last one by default.
        donate_argnums: arguments whose buffers the step may reuse.
        check_vma: let JAX check the types of replication. Without it, a result that differs
            between workers is not noticed: one worker's is returned.

    Returns:
        A function of the same arguments, with the methods `lower` and `trace` of `jax.jit`'s.

    Raises:
        ValueError: if the mesh has no such axis, a batch does not divide by the number of
            workers, memory is for another number of workers, or (with `check_vma`) a result
            differs between workers.

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

    def marks_of(args):
        which = {number % len(args) for number in batches} if args else set()
        return [
            mark
            for number, arg in enumerate(args)
            for mark in _marks(arg, everything=number in which)
        ]

    def check(args):
        for number in {number % len(args) for number in batches} if args else ():
            _check_divides(args[number], number, workers)
        _check_accumulators(args)
        for path, leaf in jax.tree_util.tree_leaves_with_path(args):
            if workers_.marked(path):
                _check_workers(leaf, workers)

    def mapped(*args):
        check(args)
        leaves, treedef = jax.tree.flatten(args)
        marks = marks_of(args)
        out = {}

        def body(replicated, per_worker):
            merged = _merge(marks, replicated, per_worker)
            results = step(*jax.tree.unflatten(treedef, merged))
            flat, out["treedef"] = jax.tree.flatten(results)
            out["marks"] = _marks(results)
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

    compiled = jax.jit(functools.wraps(step)(mapped), donate_argnums=donate_argnums)
    places = {mark: NamedSharding(mesh, split if mark else PartitionSpec()) for mark in (0, 1)}

    @functools.wraps(step)
    def run(*args):
        check(args)
        # An argument that lies elsewhere the first time would have the step compiled twice.
        leaves, treedef = jax.tree.flatten(args)
        placed = [
            leaf if _placed(leaf, mesh) else jax.device_put(leaf, places[mark])
            for leaf, mark in zip(leaves, marks_of(args), strict=True)
        ]
        return compiled(*jax.tree.unflatten(treedef, placed))

    run.__dict__.update(lower=compiled.lower, trace=compiled.trace)
    return run


def init_state(tx: Any, params: PyTree, mesh: Mesh, axis_name: AxisName) -> PyTree:
    """The state of an optax transformation on a mesh, each worker's memory on its own device.

    Args:
        tx: any optax transformation that holds a `compressed_mean`, say.
        params: the parameters, replicated.
        mesh: the device mesh.
        axis_name: the axis or axes that the workers are on.
    """
    init = data_parallel(lambda p, _: tx.init(p), mesh, axis_name)
    return place(init(params, ()), mesh, axis_name)


def _placed(leaf: Any, mesh: Mesh) -> bool:
    """Whether an argument lies on the mesh already; how it lies there is not ours to change."""
    if isinstance(leaf, core.Tracer):
        return True
    return isinstance(leaf, jax.Array) and leaf.sharding.device_set == set(mesh.devices.flat)


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


def _marks(tree: PyTree, everything: bool = False) -> list[bool]:
    """For each leaf, whether it is split over the workers."""
    return [
        everything or workers_.marked(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


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


def _check_workers(leaf: Any, workers: int) -> None:
    if jnp.ndim(leaf) == 0 or leaf.shape[0] != workers:
        raise ValueError(
            f"the state holds the memory of {leaf.shape[0] if jnp.ndim(leaf) else 'no'} workers "
            f"and the mesh has {workers}: make it with jaxcomp.init_state(tx, params, mesh, "
            "axis_name), bring one worker's to the mesh with jaxcomp.place, or move it from "
            "another worker count with jaxcomp.resize_workers"
        )


def _check_accumulators(args: PyTree) -> None:
    def accumulates(node):
        return isinstance(node, optax.MultiStepsState)

    nodes = jax.tree.leaves(args, is_leaf=lambda n: accumulates(n) or workers_.is_per_worker(n))
    for node in filter(accumulates, nodes):
        inner = jax.tree.leaves(node.inner_opt_state, is_leaf=workers_.is_per_worker)
        if any(map(workers_.is_per_worker, inner)):
            raise ValueError(
                "optax.MultiSteps must not wrap compressed_mean: its accumulator would hold each "
                "worker's own gradients as if they were replicated. Accumulate after the mean, "
                "optax.chain(compressed_mean(...), optax.MultiSteps(opt, k)), or before it, "
                "optax.chain(jaxcomp.per_worker(optax.MultiSteps(optax.identity(), k)), "
                "compressed_mean(...), opt)."
            )


def _check_replicated(results: PyTree, axis_name: AxisName) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(results):
        if not workers_.marked(path) and axes.varies(jnp.asarray(leaf), axis_name):
            raise ValueError(
                f"result{jax.tree_util.keystr(path)} differs between the workers of "
                f"{axis_name!r}. A loss or metric: average it with jax.lax.pmean. Optimizer state "
                "that sees gradients before the mean (local momentum, clipping statistics, "
                "optax.MultiSteps): wrap that transformation with jaxcomp.per_worker, or chain it "
                "after compressed_mean. Parameters: let compressed_mean see their gradient."
            )
