"""The fast Walsh-Hadamard transform of blocks, and the random signs that make it a rotation.

The transform adds and subtracts, in one order: that of the butterfly network with the largest
stride first. So its result has the same bits on every platform, fused with whatever comes before
and after, under `jit`, `vmap` and eagerly (numbers below the normal ones aside, which a CPU counts
as zero). It is not normalised: its entries are ±1, and dividing by √block is left to the caller,
who may know a better place for it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float32, UInt32

from jaxcomp.backend import axes, platforms
from jaxcomp.rotate import gpu, reference, tpu
from jaxcomp.types import Array

LARGEST = 2**15
"""The largest block."""

_PARTS = {"reference": reference, "gpu": gpu, "tpu": tpu}


def transform(x: Float32[Array, "n size"], block: int) -> Float32[Array, "n size"]:
    """`H x` of each block, where `H[i, j] = -1` to the number of bits that `i` and `j` share.

    It is symmetric, so it is its own adjoint, and its own inverse times the block. An element that
    is not finite leaves no element of its block finite.

    Args:
        x: the buckets, of whole blocks.
        block: consecutive elements that are transformed together, a power of two.

    Raises:
        ValueError: for another block, or if `x` is not of whole ones.

    Example:
        >>> transform(jnp.array([[1.0, 2.0, 3.0, 4.0]]), 4)
        Array([[10., -2., -4.,  0.]], dtype=float32)
    """
    check(x, block)
    return _transform(x, block)


def rotate(
    x: Float32[Array, "n size"],
    high: UInt32[Array, " n"],
    low: UInt32[Array, " n"],
    block: int,
    *,
    down: int | float = 1,
    up: int | float = 1,
    implementation: str | None = None,
) -> Float32[Array, "n size"]:
    """`H D x` of each block, where `D` are random signs.

    Args:
        x: the buckets, of whole blocks.
        high: the first seed word of each bucket, as from `noise.seeds`.
        low: the second. Noise that must be independent of the signs needs other seeds.
        block: consecutive elements that are rotated together, a power of two.
        down: a factor of the elements, a power of two, so that no product rounds.
        up: a factor of the rotated elements, another power of two.
        implementation: one of `compiler.IMPLEMENTATIONS`; None for the platform's own, which is the
            reference wherever a kernel cannot hold a block. All give the same bits.

    Returns:
        The rotated buckets, √block times as long if `down` and `up` are 1.

    Raises:
        ValueError: for another block, if `x` is not of whole ones, for another implementation, or
            blocks that a forced kernel cannot hold.

    Example:
        >>> from jaxcomp.numerics import noise
        >>> high, low = noise.seeds(noise.raw(7), jnp.uint32(0), 1)
        >>> rotate(jnp.array([[0.0, 8.0, 0.0, 0.0]]), high, low, 4)
        Array([[ 8., -8.,  8., -8.]], dtype=float32)
    """
    check(x, block)
    return _run("rotate", x, high, low, block, down, up, implementation)


def unrotate(
    z: Float32[Array, "n size"],
    high: UInt32[Array, " n"],
    low: UInt32[Array, " n"],
    block: int,
    *,
    down: int | float = 1,
    up: int | float = 1,
    implementation: str | None = None,
) -> Float32[Array, "n size"]:
    """`D H z` of each block: the adjoint of `rotate`, and its inverse times the block.

    Args:
        z: the rotated buckets.
        high: the first seed word of each bucket, as it was rotated with.
        low: the second.
        block: consecutive elements that were rotated together.
        down: a factor of the rotated elements, a power of two.
        up: a factor of the result, another power of two.
        implementation: as for `rotate`.

    Raises:
        ValueError: as `rotate` does.

    Example:
        >>> from jaxcomp.numerics import noise
        >>> high, low = noise.seeds(noise.raw(7), jnp.uint32(0), 1)
        >>> z = rotate(jnp.array([[1.0, 2.0, 3.0, 4.0]]), high, low, 4)
        >>> unrotate(z, high, low, 4) / 4
        Array([[1., 2., 3., 4.]], dtype=float32)
    """
    check(z, block)
    return _run("unrotate", z, high, low, block, down, up, implementation)


def check(x: Array, block: int) -> None:
    """Raises a `ValueError` if these buckets are not of blocks that can be transformed."""
    if not isinstance(block, int) or not 2 <= block <= LARGEST or block & (block - 1):
        raise ValueError(f"`block` must be a power of two from 2 to {LARGEST}, got {block!r}")
    if x.ndim != 2 or x.dtype != jnp.float32 or x.shape[1] % block:
        raise ValueError(
            f"`x` must be float32[n, size], the size a multiple of the block, {block}, "
            f"got {x.dtype}{list(x.shape)}"
        )


# Compiled for eager callers too: otherwise a CPU's loop would be compiled again at each call.
_transform = jax.jit(reference.transform, static_argnums=1)


@functools.partial(jax.jit, static_argnums=(0, 4, 5, 6, 7))
def _run(
    work: str,
    x: Array,
    high: Array,
    low: Array,
    block: int,
    down: int | float,
    up: int | float,
    implementation: str | None,
) -> Array:
    if x.size == 0:
        return x  # The grid of a kernel would be empty.

    def run(name: str) -> Callable[..., Any]:
        rotated = platforms.implementation(name, _PARTS, work, block)
        return lambda blocks, *seeds: rotated(blocks, reference.Seeds(*seeds), down, up)

    # All implementations return the same type of replication.
    args = axes.match_vma(x.reshape(-1, block), *block_seeds(x, high, low, block))
    if implementation is not None:
        return run(implementation)(*args).reshape(x.shape)
    found = platforms.by_platform(
        platforms.program(run("reference"), *args), platforms.kernels(run), *args
    )
    return found.reshape(x.shape)


def block_seeds(
    x: Float32[Array, "n size"], high: Array, low: Array, block: int
) -> reference.Seeds:
    """The seeds of each block of the buckets `x`, from those of each bucket."""
    n, count = x.shape[0], x.shape[1] // block
    begin = lax.broadcasted_iota(jnp.uint32, (n, count), 1) * jnp.uint32(block)
    high, low = (jnp.broadcast_to(word[:, None], (n, count)) for word in (high, low))
    return reference.Seeds(high.reshape(-1, 1), low.reshape(-1, 1), begin.reshape(-1, 1))
