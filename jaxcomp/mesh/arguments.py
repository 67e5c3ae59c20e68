"""The arguments of a training step: names, batches, and checks of their placement."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import core
from jax.sharding import NamedSharding, PartitionSpec

from jaxcomp.backend import axes
from jaxcomp.mesh import per_worker
from jaxcomp.types import AxisName, PyTree

Numbers = int | tuple[int, ...]
Names = str | tuple[str, ...]


class Arguments:
    """The arguments of a step, by position and by name, and the settings about them.

    A call is stored as one list, whose last entries are the keyword arguments.

    Args:
        step: the step, whose signature has the names.
        batch_argnums: the numbers of the batches; None, without names too, for the last argument.
        batch_argnames: the names of batches.
        donate_argnums: the numbers of the arguments that may be overwritten.
        donate_argnames: the names of such arguments.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        batch_argnums: Numbers | None,
        batch_argnames: Names,
        donate_argnums: Numbers,
        donate_argnames: Names,
    ):
        try:
            self.signature = inspect.signature(step)
        except (TypeError, ValueError):  # A function in C has no signature.
            self.signature = None
        self.default = batch_argnums is None and not batch_argnames
        last = (-1,) if self.default else ()
        self.batches = (
            last if batch_argnums is None else _tuple("batch_argnums", batch_argnums, int)
        )
        self.batch_names = _tuple("batch_argnames", batch_argnames, str)
        self.donated = _tuple("donate_argnums", donate_argnums, int)
        self.donated_names = _tuple("donate_argnames", donate_argnames, str)
        self._check_names("batch_argnames", self.batch_names)
        self._check_names("donate_argnames", self.donated_names)

    def _check_names(self, setting: str, names: tuple[str, ...]) -> None:
        if self.signature is None:
            return
        kinds = {parameter.kind for parameter in self.signature.parameters.values()}
        known = tuple(self.signature.parameters)
        for name in names:
            if name not in known and inspect.Parameter.VAR_KEYWORD not in kinds:
                raise ValueError(
                    f"`{setting}` must name arguments of the step {known}, got {name!r}"
                )

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, tuple[str, ...]]:
        """All arguments of a call, in order, and the keywords of the last entries."""
        if kwargs and self.signature is not None:
            bound = self.signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        return (*args, *kwargs.values()), tuple(kwargs)

    def names(self, count: int, keywords: tuple[str, ...]) -> list[str]:
        """The name of each argument of a call, or an empty string."""
        found = []
        for name, parameter in self.signature.parameters.items() if self.signature else ():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                found.append(name)
        placed = count - len(keywords)
        return [*found[:placed], *[""] * (placed - len(found)), *keywords]

    def which(self, count: int, keywords: tuple[str, ...]) -> set[int]:
        """The numbers of the batches."""
        if not count:
            return set()
        for number in self.batches:
            if not -count <= number < count:
                raise ValueError(
                    f"`batch_argnums` must be numbers of the {count} arguments of the call, got "
                    f"{number}"
                )
        return {number % count for number in self.batches} | set(
            self._numbers(self.batch_names, count, keywords)
        )

    def donate(self, count: int, keywords: tuple[str, ...]) -> tuple[int, ...]:
        """The numbers of the arguments that may be overwritten."""
        by_number = {number for number in self.donated if number < count - len(keywords)}
        return tuple(sorted(by_number | set(self._numbers(self.donated_names, count, keywords))))

    def _numbers(self, names: tuple, count: int, keywords: tuple[str, ...]) -> Iterable[int]:
        known = self.names(count, keywords)
        return [known.index(name) for name in names if name in known]

    def check(
        self, args: Sequence[Any], keywords: tuple[str, ...], pieces: int, axis_name: AxisName
    ) -> None:
        """Refuses batches that do not divide evenly or are split along another dimension."""
        names = self.names(len(args), keywords)
        for number in sorted(self.which(len(args), keywords)):
            if self.default and _is_key(args[number]):
                raise ValueError(
                    f"the last argument, {argument_name(number, names)}, is a PRNG key, or uint32 "
                    f"of its shape (2,) or (4,), and would be split as the batch. "
                    f"{_which_of(names)}"
                )
            _check_batch(args[number], argument_name(number, names), pieces, axis_name)

    def advice(self, count: int, keywords: tuple[str, ...]) -> str:
        """The batch that is taken by default, for a step that fails; empty if batches are named."""
        if not self.default or count < 2:
            return ""
        names = self.names(count, keywords)
        return (
            f"jaxcomp.data_parallel: only the last argument, {argument_name(count - 1, names)}, is "
            f"split over the workers; each has all of the others. {_which_of(names)}"
        )


