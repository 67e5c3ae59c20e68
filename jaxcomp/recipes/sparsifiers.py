"""Sparsifiers by their names in the literature."""

from jaxcomp import checks
from jaxcomp.base import Codec
from jaxcomp.codecs.cosine import Cosine
from jaxcomp.codecs.quantizer import Quantizer
from jaxcomp.codecs.random_k import RandomK
from jaxcomp.codecs.sparsifier import Sparsifier
from jaxcomp.quantize.rounding import Nearest
from jaxcomp.quantize.scales import MaxAbs, RootMeanSquare
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
    """Sends the largest elements, and their indices.

    It keeps exactly the `k = ⌈fraction · n⌉` largest `|x|`: a contraction with `δ ≥ k/n`. It is
    biased: use a residual.

    Args:
        fraction: the fraction of elements that is sent, in (0, 1].
        bucket_size: elements in a bucket, in each of which the largest are chosen; None for one
            bucket per leaf.
        values: a codec for the values, such as `jaxcomp.qsgd_inf(bits=8)`, or
            `jaxcomp.ndsc(bits=4)` for democratic sparsification; None sends them unchanged.
        indices: the encoding of the indices, from `jaxcomp.codecs`: `EliasFano()`, `RiceGaps()`,
            `Packed()`, `Bitmap()` or `Raw()`.

    Raises:
        ValueError: for a fraction outside (0, 1], a bucket size that is not positive, or a codec of
            values that has a state, or whose error may be larger than its input or has no known
            bound.

    Example:
        >>> import jaxcomp, jax.numpy as jnp
        >>> jaxcomp.roundtrip(top_k(fraction=0.5), 0, jnp.array([1.0, -3.0, 0.5, 2.0]))
        Array([ 0., -3.,  0.,  2.], dtype=float32)

    References:
        Aji and Heafield, `Sparse communication for distributed gradient descent
        <https://arxiv.org/abs/1704.05021>`_, 2017; Stich et al., `Sparsified SGD with memory
        <https://arxiv.org/abs/1809.07599>`_, 2018.

    Note:
        Indices cost about `2 + log₂(n/k)` bits each (8.6 at 1 %), not 32. float64 is compared as
        float32.
    """
    return Sparsifier(
        choice=Largest(fraction), values=values, indices=indices, bucket_size=bucket_size
    )


def chunk_top_k(k: int = 128, chunk: int = 8192) -> Sparsifier:
    """Sends the largest elements of each chunk in two bits each, and their indices.

    A value is a sign and one of two magnitudes, of which one is twice the other. The step of a
    chunk is the one of smallest error.

    Args:
        k: the number of elements that are sent of a chunk.
        chunk: the elements of a chunk.

    Raises:
        ValueError: for more elements than a chunk has, or numbers that are not positive.

    Example:
        >>> import jaxcomp, jax.numpy as jnp
        >>> like = jnp.zeros((1024, 4096))
        >>> round(8 * jaxcomp.wire_bytes(chunk_top_k(), like) / like.size, 3)
        0.16

    References:
        Sarfi et al., `Communication efficient LLM pre-training with SparseLoCo
        <https://arxiv.org/abs/2508.15706>`_, 2025.

    Note:
        The paper sends 64 of 4,096 elements, the same share; chunks are twice as long here, so that
        a step of 32 bits is shared by 128 values. The authors' code cuts matrices into tiles of
        64 × 64, and its two bits are uniform bins over ±3 standard deviations of the values that
        are sent, decoded to the means of what is in them.
    """
    checks.integer("chunk", chunk, 1)
    checks.integer("k", k, 1, chunk)
    values = Quantizer(
        levels=Geometric(positive=2, per_octave=1),
        scale=RootMeanSquare(times=1.15),
        rounding=Nearest(),
        bucket_size=k,
        fit="least_squares",
    )
    return top_k(k / chunk, chunk, values=values)


