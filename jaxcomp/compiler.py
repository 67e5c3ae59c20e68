"""What must be said to the compiler, kept in one place because it is not part of JAX's promise."""

import functools
from collections.abc import Callable
from typing import Any

import jax
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
        return jax.lax.platform_dependent(*args, cpu=separate, default=f)

    return call
