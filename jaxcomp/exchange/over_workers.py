"""Sums and means over workers, with the same bits for every mapping of workers.

An all-reduce between the CPUs of one process adds in the order of the workers. Under `vmap` there
is no all-reduce, and XLA may add the rows of a matrix in another order. This module therefore gives
`vmap` a batching rule that adds in the order of the workers too.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching

from jaxcomp.backend import axes, platforms, xla
from jaxcomp.exchange import packing, trips
from jaxcomp.numerics import addition
from jaxcomp.types import Array, AxisName

_Collective: TypeAlias = Callable[..., list[Array]]
"""`(axis_name, *arrays) ↦ arrays` for those of one worker."""

_Together: TypeAlias = Callable[..., list[Array]]
"""`(*arrays) ↦ arrays` for those of all workers, stacked in their order."""


def total(arrays: Sequence[Array], axis_name: AxisName, delay: float | None = None) -> list[Array]:
    """`Σ xᵢ` of each array in its own dtype, by an all-reduce.

    Where messages have a delay (`trips`), arrays of a dtype are sent as one, and few elements go to
    all workers at once, which add them in the order of the workers.
    """
    return _over(functools.partial(_sums, delay), _ordered, _all_reduce, arrays, axis_name)


def mean(
    arrays: Sequence[Array],
    axis_name: AxisName,
    weight: Array | None = None,
    delay: float | None = None,
) -> list[Array]:
    """`Σ wᵢ·xᵢ / n` of each array; a worker of weight zero adds nothing, even if it is not finite.

    Floats of 16 bits are added in float32 and rounded once. Where messages are sent at once, and if
    the platform's all-reduce does not do that, every worker adds a slice and sends its mean to all.
    On a CPU, whose all-reduce sends bfloat16 as float32, this applies to bfloat16 and float16;
    elsewhere to float16, whose sum overflows long before its mean. Other dtypes are added in their
    own dtype.
    """
    found = [x if x.size else jnp.zeros(x.shape, x.dtype) for x in arrays]  # The same on all.
    narrow = [i for i, x in enumerate(arrays) if is_narrow(x.dtype) and x.size]
    rest = [i for i, x in enumerate(arrays) if not is_narrow(x.dtype)]
    sums = total([addition.weigh(arrays[i], weight) for i in rest], axis_name, delay)
    for i, x in zip(rest, sums, strict=True):
        # Multiply by the reciprocal: compiled code divides by a constant so, eager code does not.
        found[i] = x * jnp.asarray(1 / axes.size(axis_name), x.dtype)
    for dtype in dict.fromkeys(arrays[i].dtype for i in narrow):
        alike = [i for i in narrow if arrays[i].dtype == dtype]
        given = [arrays[i] for i in alike] + ([] if weight is None else [weight])
        means = _over(
            functools.partial(_narrow_means, len(alike), delay),
            functools.partial(_stacked_means, len(alike)),
            functools.partial(_plain_means, len(alike)),
            given,
            axis_name,
        )
        for i, x in zip(alike, means[: len(alike)], strict=True):
            found[i] = x
    return found


def is_narrow(dtype: Any) -> bool:
    """Whether these are floats of 16 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 2


def mean_of_rows(rows: Array, axis_name: AxisName) -> Array:
    """From `[n, size]`, gives worker `j` the mean of all workers' row `j`.

    It uses a reduce-scatter on accelerators, and for float16, or on a CPU, an all-to-all and a sum
    in the order of the workers.
    """
    rows = axes.vary(rows, axis_name)

    def exchanged(rows: Array) -> Array:
        return _mean_of(_exchanged(rows, axis_name))

    def scattered(rows: Array) -> Array:
        before, after = addition.mean_factors(len(rows))
        flat = rows.reshape(-1) * addition.hold_factor(before, rows.dtype)
        own = lax.psum_scatter(flat, axis_name, scatter_dimension=0, tiled=True)
        return (addition.widen(own) * jnp.asarray(after, addition.wide(own.dtype))).astype(
            rows.dtype
        )

    if rows.dtype == jnp.float16:
        return exchanged(rows)
    return lax.platform_dependent(rows, cpu=exchanged, default=scattered)


