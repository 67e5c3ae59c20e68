"""A training step and its state on a mesh, with one worker for each device of an axis."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcomp.backend import axes
from jaxcomp.mesh import (
    arguments,
    axis_types,
    hints,
    objects,
    per_worker,
    place,
    placement,
    replicas,
    retyping,
)
from jaxcomp.types import AxisName, PyTree


def data_parallel(
    step: Callable[..., Any],
    mesh: Mesh,
    axis_name: AxisName,
    *,
    batch_argnums: int | tuple[int, ...] | None = None,
    batch_argnames: str | tuple[str, ...] = (),
    batch_spec: PartitionSpec | None = None,
    donate_argnums: int | tuple[int, ...] = (),
    donate_argnames: str | tuple[str, ...] = (),
    check_vma: bool = True,
) -> Callable[..., Any]:
    """Compiles a training step with one worker for each device of the mesh axis.

    Each batch is split along its leading dimension; every other argument is replicated, except the
    `PerWorker` memory in it. The results must be the same on all workers, except `PerWorker`
    memory: average the loss with `jax.lax.pmean`, or use `jaxcomp.value_and_grad`. Arguments are
    placed on the mesh as needed; arrays that are already on the mesh keep their placement. Memory
    of one worker, as `tx.init` makes it, is copied to each worker.

    Objects of flax's nnx (modules, optimizers, metrics) can be arguments, and change in place, as
    under `nnx.jit`. Batch statistics (`nnx.BatchStat`) and `nnx.metrics.Average` or `Accuracy` that
    differ between workers after the step are averaged. Modules of equinox can be arguments and
    results: their leaves that are not arrays are static, and the step is compiled again when these
    change.

    Parameters may be sharded over other axes of the mesh; a worker then consists of all devices
    with the same place on `axis_name`. Results are then placed like the argument of the same name
    and shape: parameters and moments keep their placement.

    The axes of the mesh may be explicit or automatic; inside the step, those of the shards are
    automatic. Results lie on the given mesh, with its axis types, whatever `jax.set_mesh` says.

    Args:
        step: for instance `step(params, state, batch) -> (params, state, loss)`; collectives and
            `compressed_mean` inside it use `axis_name`.
        mesh: a device mesh that has the axis.
        axis_name: the axis or axes that the workers are on.
        batch_argnums: the numbers of the arguments that are batches. By default the last argument
            is the batch; a PRNG key there, or another argument that looks like a batch, is an
            error.
        batch_argnames: the names of arguments that are batches.
        batch_spec: the sharding of batches on the whole mesh, if a worker's batch is split further
            over its devices, as in `PartitionSpec(("dcn", "fsdp"))`; it begins with `axis_name`.
        donate_argnums: the numbers of arguments whose buffers the step may reuse.
        donate_argnames: the names of such arguments.
        check_vma: True lets JAX check the types of replication. With False, the results of the
            first call are compared between the workers, bit for bit; a difference that begins later
            is not detected, and one worker's result is returned.

    Returns:
        A function of the same arguments, with the methods `lower` and `trace` as from `jax.jit`.

    Raises:
        ValueError: if the mesh has no such axis, `batch_spec` does not begin with it, the number of
            workers does not divide a batch, it is unclear which arguments are batches, another
            argument is split over the workers, memory is for another number of workers, or a
            result differs between workers.

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
    inside = axis_types.automatic(mesh)
    given = arguments.Arguments(
        step, batch_argnums, batch_argnames, donate_argnums, donate_argnames
    )
    workers, typed = place.workers_of(mesh, axis_name), bool(axis_types.explicit(mesh))
    shards = mesh.size > workers or (typed and len(mesh.axis_names) > len(axes.names(axis_name)))
    split = PartitionSpec(axis_name)
    pieces = workers if batch_spec is None else _pieces(batch_spec, mesh, axis_name)
    of_batch = split if batch_spec is None else batch_spec

    def marks_of(args, batches):
        return [
            mark
            for number, arg in enumerate(args)
            for mark in _marks(arg, everything=number in batches)
        ]

    def check(args, keywords):
        given.check(args, keywords, pieces)
        names, batches = given.names(len(args), keywords), given.which(len(args), keywords)
        for path, leaf in jax.tree_util.tree_leaves_with_path(args):
            number = path[0].idx
            if per_worker.marked(path):
                place.check_workers(leaf, workers)
            elif workers > 1 and number not in batches:
                name = functools.partial(place.named, arguments.named(number, names), path[1:])
                arguments.check_whole(leaf, axis_name, name, arguments.OR_BATCH)

    def layout(args, batches):
        # Without it, the compiler may change the layout of results, and compile the step twice.
        homes = {}
        for number in reversed(range(len(args))):  # The first of two equal names wins.
            homes |= {} if number in batches else placement.homes(args[number], mesh)
        return tuple(homes.items()) if shards else ()

    def mapped(*args, layout, keywords, rest):
        check(args, keywords)
        with jax.sharding.use_abstract_mesh(inside.abstract_mesh):
            args = placement.to_automatic(args, inside)
            results = spread(args, dict(layout), keywords, rest)
        return placement.to_given(results, mesh, dict(layout), axis_name) if typed else results

    def spread(args, homes, keywords, rest):
        batches, doubts = given.which(len(args), keywords), given.doubts(args, keywords)
        if batch_spec is not None:
            home = NamedSharding(inside, batch_spec)
            args = [
                jax.lax.with_sharding_constraint(arg, home) if number in batches else arg
                for number, arg in enumerate(args)
            ]
        leaves, treedef = jax.tree.flatten(tuple(args))
        marks = marks_of(args, batches)
        out = {}

        def body(step, replicated, per_worker):
            merged = _merge(marks, replicated, per_worker)
            own = jax.tree.unflatten(treedef, merged)
            own = [x if n in batches else placement.stay(x, homes) for n, x in enumerate(own)]

            def named(*own):
                placed = len(own) - len(keywords)
                return step(*own[:placed], **dict(zip(keywords, own[placed:], strict=True)))

            with hints.added(axis_name):
                call = functools.partial(objects.call, named, own, rest, axis_name)
                results = arguments.run(call, args, doubts)
            flat, out["treedef"] = jax.tree.flatten(results)
            out["marks"] = _marks(results)
            if check_vma:
                _check_replicated(results, axis_name)
            return _part(flat, out["marks"])

        def parts_of(step):
            return jax.shard_map(
                functools.partial(body, step),
                mesh=inside,
                in_specs=(PartitionSpec(), split),
                out_specs=(PartitionSpec(), split),
                axis_names=set(axes.names(axis_name)),
                check_vma=check_vma,
            )(*_part(leaves, marks))

        try:
            parts = parts_of(step)
        except _DiffersError:  # Perhaps only by its type, as the zeros of frozen leaves.
            parts = parts_of(retyping.narrowed(step))
        results = jax.tree.unflatten(out["treedef"], _merge(out["marks"], *parts))
        return placement.at_home(results, inside, homes, axis_name)

    functools.update_wrapper(mapped, step)
    del mapped.__wrapped__  # Its signature lacks the layout.

    def whole(args, batches):
        """Trees of arrays, with memory of all workers, and the rest of the arguments."""

        def one(path, leaf):
            if not (per_worker.marked(path) and placement.of_one(leaf, workers)):
                return leaf
            return placement.shared(leaf, mesh, workers, placement.spec(path, leaf, {}, axis_name))

        plain, rest = objects.part(args, batches)
        plain = [
            arg if n in batches else jax.tree_util.tree_map_with_path(one, arg)
            for n, arg in enumerate(plain)
        ]
        return plain, rest

    @functools.cache
    def compiled(count, keywords):
        donated, static = given.donate(count, keywords), ("layout", "keywords", "rest")
        return jax.jit(mapped, donate_argnums=donated, static_argnames=static)

    def arrange(args, batches, move):
        """Applies `move` to each array that is not on the mesh, with its target placement."""

        def one(number, path, leaf):
            if placement.placed(leaf, mesh):
                return leaf
            spec = of_batch if number in batches else placement.spec(path, leaf, {}, axis_name)
            return move(leaf, mesh, spec)

        return [
            jax.tree_util.tree_map_with_path(functools.partial(one, number), arg)
            for number, arg in enumerate(args)
        ]

    def call(args, kwargs, move, stage):
        args, keywords = given.bind(args, kwargs)
        batches = given.which(len(args), keywords)
        plain, rest = whole(args, batches)
        check(plain, keywords)
        with axis_types.surroundings(mesh):
            # An argument with another placement in the first call would compile the step twice.
            plain = arrange(plain, batches, move)
            chosen = stage(compiled(len(args), keywords))
            homes = layout(plain, batches)
            return args, rest, chosen(*plain, layout=homes, keywords=keywords, rest=rest)

    unseen = not check_vma

    @functools.wraps(step)
    def run(*args, **kwargs):
        nonlocal unseen
        if workers > 1:
            everything = (*args, *kwargs.values())
            objects.renew(everything, lambda tx, params: init_state(tx, params, mesh, axis_name))
        args, rest, results = call(args, kwargs, placement.put, lambda step: step)
        if unseen:
            unseen = not replicas.check(results, mesh, axis_name)
        return objects.finish(args, rest, results)

    def staged(stage):
        return lambda *args, **kwargs: call(args, kwargs, placement.like, stage)[2]

    run.__dict__.update(
        lower=staged(lambda step: step.lower), trace=staged(lambda step: step.trace)
    )
    return run


