"""Dispatch to an implementation: the platform's own if it can do the work, unless one is forced.

All give the same bits. `None` leaves the choice to the platform that the program is lowered for: to
quantise and pack, and to decode and sum, a GPU (CUDA) or TPU takes its fused kernel for buckets
that the kernel can hold; everything else takes the reference, which XLA compiles. Where a mesh axis
is not manual, XLA may have to split the work over devices, and takes the reference too. A name
forces one, and raises where that one cannot work.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float32, UInt32

from jaxcomp.backend import axes, platforms
from jaxcomp.bits import gpu, reference, tpu
from jaxcomp.bits.grid import Grid
from jaxcomp.bits.planes import Bits, planes, words
from jaxcomp.types import Array, ArrayLike

IMPLEMENTATIONS = platforms.IMPLEMENTATIONS
_PARTS = {"reference": reference, "gpu": gpu, "tpu": tpu}


def pack(
    codes: UInt32[Array, "n size"], *, bits: Bits, implementation: str | None = None
) -> UInt32[Array, "n words"]:
    """Codes below `2**bits` (below 3 for `bits=1.6`), one bucket per row, as words.

    Args:
        codes: `uint32[n, size]`.
        bits: width of a code, an integer from 1 to 32 (1 to 8 in a kernel), or 1.6.
        implementation: one of `IMPLEMENTATIONS`; None for the reference on every platform, since
            XLA fuses it with whatever makes the codes.

    Raises:
        ValueError: for another width or implementation, or buckets that a kernel cannot hold.

    Example:
        >>> pack(jnp.arange(8, dtype=jnp.uint32)[None], bits=4)
        Array([[1985229328]], dtype=uint32)
    """
    planes(bits)
    run = _one("pack", implementation, bits, codes.shape[1], codes.dtype)
    return run(codes, bits=bits)


def unpack(
    packed: UInt32[Array, "n words"], *, bits: Bits, size: int, implementation: str | None = None
) -> UInt32[Array, "n size"]:
    """The first `size` codes of each row of words: the inverse of `pack`.

    Args:
        packed: `uint32[n, words]`.
        bits: as given to `pack`.
        size: codes in a bucket.
        implementation: as for `pack`.

    Raises:
        ValueError: for another width or implementation, a wrong number of words, or buckets that a
            kernel cannot hold.

    Example:
        >>> unpack(jnp.array([[0x76543210]], jnp.uint32), bits=4, size=5)
        Array([[0, 1, 2, 3, 4]], dtype=uint32)
    """
    if packed.shape[1] != words(size, bits):
        raise ValueError(
            f"`packed` must have {words(size, bits)} words a row for {size} codes of {bits} "
            f"bits, got shape {packed.shape}"
        )
    run = _one("unpack", implementation, bits, size, jnp.uint32)
    return run(packed, bits=bits, size=size)


def encode(
    grid: Grid,
    x: Array,
    count: Array,
    key: UInt32[Array, "2"],
    first: Array,
    scale: Float32[Array, " n"] | None = None,
    *,
    implementation: str | None = None,
) -> tuple[UInt32[Array, "n words"], Float32[Array, " n"]]:
    """Quantises and packs in one pass: returns the words and the step of each bucket.

    Args:
        grid: how a bucket gets its step, and an element its code.
        x: `[n, size]`, zero-padded.
        count: `[n]`, the real elements of each bucket.
        key: the key of the dither.
        first: the number of bucket 0, for the dither.
        scale: `[n]`, in place of the bucket's own; None for its own.
        implementation: one of `IMPLEMENTATIONS`; None for the platform's own.

    Raises:
        ValueError: for another implementation, or buckets that a forced kernel cannot hold.
    """
    given = () if scale is None else (scale,)

    def run(name: str) -> Callable[..., Any]:
        return functools.partial(_one("encode", name, grid.bits, x.shape[1], x.dtype), grid)

    number = jnp.asarray(first).astype(jnp.uint32)
    # Of one type of replication, so that all implementations return the same types.
    args = axes.match_vma(*map(jnp.asarray, (x, count, key, number, *given)))
    if implementation is not None:
        return run(implementation)(*args)
    # Traced here, so that the stack has one frame less at the first arithmetic.
    default = jax.make_jaxpr(run("reference"), return_shape=True)(*args)
    return platforms.by_platform(default, platforms.kernels(run), *args)


def encode_fitted(
    grid: Grid,
    reference: Callable[..., Any],
    x: Array,
    count: Array,
    key: UInt32[Array, "2"],
    first: Array,
) -> tuple[UInt32[Array, "n words"], tuple[Float32[Array, " n"]]]:
    """`encode` with a step that is fitted to the codes: one pass on a GPU, else the reference.

    Args:
        grid: as for `encode`; its `fitted` gives the step that is sent.
        reference: `reference(x, count, key, first)` returns the same bits.
        x: as for `encode`, as all that follow.
        count: the real elements of each bucket.
        key: the key of the dither.
        first: the number of bucket 0.
    """
    number = jnp.asarray(first).astype(jnp.uint32)
    args = axes.match_vma(*map(jnp.asarray, (x, count, key, number)))
    refused = gpu.refuses(grid.bits, x.shape[1], x.dtype) or not gpu.folds(x.shape[1], grid.bits)
    own = {} if refused else {"cuda": functools.partial(gpu.encode, grid)}
    words, step = platforms.by_platform(
        platforms.program(lambda *args: jax.tree.leaves(reference(*args)), *args), own, *args
    )
    return words, (step,)


def decode_sum(
    grid: Grid,
    packed: UInt32[Array, "workers n words"],
    steps: Float32[Array, "workers n"],
    like: ArrayLike,
    *,
    implementation: str | None = None,
) -> Array:
    """Unpacks, scales and accumulates the payloads of all workers, in their order.

    Args:
        grid: the values of the codes.
        packed: the words of each worker.
        steps: the steps of each worker's buckets.
        like: shape `[n, size]` and dtype of the result; the sum is taken in float32, or in float64
            for float64.
        implementation: as for `encode`.

    Raises:
        ValueError: for another implementation, or buckets that a forced kernel cannot hold.
    """
    like = jax.ShapeDtypeStruct(like.shape, like.dtype)

    def run(name: str) -> Callable[..., Any]:
        work = _one("decode_sum", name, grid.bits, like.shape[1], like.dtype)
        return lambda packed, steps: work(grid, packed, steps, like)

    args = axes.match_vma(*map(jnp.asarray, (packed, steps)))
    if implementation is not None:
        return run(implementation)(*args)
    return platforms.by_platform(
        platforms.program(run("reference"), *args), platforms.kernels(run), *args
    )


def _one(
    work: str, implementation: str | None, bits: Bits, size: int, dtype: Any
) -> Callable[..., Any]:
    """Calls one implementation of an operation, or raises if it cannot process the input."""
    return platforms.implementation(implementation, _PARTS, work, bits, size, dtype)
