"""A training step and its state on a mesh, with one worker for each device of an axis."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxcomp import checks
from jaxcomp.mesh import (
    arguments,
    axis_types,
    calls,
    hints,
    objects,
    per_worker,
    place,
    placement,
    pmapped,
    replicas,
)
from jaxcomp.mesh.mapped_step import MappedStep
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
    adapt: bool = False,
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
        batch_argnums: the numbers of the arguments that are batches, of which each worker has a
            part. By default the last argument alone is the batch, whatever its shape; a PRNG key
            there, typed or raw (`uint32[2]`, `[4]`), is an error. Name the batches if there are
            several, as in `batch_argnums=(2, 3)` for `step(params, state, x, y)`.
        batch_argnames: the names of arguments that are batches.
        batch_spec: the sharding of batches on the whole mesh, if a worker's batch is split further
            over its devices, as in `PartitionSpec(("dcn", "fsdp"))`; it begins with `axis_name`.
        donate_argnums: the numbers of arguments whose buffers the step may reuse.
        donate_argnames: the names of such arguments.
        check_vma: True lets JAX check the types of replication. With False, the results of the
            first call are compared between the workers, bit for bit; a difference that begins later
            is not detected, and one worker's result is returned.
        adapt: whether code for the whole mesh runs inside of the step as it is. While it is traced,
            `jax.lax.with_sharding_constraint`, `jax.sharding.reshard`, `out_sharding=` and
            `jax.shard_map` with a mesh leave out the axes of the workers, and take the current
            mesh; JAX's functions are replaced meanwhile, in this thread.

    Returns:
        A function of the same arguments, with the methods `lower` and `trace` as from `jax.jit`.

    Raises:
        ValueError: if the mesh has no such axis, `batch_spec` does not begin with it, the number of
            workers does not divide a batch, a batch is split over them along another dimension, the
            batch by default is a key, another argument is split over the workers, memory is for
            another number of workers, or a result differs between workers.

    Example:
        >>> import jax.numpy as jnp
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> mean = data_parallel(lambda x: jax.lax.pmean(x.sum(), "data"), mesh, "data")
        >>> mean(jnp.arange(4.0))
        Array(6., dtype=float32)
    """
    checks.function("step", step)
    placement.check_axes(mesh, axis_name)
    given = arguments.Arguments(
        step, batch_argnums, batch_argnames, donate_argnums, donate_argnames
    )
    runner = _Runner(MappedStep(step, mesh, axis_name, given, batch_spec, check_vma, adapt))

    @functools.wraps(step)
    def run(*args, **kwargs):
        return runner.run(args, kwargs)

    run.__dict__.update(
        lower=runner.make_stage(lambda step: step.lower),
        trace=runner.make_stage(lambda step: step.trace),
    )
    return run


class _Ready(NamedTuple):
    """Arguments that were checked and lie on the mesh.

    Attributes:
        args: trees of arrays.
        moves: how arrays came there, by the number of the leaf; None if more than that was done.
        keywords: the names of the last arguments.
        layout: where arrays of each name and shape lie.
        rest: what is not an array.
    """

    args: list
    moves: calls.Moves | None
    keywords: tuple[str, ...]
    layout: tuple
    rest: objects.Rest


