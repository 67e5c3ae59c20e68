"""Sparsifiers by their names in the literature."""

from jaxcomp.codecs.sparsifier import TopK


def top_k(fraction: float = 0.01, bucket_size: int | None = None) -> TopK:
    """The largest elements as they are, and their places.

    Keeps `k = ⌈fraction · n⌉` elements: a contraction with `δ ≥ k/n`. Biased: use a residual.

    Args:
        fraction: share of the elements that is sent, in (0, 1].
        bucket_size: elements among which to choose; None for the whole leaf.

    Raises:
        ValueError: for a fraction outside (0, 1] or a bucket size that is not positive.

    Example:
        >>> import jaxcomp, jax.numpy as jnp
        >>> jaxcomp.roundtrip(top_k(fraction=0.5), 0, jnp.array([1.0, -3.0, 0.5, 2.0]))
        Array([ 0., -3.,  0.,  2.], dtype=float32)

    References:
        Aji and Heafield, `Sparse communication for distributed gradient descent
        <https://arxiv.org/abs/1704.05021>`_, 2017; Stich et al., `Sparsified SGD with memory
        <https://arxiv.org/abs/1809.07599>`_, 2018.

    Note:
        Places cost `⌈log₂ size⌉` bits each, not 32.
    """
    return TopK(fraction=fraction, bucket_size=bucket_size)
