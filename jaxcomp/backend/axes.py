"""Facts about a mapped axis and collectives over it, under `shard_map`, `pmap` and `vmap`.

JAX's types of replication ("varying manual axes") exist only under `shard_map(check_vma=True)`;
each helper here does the right thing with and without them.
"""

import collections
import contextlib
import contextvars
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import batching, mlir

from jaxcomp.backend import platforms
from jaxcomp.types import Array, AxisName, PyTree

_TILE = 128
"""Elements of a TPU's tile. XLA replaces the gather of a vector that is not of whole tiles by an
all-reduce, which sends twice the bytes."""


_ASSUMED: contextvars.ContextVar[int | None] = contextvars.ContextVar("workers", default=None)


@contextlib.contextmanager
def assume_workers(workers: int) -> Iterator[None]:
    """Within this context, states made outside a mapped function are for this number of workers."""
    token = _ASSUMED.set(workers)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def known(axis_name: AxisName) -> bool:
    """Whether the number of workers is known: inside a mapped function, or assumed."""
    return bound(axis_name) or _ASSUMED.get() is not None


def names(axis_name: AxisName) -> tuple:
    """The axis name or names as a tuple."""
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def bound(axis_name: AxisName) -> bool:
    """Whether we are inside a function that is mapped over this axis."""
    if any(isinstance(name, int | list) for name in names(axis_name)):
        return False  # In JAX, a number is a dimension of an array.
    try:
        lax.axis_size(axis_name)
    except NameError:
        return False
    return True


def require(axis_name: AxisName) -> None:
    """Raises a `ValueError` unless we are inside a function that is mapped over this axis."""
    if not bound(axis_name):
        raise ValueError(
            f"`axis_name` must be an axis of the surrounding mapped function, and {axis_name!r} "
            "is not bound here. Call this inside `jax.shard_map`, `jax.pmap` or "
            "`jax.vmap(axis_name=...)`, or wrap the step with `jaxcomp.data_parallel`."
        )


def size(axis_name: AxisName) -> int:
    """The number of workers on the axis; 1 outside a mapped function, or as many as assumed."""
    return lax.axis_size(axis_name) if bound(axis_name) else _ASSUMED.get() or 1


def sizes(axis_name: AxisName) -> tuple[int, ...]:
    """The size of each axis; ones outside a mapped function, but the first as assumed."""
    if not bound(axis_name):
        return (size(axis_name), *(1 for _ in names(axis_name)[1:]))
    return tuple(size(name) for name in names(axis_name))


def lanes(axis_name: AxisName) -> tuple:
    """The axes that `jax.vmap` maps within each device, where the others are axes of devices.

    Empty if all are axes of devices, or if `jax.vmap` simulates all workers.
    """
    devices = jax.sharding.get_abstract_mesh().manual_axes
    found = tuple(name for name in names(axis_name) if name not in devices)
    return found if len(found) < len(names(axis_name)) else ()


def without(axis_name: AxisName, left_out: tuple) -> AxisName:
    """The other axes; the name alone if one is left."""
    rest = tuple(name for name in names(axis_name) if name not in left_out)
    return rest[0] if len(rest) == 1 else rest


def first(tree: PyTree, axis_name: AxisName) -> PyTree:
    """The tree of the first worker; under `jax.vmap`, without an axis of workers."""

    def of_first(x: Array) -> Array:
        for name in names(axis_name):
            x = lax.all_gather(x, name)[0]
        return x

    return jax.tree.map(of_first, tree)


def typed(axis_name: AxisName) -> bool:
    """Whether JAX tracks, in types, which values differ between the workers of this axis."""
    return varies(lax.axis_index(axis_name), axis_name)


def varies(x: Array, axis_name: AxisName) -> bool:
    """Whether the type of `x` says that its value differs between the workers of this axis."""
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return kind is not None and set(names(axis_name)) <= set(kind.varying)


