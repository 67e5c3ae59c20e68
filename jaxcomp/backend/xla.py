"""Directions to the compiler, in one place because JAX does not promise that they work."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import core
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from jaxcomp import checks

IMPLEMENTATIONS = ("reference", "gpu", "tpu", "gpu_interpret", "tpu_interpret")
"""The names by which one implementation of what has kernels may be forced."""

_PLATFORMS = {"gpu": "cuda", "tpu": "tpu"}


class RefusedError(ValueError):
    """The error for an input that a kernel cannot process."""


@contextlib.contextmanager
def constants() -> Iterator[None]:
    """Runs eager operations immediately within this context, even while a program is traced.

    The mesh of that program is left aside, or JAX would take the constants for parts of its arrays.
    """
    empty = jax.sharding.AbstractMesh((), ())
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(empty):
        yield


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

    known: dict[Any, tuple[Callable[..., Any], Any]] = {}

    def separate(*args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        kinds = (treedef, jax.config.read("jax_enable_x64"), *map(jax.typeof, leaves))
        if kinds not in known:
            traced, shapes = jax.make_jaxpr(f, return_shape=True)(*args)

            def run(*given: Any) -> list[Any]:
                return [in_rows(x, lanes) for x in _flattened(traced)(*given)]

            known[kinds] = jax.jit(run, inline=False), shapes
        run, shapes = known[kinds]
        likes, structure = jax.tree.flatten(shapes)
        with set_xla_metadata(inlineable="false"):
            out = run(*leaves)
        whole = [x.reshape(like.shape) for x, like in zip(out, likes, strict=True)]
        return jax.tree.unflatten(structure, whole)

    @functools.wraps(f)
    def call(*args: Any) -> Any:
        if not any(isinstance(leaf, core.Tracer) for leaf in jax.tree.leaves(args)):
            return f(*args)  # An eager call has nothing to compile separately.
        return jax.lax.platform_dependent(*args, cpu=separate, default=f)

    return call


def large(size: int) -> bool:
    """Whether arrays of this size take long enough to justify the compilation of more kernels."""
    return size >= _LARGE


_LARGE = 2**18


def in_rows(x: jax.Array, lanes: int) -> jax.Array:
    """`x` in rows of `lanes` elements, if it is so many whole rows and they are not short.

    On a CPU, XLA loops over what a fusion returns. In rows as long as the stretches that are read,
    neighbours are read as one vector; along anything longer, one by one, which takes three times as
    long.
    """
    return x if lanes < _FEWEST_LANES or x.size % lanes else x.reshape(-1, lanes)


_FEWEST_LANES = 8


def _flattened(traced: Any) -> Callable[..., list[Any]]:
    """Inlines the jitted functions, such as `jnp.pad`, into the traced function.

    What is said of a function is said of all that it calls: each would be kept apart from its
    neighbours too, and its result be written to memory.
    """

    def run(*args: Any) -> list[Any]:
        values = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
        values.update(zip(traced.jaxpr.invars, args, strict=True))

        def read(x: Any) -> Any:
            return x.val if isinstance(x, jex_core.Literal) else values[x]

        for eqn in traced.jaxpr.eqns:
            given = [read(x) for x in eqn.invars]
            if eqn.primitive.name in ("jit", "pjit"):
                out = _flattened(eqn.params["jaxpr"])(*given)
            elif eqn.primitive is _by_platform:  # Kernels of other platforms are not needed.
                out = _flattened(eqn.params["traced"])(*given)
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


def joined(parts: Sequence[jax.Array]) -> jax.Array:
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
        first, *others = [joined(run) for run in runs]
        begin = first.size
        whole = jax.lax.pad(first, jnp.zeros((), first.dtype), [(0, total - begin, 0)])
        for part in others:
            whole = jax.lax.dynamic_update_slice(whole, part, (begin,))
            begin += part.size
        return whole

    return jax.lax.platform_dependent(*parts, cpu=compile_separately(in_place), default=known)


_UNEVEN = 1.5
"""The largest accepted time of a concatenation, in times of a copy."""

_FEW = 8
"""Parts longer than such a share are put in place by a kernel each."""


def cut(flat: jax.Array, begins: Sequence[int], lengths: Sequence[int]) -> list[jax.Array]:
    """Slices of a non-empty vector from each `begin`, each with its length.

    Kernels that differ in nothing but a constant are compiled once if the constant is an argument,
    and a constant that the compiler can see it puts into the kernel. So on a CPU the places are
    hidden from it: cutting a batch into fifty leaves of two shapes is two kernels, not fifty.
    """

    def known(zero):
        return tuple(jnp.zeros_like(zero) + begin for begin in begins)

    if not isinstance(flat, core.Tracer):
        return [flat[begin : begin + length] for begin, length in zip(begins, lengths, strict=True)]
    offsets = jax.lax.platform_dependent(
        zero_after(flat), cpu=lambda zero: hidden(begins, zero), default=known
    )
    return [
        jax.lax.dynamic_slice(flat, (offset,), (length,))
        for offset, length in zip(offsets, lengths, strict=True)
    ]


def zero_after(x: jax.Array) -> jax.Array:
    """Zero for every `x`. The compiler does not know this, so the result depends on `x`."""
    return jnp.minimum(x.reshape(-1)[0].astype(jnp.int32) & 1, 0)


def hidden(numbers: Sequence[int], zero: jax.Array) -> tuple[jax.Array, ...]:
    """The numbers as values that the compiler cannot treat as constants."""
    return compile_separately(lambda zero: tuple(zero + number for number in numbers))(zero)


def implementation(
    name: str | None, parts: Mapping[str, Any], work: str, *held: Any
) -> Callable[..., Any]:
    """Calls one implementation of an operation, or raises if it cannot process the input.

    Args:
        name: one of `IMPLEMENTATIONS`; None for the reference.
        parts: what has a function called `work`, by the names "reference", "gpu" and "tpu". Those
            of the last two take `interpret`, and `refuses(*held)` says why they cannot work, or
            None.
        work: what to do.
        *held: what a kernel must hold.

    Raises:
        ValueError: for another name, or, as a `RefusedError`, for what the kernel cannot hold.
    """
    checks.choice("implementation", name, (*IMPLEMENTATIONS, None))
    if name in ("reference", None):
        return getattr(parts["reference"], work)
    kernels = parts[name.removesuffix("_interpret")]
    refusal = kernels.refuses(*held)
    if refusal:
        raise RefusedError(f"`implementation` {name!r} cannot do this: {refusal}; 'reference' can")
    return functools.partial(getattr(kernels, work), interpret=name.endswith("_interpret"))


def kernels(run: Callable[[str], Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Maps each platform that has its own implementation to `run(name)`, unless that refuses."""
    own = {}
    for name, platform in _PLATFORMS.items():
        try:
            own[platform] = run(name)
        except RefusedError:
            continue
    return own


