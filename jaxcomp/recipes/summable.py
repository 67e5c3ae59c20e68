"""Quantizers whose integers collectives can add, by their names in the literature."""

from jaxcomp import checks
from jaxcomp.codecs.quantizer import Quantizer
from jaxcomp.codecs.rotated import Rotated
from jaxcomp.quantize import levels, rounding, scales


def int_sgd(bits: int = 8, alpha: int | float = 1.0, bucket_size: int | None = None) -> Quantizer:
    """IntSGD: integers with one step for all workers, whose sum fits `bits` bits.

    `mean = step · Σ Int(xᵢ / step) / n`, rounded at random, with `step = √2 · rms / alpha` for the
    largest root mean square of all workers. The squared error of the mean is at most
    `d · step² / 4n`, which is `‖x‖² / (2n · alpha²)` for the worker with the largest norm. With
    `Psum` a word has at least `32 // bits` sums, and `n` workers send integers up to
    `min(31, (2^(bits − 1) − 1) // n)`.

    Args:
        bits: the width of a sum, 2 to 8.
        alpha: divides the step: a larger `alpha` gives finer steps and clips at smaller elements.
        bucket_size: elements that share a step; None for one step a leaf, as in the paper.

    Raises:
        ValueError: for another width, or an `alpha` or bucket size that is not positive; on use,
            for more workers than `2^(bits − 1) − 1`.

    Example:
        >>> import jaxcomp, jax.numpy as jnp
        >>> like = {"w": jnp.zeros((1024, 1024))}
        >>> jaxcomp.wire_bytes(jaxcomp.Psum(int_sgd()), like, workers=8)
        1835015
        >>> jaxcomp.wire_bytes(jaxcomp.Dense(), like, workers=8)
        7340032

    References:
        Mishchenko, Wang, Kovalev and Richtárik, `IntSGD: adaptive floatless compression of
        stochastic gradients <https://arxiv.org/abs/2102.08374>`_, 2021.

    Note:
        The paper's step is `√(2n)` times the root mean square of the mean, from a moving average
        over past updates, which a codec does not see. If noise dominates the gradients, the mean is
        smaller by `√n`, and both steps are the same; the step here needs no history. Workers agree
        on the largest norm, not on the mean of the squared norms, since a maximum does not depend
        on an order of rounding. Clipped values are lost: eight bits hold `44 rms` up to 4 workers,
        `21 rms` at 8, and `1.4 rms` from 64 on. So the codec is declared neither unbiased nor
        contractive, and gets no residual. Integers are limited to ±31, although fewer than 4
        workers could send larger ones, because the steps of a bfloat16 leaf would have a single
        bit.
    """
    checks.integer("bits", bits, 2, 8)
    steps = min(2 ** (bits - 1) - 1, 31)
    return Quantizer(
        levels=levels.Uniform(steps=steps),
        scale=scales.for_steps(steps, alpha),
        rounding=rounding.Stochastic(),
        bucket_size=bucket_size,
        shared=True,
        sum_bits=bits,
    )


def thc(bits: int = 4, clipped: float = 1 / 32, bucket_size: int | None = 4096) -> Rotated:
    """THC: a shared rotation and range, so that integers can be summed and rotated back once.

    After the rotation, elements look Gaussian. They are clipped such that a fraction `clipped` of
    the elements is clipped on the worker with the largest norm, and rounded at random to
    `2^bits − 1` evenly spaced levels. With `Psum`, integers are added in fields of
    `⌈log₂((2^bits − 2)·n + 1)⌉` bits.

    Args:
        bits: the width of a code, 2 to 8.
        clipped: the fraction of elements that is clipped, above 0 and below 1.
        bucket_size: elements that share a norm; None for one norm a leaf, as in the paper.

    Raises:
        ValueError: for another width or fraction, or a bucket size that is not positive.

    Example:
        >>> thc(bits=4).codec.summable(workers=8).facts.bits_per_element
        8.0

    References:
        Li et al., `THC: accelerating distributed deep learning using tensor homomorphic compression
        <https://arxiv.org/abs/2302.08545>`_, 2024.

    Note:
        The paper's levels are 16 of the integers from 0 to 30, chosen for the distribution: workers
        send four bits, a server looks up the integers, and the downlink has eight bits. Here the
        integers themselves are added in the collective, so using all of them costs no more:
        `bits=5` has 31 levels, in eight bits up to 8 workers. Blocks of 4,096 are rotated instead
        of the whole vector. Clipping adds a small bias, and a worker whose norm is far below the
        largest is rounded coarsely. So the codec is declared neither unbiased nor contractive, and
        gets no residual; the paper has one.
    """
    checks.integer("bits", bits, 2, 8)
    quantizer = Quantizer(
        levels=levels.Uniform(steps=2 ** (bits - 1) - 1),
        scale=scales.clipping(clipped),
        rounding=rounding.Stochastic(),
        bucket_size=bucket_size,
        shared=True,
    )
    return Rotated(codec=quantizer, shared=True)
