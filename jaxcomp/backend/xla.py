"""Directions to the compiler, in one place because JAX does not promise that they work."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import core
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core as jex_core
from jax.interpreters import batching, mlir, partial_eval

from jaxcomp.backend import platforms


@contextlib.contextmanager
def constants() -> Iterator[None]:
    """Runs eager operations immediately within this context, even while a program is traced.

    The mesh of that program is left aside, or JAX would take the constants for parts of its arrays.
    """
    empty = jax.sharding.AbstractMesh((), ())
    with (
        jax.ensure_compile_time_eval(),
        jax.sharding.use_abstract_mesh(empty),
        jax.transfer_guard("allow"),  # A user's guard is for arrays of the step.
    ):
        yield


def evaluate(f: Callable[..., Any], *args: Any) -> Any:
    """`f` of constants as one program that runs at once, even while another program is traced.

    Within `constants`, what does not depend on an argument is a program per operation, also in a
    function that is jitted: thirty small programs take a second to compile.

    Args:
        f: a function of trees of arrays.
        args: its arguments, none of them traced.
    """
    empty = jax.sharding.AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(empty), jax.transfer_guard("allow"):
        return jax.jit(f).lower(*args).compile()(*args)


def compile_separately(
    f: Callable[..., Any], lanes: int = 1, size: int | None = None
) -> Callable[..., Any]:
    """Compiles `f` as a separate XLA function, so that it is not fused into each consumer.

    XLA fuses a cheap producer into each of its consumers. A decoder whose result is sliced into a
    hundred leaves would be compiled a hundred times, together with whatever consumes each leaf.
    On a CPU, where compiling is slow and a call is free, it becomes a function in the program;
    other platforms get `f` as it is.

    Values that are computed digit by digit for a row must be compiled separately. In a loop over
    the row's elements they are the same for all lanes, and the vectorizer of LLVM (from JAX 0.11
    on) needs time exponential in the number of digits to find that out. With twenty digits, a
    compilation does not end.

    What is returned for `f` is traced once for arguments of the same types: keep it, and a program
    that calls it several times has it once.

    Args:
        f: a function of trees of arrays.
        lanes: how many neighbours of its result are made from neighbours of its input, such as the
            codes in the words of a bucket; `in_rows` says why.
        size: elements that it works on, if it is only worth it for many (`large`); else always.
    """
    if size is not None and not large(size):
        return f

    known: dict[Any, _Separate] = {}

    @functools.wraps(f)
    def call(*args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        if not any(isinstance(leaf, core.Tracer) for leaf in leaves):
            return f(*args)  # An eager call has nothing to compile separately.
        kinds = (treedef, jax.config.read("jax_enable_x64"), *map(jax.typeof, leaves))
        if kinds not in known:
            known[kinds] = _Separate(f, lanes, args)
        return known[kinds](*leaves)

    return call


class _Separate:
    """A function that is compiled separately, for arguments of one type."""

    def __init__(self, f: Callable[..., Any], lanes: int, args: Any):
        closed, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
        self.structure = jax.tree.structure(shapes)
        # What the function closes over may belong to the program that is traced.
        self.constants = closed.consts
        jaxpr = closed.jaxpr
        jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
        # The compiler does not remove arguments that a function of the program does not use.
        jaxpr, self.used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        traced = self.traced = jex_core.ClosedJaxpr(jaxpr, [])

        def run(*given: Any) -> list[Any]:
            return [in_rows(x, lanes) for x in _flatten(traced)(*given)]

        run.__name__ = getattr(f, "__name__", "run")  # The name of the function in the program.
        self.run = jax.jit(run, inline=False)

    def __call__(self, *leaves: Any) -> Any:
        args = itertools.compress((*self.constants, *leaves), self.used)
        out = _separately.bind(*args, traced=self.traced, run=self.run)
        return jax.tree.unflatten(self.structure, out)


_separately = platforms.primitive("jaxcomp_separately")


def _separate(*args: jax.Array, traced: Any, run: Any) -> list[jax.Array]:
    with set_xla_metadata(inlineable="false"):
        found = run(*args)
    return [x.reshape(like.shape) for x, like in zip(found, traced.out_avals, strict=True)]


def _batch_separate(args: Any, dims: Any, *, traced: Any, run: Any) -> Any:
    del run
    batched = jax.vmap(jex_core.jaxpr_as_fun(traced), in_axes=tuple(dims))
    out = compile_separately(batched)(*args)
    return out, [0] * len(out)


batching.primitive_batchers[_separately] = _batch_separate
mlir.register_lowering(
    _separately, mlir.lower_fun(_separate, multiple_results=True), platform="cpu"
)


def in_few_shapes(f: Callable[[jax.Array], Any]) -> Callable[[jax.Array], Any]:
    """Compiles separately a function of each element by itself, for few lengths of its argument.

    A program of many leaves would have it once for every length. So the argument is filled up with
    zeros to a power of two, and the results are cut.

    Args:
        f: a function of an array, whose first axis is that of all its results.
    """
    separate = compile_separately(f)

    def call(x: jax.Array) -> Any:
        rows = x.shape[0] if x.ndim else 1
        missing = power_of_two(rows) - rows
        if not missing or not isinstance(x, core.Tracer):
            return separate(x)
        filled = jnp.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)])
        return jax.tree.map(lambda part: part[: len(x)], separate(filled))

    return call


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below a number; one for zero."""
    return 1 << max(number - 1, 0).bit_length()


def large(size: int) -> bool:
    """Whether arrays of this size take long enough to justify the compilation of more kernels."""
    return size >= _LARGE


_LARGE = 2**18


