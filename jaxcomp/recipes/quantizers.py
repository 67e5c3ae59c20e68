"""Quantizers by their names in the literature."""

from jaxcomp import checks
from jaxcomp.codecs.cast import Cast
from jaxcomp.codecs.quantizer import Quantizer
from jaxcomp.quantize import levels as levels_, optimal, rounding, scales


def cast(dtype: str = "bfloat16", bucket_size: int | None = 512) -> Cast:
    """Rounds each element to the nearest value of a narrower float.

    Args:
        dtype: "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2" or "float32".
        bucket_size: elements that share a power-of-two scale; bfloat16 and float32 need none.

    Raises:
        ValueError: for another dtype or a bucket size that is not positive.

    Example:
        >>> cast("bfloat16").facts.bits_per_element
        16.0

    Note:
        Rounding to nearest is biased, so `compressed_mean` adds a residual by default.
    """
    return Cast(dtype=dtype, bucket_size=bucket_size)


def sign(bucket_size: int | None = 512) -> Quantizer:
    """One bit per element: `mean|x| · sign(x)` in each bucket, with `sign(0) = +1`.

    A contraction with `δ = ‖x‖₁² / (n‖x‖²)`: 2/π for a Gaussian bucket. Biased: use a residual.

    Args:
        bucket_size: elements that share a scale; None for one scale per leaf.

    Example:
        >>> sign().facts.bits_per_element
        1.0625

    References:
        Seide et al., 1-bit stochastic gradient descent and its application to data-parallel
        distributed training of speech DNNs, 2014; Karimireddy et al., `Error feedback fixes
        SignSGD and other gradient compression schemes <https://arxiv.org/abs/1901.09847>`_, 2019.

    Note:
        The scale is the mean of |x| over a bucket, not over a layer; a zero bucket stays zero.
        Elements within 2⁻²⁰ of the scale of zero count as positive, because denormals are zero only
        on a CPU.
    """
    return Quantizer(
        levels=levels_.Sign(),
        scale=scales.MeanAbs(),
        rounding=rounding.Nearest(),
        bucket_size=bucket_size,
    )


def qsgd(
    bits: int = 4,
    bucket_size: int | None = 512,
    *,
    levels: str = "midtread",
    subtractive: bool = False,
    shared_dither: bool = False,
) -> Quantizer:
    """Uniform levels, Euclidean bucket scale, unbiased rounding.

    `x̂ᵢ = ‖x‖₂ · qᵢ / s` with zero and `s = 2^(bits−1) − 1` levels per side. The relative variance
    is at most `√d/s − 1` for `d ≥ 4s²`, else `d/4s²` (mid-rise: `d/(2^bits − 1)²`). `qsgd_inf` has
    a smaller error at the same bits for nearly every input.

    Args:
        bits: width of a code, 2 to 8 (1 to 8 for "midrise").
        bucket_size: elements that share a norm; None for one norm a leaf.
        levels: "midtread" has a zero level; "midrise" has `2^bits` levels without zero.
        subtractive: True for subtractive dither: the decoder draws the same dither and subtracts
            it. The variance of an element is then a third of the worst case, but the same for every
            element, zeros too: in a bucket with one large element the total is larger, `d/12s²`
            (mid-rise: `d/3(2^bits − 1)²`).
        shared_dither: True if all workers draw the same dither.

    Raises:
        ValueError: for other widths or levels, or a bucket size that is not positive.

    Example:
        >>> qsgd(bits=4, bucket_size=512).facts.bits_per_element
        4.0625

    References:
        Alistarh et al., `QSGD: communication-efficient SGD via gradient quantization and encoding
        <https://arxiv.org/abs/1610.02132>`_, 2017.

    Note:
        Codes have fixed width instead of Elias codes. The paper calls 16 levels per side "4 bits";
        here 4 bits hold zero and 7 levels per side. "midrise" is the grid of the public NUQSGD and
        ALQ code, `linspace(−1, 1, 2^bits)`.
    """
    rule = rounding.Subtractive if subtractive else rounding.Stochastic
    return _uniform(bits, scales.L2(), bucket_size, rule(shared=shared_dither), levels)