class _Runner:
    """Arranges the arguments of a mapped step on its mesh, and runs, lowers or traces it."""

    def __init__(self, mapped: MappedStep):
        self.mapped, self.mesh, self.axis_name = mapped, mapped.mesh, mapped.axis_name
        self.given, self.workers = mapped.given, mapped.workers
        self.unseen = not mapped.check_vma
        self.compiled = functools.cache(self._compile)
        self.calls = calls.Calls()

    def run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The results of the step; without types, the first are compared between workers."""
        args, keywords = self.given.bind(args, kwargs)
        leaves, treedef = jax.tree.flatten(args)
        kind = calls.kind(leaves, treedef, keywords)
        known = self.calls.find(kind)
        if known is not None and not self.unseen:
            with axis_types.surroundings(self.mesh), hints.add_note(self.axis_name):
                return known.run(args, leaves, treedef)
        ready = self._prepare(args, keywords, placement.put)
        with axis_types.surroundings(self.mesh), hints.add_note(self.axis_name):
            results = self._step(ready)(*ready.args)
        if ready.moves is not None:
            self.calls.add(kind, leaves, calls.Call(ready.moves, self._step(ready)))
        if self.unseen:
            self.unseen = not replicas.check(results, self.mesh, self.axis_name)
        return objects.finish(args, ready.rest, results)

    def make_stage(self, stage: Callable[..., Any]) -> Callable[..., Any]:
        """`lower` or `trace` of the compiled step, for shapes or arrays."""

        def run(*args: Any, **kwargs: Any) -> Any:
            ready = self._prepare(*self.given.bind(args, kwargs), placement.like)
            with axis_types.surroundings(self.mesh), hints.add_note(self.axis_name):
                found = stage(self._step(ready))(*ready.args)
            return found if ready.rest == objects.Rest() else _Staged(found, self, ready.rest)

        return run

    def run_ahead(self, compiled: Any, rest: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The results of a step that was compiled ahead of time for these static leaves."""
        args, keywords = self.given.bind(args, kwargs)
        ready = self._prepare(args, keywords, placement.put)
        if ready.rest != rest:
            raise ValueError(
                "the arguments must have the static leaves, and nnx objects of the structure, "
                "for which the step was compiled ahead of time, got others: lower and compile "
                "it again"
            )
        with axis_types.surroundings(self.mesh), hints.add_note(self.axis_name):
            return objects.finish(args, rest, compiled(*ready.args))

    def _prepare(self, args: tuple, keywords: tuple[str, ...], move: Any) -> _Ready:
        batches = self.given.which(len(args), keywords)
        plain, rest = objects.part(args, batches)
        whole, copied = self._whole(plain, batches)
        if copied:
            pmapped.check_rows(args)
        self.mapped.check(whole, keywords)
        with axis_types.surroundings(self.mesh):
            # An argument with another placement in the first call would compile the step twice.
            placed, moves = self._arrange(whole, batches, move)
            layout = self.mapped.layout(placed, batches)
        again = not copied and rest == objects.Rest()
        return _Ready(placed, moves if again else None, keywords, layout, rest)

    def _step(self, ready: _Ready) -> Callable[..., Any]:
        return self.compiled(len(ready.args), ready.keywords, ready.layout, ready.rest)

    def _compile(self, count: int, keywords: tuple[str, ...], layout: Any, rest: Any) -> Any:
        donated = self.given.donate(count, keywords)
        return jax.jit(self.mapped.program(keywords, layout, rest), donate_argnums=donated)

    def _whole(self, args: list, batches: set[int]) -> tuple[list, bool]:
        """The arguments with memory of all workers, and whether memory of one was copied to all."""
        copied = []

        def one(path, leaf):
            if not (per_worker.marked(path) and placement.of_one(leaf, self.workers)):
                return leaf
            copied.append(path)
            spec = placement.spec(path, leaf, {}, self.axis_name, self.mesh)
            return placement.copy_to_all(leaf, self.mesh, self.workers, spec)

        whole = [
            arg if n in batches else jax.tree_util.tree_map_with_path(one, arg)
            for n, arg in enumerate(args)
        ]
        return whole, bool(copied)

    def _arrange(self, args: list, batches: set[int], move: Any) -> tuple[list, calls.Moves]:
        """Applies `move` to each array that is not on the mesh, with its target placement."""
        flat, treedef = jax.tree_util.tree_flatten_with_path(args)
        leaves, moves = [leaf for _, leaf in flat], {}
        for n, (path, leaf) in enumerate(flat):
            if placement.placed(leaf, self.mesh):
                continue
            batch = path[0].idx in batches
            spec = placement.spec(path[1:], leaf, {}, self.axis_name, self.mesh)
            of = self.mapped.of_batch if batch else spec
            moves[n] = functools.partial(move, mesh=self.mesh, spec=of)
            leaves[n] = moves[n](leaf)
        return jax.tree.unflatten(treedef, leaves), moves


class _Staged:
    """A stage (`Traced`, `Lowered`, `Compiled`) of a step that has objects or static leaves.

    JAX's own stages know trees of arrays only; a step compiled ahead of time is called with the
    whole arguments, too.
    """

    def __init__(self, stage: Any, runner: _Runner, rest: Any):
        self._stage, self._runner, self._rest = stage, runner, rest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def lower(self, *args: Any, **kwargs: Any) -> "_Staged":
        return _Staged(self._stage.lower(*args, **kwargs), self._runner, self._rest)

    def compile(self, *args: Any, **kwargs: Any) -> "_Staged":
        return _Staged(self._stage.compile(*args, **kwargs), self._runner, self._rest)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._runner.run_ahead(self._stage, self._rest, args, kwargs)


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
            before the mean (wrap that transformation with `jaxcomp.per_worker`); for a mesh without
            devices.
    """
    checks.transformation("tx", tx)
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            f"`mesh` must have devices, got {mesh!r}; jaxcomp.restore_target(tx, params, mesh, "
            f"{axis_name!r}) gives the shapes of a state without any"
        )
    params = place.place(params, mesh, axis_name)
    init = data_parallel(lambda p, _: tx.init(p), mesh, axis_name)
    homes = placement.homes(params, mesh)

    def lie(path, leaf):
        return NamedSharding(mesh, placement.spec(path, leaf, homes, axis_name, mesh))

    with axis_types.surroundings(mesh):
        state = jax.eval_shape(init, params, ())
        per_worker.check_order(state)
        lies = jax.tree_util.tree_map_with_path(lie, state)
        return jax.jit(init, out_shardings=lies)(params, ())