def varying_axes(x: Any) -> frozenset:
    """The axes over which the type of an array, or a type itself, says that it differs."""
    kind = getattr(jax.typeof(x) if hasattr(x, "__array__") else x, "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


def vary(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Types every leaf of the tree as varying over the workers, where such types exist."""
    if not typed(axis_name):
        return tree

    def cast(x):
        known = jax.typeof(x).manual_axis_type.varying
        missing = tuple(name for name in names(axis_name) if name not in known)
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


_replicated = jex_core.Primitive("jaxcomp_replicated")


def type_replicated(x: Array, axis_name: AxisName) -> Array:
    """Types an array as replicated, and sends nothing; its values are the same on all workers."""
    over = tuple(name for name in names(axis_name) if name in varying_axes(x))
    return _replicated.bind(x, over=over) if over else x


def _drop_varying(x: Any, *, over: tuple) -> Any:
    kind = x.manual_axis_type
    return x.update(manual_axis_type=kind.update(varying=kind.varying - set(over)))


_replicated.def_impl(lambda x, **_: x)
_replicated.def_abstract_eval(_drop_varying)
batching.defvectorized(_replicated)
mlir.register_lowering(_replicated, lambda _, x, **__: [x])


def match_vma(*arrays: Array) -> tuple[Array, ...]:
    """Types all arrays as varying if one of them is, as a kernel requires of its arguments."""
    known = [getattr(jax.typeof(x), "manual_axis_type", None) for x in arrays]
    varying = frozenset().union(*(kind.varying for kind in known if kind is not None))

    def cast(x, kind):
        missing = () if kind is None else tuple(sorted(varying - kind.varying, key=str))
        return lax.pcast(x, missing, to="varying") if missing else x

    return tuple(cast(x, kind) for x, kind in zip(arrays, known, strict=True))


def zeros(like: jax.ShapeDtypeStruct) -> Array:
    """Zeros that differ between workers, by their type, wherever an array like this does."""
    found, missing = jnp.zeros(like.shape, like.dtype), tuple(sorted(varying_axes(like), key=str))
    return lax.pcast(found, missing, to="varying") if missing else found


def result(shape: tuple[int, ...], dtype: Any, like: Array) -> jax.ShapeDtypeStruct:
    """The type of a kernel's output that differs between workers wherever `like` does."""
    kind = getattr(jax.typeof(like), "manual_axis_type", None)
    if kind is None:
        return jax.ShapeDtypeStruct(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)


def everyones(x: Array, axis_name: AxisName) -> Array:
    """Every worker's array, stacked; the result is typed as replicated."""
    return _gather(x, axis_name)


def between_devices(axis_name: AxisName) -> bool:
    """Whether all axes are axes of devices, none of `jax.vmap`."""
    return set(names(axis_name)) <= set(jax.sharding.get_abstract_mesh().manual_axes)


def gather(x: Array, axis_name: AxisName, *, at_once: bool = False) -> Array:
    """Gathers and stacks every worker's vector; the result is typed as replicated.

    Args:
        x: this worker's vector.
        axis_name: the axes of the workers.
        at_once: send it to all workers at the same time, by an all-to-all, not along a ring.
    """
    (size,) = x.shape
    if at_once and between_devices(axis_name):
        rows = jnp.broadcast_to(x, (lax.axis_size(axis_name), size))
        return type_replicated(exchange(rows, axis_name, at_once=True), axis_name)

    def pad_and_gather(x: Array) -> Array:
        return _gather(jnp.pad(x, (0, -size % _TILE)), axis_name)[:, :size]

    if size % _TILE == 0 or not between_devices(axis_name):
        return _gather(x, axis_name)
    return platforms.collective(lambda x: _gather(x, axis_name), x, {"tpu": pad_and_gather})


def _gather(x: Array, axis_name: AxisName) -> Array:
    if typed(axis_name):
        return lax.all_gather(vary(x, axis_name), axis_name, to="invarying")
    return lax.all_gather(x, axis_name)


def permute(x: Array, sources: Sequence[int], axis_name: AxisName) -> Array:
    """The vector of worker `sources[i]` on worker `i`; `sources` is a permutation."""
    pairs = [(source, worker) for worker, source in enumerate(sources)]
    return lax.ppermute(vary(x, axis_name), axis_name, pairs)


def permute_some(x: Array, pairs: Sequence[tuple[int, int]], axis_name: AxisName) -> Array:
    """Sends along these pairs; a worker to which none leads receives zeros."""
    x, n = vary(x, axis_name), size(axis_name)
    if between_devices(axis_name) or len(pairs) == n:
        return lax.ppermute(x, axis_name, pairs)
    # `jax.vmap` permutes all workers or none.
    idle = [set(range(n)) - set(ends) for ends in (zip(*pairs, strict=True) if pairs else ((), ()))]
    found = lax.ppermute(x, axis_name, [*pairs, *zip(*map(sorted, idle), strict=True)])
    hears = jnp.isin(lax.axis_index(axis_name), jnp.array([to for _, to in pairs], jnp.int32))
    return jnp.where(hears, found, 0)


def maximum(x: Array, axis_name: AxisName) -> Array:
    """The elementwise maximum of floats ≥ 0 over all workers; NaN and Inf propagate."""
    # Over the bits, which are ordered like the values, because a float maximum may drop NaN.
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))
    return lax.bitcast_convert_type(lax.pmax(bits, axis_name), x.dtype)