def qsgd_inf(
    bits: int = 4,
    bucket_size: int | None = 512,
    *,
    levels: str = "midtread",
    subtractive: bool = False,
    shared_dither: bool = False,
) -> Quantizer:
    """Uniform levels, largest-element bucket scale, unbiased rounding.

    `x̂ᵢ = max|x| · qᵢ / s` with `s = 2^(bits−1) − 1`; relative variance at most
    `½(√(1 + (d − 1)/s²) − 1)` (mid-rise: `d/(2^bits − 1)²`).

    Args:
        bits: width of a code, 2 to 8 (1 to 8 for "midrise").
        bucket_size: elements that share a scale; None for one scale per leaf.
        levels: "midtread" or "midrise", as for `qsgd`.
        subtractive: as for `qsgd`; it halves the error on Gaussian input.
        shared_dither: as for `qsgd`.

    Raises:
        ValueError: for other widths or levels, or a bucket size that is not positive.

    Example:
        >>> qsgd_inf(bits=8, bucket_size=512).facts.bits_per_element
        8.0625

    References:
        Alistarh et al., `QSGD <https://arxiv.org/abs/1610.02132>`_, 2017, whose experiments
        normalise by the largest element.
    """
    rule = rounding.Subtractive if subtractive else rounding.Stochastic
    return _uniform(bits, scales.MaxAbs(), bucket_size, rule(shared=shared_dither), levels)


def blockwise(bits: int = 4, bucket_size: int | None = 128) -> Quantizer:
    """Integers from `−s` to `s`, rounded to nearest, with one scale for each block.

    `x̂ᵢ = max|x| · round(xᵢ s / max|x|) / s` with `s = 2^(bits−1) − 1`. The error of an element is
    at most `max|x| / 2s`, and the squared error is half that of `qsgd_inf` at the same bits. A
    contraction, but biased: use a residual.

    Args:
        bits: width of a code, 2 to 8.
        bucket_size: elements that share a scale; None for one scale per leaf.

    Raises:
        ValueError: for other widths or a bucket size that is not positive.

    Example:
        >>> blockwise(bits=4, bucket_size=128).facts.bits_per_element
        4.25

    References:
        Dettmers et al., `8-bit optimizers via block-wise quantization
        <https://arxiv.org/abs/2110.02861>`_, 2021.

    Note:
        Levels are evenly spaced instead of the paper's dynamic ones, and blocks have 128 elements
        instead of 2,048, because at four bits the largest element of a block determines the error.
    """
    return _uniform(bits, scales.MaxAbs(), bucket_size, rounding.Nearest())


def terngrad(
    clip: float | None = 2.5,
    *,
    scaler: str = "max",
    shared: bool = False,
    bucket_size: int | None = None,
) -> Quantizer:
    """Values in {−s, 0, +s} with the scaler `s` of the leaf, and unbiased rounding after clipping.

    The relative variance is at most `(√d − 1)/2` without clipping.

    Args:
        clip: the clip, in standard deviations; None for no clipping.
        scaler: "max" uses the largest element after clipping, "clip" the clip itself, as the
            authors' code does; they differ if no element is clipped.
        shared: True uses the largest scaler of all workers (a `pmax`), as in the paper, so that all
            workers use the same levels.
        bucket_size: elements that share a scaler; None for one per leaf, as in the paper.

    Raises:
        ValueError: for a clip or bucket size that is not positive, or another scaler.

    Example:
        >>> terngrad(clip=None).unbiased
        True

    References:
        Wen et al., `TernGrad: ternary gradients to reduce communication in distributed deep
        learning <https://arxiv.org/abs/1705.07878>`_, 2017.

    Note:
        Five codes share a byte: 1.6 bits per element; the paper counts log₂ 3. The clip is never
        below the mean of the leaf, because a constant leaf would otherwise become zero. With
        clipping the codec is neither unbiased nor a contraction, so it gets no residual, which
        would grow. `averaged_ternary` is the codec of the downlink, for the mean.

        With `shared=True` each worker clips at the shared scaler, as in the authors' code. In the
        paper each worker clips at its own clip before the scalers are shared: for this, clip each
        leaf in a transformation before the mean, and use `terngrad(clip=None, shared=True)`.
    """
    checks.choice("scaler", scaler, ("max", "clip"))
    clipped = scales.ClippedMax(clip, at_most_max=scaler == "max") if clip is not None else None
    return Quantizer(
        levels=levels_.Uniform(steps=1),
        scale=clipped or scales.MaxAbs(),
        rounding=rounding.Stochastic(),
        bucket_size=bucket_size,
        shared=shared,
    )