def init_state(tx: Any, params: PyTree, mesh: Mesh, axis_name: AxisName) -> PyTree:
    """Initialises an optax state on a mesh, with each worker's memory on its own device.

    For sharded parameters, the memory of each shard is on the shard's device, and an optimizer's
    arrays for a parameter (their path ends with the parameter's path, and they have its shape) are
    sharded like the parameter. No device ever holds a whole array of those.

    Args:
        tx: any optax transformation, usually one with a `compressed_mean`.
        params: the parameters; those on the mesh keep their placement, for instance sharded over
            its other axes, and others are replicated.
        mesh: the device mesh of the state, with its axis types.
        axis_name: the axis or axes that the workers are on.

    Raises:
        ValueError: if parameters are split over the workers, or if optax keeps arrays of gradients
            before the mean (wrap that transformation with `jaxcomp.per_worker`).
    """
    params = place.place(params, mesh, axis_name)
    init = data_parallel(lambda p, _: tx.init(p), mesh, axis_name)
    homes = placement.homes(params, mesh)

    def lie(path, leaf):
        return NamedSharding(mesh, placement.spec(path, leaf, homes, axis_name))

    with axis_types.surroundings(mesh):
        state = jax.eval_shape(init, params, ())
        per_worker.check_order(state)
        lies = jax.tree_util.tree_map_with_path(lie, state)
        return jax.jit(init, out_shardings=lies)(params, ())


