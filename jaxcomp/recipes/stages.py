"""Compression in several stages."""

from jaxcomp import checks
from jaxcomp.base import Codec
from jaxcomp.codecs.combinators import Chained
from jaxcomp.codecs.staged import Staged


def msc(codec: Codec, stages: int) -> Chained | Staged:
    """Multi-stage compression: each stage encodes what those before it missed.

    `x̂ = Σᵣ x̂ᵣ`, `x̂ᵣ = C(x − x̂₁ − … − x̂ᵣ₋₁)`. A contraction of `δ` becomes one of
    `1 − (1 − δ)^R`; an unbiased codec of variance `ω` is scaled so that it stays unbiased, with
    variance `q^R/(1 − q^R)`, `q = ω/(1 + ω)`.

    Args:
        codec: of each stage; the payload is `stages` times its.
        stages: `R`, at least 1.

    Raises:
        ValueError: for fewer stages than one, or an unbiased codec of unknown variance.

    Example:
        >>> import jaxcomp, jax.numpy as jnp
        >>> jaxcomp.roundtrip(msc(jaxcomp.top_k(0.25), 2), 0, jnp.array([1.0, -4.0, 3.0, 2.0]))
        Array([ 0., -4.,  3.,  0.], dtype=float32)

    References:
        Huang et al., `Lower bounds and nearly optimal algorithms in distributed learning with
        communication compression <https://arxiv.org/abs/2206.03665>`_, 2022.

    Note:
        Of top-k, `R` stages are top-`R·k`: use one with a larger fraction. Stages pay for signs,
        random places, low rank and quantisers of few levels.
    """
    checks.integer("stages", stages, 1)
    if codec.unbiased:
        return Staged(codec=codec, stages=stages)
    return Chained(codecs=(codec,) * stages)