_by_platform = jex_core.Primitive("jaxcomp_by_platform")
_by_platform.multiple_results = True


def by_platform(default: Any, own: dict[str, Callable[..., Any]], *args: jax.Array) -> Any:
    """`own[platform](*args)` on platforms with their own function, else `default(*args)`.

    As `jax.lax.platform_dependent`, but an own function is traced only when a program is lowered
    for its platform: tracing a kernel takes longer than compiling what a CPU runs in its place. All
    must return arrays of the same shapes and dtypes; derivatives are those of `default`.

    Own functions are kernels, which XLA cannot split over devices: where it might have to (under a
    mesh axis that is not manual), every platform takes `default`. So does a CPU under `vmap`: there
    slices at places that are computed become gathers.

    Args:
        default: `program(function, *args)`.
        own: by platform, its own function.
        *args: arrays.
    """
    jaxpr, shapes = default
    flat = tuple((platform, _flat(f)) for platform, f in own.items())
    out = _by_platform.bind(*args, default=jex_core.jaxpr_as_fun(jaxpr), own=flat, traced=jaxpr)
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


def program(function: Callable[..., Any], *args: jax.Array) -> tuple[Any, Any]:
    """The program of a function, and the shapes of its results."""
    return jax.make_jaxpr(function, return_shape=True)(*args)


def _flat(f: Callable[..., Any]) -> Callable[..., list[jax.Array]]:
    return lambda *args: jax.tree.leaves(f(*args))


def _run(*args: jax.Array, default: Any, own: Any, traced: Any) -> list[jax.Array]:
    """Runs eagerly, on the device of the arrays."""
    del traced
    devices = set().union(*(x.devices() for x in args))
    if len(devices) > 1:
        return default(*args)
    (device,) = devices
    platform = getattr(device.client, "_raw_platform", device.platform)  # "cuda", "rocm".
    return dict(own).get(platform, default)(*args)


def _batched(args: Any, dims: Any, *, default: Any, own: Any, traced: Any) -> Any:
    del traced

    def batch(f):
        return jax.vmap(f, in_axes=tuple(dims))  # None where an argument is not mapped.

    kernels = {platform: batch(f) for platform, f in own if platform != "cpu"}
    out = by_platform(program(batch(default), *args), kernels, *args)
    return out, [0] * len(out)


def _differentiated(primals: Any, tangents: Any, *, default: Any, own: Any, traced: Any) -> Any:
    del own, traced
    given = [ad.instantiate_zeros(tangent) for tangent in tangents]
    return jax.jvp(default, tuple(primals), tuple(given))


def _lowered(platform: str | None) -> Callable[..., Any]:
    def rule(ctx: Any, *args: Any, default: Any, own: Any, traced: Any) -> Any:
        del traced
        run = dict(own).get(platform, default) if _all_local(ctx) else default
        return mlir.lower_fun(run, multiple_results=True)(ctx, *args)

    return rule


def _all_local(ctx: Any) -> bool:
    """Whether the lowered program runs on one device, or separately on each device."""
    context = ctx.module_context.axis_context
    if hasattr(context, "manual_axes"):
        manual = set(context.manual_axes) | set(context.mesh.manual_axes)
        return manual == set(context.mesh.axis_names)
    return getattr(context, "num_devices", 1) == 1


_by_platform.def_impl(_run)
_by_platform.def_abstract_eval(lambda *_, traced, **__: list(traced.out_avals))
batching.primitive_batchers[_by_platform] = _batched
ad.primitive_jvps[_by_platform] = _differentiated
mlir.register_lowering(_by_platform, _lowered(None))
for _platform in ("cpu", "cuda", "tpu"):
    mlir.register_lowering(_by_platform, _lowered(_platform), platform=_platform)