def _pieces(batch_spec: PartitionSpec, mesh: Mesh, axis_name: AxisName) -> int:
    """The number of pieces into which a batch's leading dimension is split."""
    first = batch_spec[0] if len(batch_spec) else None
    names = () if first is None else axes.names(first)
    own = axes.names(axis_name)
    if names[: len(own)] != own:
        raise ValueError(
            f"`batch_spec` must begin with the axis of the workers, {axis_name!r}, as in "
            f"PartitionSpec({(*own, 'fsdp')!r}), got {batch_spec}"
        )
    return place.workers_of(mesh, names)


def _marks(tree: PyTree, everything: bool = False) -> list[bool]:
    """For each leaf, whether it is split over the workers."""
    return [
        everything or per_worker.marked(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _part(leaves: list, marks: list[bool]) -> tuple[list, list]:
    replicated = [leaf for leaf, split in zip(leaves, marks, strict=True) if not split]
    return replicated, [leaf for leaf, split in zip(leaves, marks, strict=True) if split]


def _merge(marks: list[bool], replicated: list, per_worker: list) -> list:
    sources = {False: iter(replicated), True: iter(per_worker)}
    return [next(sources[split]) for split in marks]


class _DiffersError(ValueError):
    """A result is typed as different between workers."""


def _check_replicated(results: PyTree, axis_name: AxisName) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(results):
        if not per_worker.marked(path) and axes.varies(jnp.asarray(leaf), axis_name):
            raise _DiffersError(
                f"result{jax.tree_util.keystr(path)} differs between the workers of "
                f"{axis_name!r}. {replicas.REMEDIES}"
            )
