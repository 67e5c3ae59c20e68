"""Compression in several stages."""

from jaxcomp import checks
from jaxcomp.base import Codec
from jaxcomp.codecs.combinators import Chained
from jaxcomp.codecs.staged import Staged


def msc(codec: Codec, stages: int) -> Chained | Staged:
    """Multi-stage compression: each stage encodes the remaining error of the stages before it.

    `x̂ = Σᵣ x̂ᵣ`, `x̂ᵣ = C(x − x̂₁ − … − x̂ᵣ₋₁)`. A contraction with `δ` becomes one with
    `1 − (1 − δ)^R`. An unbiased codec of variance `ω` is scaled so that the sum stays unbiased,
    with variance `q^R/(1 − q^R)`, `q = ω/(1 + ω)`.

    Args:
        codec: the codec of each stage; the payload has `stages` times its size.
        stages: `R`, at least 1.

    Raises:
        ValueError: for fewer than one stage, or an unbiased codec of unknown variance.

    Example:
        >>> import jaxcomp, jax.numpy as jnp
        >>> jaxcomp.roundtrip(msc(jaxcomp.top_k(0.25), 2), 0, jnp.array([1.0, -4.0, 3.0, 2.0]))
        Array([ 0., -4.,  3.,  0.], dtype=float32)

    References:
        Huang et al., `Lower bounds and nearly optimal algorithms in distributed learning with
        communication compression <https://arxiv.org/abs/2206.03665>`_, 2022.

    Note:
        `R` stages of top-k equal top-`R·k`: use one stage with a larger fraction. Stages are useful
        for signs, random indices, low rank and quantisers of few levels.
    """
    checks.integer("stages", stages, 1)
    checks.part("codec", codec, Codec)
    if codec.unbiased:
        return Staged(codec=codec, stages=stages)
    return Chained(codecs=(codec,) * stages)