def threshold(
    value: int | float,
    fraction: int | float = 0.1,
    bucket_size: int | None = None,
    *,
    values: Codec | None = None,
    indices: Indices = EliasFano(),
) -> Sparsifier:
    """Sends the elements that reach a fixed threshold, and their indices.

    It keeps all `|x| ≥ value`, so an unsent element is below `value`. It is biased: use a residual,
    in which small elements accumulate until they reach the threshold.

    Args:
        value: the threshold, positive.
        fraction: the capacity as a fraction of the elements, in (0, 1]. Payloads always have this
            size; if more elements reach the threshold, a run of them with a random start is not
            sent.
        bucket_size: elements in a bucket, which has the capacity; None for one bucket per leaf.
        values: a codec for the values; None sends them unchanged.
        indices: the encoding of the indices.

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
    """Sends the elements above a sampled threshold: 0.8 to 1.3 times a fraction of the elements.

    It is the codec of Deep Gradient Compression (DGC). The momentum correction of the method is a
    feedback, its warm-up is a `ReducerSchedule` with `dgc_warmup`, and its clipping is `clip_local`
    before the mean:

        Link(dgc(0.001), MomentumCorrection(momentum=0.9))

    Args:
        fraction: the fraction of elements to send, in (0, 1].
        bucket_size: elements in a bucket, in each of which elements are chosen; None for one bucket
            a leaf.
        sample: the fraction of elements in the sample, raised so that about 400 of the sampled
            elements exceed the threshold.
        values: a codec for the values; None sends them unchanged.
        indices: the encoding of the indices.

    Raises:
        ValueError: for a fraction outside (0, 1], or for the same reasons as `top_k`.

    Example:
        >>> import jaxcomp
        >>> feedback = jaxcomp.MomentumCorrection(momentum=0.9)
        >>> jaxcomp.Link(dgc(0.001), feedback).feedback.momentum
        0.9

    References:
        Lin et al., `Deep gradient compression <https://arxiv.org/abs/1712.01887>`_, 2018.

    Note:
        If more than 1.3 times the fraction exceed the threshold, exactly the fraction of largest
        elements is sent; the authors' code drops the excess by position in the array. It samples
        `max(1 %, 400)`; the authors' code `max(1 %, 2/δ)`.
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
    """Sends the elements above a threshold computed from a distribution fitted to the magnitudes.

    `η₁ = β ln(1/δ₁)` for the exponential distribution with mean `β`. In each further stage the
    distribution is fitted to the excess over the threshold: `η_m = η_{m−1} + β_m ln(1/δ_m)`. The
    number of stages, and a correction of `δ`, adapt for each leaf to the number of elements that
    exceeded the threshold in earlier steps.

    Args:
        fraction: the fraction `δ` of elements to send, in (0, 1].
        bucket_size: elements in a bucket, in each of which elements are chosen; None for one bucket
            a leaf.
        law: "exponential", "pareto" (generalised; SIDCo-P), "gamma" (SIDCo-GP) or
            "gamma_approximate" (its published approximation, for shapes up to 1).
        stages: a fixed number of stages; None to adapt it.
        values: a codec for the values; None sends them unchanged.
        indices: the encoding of the indices.

    Raises:
        ValueError: for a fraction outside (0, 1], another `law` or fewer than one stage.

    Example:
        >>> import jaxcomp, jax.numpy as jnp
        >>> jaxcomp.wire_bytes(sidco(fraction=0.001), jnp.zeros(1_000_000))
        7076

    References:
        Abdelmoniem et al., `An efficient statistical-based gradient compression technique for
        distributed training systems <https://arxiv.org/abs/2101.10761>`_, 2021.

    Note:
        The authors' code has three rules for the number of stages, which start from one. The first
        changes it in a fixed direction, which does not stop for heavy tails; the other two reverse
        the direction when a change made the result worse. The rule here starts from two, reverses
        in the same way, and remembers the best number. If that still gives too many or too few
        elements, as in mixtures of scales, the target fraction is corrected by up to a factor of
        four. Zeros are not part of the fit. In a leaf of more than four million elements, the fit
        uses every second, third, … block of 512. The capacity is 1.3 times the fraction; of more
        elements, a run with a random start stays in the residual.
    """
    return Sparsifier(
        choice=Fitted(fraction=fraction, law=law, stages=stages),
        values=values,
        indices=indices,
        bucket_size=bucket_size,
    )


