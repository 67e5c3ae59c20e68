"""How a training step and its state are laid on a mesh."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcomp import (
    arguments,
    axes,
    axis_types,
    hints,
    objects,
    placement,
    replicas,
    retyping,
    workers as workers_,
)
from jaxcomp.types import AxisName, PyTree


def local(params: PyTree, axis_name: AxisName) -> PyTree:
    """The parameters, typed so that their gradient is this worker's own.

    Under `shard_map` with `check_vma=True`, JAX hands the gradient of a replicated parameter out
    already summed over the axis, and there is nothing left to compress. Differentiate the loss
    here instead: `jax.grad(loss)(local(params, "data"), batch)`, or take
    `jaxcomp.value_and_grad(loss, "data")(params, batch)`, which also averages the loss. Under
    `pmap`, `vmap` and `check_vma=False` this is the identity.

    The loss must be this worker's own. Average its value after `jax.value_and_grad`: of a loss that
    `jax.lax.pmean` has averaged inside the function, JAX divides the gradients by the number of
    workers, and `compressed_mean` refuses them.

    Raises:
        ValueError: if the axis is not bound, or for an nnx object, whose copy would lose what
            changes in place.
    """
    axes.require(axis_name)
    if objects.holds(params):
        raise ValueError(
            "`params` must be a tree of arrays, got an nnx object: a call of its copy would change "
            "random streams and batch statistics of the copy only. Use "
            f"jaxcomp.value_and_grad(loss_fn, {axis_name!r})(model, batch), which changes the "
            "model in place."
        )
    return objects.vary(params, axis_name)


def place(tree: PyTree, mesh: Mesh, axis_name: AxisName, *, params: PyTree | None = None) -> PyTree:
    """Puts a tree on a mesh: memory split over workers and shards, everything else replicated.

    Memory of one worker, as `tx.init` makes it outside of a mapped function, is given to each.
    Leaves that are not arrays, such as functions in an equinox module, stay. Other arrays that lie
    on the mesh already stay as they lie. Arrays that lie on the same devices and axes, but with
    other axis types, change only their type: no data is copied, so the old array and the new one
    share their buffers.

    Args:
        tree: any tree, such as a flax `TrainState` or the state of an `nnx.Optimizer`. Of shapes
            and dtypes (`jax.ShapeDtypeStruct`), those with shardings are returned: a target to
            restore a checkpoint into.
        mesh: the device mesh.
        axis_name: the axis or axes that the workers are on.
        params: sharded parameters, as they lie on the mesh: arrays of the tree that belong to one
            (moments of Adam: their path ends with its path, and they have its shape) are laid like
            it.

    Raises:
        ValueError: if `PerWorker` memory is for another number of workers, or another array lies
            split over them.

    Example:
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> place({"w": jnp.ones(2)}, mesh, "data")["w"].sharding.spec
        P()
    """
    workers, homes = _workers(mesh, axis_name), placement.homes(params, mesh)

    def put(path, leaf):
        spec = placement.spec(path, leaf, homes, axis_name)
        shape = isinstance(leaf, jax.ShapeDtypeStruct)
        if workers_.marked(path):
            if not shape and placement.of_one(leaf, workers):
                return placement.shared(leaf, mesh, workers, spec)
            _check_workers(leaf, workers)
        elif workers > 1:
            name = functools.partial(_named, "`tree`", path)
            arguments.check_whole(leaf, axis_name, name)
        if shape:
            return jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec), weak_type=leaf.weak_type
            )
        if spec != PartitionSpec():
            return jax.device_put(leaf, NamedSharding(mesh, spec))
        if isinstance(leaf, core.Tracer) or placement.named(leaf, mesh):
            return leaf
        return placement.put(leaf, mesh, spec)

    kept, rest = objects.select(tree, objects.dynamic(tree))
    return objects.combine(jax.tree_util.tree_map_with_path(put, kept), rest)


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
    """A compiled training step, one worker a device of the mesh axis.

    Each batch is split along its leading dimension, every other argument is replicated but for
    the `PerWorker` memory in it. What the step returns must be the same on all workers, again but
    for `PerWorker` memory: average the loss with `jax.lax.pmean`, or take it from
    `jaxcomp.value_and_grad`. Arguments are placed on the mesh as needed; what lies on it already
    stays as it lies. Memory of one worker, as `tx.init` makes it, is given to each.

    Objects of flax's nnx (modules, optimizers, metrics) are arguments as they are, and change in
    place, as under `nnx.jit`. Batch statistics (`nnx.BatchStat`) and `nnx.metrics.Average` or
    `Accuracy` that differ between workers at the end are averaged. Modules of equinox are arguments
    and results as they are: their leaves that are not arrays are static, and the step is compiled
    again where these change.

    Parameters may be sharded over other axes of the mesh, and a worker is then all the devices that
    share its place on `axis_name`. There, what the step returns lies like what it got of the same
    name and shape: parameters and moments stay where they were.

    The axes of the mesh may be explicit or automatic; inside the step, those of the shards are
    automatic. Results lie on the given mesh, with its axis types, whatever `jax.set_mesh` says.

    Args:
        step: for instance `step(params, state, batch) -> (params, state, loss)`; collectives and
            `compressed_mean` inside it use `axis_name`.
        mesh: a device mesh that has the axis.
        axis_name: the axis or axes that the workers are on.
        batch_argnums: the numbers of the arguments that are batches. By default the last argument
            is the batch, unless it is a PRNG key or another one looks like a batch too.
        batch_argnames: the names of arguments that are batches.
        batch_spec: how batches lie on the whole mesh, if a worker's part is split further among
            its devices, as in `PartitionSpec(("dcn", "fsdp"))`; it begins with `axis_name`.
        donate_argnums: the numbers of arguments whose buffers the step may reuse.
        donate_argnames: the names of such arguments.
        check_vma: let JAX check the types of replication. Without it, the results of the first call
            are compared between the workers, bit for bit; a difference that begins later is not
            noticed, and one worker's result is returned.

    Returns:
        A function of the same arguments, with the methods `lower` and `trace` of `jax.jit`'s.

    Raises:
        ValueError: if the mesh has no such axis, `batch_spec` does not begin with it, a batch does
            not divide by the number of workers, it is unclear which arguments are batches, another
            argument lies split over the workers, memory is for another number of workers, or a
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
    workers, typed = _workers(mesh, axis_name), bool(axis_types.explicit(mesh))
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
            if workers_.marked(path):
                _check_workers(leaf, workers)
            elif workers > 1 and number not in batches:
                name = functools.partial(_named, arguments.named(number, names), path[1:])
                arguments.check_whole(leaf, axis_name, name, arguments.OR_BATCH)

    def layout(args, batches):
        # Left to itself, the compiler may lay results otherwise, and have the step compiled twice.
        homes = {}
        for number in reversed(range(len(args))):  # Of two of a name, the first one counts.
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
        except _DiffersError:  # Or is typed so only, as the zeros of frozen leaves are.
            parts = parts_of(retyping.narrowed(step))
        results = jax.tree.unflatten(out["treedef"], _merge(out["marks"], *parts))
        return placement.at_home(results, inside, homes, axis_name)

    functools.update_wrapper(mapped, step)
    del mapped.__wrapped__  # Whose signature lacks the layout.

    def whole(args, batches):
        """Trees of arrays, with memory of all workers, and the rest of the arguments."""

        def one(path, leaf):
            if not (workers_.marked(path) and placement.of_one(leaf, workers)):
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
        """Each array that does not lie on the mesh, and where it belongs, through `move`."""

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
            # An argument that lies elsewhere the first time would have the step compiled twice.
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
    """The state of an optax transformation on a mesh, each worker's memory on its own device.

    Of sharded parameters, the memory of each shard lies where the shard does, and what an optimizer
    keeps for a parameter (its path ends with the parameter's, and it has its shape) is laid like
    it. No device ever holds a whole array of those.

    Args:
        tx: any optax transformation that holds a `compressed_mean`, say.
        params: the parameters; those that lie on the mesh are taken as they lie, for instance
            sharded over its other axes, and others are replicated.
        mesh: the device mesh, on which the state lies, with its axis types.
        axis_name: the axis or axes that the workers are on.

    Raises:
        ValueError: if parameters lie split over the workers, or if optax keeps arrays of gradients
            before the mean (wrap that transformation with `jaxcomp.per_worker`).
    """
    params = place(params, mesh, axis_name)
    init = data_parallel(lambda p, _: tx.init(p), mesh, axis_name)
    homes = placement.homes(params, mesh)

    def lie(path, leaf):
        return NamedSharding(mesh, placement.spec(path, leaf, homes, axis_name))

    with axis_types.surroundings(mesh):
        state = jax.eval_shape(init, params, ())
        workers_.check_order(state)
        lies = jax.tree_util.tree_map_with_path(lie, state)
        return jax.jit(init, out_shardings=lies)(params, ())


