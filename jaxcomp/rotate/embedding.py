"""Embeddings in a frame: more coordinates than elements, and none of them large.

The frame is `S`, the kept elements of each block of `D H z / √block`, so `S Sᵀ = 1`. Of all `z`
with `S z = x`, `Sᵀ x` (a rotation) is the shortest, and near-democratic: its largest coordinate is
about `√(2 log block)` times the root of the mean square. A democratic one has no such factor.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float32, UInt32

from jaxcomp.numerics import exact
from jaxcomp.quantize import totals
from jaxcomp.rotate import hadamard, reference
from jaxcomp.rotate.reference import Seeds
from jaxcomp.types import Array

_LIMIT = 0.8
"""The clip of the first step, in units of `‖x‖ / √block`."""

_DECAY = 0.7
"""The factor by which each step lowers the clip."""

_STEPS = 8
"""Steps that clip; further ones gain almost nothing."""

_GOLDEN_RATIO = 0.6180339887


def slots(real: int, block: int) -> np.ndarray:
    """The positions of the `real` elements in a block of the transform, spread pseudo-randomly.

    Kept side by side, their frame has too much structure: of twice as many coordinates as elements
    each would come twice, and nothing could be gained.

    Args:
        real: how many elements, at most the block.
        block: slots in a block, a power of two.

    Example:
        >>> slots(5, 8)
        array([0, 5, 2, 7, 4])
    """
    _check_real(real, block)
    # An odd stride, so that no slot occurs twice.
    return np.arange(real) * (int(_GOLDEN_RATIO * block) | 1) % block


def democratic(
    x: Float32[Array, "n size"],
    high: UInt32[Array, " n"],
    low: UInt32[Array, " n"],
    real: int,
    block: int,
    kept: np.ndarray | None = None,
) -> Float32[Array, "n size"]:
    """Coordinates `z` of `x`, `S z = x` up to rounding, whose largest is as small as may be.

    By the loop of Lyubarskii and Vershynin: `b = clip(Sᵀ v, ±T)`, `z += b`, `v -= S b`, from
    `v = x` on, with a lower `T` at each step; what remains of `v` at the end is embedded as it is.

    Args:
        x: the buckets, of whole blocks, zero wherever no element is kept.
        high: the first seed word of each bucket.
        low: the second. `hadamard.unrotate` with these seeds, divided by √block, is `S`.
        real: elements that are kept in a block.
        block: coordinates of a block, a power of two.
        kept: where in a block they are, as `slots` says; None for the first ones.

    Returns:
        The coordinates. A block that is not finite is so in each of its coordinates.

    Raises:
        ValueError: for another block, if `x` is not of whole ones, or if the elements kept are not
            as many as `real`.

    Example:
        >>> from jaxcomp.numerics import noise
        >>> high, low = noise.seeds(noise.raw(7), jnp.uint32(0), 1)
        >>> x = jnp.zeros((1, 64)).at[0, slots(40, 64)].set(jnp.arange(40.0))
        >>> z = democratic(x, high, low, 40, 64, slots(40, 64))
        >>> near = hadamard.rotate(x, high, low, 64) / 8
        >>> bool(jnp.abs(z).max() < 0.8 * jnp.abs(near).max())
        True

    Note:
        The papers' limits and numbers of steps, which their proofs need, clip next to nothing in
        blocks of this size with fewer than one and a half coordinates per element; those here were
        found by trying. The papers drop what remains at the end; here nothing is lost.

    References:
        Lyubarskii and Vershynin, `Uncertainty principles and vector quantization
        <https://arxiv.org/abs/math/0611343>`_, 2006. Saha, Pilanci and Goldsmith, `Efficient
        randomized subspace embeddings for distributed optimization under a communication budget
        <https://arxiv.org/abs/2103.07578>`_, 2021.
    """
    hadamard.check(x, block)
    _check_real(real, block)
    mask = np.zeros(block, bool)
    mask[np.arange(real) if kept is None else kept] = True
    if mask.sum() != real:
        raise ValueError(f"`kept` must name `real` slots, {real}, got {mask.sum()}")
    return _democratic(x, high, low, mask, block)


def _check_real(real: int, block: int) -> None:
    if not 1 <= real <= block:
        raise ValueError(f"`real` must be from 1 to the block, {block}, got {real}")


@functools.partial(jax.jit, static_argnums=4)
def _democratic(x: Array, high: Array, low: Array, mask: Array, block: int) -> Array:
    blocks, seeds = x.reshape(-1, block), hadamard.block_seeds(x, high, low, block)
    found = reference.over_blocks(lambda part, own: _embed(part, own, mask), blocks, seeds)
    return found.reshape(x.shape)


def _embed(x: Float32[Array, "rows block"], seeds: Seeds, mask: Array) -> Array:
    # No product here feeds a sum, which a compiler might fuse or not: in units in which the
    # transform needs no factor, `v` is block times too large, and `z` √block times. A step that
    # clips at infinity takes the whole remainder.
    block = x.shape[1]

    def step(turn, carry):
        v, z, limit = carry
        u = reference.butterflies(reference.flip(v, seeds)) * jnp.float32(1 / block)
        b = jnp.clip(u, -limit, limit)
        v = v - jnp.where(mask[None], reference.butterflies(b, seeds), 0)
        limit = jnp.where(turn == _STEPS - 1, jnp.inf, limit * jnp.float32(_DECAY))
        return v, z + b, limit

    # A power of two that scales the largest element close to 1, and its reciprocal.
    top = totals.max_abs(x)
    power = jnp.clip(253 - (lax.bitcast_convert_type(top, jnp.int32) >> 23), 1, 252)
    down, up = (lax.bitcast_convert_type(e << 23, jnp.float32) for e in (power, 254 - power))
    v = x * down
    quarter = v * jnp.float32(0.25)
    length = exact.sqrt(totals.total(quarter * quarter))
    start = v * jnp.float32(block), jnp.zeros_like(x), length * jnp.float32(4 * _LIMIT)
    _, z, _ = lax.fori_loop(0, _STEPS + 1, step, start)
    z = z * (up * jnp.float32(block**-0.5))
    # Coordinates may be larger than the elements; those of the largest floats stay finite.
    largest = jnp.finfo(jnp.float32).max
    return jnp.where(totals.is_finite(top), jnp.clip(z, -largest, largest), z)