def gather(x: Array, axis_name: AxisName, *, at_once: bool = False) -> Array:
    """Every worker's vector, stacked, by an all-gather in the vector's own width."""
    if not is_narrow(x.dtype):
        return axes.gather(x, axis_name, at_once=at_once)
    # Send integers, since a CPU would send float32; the barrier keeps a cast after the collective.
    words = lax.optimization_barrier(_as_words(x))
    return lax.bitcast_convert_type(axes.gather(words, axis_name, at_once=at_once), x.dtype)


def _exchanged(rows: Array, axis_name: AxisName, at_once: bool = False) -> Array:
    """`[n, size]`: all workers' rows with this worker's number."""
    if not is_narrow(rows.dtype):
        return axes.exchange(rows, axis_name, at_once=at_once)
    words = axes.exchange(_as_words(rows), axis_name, at_once=at_once)
    return lax.bitcast_convert_type(words, rows.dtype)


def _as_words(x: Array) -> Array:
    """Floats of 16 bits as integers, which no compiler widens for a collective."""
    return lax.bitcast_convert_type(x, jnp.uint16)


def _all_reduce(axis_name: AxisName, *arrays: Array) -> list[Array]:
    return list(lax.psum(arrays, axis_name))


def _sums(delay: float | None, axis_name: AxisName, *arrays: Array) -> list[Array]:
    if not trips.wait(delay) or not axes.between_devices(axis_name):
        return _all_reduce(axis_name, *arrays)
    add = functools.partial(_sum, delay, axis_name)
    sums = packing.by_dtype([x.reshape(-1) for x in arrays], add)
    return [x.reshape(like.shape) for x, like in zip(sums, arrays, strict=True)]


def _sum(delay: float | None, axis_name: AxisName, flat: Array) -> Array:
    n = axes.size(axis_name)
    way = trips.of_sum(flat.nbytes, n, delay)
    if way == trips.RING:
        return lax.psum(flat, axis_name)
    if way == trips.GATHERED:
        return _ordered(axes.gather(flat, axis_name, at_once=True))[0]
    return _in_slices(flat, axis_name, lambda stack: _ordered(stack)[0], at_once=True)


def _in_slices(
    flat: Array, axis_name: AxisName, combine: Callable[[Array], Array], at_once: bool
) -> Array:
    """Two shots: each worker combines everyone's slice of its number, and sends it to all."""
    n = axes.size(axis_name)
    rows = jnp.pad(flat, (0, -flat.size % n)).reshape(n, -1)
    own = combine(_exchanged(rows, axis_name, at_once))
    return gather(own, axis_name, at_once=at_once).reshape(-1)[: flat.size]


def _ordered(*stacks: Array) -> list[Array]:
    return [addition.in_order(x.__getitem__, len(x)) for x in stacks]


def _narrow_means(
    count: int, delay: float | None, axis_name: AxisName, *args: Array
) -> list[Array]:
    n = axes.size(axis_name)
    once = trips.at_once(sum(x.nbytes for x in args[:count]) / n, n, delay)
    shots = functools.partial(_two_shots, count, once, axis_name)
    if once or args[0].dtype == jnp.float16:
        return shots(*args)
    plain = functools.partial(_plain_means, count, axis_name)
    return lax.platform_dependent(*args, cpu=shots, default=plain)


def _two_shots(count: int, at_once: bool, axis_name: AxisName, *args: Array) -> list[Array]:
    leaves, weight = args[:count], args[count:]
    everyone = [axes.gather(w.reshape(1), axis_name, at_once=at_once)[:, 0] for w in weight]
    whole = _in_slices(
        xla.join(leaves), axis_name, lambda stack: _mean_of(stack, *everyone), at_once
    )
    sizes = [x.size for x in leaves]
    parts = xla.cut(whole, [sum(sizes[:i]) for i in range(count)], sizes)
    return [part.reshape(x.shape) for part, x in zip(parts, leaves, strict=True)]


def _stacked_means(count: int, *args: Array) -> list[Array]:
    return [_mean_of(x, *args[count:]) for x in args[:count]]


