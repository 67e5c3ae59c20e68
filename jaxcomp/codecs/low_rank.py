"""Low-rank approximation of a leaf: its matrix shape, and the algebra of the factors.

Factors are stored as rows, `left: [n, rank, rows]` and `right: [n, rank, cols]`, because a TPU pads
a short last axis to 128 lanes.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float

from jaxcomp import checks
from jaxcomp.base import Codec, Facts
from jaxcomp.layout import stacking
from jaxcomp.layout.trees import Layout
from jaxcomp.numerics import addition, noise, orthonormal
from jaxcomp.types import Array, ArrayLike, Key

_START = np.array([0x4C6F7752, 0x616E6B], np.uint32)
"""The key of the first factors: a constant, since all workers must start alike."""

_DOWN = 2.0**-12
"""A power of two that scales all matrices, so that sums of the largest floats do not overflow."""

_EXACT = lax.Precision.HIGHEST
"""By default, GPUs and TPUs round the factors of a float32 product to ten or seven bits."""


class LowRankPayload(NamedTuple):
    """Both factors of every matrix: `[buckets, stack, rank, rows]`, `[buckets, stack, rank, cols]`.

    Attributes:
        left: orthonormal rows, or zero rows if the matrix has a lower rank.
        right: the projection of the matrix on them.
    """

    left: Array
    right: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRank(Codec, public=("factors", "matrices")):
    """Approximates a leaf by the product of two thin matrices, by one step of power iteration.

    `P = orth(M Q)`, `Qᵀ = Pᵀ M`, decoded to `P Qᵀ`; the next step starts from this `Q`. Used alone,
    each worker computes its own factors. In `PowerIteration`, all workers compute one `P` and one
    `Q` together, and this codec decides which leaves are compressed.

    A leaf of shape `(a, b, …, z)` is one matrix: its axes are split, in order, into rows and
    columns such that `rows + cols` is smallest. A convolution `(3, 3, 64, 128)` is `576 × 128`, an
    attention kernel `(512, 8, 64)` is `512 × 512`.

    Args:
        rank: the columns of a factor, limited to the rows and columns of the matrix.
        stacked_axes: the number of leading axes that index layers or experts, as in
            `flax.linen.scan`; each index has a separate matrix. Means warn of leaves that look
            stacked, and `describe` names them.
        min_ratio: the smallest compression ratio, with factors in 32-bit floats, at which a leaf is
            compressed; other leaves stay dense.
        matrix: set by the policy, which sees the leaf: `(stack, rows, cols)`.

    Raises:
        ValueError: for an argument out of range, or if `encode` is called without a `matrix`.

    Example:
        >>> import jaxcomp
        >>> x = jnp.outer(jnp.arange(40.0), jnp.arange(64.0))
        >>> bool(jnp.allclose(jaxcomp.roundtrip(LowRank(rank=1), 0, x), x, rtol=1e-5))
        True
    """

    rank: int
    stacked_axes: int = 0
    min_ratio: int | float = 2.0
    matrix: tuple[int, int, int] | None = None
    bucket_size = None
    unbiased = False
    facts = Facts(shaped=True)

    def __post_init__(self):
        checks.integer("rank", self.rank, 1)
        checks.integer("stacked_axes", self.stacked_axes, 0)
        checks.number("min_ratio", self.min_ratio, 0.0)

    def for_leaf(
        self, shape: tuple[int, ...], dtype: Any, stacked: int = 0
    ) -> "tuple[LowRank | None, str | None]":
        """The codec for a leaf of this shape, or None and the reason to leave it dense."""
        axes = max(stacked, self.stacked_axes)
        layers, inner = shape[:axes], shape[axes:]
        if len(inner) < 2:
            beside = f" beside {len(layers)} stacked axes" if layers else ""
            return None, f"{len(inner)}-D{beside}, no matrix"
        rows, cols = min(
            ((math.prod(inner[:i]), math.prod(inner[i:])) for i in range(1, len(inner))), key=sum
        )
        rank = min(self.rank, rows, cols)
        if rank == 0 or 0 in layers:
            return None, "empty"
        factors = rank * (rows + cols) * addition.wide(dtype).itemsize
        ratio = rows * cols * jnp.dtype(dtype).itemsize / factors
        if ratio < self.min_ratio:
            return None, f"factors {ratio:.2g}x smaller, below min_ratio={self.min_ratio:g}"
        matrix = (math.prod(layers), rows, cols)
        return LowRank(rank=rank, min_ratio=self.min_ratio, matrix=matrix), None

    def init(self, like: ArrayLike) -> Float[Array, "n rank cols"]:
        """The initial right factors: a hash of the position, the same on all workers."""
        return start(self.factors(like)[1])

    def factors(self, like: ArrayLike) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Shape and dtype of the left and the right factors of a batch like this."""
        stack, rows, cols = self._matrix_shape
        n, dtype = like.shape[0] * stack, addition.wide(like.dtype)
        left, right = (jax.ShapeDtypeStruct((n, self.rank, size), dtype) for size in (rows, cols))
        return left, right

    def matrices(self, x: Array) -> Float[Array, "n rows cols"]:
        """The matrices of a batch divided by 2¹², in the dtype of the arithmetic."""
        _, rows, cols = self._matrix_shape
        wide = addition.wide(x.dtype)
        return (x.astype(wide) * jnp.asarray(_DOWN, wide)).reshape(-1, rows, cols)

    def encode(self, key: Key, x: Array, count: Array, state: Array) -> tuple[LowRankPayload, Any]:
        del key, count
        matrices = self.matrices(x)
        (left,) = orthonormal.orthonormal([left_of(matrices, state)])
        right = right_of(matrices, left)
        shape = (x.shape[0], self._matrix_shape[0], self.rank, -1)
        payload = LowRankPayload(left.reshape(shape), right.reshape(shape))
        return payload, orthonormal.refresh([right], [state])[0]

    def decode(self, key: Key, payload: LowRankPayload, like: ArrayLike, side: Any = None) -> Array:
        del key, side
        flat = [part.reshape(-1, *part.shape[2:]) for part in payload]
        return product(flat[0], flat[1], like)

    @property
    def _matrix_shape(self) -> tuple[int, int, int]:
        if self.matrix is None:
            raise ValueError(
                "`matrix` must be set, which a Policy does when it sees the leaf: use LowRank in a "
                "Policy, a Link, a reducer or jaxcomp.encode, and not inside another codec, got "
                f"{self!r}"
            )
        return self.matrix