def _named(tree: str, path: tuple) -> str:
    return tree + jax.tree_util.keystr(path)


def _workers(mesh: Mesh, axis_name: AxisName) -> int:
    return math.prod(mesh.shape[name] for name in axes.names(axis_name))


def _pieces(batch_spec: PartitionSpec, mesh: Mesh, axis_name: AxisName) -> int:
    """Into how many the leading dimension of a batch is split."""
    first = batch_spec[0] if len(batch_spec) else None
    names = () if first is None else axes.names(first)
    own = axes.names(axis_name)
    if names[: len(own)] != own:
        raise ValueError(
            f"`batch_spec` must begin with the axis of the workers, {axis_name!r}, as in "
            f"PartitionSpec({(*own, 'fsdp')!r}), got {batch_spec}"
        )
    return _workers(mesh, names)


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


def _check_workers(leaf: Any, workers: int) -> None:
    if jnp.ndim(leaf) == 0 or leaf.shape[0] != workers:
        raise ValueError(
            f"the state holds the memory of {leaf.shape[0] if jnp.ndim(leaf) else 'no'} workers "
            f"and the mesh has {workers}: make it with jaxcomp.init_state(tx, params, mesh, "
            "axis_name), bring one worker's to the mesh with jaxcomp.place, or move it from "
            "another worker count with jaxcomp.resize_workers"
        )


class _DiffersError(ValueError):
    """A result is typed as different between workers."""


def _check_replicated(results: PyTree, axis_name: AxisName) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(results):
        if not workers_.marked(path) and axes.varies(jnp.asarray(leaf), axis_name):
            raise _DiffersError(
                f"result{jax.tree_util.keystr(path)} differs between the workers of "
                f"{axis_name!r}. {replicas.REMEDIES}"
            )