def check_whole(
    leaf: Any, axis_name: AxisName, tree: Callable[[], str], path: tuple, batch: str = ""
) -> None:
    """Refuses an array outside of `PerWorker` memory that is split over several workers.

    Args:
        leaf: the array.
        axis_name: the axes of the workers.
        tree: the name of the tree that has it.
        path: the path of the array in the tree.
        batch: advice for what may be a batch.

    Raises:
        ValueError: if it is, with its name.
    """
    if not split_over(leaf) & set(axes.names(axis_name)):
        return
    names = [jax.tree_util.keystr((key,), simple=True) for key in path]
    memory = _OR_MEMORY if any(map(per_worker.stored_as_memory, names)) else ""
    raise ValueError(
        f"{tree()}{jax.tree_util.keystr(path)} must not be sharded over {axis_name!r}, the axis of "
        "the workers, since each worker has all parameters and every device would gather it. Split "
        "that axis of the mesh into two, as in jax.make_mesh((workers, shards), ('data', 'fsdp')), "
        "shard parameters over the second one, and give compressed_mean their `param_specs`."
        f"{batch}{memory}"
    )


_OR_MEMORY = (
    " Memory of a checkpoint that was restored without a target, and has lost its type: make the "
    "state with jaxcomp.graft(tx, state, params, mesh, axis_name)."
)

OR_BATCH = " A batch: name it by `batch_argnums` or `batch_argnames`."
"""Other meanings of an argument that is split over the workers."""


def argument_name(number: int, names: list[str]) -> str:
    """The name of an argument in an error message."""
    return f"argument {number} ('{names[number]}')" if names[number] else f"argument {number}"


def _which_of(names: list[str]) -> str:
    known = ", ".join(repr(name) if name else str(at) for at, name in enumerate(names))
    return f"Name the batches among ({known}) by `batch_argnums` or `batch_argnames`."


def _check_batch(batch: PyTree, name: str, pieces: int, axis_name: AxisName) -> None:
    for leaf in jax.tree.leaves(batch):
        others = _entries(leaf)[1:]
        if any(set(entry) & set(axes.names(axis_name)) for entry in others):
            raise ValueError(
                f"{name} is a batch, and is split over {axis_name!r}, the axis of the workers, "
                f"along its leading dimension, got an array of shape {jnp.shape(leaf)} that is "
                f"sharded over it along another one, as {_spec(leaf)}. Move the dimension "
                "of examples to the front, as in jnp.moveaxis(batch, 1, 0); `batch_spec`, which "
                f"begins with {axis_name!r}, may split others over other axes only"
            )
        shape = jnp.shape(leaf)
        if not shape or shape[0] % pieces:
            raise ValueError(
                f"{name} is a batch, and the leading dimension of each of its arrays "
                f"must be a multiple of the {pieces} workers, got shape {shape}"
            )


def _is_key(arg: Any) -> bool:
    kind = getattr(arg, "dtype", None)
    if kind is None:
        return False
    if jnp.issubdtype(kind, jax.dtypes.prng_key):
        return True
    # One raw key, of threefry or of rbg; more rows are data.
    return kind == jnp.uint32 and arg.shape in ((2,), (4,))


def _tuple(name: str, given: Any, kind: type) -> tuple:
    """One number or name, or several, as a tuple."""
    several = (
        (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    )
    if not all(isinstance(one, kind) for one in several):
        wanted = "numbers" if kind is int else "names"
        raise ValueError(f"`{name}` must be {wanted} of arguments of the step, got {given!r}")
    return several


def split_over(leaf: Any) -> set[str]:
    """The mesh axes over which an array is split, as far as they are known."""
    return {name for entry in _entries(leaf) for name in entry}


def _entries(leaf: Any) -> list[tuple[str, ...]]:
    """The mesh axes over which each dimension of an array is split, as far as they are known."""
    return [e if isinstance(e, tuple) else () if e is None else (e,) for e in _spec(leaf)]


def _spec(leaf: Any) -> PartitionSpec:
    of = jax.typeof(leaf) if isinstance(leaf, core.Tracer) else leaf
    sharding = getattr(of, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