def merged_layers(layout: Layout) -> tuple[str, ...]:
    """A hint for each likely stack of layers of which a leaf is taken for one matrix."""
    whole = {
        leaf: codec.rank
        for leaf, codec in enumerate(layout.codecs)
        if isinstance(codec, LowRank) and codec.matrix is not None and codec.matrix[0] == 1
    }
    hints = []
    for stack in stacking.stacks(layout) if whole else ():
        merged = {leaf: whole[leaf] for leaf in stack.leaves if leaf in whole}
        if not merged:
            continue
        some = ", ".join(
            f"'{layout.paths[leaf]}' {list(layout.likes[leaf].shape)}" for leaf in list(merged)[:4]
        )
        more = f" and {len(merged) - 4} more" if len(merged) > 4 else ""
        hints.append(
            f"{stack.glob!r} looks like {stack.length} stacked layers or experts, but low rank "
            f"takes each leaf for one matrix, vectors of the layers too: {some}{more}. Separate "
            f"matrices have rules=(jaxcomp.Rule({stack.glob!r}, jaxcomp.codecs.LowRank("
            f"rank={max(merged.values())}, stacked_axes=1)),)"
        )
    return tuple(hints)


@functools.partial(jax.jit, static_argnums=0)
def start(like: ArrayLike) -> Float[Array, "n rank size"]:
    """Pseudo-random factors of length one: a hash of the position."""
    n, rank, size = like.shape
    word = noise.at(*noise.rows(jnp.asarray(_START), jnp.uint32(0), (n * rank, size)))
    values = lax.bitcast_convert_type(word, jnp.int32).astype(like.dtype)
    return orthonormal.unit(values.reshape(like.shape))


def left_of(
    matrices: Float[Array, "n rows cols"], right: Float[Array, "n rank cols"]
) -> Float[Array, "n rank rows"]:
    """`(M Q)ᵀ`."""
    return _dots(right, matrices, (1, 1))


def right_of(
    matrices: Float[Array, "n rows cols"], left: Float[Array, "n rank rows"]
) -> Float[Array, "n rank cols"]:
    """`Pᵀ M`."""
    return _dots(left, matrices, (1, 0))


def product(
    left: Float[Array, "n rank rows"], right: Float[Array, "n rank cols"], like: ArrayLike
) -> Array:
    """`P Qᵀ · 2¹²` in the shape and dtype of `like`; finite values stay finite."""
    whole = _dots(left, right, (0, 0)).reshape(like.shape)
    largest = min(float(jnp.finfo(dtype).max) for dtype in (like.dtype, whole.dtype)) * _DOWN
    whole = jnp.where(jnp.isfinite(whole), jnp.clip(whole, -largest, largest), whole)
    return (whole * jnp.asarray(1 / _DOWN, whole.dtype)).astype(like.dtype)


def _dots(a: Array, b: Array, over: tuple[int, int]) -> Array:
    """The product of each pair of matrices over one axis of each, without a transpose."""
    if a.shape[0] == 1:  # A CPU uses all threads for a product, but not for a batch of one.
        only = (((over[0],), (over[1],)), ((), ()))
        return lax.dot_general(a[0], b[0], only, precision=_EXACT)[None]
    pairs = (((over[0] + 1,), (over[1] + 1,)), ((0,), (0,)))
    return lax.dot_general(a, b, pairs, precision=_EXACT)
