"""Sparsifiers by their names in the literature."""

from jaxcomp import checks
from jaxcomp.base import Codec
from jaxcomp.codecs.cosine import Cosine
from jaxcomp.codecs.quantizer import Quantizer
from jaxcomp.codecs.random_k import RandomK
from jaxcomp.codecs.sparsifier import Sparsifier
from jaxcomp.quantize.rounding import Nearest
from jaxcomp.quantize.scales import MaxAbs
from jaxcomp.quantize.tables import Geometric
from jaxcomp.sparsify.choices import AtLeast, Largest, NearLargest, Sampled
from jaxcomp.sparsify.deltas import Deltas
from jaxcomp.sparsify.fitted import Fitted
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
        indices: how places become words, of `jaxcomp.codecs`: `EliasFano()`, `RiceGaps()`,
            `Packed()`, `Bitmap()` or `Raw()`.

    Raises:
        ValueError: for a fraction outside (0, 1], a bucket size that is not positive, or a codec of
            values that has a state or whose error may be larger than its input.

    Example:
        >>> import jaxcomp, jax.numpy as jnp
        >>> jaxcomp.roundtrip(top_k(fraction=0.5), 0, jnp.array([1.0, -3.0, 0.5, 2.0]))
        Array([ 0., -3.,  0.,  2.], dtype=float32)

    References:
        Aji and Heafield, `Sparse communication for distributed gradient descent
        <https://arxiv.org/abs/1704.05021>`_, 2017; Stich et al., `Sparsified SGD with memory
        <https://arxiv.org/abs/1809.07599>`_, 2018.

    Note:
        Places cost about `2 + log₂(n/k)` bits each (8.6 at 1 %), not 32. float64 is compared as
        float32.
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


def dgc(
    fraction: int | float = 0.001,
    bucket_size: int | None = None,
    *,
    sample: float = 0.01,
    values: Codec | None = None,
    indices: Indices = EliasFano(),
) -> Sparsifier:
    """The elements above a threshold from a sample: between 0.8 and 1.3 times a fraction of them.

    The codec of Deep Gradient Compression (DGC). The momentum correction of the method is a
    feedback, its warm-up is a `ReducerSchedule` with `dgc_warmup`, and its clipping is `clip_local`
    before the mean:

        Link(dgc(0.001), MomentumCorrection(momentum=0.9))

    Args:
        fraction: share of the elements to send, in (0, 1].
        bucket_size: elements among which to choose; None for the whole leaf.
        sample: share of the elements that is looked at, at least about 400 that are sent.
        values: a codec for the values; None for the values as they are.
        indices: how places become words.

    Raises:
        ValueError: for a share outside (0, 1], or as for `top_k`.

    Example:
        >>> import jaxcomp
        >>> feedback = jaxcomp.MomentumCorrection(momentum=0.9)
        >>> jaxcomp.Link(dgc(0.001), feedback).feedback.momentum
        0.9

    References:
        Lin et al., `Deep gradient compression <https://arxiv.org/abs/1712.01887>`_, 2018.

    Note:
        Where more than 1.3 times the share exceed the threshold, exactly the share of largest ones
        is sent, and no element is left out for its place in the array, as the authors' code does
        with what exceeds the share. It samples `max(1 %, 400)`; the authors' code `max(1 %, 2/δ)`.
    """
    return Sparsifier(
        choice=Sampled(fraction, sample), values=values, indices=indices, bucket_size=bucket_size
    )


def sidco(
    fraction: int | float = 0.001,
    bucket_size: int | None = None,
    *,
    law: str = "exponential",
    stages: int | None = None,
    values: Codec | None = None,
    indices: Indices = EliasFano(),
) -> Sparsifier:
    """The elements above a threshold in closed form, from a law fitted to the magnitudes.

    `η₁ = β ln(1/δ₁)` for the exponential law with mean `β`; then, stage by stage, the law is fitted
    again to what exceeds the threshold: `η_m = η_{m−1} + β_m ln(1/δ_m)`. The number of stages, and
    a correction of `δ`, are found by themselves, for each leaf, from how many elements exceeded the
    threshold before.

    Args:
        fraction: share `δ` of the elements to send, in (0, 1].
        bucket_size: elements among which to choose; None for the whole leaf.
        law: "exponential", "pareto" (generalised; SIDCo-P), "gamma" (SIDCo-GP) or
            "gamma_approximate" (its published approximation, for shapes up to 1).
        stages: a fixed number of stages; None to adapt it.
        values: a codec for the values; None for the values as they are.
        indices: how places become words.

    Raises:
        ValueError: for a share outside (0, 1], another law or fewer than one stage.

    Example:
        >>> import jaxcomp, jax.numpy as jnp
        >>> jaxcomp.wire_bytes(sidco(fraction=0.001), jnp.zeros(1_000_000))
        7076

    References:
        Abdelmoniem et al., `An efficient statistical-based gradient compression technique for
        distributed training systems <https://arxiv.org/abs/2101.10761>`_, 2021.

    Note:
        Of the three rules for the number of stages in the authors' code, which start from one, the
        first moves in a fixed direction, which never ends for heavy tails, and the other two turn
        round where a move made it worse; this one starts from two, turns round likewise, and
        remembers the best. Where that still finds too many or too few, as in mixtures of
        scales, the threshold is for a share up to four times smaller or larger. Zeros take no part
        in the fit. Of a leaf of more than four
        million elements, the law sees every second, third, … part of 512. There is room for 1.3
        times the share; of more, a run that begins at random stays in the residual.
    """
    return Sparsifier(
        choice=Fitted(fraction=fraction, law=law, stages=stages),
        values=values,
        indices=indices,
        bucket_size=bucket_size,
    )


