"""A training step under `shard_map`: checks, the body of one worker, and where results lie."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxcomp.backend import adapting, axes, mapping
from jaxcomp.base.adapter import Objects
from jaxcomp.mesh import (
    arguments,
    axis_types,
    hints,
    objects,
    per_worker,
    place,
    placement,
    pmapped,
    replicas,
)
from jaxcomp.misuse import program, uniform
from jaxcomp.types import AxisName, PyTree


class MappedStep:
    """A step over the workers of a mesh; `program` makes what is compiled.

    Attributes:
        mesh: the mesh as it was given.
        axis_name: the axes of the workers.
        given: which arguments are batches.
        check_vma: whether JAX checks the types of replication.
        workers: the number of workers.
        of_batch: the sharding of batches.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        mesh: Mesh,
        axis_name: AxisName,
        given: arguments.Arguments,
        batch_spec: PartitionSpec | None,
        check_vma: bool,
        adapt: bool,
    ):
        self.mesh, self.axis_name, self.given, self.check_vma = mesh, axis_name, given, check_vma
        self.workers = place.workers_of(mesh, axis_name)
        self.of_batch = PartitionSpec(axis_name) if batch_spec is None else batch_spec
        self._step, self._batch_spec, self._adapt = step, batch_spec, adapt
        self._twin = axis_types.automatic(mesh)
        self._typed = bool(axis_types.explicit(mesh))
        unused = len(mesh.axis_names) > len(axes.names(axis_name))
        self._sharded = mesh.size > self.workers or (self._typed and unused)
        whole = batch_spec is None
        self._pieces = self.workers if whole else _pieces(self.of_batch, mesh, axis_name)

    def program(self, keywords: tuple[str, ...], layout: tuple, rest: Any) -> Callable[..., Any]:
        """The function of arrays that is compiled, with the name of the step."""

        def program(*args):
            return self._run(args, layout, keywords, rest)

        functools.update_wrapper(program, self._step)
        del program.__wrapped__  # Its arguments may have other names, and keywords are in place.
        return program

    def check(self, args: Sequence[Any], keywords: tuple[str, ...]) -> None:
        """Raises a `ValueError` for arguments that are not laid out as the step needs them."""
        self.given.check(args, keywords, self._pieces, self.axis_name)
        names = self.given.names(len(args), keywords)
        batches = self.given.which(len(args), keywords)
        if self.workers > 1:
            whole = [arg for number, arg in enumerate(args) if number not in batches]
            pmapped.check(whole, self.axis_name)
        for path, leaf in jax.tree_util.tree_leaves_with_path(args):
            number = path[0].idx
            if per_worker.marked(path):
                place.check_workers(leaf, self.workers)
            elif self.workers > 1 and number not in batches:
                tree = functools.partial(arguments.argument_name, number, names)
                arguments.check_whole(leaf, self.axis_name, tree, path[1:], arguments.OR_BATCH)

    def layout(self, args: Sequence[Any], batches: set[int]) -> tuple:
        """Where the arrays of each name and shape lie, if any may be sharded."""
        # Without it, the compiler may change the layout of results, and compile the step twice.
        homes = {}
        for number in reversed(range(len(args))):  # The first of two equal names wins.
            homes |= {} if number in batches else placement.homes(args[number], self.mesh)
        return tuple(homes.items()) if self._sharded else ()

    def _run(self, args: Sequence[Any], layout: tuple, keywords: tuple[str, ...], rest: Any) -> Any:
        self.check(args, keywords)
        homes, inside = dict(layout), self._inside()
        with jax.sharding.use_abstract_mesh(self._twin.abstract_mesh):
            args = placement.to_automatic(args, inside)
            results = self._spread(inside, args, homes, keywords, rest)
        if not self._typed:
            return results
        return placement.to_given(results, self.mesh, homes, self.axis_name)

    def _inside(self) -> Mesh | AbstractMesh:
        """The mesh of automatic axes that the step runs on.

        JAX refuses a callback in a program that names two meshes with devices. So the twin of a
        mesh with explicit axes has none, where the current mesh says which devices there are.
        """
        alone = not self._typed or jax.sharding.get_abstract_mesh().empty
        return self._twin if alone else self._twin.abstract_mesh

    def _spread(
        self,
        inside: Mesh | AbstractMesh,
        args: Sequence[Any],
        homes: dict,
        keywords: tuple[str, ...],
        rest: Any,
    ) -> Any:
        """The results of the step on all workers, on a mesh of automatic axes."""
        batches = self.given.which(len(args), keywords)
        if self._batch_spec is not None:
            home = NamedSharding(inside, self._batch_spec)
            args = [
                jax.lax.with_sharding_constraint(arg, home) if number in batches else arg
                for number, arg in enumerate(args)
            ]
        leaves, treedef = jax.tree.flatten(tuple(args))
        marks = [
            mark
            for number, arg in enumerate(args)
            for mark in _marks(arg, everything=number in batches)
        ]
        out = {}

        def body(replicated, per_worker):
            own = jax.tree.unflatten(treedef, _merge(marks, replicated, per_worker))
            own = [x if n in batches else placement.stay(x, homes) for n, x in enumerate(own)]
            results = self._own_results(own, args, keywords, rest)
            flat, out["treedef"] = jax.tree.flatten(results)
            out["marks"] = _marks(results)
            return _part(flat, out["marks"])

        parts = self._map_body(inside, body, _part(leaves, marks))
        results = jax.tree.unflatten(out["treedef"], _merge(out["marks"], *parts))
        return placement.at_home(results, inside, homes, self.axis_name)

    def _own_results(
        self, own: list, args: Sequence[Any], keywords: tuple[str, ...], rest: Any
    ) -> Any:
        """The results of one worker, from its own arguments."""

        def call(*own):
            placed = len(own) - len(keywords)
            return self._step(*own[:placed], **dict(zip(keywords, own[placed:], strict=True)))

        adapted = adapting.adapted(self.axis_name) if self._adapt else contextlib.nullcontext()
        try:
            with adapted:
                results = objects.call(call, list(own), rest, self.axis_name)
        except (TypeError, ValueError) as error:
            advice = self.given.advice(len(args), keywords)
            if advice and not hints.hints_for(error):
                error.add_note(advice)
            raise
        batches = self.given.which(len(args), keywords)
        known = [
            (leaf, differs)
            for number, arg in enumerate(own)
            for leaf, differs in zip(
                jax.tree.leaves(arg), _marks(arg, everything=number in batches), strict=True
            )
        ]
        # Reads the traced step: conditions of collectives, and gradients summed twice.
        program.check(results, known, self.axis_name)
        if self.check_vma:
            results = _type_replicated(results, known, self.axis_name)
            _check_replicated(results, rest.kind, self.axis_name)
        return results

    def _map_body(
        self, inside: Mesh | AbstractMesh, body: Callable[..., Any], parts: tuple[list, list]
    ) -> tuple[list, list]:
        split = PartitionSpec(self.axis_name)
        mapped = mapping.shard_map(
            body,
            mesh=inside,
            in_specs=(PartitionSpec(), split),
            out_specs=(PartitionSpec(), split),
            axis_names=set(axes.names(self.axis_name)),
            check_vma=self.check_vma,
        )
        # Without a current mesh, which `checkify` would take for that of the body.
        with hints.add_note(self.axis_name), jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return mapped(*parts)


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