def exchange(rows: Array, axis_name: AxisName, *, at_once: bool = False) -> Array:
    """Sends row `j` of `[workers, words]` to worker `j`; returns the rows that this worker
    receives.

    Args:
        rows: the rows.
        axis_name: the axes of the workers.
        at_once: between CPUs of several processes, send all rows at the same time, not in turns.
    """
    size = rows.shape[1]

    def swap(rows: Array) -> Array:
        # Send one vector: a TPU would pad a matrix of few rows to eight rows.
        flat = _make_mapped(vary(rows.reshape(-1), axis_name), axis_name)
        return lax.all_to_all(flat, axis_name, 0, 0, tiled=True).reshape(rows.shape)

    def pad_and_swap(rows: Array) -> Array:
        return swap(jnp.pad(rows, ((0, 0), (0, -size % _TILE))))[:, :size]

    if size == 0:
        return rows
    if not between_devices(axis_name):
        return swap(rows)
    # Long rows between CPUs of several hosts avoid Gloo's all-to-all: two workers that send to each
    # other wait for each other.
    own: dict[str, Any] = {} if size % _TILE == 0 else {"tpu": pad_and_swap}
    if jax.process_count() > 1 and not at_once:
        own["cpu"] = lambda rows: _in_turns(rows, axis_name)
    return platforms.collective(swap, rows, own) if own else swap(rows)


def _make_mapped(x: Array, axis_name: AxisName) -> Array:
    """An array that `jax.vmap` maps, even if all workers have the same.

    Its rule for an all-to-all of an array that is not mapped builds one of the wrong shape.
    """
    devices = jax.sharding.get_abstract_mesh().manual_axes
    for name in names(axis_name):
        if name not in devices:
            x = jnp.where(lax.axis_index(name) >= 0, x, jnp.zeros_like(x))
    return x


def _in_turns(rows: Array, axis_name: AxisName) -> Array:
    """The same all-to-all as a sequence of permutations, each to a single worker."""
    (n, size), own, turns = rows.shape, lax.axis_index(axis_name), _turns(rows.shape[0])
    parts = max(1, len(turns) // max(1, n - 1))
    rows = jnp.pad(rows, ((0, 0), (0, -size % parts))).reshape(n, parts, -1)
    found = rows = vary(rows, axis_name)
    for ring, part in turns:
        by = [ring.index(worker) for worker in range(n)]
        to, of = jnp.array(ring)[own], jnp.array(part)[own]
        came, where = jnp.array(by)[own], jnp.array([part[worker] for worker in by])[own]
        sent = lax.dynamic_slice(rows, (to, of, 0), (1, 1, rows.shape[2]))
        pairs = list(enumerate(ring))
        rows, arrived = lax.optimization_barrier((rows, lax.ppermute(sent, axis_name, pairs)))
        found = lax.dynamic_update_slice(found, arrived, (came, where, 0))
    return found.reshape(n, -1)[:, :size]


def _turns(n: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The receiver of each worker, and the slice of the row to send, for each permutation.

    Gloo uses the connection to a worker both to send and to announce what it can receive, so two
    workers that send to each other wait for each other. Cyclic shifts have no such pairs, except
    the shift by half of the workers. With four workers that would be a third of all shifts, so they
    send halves along the six cycles in which every worker follows every other one twice.
    """
    if n != 4:
        return [(tuple((i + turn) % n for i in range(n)), (0,) * n) for turn in range(1, n)]
    turns: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    sent: collections.Counter[tuple[int, int]] = collections.Counter()
    for order in itertools.permutations(range(1, n)):
        ring = [0] * n
        for worker, then in itertools.pairwise((0, *order, 0)):
            ring[worker] = then
        turns.append((tuple(ring), tuple(sent[arc] for arc in enumerate(ring))))
        sent.update(enumerate(ring))
    return turns
