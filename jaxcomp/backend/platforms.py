"""Own implementations of an operation for some platforms, chosen when a program is lowered."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from jaxcomp import checks

IMPLEMENTATIONS = ("reference", "gpu", "tpu", "gpu_interpret", "tpu_interpret")
"""Valid values of `implementation=`."""

_PLATFORMS = {"gpu": "cuda", "tpu": "tpu"}


class RefusedError(ValueError):
    """The error for an input that a kernel cannot process."""


def implementation(
    name: str | None, parts: Mapping[str, Any], work: str, *held: Any
) -> Callable[..., Any]:
    """Calls one implementation of an operation, or raises if it cannot process the input.

    Args:
        name: one of `IMPLEMENTATIONS`; None for the reference.
        parts: modules with a function called `work`, by the names "reference", "gpu" and "tpu".
            Functions of the last two take `interpret`, and `refuses(*held)` gives the reason why
            they cannot work, or None.
        work: the name of the function.
        *held: the arguments of `refuses`, such as the size of a bucket.

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


def choose(default: Callable[..., Any], cpu: Callable[..., Any], *args: Any) -> Any:
    """`by_platform` for functions of trees of arrays, of which a CPU has its own."""
    flat, structure = jax.tree.flatten(args)
    first, own = (
        lambda *flat, f=f: f(*jax.tree.unflatten(structure, flat)) for f in (default, cpu)
    )
    return by_platform(program(first, *flat), {"cpu": own}, *flat)


PRIMITIVE = jex_core.Primitive("jaxcomp_by_platform")
PRIMITIVE.multiple_results = True


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
    flat = tuple(
        (platform, lambda *args, f=f: jax.tree.leaves(f(*args))) for platform, f in own.items()
    )
    out = PRIMITIVE.bind(*args, default=jex_core.jaxpr_as_fun(jaxpr), own=flat, traced=jaxpr)
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


def program(function: Callable[..., Any], *args: jax.Array) -> tuple[Any, Any]:
    """The program of a function, and the shapes of its results."""
    return jax.make_jaxpr(function, return_shape=True)(*args)


def _run(*args: jax.Array, default: Any, own: Any, traced: Any) -> list[jax.Array]:
    """Runs eagerly, on the device of the arrays."""
    del traced
    devices = set().union(*(x.devices() for x in args))
    if len(devices) > 1:
        return default(*args)
    (device,) = devices
    platform = getattr(device.client, "_raw_platform", device.platform)  # "cuda", "rocm".
    return dict(own).get(platform, default)(*args)


def _batch(args: Any, dims: Any, *, default: Any, own: Any, traced: Any) -> Any:
    del traced

    def batch(f):
        return jax.vmap(f, in_axes=tuple(dims))  # None where an argument is not mapped.

    kernels = {platform: batch(f) for platform, f in own if platform != "cpu"}
    out = by_platform(program(batch(default), *args), kernels, *args)
    return out, [0] * len(out)


def _differentiate(primals: Any, tangents: Any, *, default: Any, own: Any, traced: Any) -> Any:
    del own, traced
    given = [ad.instantiate_zeros(tangent) for tangent in tangents]
    return jax.jvp(default, tuple(primals), tuple(given))


def _lowering(platform: str | None) -> Callable[..., Any]:
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


PRIMITIVE.def_impl(_run)
PRIMITIVE.def_abstract_eval(lambda *_, traced, **__: list(traced.out_avals))
batching.primitive_batchers[PRIMITIVE] = _batch
ad.primitive_jvps[PRIMITIVE] = _differentiate
mlir.register_lowering(PRIMITIVE, _lowering(None))
for _platform in ("cpu", "cuda", "tpu"):
    mlir.register_lowering(PRIMITIVE, _lowering(_platform), platform=_platform)
