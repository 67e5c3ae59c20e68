"""Codecs that are guided by a guess of their input, or by the parameters that it changes."""

from jaxcomp.base import Codec
from jaxcomp.codecs.modulo import Modulo
from jaxcomp.codecs.rotated import Rotated
from jaxcomp.codecs.sparsifier import Sparsifier
from jaxcomp.sparsify.indices import EliasFano, Indices
from jaxcomp.sparsify.visible import Visible


def wyner_ziv(
    levels: int = 16,
    bucket_size: int | None = 4096,
    *,
    rotated: bool = True,
    private: bool = False,
    distance: float | None = None,
    relative: bool = False,
    blind: bool = False,
) -> Rotated | Modulo:
    """Wyner–Ziv coding: the integers of a fine grid modulo `levels`, completed by a guess.

    The error depends on the distance `Δ` of the guess, and not on the size of the input: with
    shared dither each element has variance `ε²/12` with `ε = 2Δ/(levels − 1)`. A rotation makes the
    largest difference of a bucket smaller, to about `√(2 ln(2d)/d)` of its length. Without a guess
    it is a plain quantizer of unbiased rounding.

    Args:
        levels: the size of the alphabet, 2 to 256: `log₂(levels)` bits per element.
        bucket_size: elements that share a radius, of 32 bits; None for one per leaf.
        rotated: whether to rotate buckets first, and the guesses with them.
        private: True for rounding with dither that the decoder does not know, with steps of
            `2Δ/(levels − 2)` and a mean variance of `ε²/6`.
        distance: `Δ`, if the encoder does not measure it; None sends the smallest that holds.
        relative: whether `distance` is in units of the largest element of a (rotated) bucket.
        blind: whether the encoder does not know the guess, and relies on `distance`. Where the
            promise is broken, elements decode to values that are far off.

    Raises:
        ValueError: for another number of levels, a distance that is not positive, or `blind` or
            `relative` without a distance.

    Example:
        >>> import jaxcomp
        >>> up = jaxcomp.federated.Uplink(wyner_ziv(levels=4), jaxcomp.federated.History())

    References:
        Mayekar, Suresh and Tyagi, `Wyner–Ziv estimators: efficient distributed mean estimation with
        side information <https://arxiv.org/abs/2011.12160>`_, 2021; Liang et al., Wyner–Ziv
        gradient compression for federated learning, 2021, whose body could not be read.

    Note:
        An encoder that knows the guess as well can send the difference, with `jaxcomp.Shift`, at
        the same bits; `docs/federated.md` compares them. Each client has a rotation of its own, and
        blocks of 4,096 are rotated instead of the whole vector.
    """
    codec = Modulo(
        levels=levels,
        private=private,
        distance=distance,
        relative=relative,
        blind=blind,
        bucket_size=bucket_size,
    )
    return Rotated(codec=codec) if rotated else codec


def visible(
    fraction: int | float = 0.1,
    bucket_size: int | None = None,
    *,
    values: Codec | None = None,
    indices: Indices = EliasFano(),
) -> Sparsifier:
    """Sends the elements of an update that change the bfloat16 values of the parameters.

    With the parameters `φ` it keeps the `x` with `bf16(φ − x) ≠ bf16(φ)`: a forward pass in
    bfloat16 sees no others. It is biased: use a residual, in which small elements accumulate until
    they are visible. The parameters are given by `jaxcomp.federated.GlobalModel` alone, as in
    `jaxcomp.federated.pulseloco`. Elsewhere they count as zeros, so that every element is visible
    that is not zero, and elements are dropped at random: use `top_k` there.

    Args:
        fraction: the capacity as a fraction of the elements, in (0, 1]. Payloads always have this
            size, messages of `to_bytes` that of the visible elements; if more are visible, a run of
            them with a random start is not sent.
        bucket_size: elements in a bucket, which has the capacity; None for one bucket per leaf.
        values: a codec for the values; None sends them unchanged, in float32.
        indices: the encoding of the indices.

    Raises:
        ValueError: as for `top_k`.

    Example:
        >>> import jax.numpy as jnp, jaxcomp
        >>> jaxcomp.federated.Uplink(visible(), jaxcomp.federated.GlobalModel()).link.feedback
        Residual(decay=1.0, dtype=None)

    References:
        Miahi and Belilovsky, `Understanding and exploiting weight update sparsity for
        communication-efficient distributed RL <https://arxiv.org/abs/2602.03839>`_, 2026.

    Note:
        An element that is not visible is below a unit in the last place of its parameter in
        bfloat16, at most 2⁻⁷ of it. Elements that are not finite are always sent, so that the
        message is refused.
    """
    return Sparsifier(
        choice=Visible(fraction), values=values, indices=indices, bucket_size=bucket_size
    )
