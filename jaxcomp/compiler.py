"""What must be said to the compiler, kept in one place because it is not part of JAX's promise."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import core
from jax.experimental.xla_metadata import set_xla_metadata


def outlined(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` compiled once, as a function of its own.

    XLA fuses a cheap producer into each of its consumers. A decoder whose result is sliced into a
    hundred leaves would be compiled a hundred times, together with whatever consumes each leaf.
    On a CPU, where compiling is slow and a call is free, it becomes a function in the program;
    other platforms get `f` as it is.
    """

    def separate(*args: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            return jax.jit(f, inline=False)(*args)

    @functools.wraps(f)
    def call(*args: Any) -> Any:
        if not any(isinstance(leaf, core.Tracer) for leaf in jax.tree.leaves(args)):
            return f(*args)  # Run eagerly, there is nothing to compile.
        return jax.lax.platform_dependent(*args, cpu=separate, default=f)

    return call


def cut(flat: jax.Array, begins: Sequence[int], lengths: Sequence[int]) -> list[jax.Array]:
    """The parts of a non-empty vector from each `begin`, each of its length.

    Kernels that differ in nothing but a constant are compiled once if the constant is an argument,
    and a constant that the compiler can see it puts into the kernel. So on a CPU the places are
    hidden from it: cutting a batch into fifty leaves of two shapes is two kernels, not fifty.
    """

    def places(zero):
        return tuple(zero + begin for begin in begins)

    def known(zero):
        return places(jnp.zeros_like(zero))

    if not isinstance(flat, core.Tracer):
        return [flat[begin : begin + length] for begin, length in zip(begins, lengths, strict=True)]
    # Zero for every value, which the compiler cannot know.
    zero = jnp.minimum(flat[0].astype(jnp.int32) & 1, 0)
    offsets = jax.lax.platform_dependent(zero, cpu=outlined(places), default=known)
    return [
        jax.lax.dynamic_slice(flat, (offset,), (length,))
        for offset, length in zip(offsets, lengths, strict=True)
    ]