def _type_replicated(results: PyTree, known: list[tuple[Any, bool]], axis_name: AxisName) -> PyTree:
    """Types results that are the same on all workers as replicated, such as `p + zeros_like(g)`."""
    leaves, treedef = jax.tree.flatten(results)
    over = set(axes.names(axis_name))
    marks = _marks(results)
    typed = [n for n, x in enumerate(leaves) if not marks[n] and over & axes.varying_axes(x)]
    same = uniform.are_same([leaves[n] for n in typed], known, axis_name) if typed else []
    for n, alike in zip(typed, same, strict=True):
        if alike:
            leaves[n] = axes.type_replicated(leaves[n], axis_name)
    return jax.tree.unflatten(treedef, leaves)


def _check_replicated(results: PyTree, kind: Objects | None, axis_name: AxisName) -> None:
    """Refuses results that are typed as different between workers, and variables of objects."""
    if kind is not None and (paths := _different(results.states, axis_name)):
        raise ValueError(
            f"the variable at {paths[0]} differs between the workers of {axis_name!r} after the "
            f"call. {kind.averages} are averaged; average anything else with jax.lax.pmean where "
            "it is written."
        )
    if paths := _different(results, axis_name):
        raise ValueError(
            f"result{paths[0]} differs between the workers of {axis_name!r}. {replicas.REMEDIES}"
        )


def _different(tree: PyTree, axis_name: AxisName) -> list[str]:
    """The paths of what is typed as different between workers, outside of memory."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return [
        jax.tree_util.keystr(path)
        for path, leaf in found
        if not per_worker.marked(path) and axes.varies(jnp.asarray(leaf), axis_name)
    ]
