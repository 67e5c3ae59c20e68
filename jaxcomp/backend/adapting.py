"""Code that was written for a whole mesh, traced where some of its axes are manual.

A program with automatic sharding says where arrays lie: by `jax.lax.with_sharding_constraint`,
`jax.sharding.reshard` and `out_sharding=`, and it maps parts of itself by `jax.shard_map`. JAX
refuses all of these inside of another `jax.shard_map` if they name its manual axes, or have a mesh
with devices. There each worker has its own part already. So the manual axes are left out, and the
mesh is the current one.

JAX has no place where these functions ask for advice. So `adapted` replaces them while a loss is
traced, wherever a module has them by name. A replaced function does what JAX's own does in all
other threads, and outside of `adapted`; references are put back at the end.
"""

import contextlib
import contextvars
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxcomp.backend import axes
from jaxcomp.types import AxisName, PyTree


class Tracing:
    """The manual axes of the program that is traced.

    Args:
        names: the manual axes.

    Attributes:
        names: the manual axes.
        nested: whether a `jax.shard_map` inside was adapted.
    """

    def __init__(self, names: tuple):
        self.names = frozenset(names)
        self.nested = False

    def spec(self, spec: PartitionSpec) -> PartitionSpec:
        """The spec without the manual axes."""
        if not self.names & {name for entry in spec for name in _names(entry)}:
            return spec
        entries = []
        for entry in spec:
            kept = tuple(name for name in _names(entry) if name not in self.names)
            entries.append(kept or None if isinstance(entry, str | tuple) else entry)
        return PartitionSpec(*entries)

    def sharding(self, given: Any) -> Any:
        """The sharding, or spec, without the manual axes, on the current mesh."""
        if isinstance(given, PartitionSpec):
            return self.spec(given)
        if isinstance(given, NamedSharding):
            mesh = jax.sharding.get_abstract_mesh()
            return NamedSharding(mesh, self.spec(given.spec), memory_kind=given.memory_kind)
        return given

    def shardings(self, tree: PyTree) -> PyTree:
        return jax.tree.map(self.sharding, tree, is_leaf=_is_sharding)


_TRACING: contextvars.ContextVar[Tracing | None] = contextvars.ContextVar("tracing", default=None)
_LOCK = threading.RLock()
_USERS = [0]


@contextlib.contextmanager
def adapted(axis_name: AxisName) -> Iterator[Tracing]:
    """Within it, in this thread, code for the whole mesh is traced with these axes manual.

    Args:
        axis_name: the manual axes.
    """
    tracing = Tracing(axes.names(axis_name))
    token = _TRACING.set(tracing)
    _install()
    try:
        yield tracing
    finally:
        _TRACING.reset(token)
        _remove()


def _install() -> None:
    with _LOCK:
        _USERS[0] += 1
        if _USERS[0] == 1:
            _replace(dict(_pairs()))


def _remove() -> None:
    with _LOCK:
        _USERS[0] -= 1
        if not _USERS[0]:
            # Modules that were imported meanwhile may have ours.
            _replace({ours: original for original, ours in _pairs()})


def _replace(each: dict[Callable[..., Any], Callable[..., Any]]) -> None:
    """Replaces functions in all modules but this one."""
    by_id = {id(before): after for before, after in each.items()}
    for module in list(sys.modules.values()):
        held = getattr(module, "__dict__", None)
        if not isinstance(held, dict) or held is globals():
            continue
        for name, value in list(held.items()):
            if id(value) in by_id:
                held[name] = by_id[id(value)]


@functools.cache
def _pairs() -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """JAX's functions, and ours."""
    found = [
        (_constrain, _constraint(_constrain)),
        (_map, _shard_map(_map)),
        (_reshard, _resharded(_reshard)),
    ]
    # The private function that reads `out_sharding=` of all others.
    internal = sys.modules.get("jax._src.sharding_impls")
    if reads := getattr(internal, "canonicalize_sharding", None):
        found.append((reads, _canonical(reads)))
    return found


_constrain, _map = jax.lax.with_sharding_constraint, jax.shard_map
_reshard = jax.sharding.reshard


def _constraint(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def with_sharding_constraint(x: PyTree, shardings: Any) -> PyTree:
        if (tracing := _TRACING.get()) is None:
            return plain(x, shardings)
        if _has_no(AxisType.Auto):  # Of explicit axes it is an assertion about the whole array.
            return x
        return plain(x, tracing.shardings(shardings))

    return with_sharding_constraint


def _resharded(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def reshard(xs: PyTree, out_shardings: Any) -> PyTree:
        if (tracing := _TRACING.get()) is None:
            return plain(xs, out_shardings)
        move = _constrain if _has_no(AxisType.Explicit) else plain
        return move(xs, tracing.shardings(out_shardings))

    return reshard


def _canonical(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def canonicalize_sharding(sharding: Any, *args: Any, **kwargs: Any) -> Any:
        if (tracing := _TRACING.get()) is None:
            return plain(sharding, *args, **kwargs)
        if _has_no(AxisType.Explicit):
            return None  # As without `out_sharding`: the compiler decides.
        return plain(tracing.sharding(sharding), *args, **kwargs)

    return canonicalize_sharding


def _shard_map(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def shard_map(f: Any = None, /, **options: Any) -> Any:
        tracing = _TRACING.get()
        if tracing is None or options.get("mesh") is None:  # Ours, or written to be nested.
            return plain(f, **options) if f is not None else plain(**options)
        if f is None:
            return functools.partial(shard_map, **options)
        tracing.nested = True
        mesh = jax.sharding.get_abstract_mesh()
        manual = set(mesh.manual_axes)
        over = set(options.get("axis_names") or options["mesh"].axis_names) - manual
        if not over:
            return f  # All of its axes are manual here.
        specs = {
            name: tracing.shardings(options[name])
            for name in ("in_specs", "out_specs")
            if name in options
        }
        return plain(f, **options | specs | {"mesh": mesh, "axis_names": over})

    return shard_map


def _has_no(kind: AxisType) -> bool:
    return kind not in jax.sharding.get_abstract_mesh().axis_types


def _names(entry: Any) -> tuple:
    return entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else ()


def _is_sharding(node: Any) -> bool:
    return node is None or isinstance(node, PartitionSpec | jax.sharding.Sharding)