def averaged_ternary(workers: int = 8, bucket_size: int | None = None) -> Quantizer:
    """Encodes the mean of ternary gradients with a shared scaler exactly: TernGrad's downlink.

    If `N` workers send `s · {−1, 0, 1}`, the mean is in `s/N · {−N, …, N}`: `⌈log₂(2N + 1)⌉` bits.
    Other input is rounded to nearest as in `blockwise`.

    Args:
        workers: the number of averaged messages, 1 to 127.
        bucket_size: elements that share a scaler; None for one per leaf.

    Raises:
        ValueError: for another number of workers or a bucket size that is not positive.

    Example:
        >>> averaged_ternary(workers=8).bits
        5

    References:
        Wen et al., `TernGrad <https://arxiv.org/abs/1705.07878>`_, 2017.

    Note:
        The scaler is found from the elements, by trying numbers of steps for the largest one.
    """
    return Quantizer(
        levels=levels_.Uniform(steps=workers),
        scale=optimal.Lattice(steps=workers),
        rounding=rounding.Nearest(),
        bucket_size=bucket_size,
    )


def threshold_ternary(rule: str = "optimal", bucket_size: int | None = 512) -> Quantizer:
    """Values in {−α, 0, +α}: zero below a threshold, and `α` is the mean magnitude above it.

    "optimal" minimises the error, which is at most `(1 − 1/Hₙ)‖x‖²` with the harmonic number
    `Hₙ ≤ 1 + ln n`; "heuristic" uses the threshold `0.7 · mean|x|`. A contraction, but biased: use
    a residual.

    Args:
        rule: "optimal", which sorts each bucket, or "heuristic", which does not.
        bucket_size: elements that share a threshold; None for one per leaf.

    Raises:
        ValueError: for another rule or a bucket size that is not positive.

    Example:
        >>> import jaxcomp, jax.numpy as jnp
        >>> jaxcomp.roundtrip(threshold_ternary(), 0, jnp.array([4.0, 3.0, 1.0, 0.0]))
        Array([3.5, 3.5, 0. , 0. ], dtype=float32)

    References:
        Xu et al., `Quantized adaptive subgradient algorithms and their applications
        <https://arxiv.org/abs/2208.05631>`_, 2022, whose abstract asks for "a threshold
        quantization strategy with relatively small error"; Li et al., `Ternary weight networks
        <https://arxiv.org/abs/1605.04711>`_, 2016 (the heuristic).

    Note:
        This is a reconstruction: we could not read the paper's own rule. Both rules belong to the
        family that its abstract describes.
    """
    checks.choice("rule", rule, ("optimal", "heuristic"))
    return Quantizer(
        levels=levels_.Uniform(steps=1),
        # Rounding to nearest gives α for elements above half of the scale.
        scale=optimal.OptimalTernary() if rule == "optimal" else scales.MeanAbs(times=1.4),
        rounding=rounding.Nearest(),
        bucket_size=bucket_size,
        fit="least_squares",
    )


def _uniform(
    bits: int,
    scale: scales.Scale,
    bucket_size: int | None,
    rule: rounding.Rounding = rounding.Stochastic(),
    levels: str = "midtread",
) -> Quantizer:
    checks.choice("levels", levels, ("midtread", "midrise"))
    checks.integer("bits", bits, 2 if levels == "midtread" else 1, 8)
    grid = levels_.Uniform(2 ** (bits - 1) - 1) if levels == "midtread" else levels_.MidRise(bits)
    return Quantizer(levels=grid, scale=scale, rounding=rule, bucket_size=bucket_size)