def _mean_of(stack: Array, weights: Array | None = None) -> Array:
    before, after = addition.mean_factors(len(stack))
    wide = addition.wide(stack.dtype)
    kept = addition.hold_factor(before, wide)

    def term(index: Any) -> Array:
        scaled = _widened(stack[index]) * kept
        return addition.weigh(scaled, None if weights is None else weights[index])

    return (addition.in_order(term, len(stack)) * jnp.asarray(after, wide)).astype(stack.dtype)


@jax.custom_jvp
def _widened(x: Array) -> Array:
    return addition.widen(x)  # A function of the bits, which has no derivative.


_widened.defjvps(lambda tangent, out, x: tangent.astype(out.dtype))


def _plain_means(count: int, axis_name: AxisName, *args: Array) -> list[Array]:
    return [lax.pmean(addition.weigh(x, *args[count:]), axis_name) for x in args[:count]]


_over_workers = platforms.primitive("jaxcomp_over_workers")


def _over(
    collective: _Collective,
    together: _Together,
    plain: _Collective,
    args: Sequence[Array],
    axis_name: AxisName,
) -> list[Array]:
    """`collective(axis_name, *args)`; under `vmap`, `together` of all workers' arguments.

    Args:
        collective: the function for workers on devices.
        together: the same function for workers as rows of an array.
        plain: the same function made of JAX's own collectives, for derivatives.
        args: this worker's arrays.
        axis_name: the axes of the workers.
    """
    if not args:
        return []
    names = axes.names(axis_name)
    ways = {"collective": collective, "together": together, "plain": plain}
    return _bind(axes.vary(tuple(args), axis_name), order=names, left=names, rows=(), **ways)


def _bind(args: Sequence[Array], **params: Any) -> list[Array]:
    if not params["left"]:
        return _run(args, **params)
    traced = jax.make_jaxpr(lambda *args: _run(args, **params))(*args)
    return _over_workers.bind(*args, traced=traced, **params)


def _run(
    args: Sequence[Array],
    *,
    order: tuple,
    left: tuple,
    rows: tuple,
    collective: _Collective,
    together: _Together,
    plain: _Collective,
) -> list[Array]:
    """The sum of arrays with a leading axis for each of `rows`, over workers along `left`."""
    del plain
    found = list(args)
    if rows:
        places = [rows.index(name) for name in order if name in rows]
        stacks = [x.transpose(*places, *range(len(rows), x.ndim)) for x in args]
        depth = len(rows)
        found = together(*(x.reshape(math.prod(x.shape[:depth]), *x.shape[depth:]) for x in stacks))
    return list(collective(left[0] if len(left) == 1 else left, *found)) if left else found


def _batched(axis: Any, args: Any, dims: Any, *, traced: Any, **params: Any) -> Any:
    del traced
    ours = axis.name in params["left"]
    if not ours and all(dim is None for dim in dims):
        out = _bind(args, **params)
        return out, [None] * len(out)

    def in_front(x: Array, dim: Any) -> Array:
        if dim is None:
            return jnp.broadcast_to(x, (axis.size, *x.shape))
        return jnp.moveaxis(x, dim, 0)

    args = [in_front(x, dim) for x, dim in zip(args, dims, strict=True)]
    if ours:
        left = tuple(name for name in params["left"] if name != axis.name)
        out = _bind(args, **params | {"left": left, "rows": (axis.name, *params["rows"])})
        return out, [None] * len(out)
    # Process arrays one by one, since each is split over the workers as a whole.
    out = lax.map(lambda args: _bind(args, **params), args)
    return out, [0] * len(out)


def _differentiated(primals: Any, tangents: Any, *, traced: Any, **params: Any) -> Any:
    del traced
    plain = params | {"collective": params["plain"]}
    given = tuple(ad.instantiate_zeros(tangent) for tangent in tangents)
    _, tangent = jax.jvp(lambda *args: _run(args, **plain), tuple(primals), given)
    return _bind(primals, **params), tangent


batching.fancy_primitive_batchers[_over_workers] = _batched
ad.primitive_jvps[_over_workers] = _differentiated
