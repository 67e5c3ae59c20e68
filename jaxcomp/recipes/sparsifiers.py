"""Sparsifiers by their names in the literature."""

from jaxcomp.codecs.sampled import RandomK
from jaxcomp.codecs.sparsifier import Sparsifier
from jaxcomp.protocols import Codec
from jaxcomp.sparsify.choices import AtLeast, Largest
from jaxcomp.sparsify.indices import EliasFano, Indices


def top_k(
    fraction: int | float = 0.01,
    bucket_size: int | None = None,
    *,
    values: Codec | None = None,
    indices: Indices = EliasFano(),
) -> Sparsifier:
    """The largest elements, and their places.

    Keeps the `k = ⌈fraction · n⌉` largest `|x|`, exactly: a contraction with `δ ≥ k/n`. Biased: use
    a residual.

    Args:
        fraction: share of the elements that is sent, in (0, 1].
        bucket_size: elements among which to choose; None for the whole leaf.
        values: a codec for the values, such as `jaxcomp.qsgd_inf(bits=8)`; None for the values as
            they are.
        indices: how places become words: `EliasFano()`, `Packed()`, `Bitmap()` or `Raw()`.

    Raises:
        ValueError: for a fraction outside (0, 1], a bucket size that is not positive, or a codec of
            values that has a state.

    Example:
        >>> import jaxcomp, jax.numpy as jnp
        >>> jaxcomp.roundtrip(top_k(fraction=0.5), 0, jnp.array([1.0, -3.0, 0.5, 2.0]))
        Array([ 0., -3.,  0.,  2.], dtype=float32)

    References:
        Aji and Heafield, `Sparse communication for distributed gradient descent
        <https://arxiv.org/abs/1704.05021>`_, 2017; Stich et al., `Sparsified SGD with memory
        <https://arxiv.org/abs/1809.07599>`_, 2018.

    Note:
        Places cost about `2 + log₂(n/k)` bits each (8.6 at 1 %), not 32.
    """
    return Sparsifier(
        choice=Largest(fraction), values=values, indices=indices, bucket_size=bucket_size
    )


def threshold(
    value: int | float,
    fraction: int | float = 0.1,
    bucket_size: int | None = None,
    *,
    values: Codec | None = None,
    indices: Indices = EliasFano(),
) -> Sparsifier:
    """The elements that reach a fixed threshold, and their places.

    Keeps all `|x| ≥ value`: what is not sent is at most `value` in each element. Biased: use a
    residual, in which small elements add up until they reach it.

    Args:
        value: the threshold, positive.
        fraction: share of the elements that there is room for, in (0, 1]. Payloads have this size
            whatever the gradient; of more elements than fit, a run that begins at random is not
            sent.
        bucket_size: elements that share the room; None for the whole leaf.
        values: a codec for the values; None for the values as they are.
        indices: how places become words.

    Raises:
        ValueError: for a threshold that is not positive, or as for `top_k`.

    Example:
        >>> import jaxcomp, jax.numpy as jnp
        >>> jaxcomp.roundtrip(threshold(1.5, fraction=1.0), 0, jnp.array([1.0, -3.0, 0.5, 2.0]))
        Array([ 0., -3.,  0.,  2.], dtype=float32)

    References:
        Strom, Scalable distributed DNN training using commodity GPU cloud computing, 2015.

    Note:
        The paper sends `±value` for each element; this sends the element.
    """
    return Sparsifier(
        choice=AtLeast(value, fraction), values=values, indices=indices, bucket_size=bucket_size
    )


def random_k(
    fraction: int | float = 0.01, bucket_size: int | None = None, *, unbiased: bool = True
) -> RandomK:
    """Elements that all workers draw alike from the key they share; only values travel.

    `x̂ᵢ = (n/k) xᵢ` for the `k` that are drawn, else 0: relative variance `n/k − 1`. Payloads may be
    summed.

    Args:
        fraction: share of the elements that is sent, in (0, 1].
        bucket_size: elements in a bucket; None for one bucket a leaf.
        unbiased: send values `n/k` times as large; else as they are, a contraction with `δ = k/n`.

    Raises:
        ValueError: for a fraction outside (0, 1] or a bucket size that is not positive.

    Example:
        >>> import jaxcomp, jax.numpy as jnp
        >>> jaxcomp.wire_bytes(random_k(fraction=0.01), jnp.zeros(100_000))
        4000

    References:
        Wangni et al., `Gradient sparsification for communication-efficient distributed optimization
        <https://arxiv.org/abs/1710.09854>`_, 2018; Stich et al., `Sparsified SGD with memory
        <https://arxiv.org/abs/1809.07599>`_, 2018.

    Note:
        One of each group of `w = round(1/fraction)` neighbours, in place of any `k` of all: the
        same variance, and memory is read in order. A bucket with an element that is not finite
        sends NaN, sampled or not.
    """
    return RandomK(fraction=fraction, scaled=unbiased, bucket_size=bucket_size)