def demo(
    k: int = 32, chunk: int = 64, *, values: Codec | None = None, indices: Indices = EliasFano()
) -> Cosine:
    """Sends the largest coefficients of the cosine transform of each square of a leaf.

    It is the codec of DeMo, which decouples the workers' momentum. DeMo uses a decaying residual as
    the momentum, `Δ ← β (Δ − sent) + g`, and the sign of the mean:

        optax.chain(
            compressed_mean(Link(demo(), Residual(decay=0.999)), axis_name="data"),
            optax.scale_by_sign(),
            optax.scale_by_learning_rate(1e-3),
        )

    By default a coefficient counts as zero for the workers that do not send it; this mean works
    with every reducer, with gates and with a downlink. The authors average over the workers that
    send a coefficient: `jaxcomp.Gather(Link(demo(), Residual(decay=0.999)), over="senders")`.

    Args:
        k: the number of coefficients sent for each square.
        chunk: the side of a square, 2 to 256; a bucket is one square.
        values: a codec for the coefficients; None for float32.
        indices: the encoding of the indices.

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
        matrices into tiles along both dimensions, which is the same if a row has `chunk` elements.
        The two means differ in signs too, since each element is a sum of coefficients that
        different numbers of workers sent. For four workers with gradients made of one Gaussian
        signal and separate noise of 0.3, 1 and 3 times its deviation, 86, 93 and 97 % of the signs
        agree. Indices take 9 bits, not 64, and sums are deterministic.
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
    """Sends the largest elements with logarithmic quantisation relative to the largest one.

    `Iᵢ = round(log_b(M / |xᵢ|))` with `M` the largest magnitude and `b = 2^(1/per_octave)`. The
    elements with `Iᵢ ≤ τ` are sent as a sign and `Iᵢ`, and decoded to `± M b^-I`, which is within a
    factor `√b` of the element.

    Args:
        fraction: the capacity as a fraction of the elements, in (0, 1].
        bucket_size: elements in a bucket, which share `M` and the capacity; None for one bucket a
            leaf.
        most: the largest `τ`, up to 127; `τ` is lowered until the elements fit the capacity.
        per_octave: the number of steps that halve a value: 1, 2, 4 or 8.
        indices: the encoding of the indices.

    Raises:
        ValueError: for a fraction outside (0, 1], or other numbers out of range.

    Example:
        >>> import jaxcomp, jax.numpy as jnp
        >>> jaxcomp.roundtrip(fastsgd(fraction=0.5), 0, jnp.array([8.0, -3.9, 0.01, 0.0]))
        Array([ 8., -4.,  0.,  0.], dtype=float32)

    References:
        FastSGD: a fast compressed SGD framework for distributed machine learning, 2021.

    Note:
        This is a reconstruction from the abstract, since we could not read the paper (a reciprocal
        mapper, logarithmic quantisation, an integer threshold, fine-grained adaptive deltas of
        keys). Indices are encoded by `Deltas()`, which take one bit more each than `EliasFano()`.
        If tails are light, few elements are within whole steps of the largest, and less than the
        fraction is sent.
    """
    checks.integer("per_octave", per_octave, 1)
    checks.integer("most", most, 0, min(127, 126 * per_octave))
    choice = NearLargest(fraction, most, per_octave)
    table = Geometric(positive=most + 1, per_octave=per_octave)
    values = Quantizer(levels=table, scale=MaxAbs(), rounding=Nearest(), bucket_size=None)
    return Sparsifier(choice=choice, values=values, indices=indices, bucket_size=bucket_size)


def random_k(
    fraction: int | float = 0.01, bucket_size: int | None = None, *, unbiased: bool = True
) -> RandomK:
    """Sends random elements that all workers draw from a shared key; only values are sent.

    `x̂ᵢ = (n/k) xᵢ` for the `k` drawn elements, else 0: the relative variance is `n/k − 1`.
    Payloads can be summed.

    Args:
        fraction: the fraction of elements that is sent, in (0, 1].
        bucket_size: elements in a bucket; None for one bucket per leaf.
        unbiased: True multiplies values by `n/k`; False sends them unchanged, a contraction with
            `δ = k/n`.

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
        It draws one of each group of `w = round(1/fraction)` neighbours instead of any `k` of all
        elements: the variance is the same, and memory is read in order. A bucket with a non-finite
        element sends NaN, even if that element is not drawn.
    """
    return RandomK(fraction=fraction, scaled=unbiased, bucket_size=bucket_size)