def in_rows(x: jax.Array, lanes: int) -> jax.Array:
    """`x` reshaped to rows of `lanes` elements, if these divide it and are not short.

    On a CPU, XLA loops over the result of a fusion. If its rows are as long as the contiguous parts
    of the input, neighbours are read as one vector; in longer rows one by one, which takes three
    times as long.
    """
    return x if lanes < _FEWEST_LANES or x.size % lanes else x.reshape(-1, lanes)


_FEWEST_LANES = 8


def _inline(traced: Any) -> Callable[..., list[Any]]:
    """A jitted function that is called by one that is compiled separately.

    XLA applies an attribute of a function to all functions that it calls, such as `jnp.pad`: each
    would be separate too, and write its result to memory. So short ones are inlined here, and
    others are marked as inlineable.
    """
    if len(traced.jaxpr.eqns) < _SHORT:
        return _flatten(traced)

    def call(*given: Any) -> list[Any]:
        with set_xla_metadata(inlineable="true"):
            return _function(traced)(*given)

    return call


_SHORT = 20
"""Functions with fewer equations are inlined."""


@functools.lru_cache(maxsize=1024)
def _function(traced: Any) -> Callable[..., list[Any]]:
    return jax.jit(_flatten(traced))


def _flatten(traced: Any) -> Callable[..., list[Any]]:
    """Calls the traced function, and inlines the jitted functions that it calls."""

    def run(*args: Any) -> list[Any]:
        values = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
        values.update(zip(traced.jaxpr.invars, args, strict=True))

        def read(x: Any) -> Any:
            return x.val if isinstance(x, jex_core.Literal) else values[x]

        for eqn in traced.jaxpr.eqns:
            given = [read(x) for x in eqn.invars]
            if eqn.primitive.name in ("jit", "pjit"):
                out = _inline(eqn.params["jaxpr"])(*given)
            elif eqn.primitive is platforms.PRIMITIVE:  # Kernels of other platforms are not needed.
                out = _flatten(eqn.params["traced"])(*given)
            else:
                bound = eqn.primitive.get_bind_params(eqn.params)
                functions, params = bound if isinstance(bound, tuple) else ((), bound)
                out = eqn.primitive.bind(*functions, *given, **params)
                out = out if eqn.primitive.multiple_results else [out]
            values.update(zip(eqn.outvars, out, strict=True))
        return [read(x) for x in traced.jaxpr.outvars]

    return run


def block_fma(x: jax.Array) -> jax.Array:
    """Clears the last bit of `x`, so that it is not a product that XLA might fuse with a sum.

    Whether a product next to a sum is rounded is for the compiler to decide, and it decides
    differently from one program to the next.
    """
    width = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    word = jax.lax.bitcast_convert_type(x, width)
    return jax.lax.bitcast_convert_type(word & ~jnp.ones((), width), x.dtype)


def join(parts: Sequence[jax.Array]) -> jax.Array:
    """Concatenates the elements of arrays of one dtype.

    On a CPU, XLA goes through a concatenation once for every part, each time as far as the longest
    part is: with one that is much longer than the others it takes twenty times as long as a copy.
    There, long parts are put in place one by one.
    """
    if len(parts) == 1:
        return parts[0].reshape(-1)

    def known(*parts):
        return jnp.concatenate([part.reshape(-1) for part in parts])

    sizes = [part.size for part in parts]
    total = sum(sizes)
    uneven = len(parts) * max(sizes) > _UNEVEN * total and max(sizes) * _FEW > total
    if not (uneven and large(total)) or not isinstance(parts[0], core.Tracer):
        return known(*parts)

    def in_place(*parts):
        runs = [[parts[0]]]
        for part in parts[1:]:
            if max(part.size, runs[-1][-1].size) * _FEW > total:
                runs.append([part])
            else:
                runs[-1].append(part)
        first, *others = [join(run) for run in runs]
        begin = first.size
        whole = jax.lax.pad(first, jnp.zeros((), first.dtype), [(0, total - begin, 0)])
        for part in others:
            whole = jax.lax.dynamic_update_slice(
                whole, part, (begin,), allow_negative_indices=False
            )
            begin += part.size
        return whole

    return jax.lax.platform_dependent(*parts, cpu=compile_separately(in_place), default=known)


_UNEVEN = 1.5
"""The largest accepted time of a concatenation, relative to a copy."""

_FEW = 8
"""Parts longer than `1 / _FEW` of the result are copied by a kernel each."""


def cut(flat: jax.Array, begins: Sequence[int], lengths: Sequence[int]) -> list[jax.Array]:
    """Slices of a non-empty vector from each `begin`, each with its length.

    Kernels that differ only in a constant are compiled once if the constant is an argument, but XLA
    puts every constant that it can see into the kernel. So on a CPU the positions are hidden from
    it: cutting a batch into fifty leaves of two shapes is two kernels, not fifty.
    """

    def known(zero):
        return tuple(jnp.zeros_like(zero) + begin for begin in begins)

    if not isinstance(flat, core.Tracer):
        return [flat[begin : begin + length] for begin, length in zip(begins, lengths, strict=True)]
    offsets = jax.lax.platform_dependent(
        zero_after(flat), cpu=lambda zero: hide(begins, zero), default=known
    )
    return [
        jax.lax.dynamic_slice(flat, (offset,), (length,), allow_negative_indices=False)
        for offset, length in zip(offsets, lengths, strict=True)
    ]


def zero_after(x: jax.Array) -> jax.Array:
    """Zero for every `x`. The compiler does not know this, so the result depends on `x`."""
    return jnp.minimum(x.reshape(-1)[0].astype(jnp.int32) & 1, 0)


def hide(numbers: Sequence[int], zero: jax.Array) -> tuple[jax.Array, ...]:
    """The numbers as values that the compiler cannot treat as constants."""
    return compile_separately(lambda zero: tuple(zero + number for number in numbers))(zero)
