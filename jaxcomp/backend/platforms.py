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


def primitive(name: str) -> Any:
    """A primitive that stands for its parameter `traced`, a program, and derives like it."""
    new = jex_core.Primitive(name)
    new.multiple_results = True

    def batch(args: Any, dims: Any, *, traced: Any, **_: Any) -> Any:
        out = jax.vmap(jex_core.jaxpr_as_fun(traced), in_axes=tuple(dims))(*args)
        return out, [0] * len(out)

    def differentiate(primals: Any, tangents: Any, *, traced: Any, **_: Any) -> Any:
        given = tuple(ad.instantiate_zeros(tangent) for tangent in tangents)
        return jax.jvp(jex_core.jaxpr_as_fun(traced), tuple(primals), given)

    def run(*args: Any, traced: Any, **_: Any) -> list[Any]:
        return jex_core.jaxpr_as_fun(traced)(*args)

    new.def_impl(run)
    mlir.register_lowering(new, mlir.lower_fun(run, multiple_results=True))
    new.def_abstract_eval(lambda *_, traced, **__: list(traced.out_avals))
    batching.primitive_batchers[new] = batch
    ad.primitive_jvps[new] = differentiate
    return new


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
    """`by_platform` for functions of trees of arrays, of which a CPU has its own.

    Where a CPU is the default, its function alone is traced: the other one takes as long.
    """
    flat, structure = jax.tree.flatten(args)

    def first(*flat: Any) -> Any:
        return default(*jax.tree.unflatten(structure, flat))

    def own(*flat: Any) -> Any:
        return cpu(*jax.tree.unflatten(structure, flat))

    def others(*flat: Any) -> list[Any]:
        return jax.tree.leaves(first(*flat))

    if jax.default_backend() != "cpu":
        return by_platform(program(first, *flat), {"cpu": own}, *flat)
    traced, shapes = program(own, *flat)
    kernels = (("cpu", jex_core.jaxpr_as_fun(traced)),)
    out = PRIMITIVE.bind(*flat, default=others, own=kernels, traced=traced, split=False)
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


PRIMITIVE = primitive("jaxcomp_by_platform")


def by_platform(
    default: Any, own: dict[str, Callable[..., Any]], *args: jax.Array, split: bool = False
) -> Any:
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
        split: whether XLA may split own functions over devices.
    """
    jaxpr, shapes = default
    flat = tuple(
        (platform, lambda *args, f=f: jax.tree.leaves(f(*args))) for platform, f in own.items()
    )
    run = jex_core.jaxpr_as_fun(jaxpr)
    out = PRIMITIVE.bind(*args, default=run, own=flat, traced=jaxpr, split=split)
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


def collective(
    default: Callable[..., Any], x: jax.Array, own: Mapping[str, Callable[..., Any]]
) -> jax.Array:
    """`own[platform](x)`, or `default(x)` on other platforms, for collectives over devices.

    `jax.lax.platform_dependent` makes a conditional of one branch, which XLA does not always
    remove, and nothing runs beside a collective inside of it.
    """
    traced = {name: jex_core.jaxpr_as_fun(jax.make_jaxpr(f)(x)) for name, f in own.items()}
    return by_platform(program(default, x), traced, x, split=True)


def program(function: Callable[..., Any], *args: jax.Array) -> tuple[Any, Any]:
    """The program of a function, and the shapes of its results."""
    return jax.make_jaxpr(function, return_shape=True)(*args)


def _run(*args: jax.Array, default: Any, own: Any, **_: Any) -> list[jax.Array]:
    """Runs eagerly, on the device of the arrays."""
    devices = set().union(*(x.devices() for x in args))
    if len(devices) > 1:
        return default(*args)
    (device,) = devices
    platform = getattr(device.client, "_raw_platform", device.platform)  # "cuda", "rocm".
    return dict(own).get(platform, default)(*args)


def _batch(args: Any, dims: Any, *, default: Any, own: Any, traced: Any, split: bool) -> Any:
    del traced

    def batch(f):
        return jax.vmap(f, in_axes=tuple(dims))  # None where an argument is not mapped.

    kernels = {platform: batch(f) for platform, f in own if platform != "cpu"}
    out = by_platform(program(batch(default), *args), kernels, *args, split=split)
    return out, [0] * len(out)


def _lowering(platform: str) -> Callable[..., Any]:
    def rule(ctx: Any, *args: Any, default: Any, own: Any, split: bool, **_: Any) -> Any:
        run = dict(own).get(platform, default) if split or _all_local(ctx) else default
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
batching.primitive_batchers[PRIMITIVE] = _batch
for _platform in ("cpu", "cuda", "tpu"):
    mlir.register_lowering(PRIMITIVE, _lowering(_platform), platform=_platform)
