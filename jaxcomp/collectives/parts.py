"""Which part of each leaf of a sharded model a device has, and what travels together."""

import dataclasses
import fnmatch
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcomp.collectives.crossings import Home
from jaxcomp.layout import trees
from jaxcomp.mesh import axis_types, specs as specs_
from jaxcomp.types import PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a model.

    Attributes:
        mesh: the mesh.
        names: the axes of the workers.
        specs: the specs of the parameters, or a prefix.
        stacked: globs of leaves whose first axis indexes layers.
        inside: globs of the other leaves that the loss makes whole.
        frozen: globs of leaves without a gradient, a mask or a prefix of one, or a function that
            returns it for the parameters.
    """

    mesh: Mesh
    names: tuple[str, ...]
    specs: PyTree
    stacked: tuple[str, ...]
    inside: tuple[str, ...]
    frozen: PyTree

    def __post_init__(self):
        for name in ("stacked", "inside"):
            globs = getattr(self, name)
            if not isinstance(globs, tuple) or not all(isinstance(glob, str) for glob in globs):
                raise ValueError(
                    f"`{name}` must be a tuple of glob strings such as ('blocks/*',), got {globs!r}"
                )

    def in_layers(self, path: str) -> bool:
        """Whether the first axis of a leaf indexes layers."""
        return _matches(path, self.stacked)

    def is_given_as_part(self, path: str) -> bool:
        """Whether the loss makes a leaf whole."""
        return _matches(path, self.stacked + self.inside)

    def groups(self, homes: Sequence[Home]) -> list[tuple[str, list[int]]]:
        """The numbers of the leaves that travel together: of stacked ones each layer."""
        found: dict[Any, list[int]] = {}
        paths = [home.path for home in homes]
        for number, path in enumerate(paths):
            kind = _matches(path, self.stacked), _matches(path, self.inside)
            found.setdefault((_branch(path, paths), kind), []).append(number)
        return [(name, numbers) for (name, _), numbers in found.items()]

    def each_spec(self, params: PyTree) -> PyTree:
        """A spec for each leaf."""
        return specs_.spread("specs", self.specs, params)

    def automatic(self, params: PyTree) -> dict[str, NamedSharding]:
        """The leaves that the compiler splits over other axes, too, and how it splits them."""
        explicit = axis_types.explicit(self.mesh)
        automatic = tuple(name for name in self.mesh.axis_names if name not in explicit)
        specs = jax.tree.leaves(self.each_spec(params), is_leaf=specs_.is_partition)
        flat = jax.tree_util.tree_leaves_with_path(params)
        return {
            trees.path_name(path): NamedSharding(self.mesh, specs_.of_axes(automatic, spec))
            for (path, _), spec in zip(flat, specs, strict=True)
            if any(n not in self.names and self.mesh.shape[n] > 1 for n in specs_.named_axes(spec))
        }

    def homes(self, params: PyTree) -> list[Home]:
        """Where each leaf lies, in the order of the leaves."""
        flat = jax.tree_util.tree_leaves_with_path(params)
        paths = [trees.path_name(path) for path, _ in flat]
        if len(set(paths)) < len(paths):
            twice = next(path for path in paths if paths.count(path) > 1)
            raise ValueError(f"`params` must have a path for each leaf, got {twice!r} twice")
        given = {"stacked": self.stacked, "inside": self.inside}
        for name, globs in {**given, "frozen": self.frozen}.items():
            for one in globs if _are_globs(globs) else ():
                if not any(_matches(path, (one,)) for path in paths):
                    raise ValueError(
                        f"`{name}` must have globs that match leaves, got {one!r}, which matches "
                        f"none of {', '.join(map(repr, paths[:6]))}{' …' if paths[6:] else ''}"
                    )
        specs = jax.tree.leaves(self.each_spec(params), is_leaf=specs_.is_partition)
        each = zip(paths, flat, specs, self._frozen(params, paths), strict=True)
        return [self._home(path, x, spec, frozen) for path, (_, x), spec, frozen in each]

    def _frozen(self, params: PyTree, paths: Sequence[str]) -> list[bool]:
        """Whether each leaf is frozen."""
        if _are_globs(self.frozen):
            return [_matches(path, self.frozen) for path in paths]
        # A module with a mask's leaves may be callable, and is no function of parameters.
        made = callable(self.frozen) and jax.tree_util.all_leaves([self.frozen])
        mask = self.frozen(params) if made else self.frozen
        try:
            found = jax.tree.leaves(jax.tree.broadcast(mask, params))
        except ValueError as error:
            found, why = [None], f" ({error})"
        else:
            why = ""
        if not all(isinstance(one, bool | np.bool_) for one in found):
            raise ValueError(
                "`frozen` must be a tuple of globs such as ('base/*',), or a tree like the "
                "parameters, a prefix of one or a function that returns one, of True and False, "
                f"got {mask!r}{why}"
            )
        return [bool(one) for one in found]

    def _home(self, name: str, x: Any, spec: PartitionSpec, frozen: bool) -> Home:
        """The home of a leaf, checked."""
        dtype = jnp.result_type(x)
        if not frozen and not (jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 2):
            raise ValueError(
                f"`params` must have floating leaves of at least 16 bits, got '{name}' of "
                f"{dtype}: name what is not trained in `frozen`, as in frozen=({name!r},)"
            )
        if jnp.issubdtype(dtype, jax.dtypes.extended):
            raise ValueError(
                f"`params` must have leaves of numbers, got '{name}' of {dtype}: give it in the "
                "batch"
            )
        if len(spec) > jnp.ndim(x):
            raise ValueError(
                f"`specs` must have at most one entry for each dimension, got {spec} for '{name}' "
                f"of shape {jnp.shape(x)}"
            )
        every = specs_.named_axes(spec)
        unknown = [axis for axis in every if axis not in self.mesh.axis_names]
        if unknown or len(set(every)) < len(every):
            raise ValueError(
                f"`specs` must name axes of the mesh, {self.mesh.axis_names}, each once, got "
                f"{spec} for '{name}'"
            )
        home = Home.of(
            name, PartitionSpec(*map(specs_.names, spec)), jnp.ndim(x), self.names, frozen=frozen
        )
        for size, split in zip(jnp.shape(x), home.spec, strict=True):
            parts = math.prod(self.mesh.shape[n] for n in split)
            if size % parts:
                raise ValueError(
                    f"`specs` must divide every leaf evenly, got {spec} for '{name}' of shape "
                    f"{jnp.shape(x)}: split another dimension, or none"
                )
        if _matches(name, self.stacked) and (jnp.ndim(x) == 0 or home.spec[0]):
            raise ValueError(
                f"`specs` must not split the first axis of '{name}', which indexes layers, got "
                f"{spec}"
            )
        return home


def _branch(path: str, paths: list[str]) -> str:
    """The part of the tree that is gathered as one message: a child of the first branching."""
    parts = path.split("/")
    depth = 0
    while depth < len(parts) - 1 and len({"/".join(p.split("/")[: depth + 1]) for p in paths}) == 1:
        depth += 1
    return "/".join(parts[: depth + 1])


def _are_globs(given: Any) -> bool:
    return isinstance(given, tuple) and all(isinstance(one, str) for one in given)


def _matches(path: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(path, glob) for glob in globs)
