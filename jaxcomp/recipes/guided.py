"""Codecs that are guided by a guess of their input, which the decoder has too."""

from jaxcomp.codecs.modulo import Modulo
from jaxcomp.codecs.rotated import Rotated


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
