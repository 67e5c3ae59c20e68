"""Quantizers by their names in the literature."""

from jaxcomp import checks
from jaxcomp.codecs.cast import Cast
from jaxcomp.codecs.quantizer import Quantizer
from jaxcomp.quantize import levels, rounding, scales


def cast(dtype: str = "bfloat16", bucket_size: int | None = 512) -> Cast:
    """Each element in a narrower float, to nearest.

    Args:
        dtype: "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2" or "float32".
        bucket_size: elements that share a power-of-two scale; bfloat16 and float32 need none.

    Raises:
        ValueError: for another dtype or a bucket size that is not positive.

    Example:
        >>> cast("bfloat16").bits_per_element
        16.0

    Note:
        Rounding to nearest is biased, so `compressed_mean` adds a residual unless told otherwise.
    """
    return Cast(dtype=dtype, bucket_size=bucket_size)


def sign(bucket_size: int | None = 512) -> Quantizer:
    """One bit an element: `mean|x| · sign(x)` in each bucket, with `sign(0) = +1`.

    A contraction with `δ = ‖x‖₁² / (n‖x‖²)`: 2/π for a Gaussian bucket. Biased: use a residual.

    Args:
        bucket_size: elements that share a scale; None for one scale a leaf.

    Example:
        >>> sign().bits_per_element
        1.0625

    References:
        Seide et al., 1-bit stochastic gradient descent and its application to data-parallel
        distributed training of speech DNNs, 2014; Karimireddy et al., `Error feedback fixes
        SignSGD and other gradient compression schemes <https://arxiv.org/abs/1901.09847>`_, 2019.

    Note:
        The scale is the mean of |x| over a bucket, not over a layer; a zero bucket stays zero.
        What is below 2⁻²⁰ of the scale counts as positive: denormals are zero on a CPU only.
    """
    return Quantizer(
        levels=levels.Sign(),
        scale=scales.MeanAbs(),
        rounding=rounding.Nearest(),
        bucket_size=bucket_size,
    )


def qsgd(bits: int = 4, bucket_size: int | None = 512) -> Quantizer:
    """Uniform levels, Euclidean bucket scale, unbiased rounding.

    `x̂ᵢ = ‖x‖₂ · qᵢ / s` with `s = 2^(bits−1) − 1` levels a side and zero among them; relative
    variance at most `min(d/4s², …, √d/s − 1)`. `qsgd_inf` is better at the same bits on nearly
    every input.

    Args:
        bits: width of a code, 2 to 8.
        bucket_size: elements that share a norm; None for one norm a leaf.

    Raises:
        ValueError: for other widths or a bucket size that is not positive.

    Example:
        >>> qsgd(bits=4, bucket_size=512).bits_per_element
        4.0625

    References:
        Alistarh et al., `QSGD: communication-efficient SGD via gradient quantization and encoding
        <https://arxiv.org/abs/1610.02132>`_, 2017.

    Note:
        Codes have fixed width instead of Elias codes. The paper calls 16 levels a side "4 bits";
        here 4 bits hold 7 a side and zero, which is what 4 bits can hold.
    """
    return _uniform(bits, scales.L2(), bucket_size)


def qsgd_inf(bits: int = 4, bucket_size: int | None = 512) -> Quantizer:
    """Uniform levels, largest-element bucket scale, unbiased rounding.

    `x̂ᵢ = max|x| · qᵢ / s` with `s = 2^(bits−1) − 1`; relative variance at most
    `½(√(1 + (d − 1)/s²) − 1)`.

    Args:
        bits: width of a code, 2 to 8.
        bucket_size: elements that share a scale; None for one scale a leaf.

    Raises:
        ValueError: for other widths or a bucket size that is not positive.

    Example:
        >>> qsgd_inf(bits=8, bucket_size=512).bits_per_element
        8.0625

    References:
        Alistarh et al., `QSGD <https://arxiv.org/abs/1610.02132>`_, 2017, whose experiments
        normalise by the largest element.
    """
    return _uniform(bits, scales.MaxAbs(), bucket_size)


def blockwise(bits: int = 4, bucket_size: int | None = 128) -> Quantizer:
    """Integers from `−s` to `s`, `s = 2^(bits−1) − 1`, rounded to nearest, a scale for each block.

    `x̂ᵢ = max|x| · round(xᵢ s / max|x|) / s`: no element is off by more than `max|x| / 2s`, half
    the squared error of `qsgd_inf` at the same bits. A contraction, but biased: use a residual.

    Args:
        bits: width of a code, 2 to 8.
        bucket_size: elements that share a scale; None for one scale a leaf.

    Raises:
        ValueError: for other widths or a bucket size that is not positive.

    Example:
        >>> blockwise(bits=4, bucket_size=128).bits_per_element
        4.25

    References:
        Dettmers et al., `8-bit optimizers via block-wise quantization
        <https://arxiv.org/abs/2110.02861>`_, 2021.

    Note:
        Evenly spaced levels in place of the paper's dynamic ones, and blocks of 128 in place of
        2,048: at four bits the largest element of a block decides the error.
    """
    return _uniform(bits, scales.MaxAbs(), bucket_size, rounding.Nearest())


def terngrad(
    clip: float | None = 2.5, *, shared: bool = False, bucket_size: int | None = None
) -> Quantizer:
    """Values in {−s, 0, +s}, `s` the largest element after clipping, unbiased rounding.

    Args:
        clip: clip at so many standard deviations; None for no clipping.
        shared: use the largest scaler of all workers (a `pmax`), as the paper does, so that all
            speak of the same levels.
        bucket_size: elements that share a scaler; None for one a leaf, as in the paper.

    Raises:
        ValueError: for a clip or bucket size that is not positive.

    Example:
        >>> terngrad(clip=None).unbiased
        True

    References:
        Wen et al., `TernGrad: ternary gradients to reduce communication in distributed deep
        learning <https://arxiv.org/abs/1705.07878>`_, 2017.

    Note:
        Five codes share a byte: 1.6 bits an element, where the paper counts log₂ 3. The scaler is
        the largest element after clipping, where the authors' code takes the clip itself. The clip
        is never below the mean of the leaf, or a constant leaf would vanish. With clipping the
        codec is neither unbiased nor a contraction, so it gets no residual: one would grow.
    """
    return Quantizer(
        levels=levels.Uniform(steps=1),
        scale=scales.MaxAbs() if clip is None else scales.ClippedMax(sigmas=clip),
        rounding=rounding.Stochastic(),
        bucket_size=bucket_size,
        shared=shared,
    )


def _uniform(
    bits: int,
    scale: scales.Scale,
    bucket_size: int | None,
    rule: rounding.Rounding = rounding.Stochastic(),
) -> Quantizer:
    checks.integer("bits", bits, 2, 8)
    return Quantizer(
        levels=levels.Uniform(steps=2 ** (bits - 1) - 1),
        scale=scale,
        rounding=rule,
        bucket_size=bucket_size,
    )