def demo(
    k: int = 32,
    chunk: int = 64,
    *,
    values: Codec | None = None,
    indices: Indices = EliasFano(),
) -> Cosine:
    """The largest coefficients of the cosine transform of each square of a leaf.

    The codec of DeMo, which decouples the momentum of the workers: with a decaying residual as the
    momentum `Δ ← β (Δ − sent) + g`, and the sign of the mean,

        optax.chain(
            compressed_mean(Link(demo(), Residual(decay=0.999)), axis_name="data"),
            optax.scale_by_sign(),
            optax.scale_by_learning_rate(1e-3),
        )

    By default a coefficient counts as zero for the workers that do not send it: that mean goes
    with every reducer, under gates and both ways. The authors take the mean over the workers that
    send it: `jaxcomp.Gather(Link(demo(), Residual(decay=0.999)), over="senders")`.

    Args:
        k: coefficients sent of each square.
        chunk: the side of a square, 2 to 256; a bucket is one square.
        values: a codec for the coefficients; None for float32.
        indices: how places become words.

    Raises:
        ValueError: for more coefficients than a square has, or sides out of range.

    Example:
        >>> import jaxcomp, jax.numpy as jnp
        >>> jaxcomp.wire_bytes(demo(k=32), jnp.zeros((64, 64)))
        164

    References:
        Peng et al., `DeMo: decoupled momentum optimization <https://arxiv.org/abs/2411.19870>`_,
        2024.

    Note:
        A square is `chunk²` consecutive elements of the flattened leaf; the published code cuts
        matrices into tiles, along both of their dimensions, which is the same where a row has
        `chunk` elements. The two means differ in signs too, since each element is a sum of
        coefficients that different numbers of workers sent. Of four workers whose gradients are one
        Gaussian signal and noise of their own, with 0.3, 1 and 3 times its deviation, 86, 93 and
        97 % of the signs agree. Places take 9 bits, not 64, and sums are deterministic.
    """
    checks.integer("chunk", chunk, 2, 256)
    checks.integer("k", k, 1, chunk**2)
    largest = Largest(k / chunk**2)
    return Cosine(
        codec=Sparsifier(choice=largest, values=values, indices=indices, bucket_size=chunk**2),
        chunk=chunk,
    )


def fastsgd(
    fraction: int | float = 0.01,
    bucket_size: int | None = None,
    *,
    most: int = 15,
    per_octave: int = 2,
    indices: Indices = Deltas(),
) -> Sparsifier:
    """The elements near the largest one, by the logarithm of how much smaller they are.

    `Iᵢ = round(log_b(M / |xᵢ|))` with `M` the largest magnitude and `b = 2^(1/per_octave)`. The
    elements with `Iᵢ ≤ τ` are sent, as a sign and `Iᵢ`, and decoded to `± M b^-I`, which is within
    a factor `√b` of them.

    Args:
        fraction: share of the elements that there is room for, in (0, 1].
        bucket_size: elements that share `M` and the room; None for the whole leaf.
        most: the largest `τ`, up to 127; it is lowered until no more elements reach it than there
            is room for.
        per_octave: how many steps halve a value: 1, 2, 4 or 8.
        indices: how places become words.

    Raises:
        ValueError: for a share outside (0, 1], or other numbers out of range.

    Example:
        >>> import jaxcomp, jax.numpy as jnp
        >>> jaxcomp.roundtrip(fastsgd(fraction=0.5), 0, jnp.array([8.0, -3.9, 0.01, 0.0]))
        Array([ 8., -4.,  0.,  0.], dtype=float32)

    References:
        FastSGD: a fast compressed SGD framework for distributed machine learning, 2021.

    Note:
        A reconstruction: of the paper only the abstract could be read (a reciprocal mapper,
        logarithmic quantisation, an integer threshold, fine-grained adaptive deltas of keys).
        Places are `Deltas()`, which take one bit more each than `EliasFano()`. Where tails are
        light, few elements lie within whole steps of the largest: less than the share is sent.
    """
    checks.integer("most", most, 0, min(127, 126 * per_octave))
    choice = NearLargest(fraction, most, per_octave)
    table = Geometric(positive=most + 1, per_octave=per_octave)
    values = Quantizer(levels=table, scale=MaxAbs(), rounding=Nearest(), bucket_size=None)
    return Sparsifier(choice=choice, values=values, indices=indices, bucket_size=bucket_size)


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
