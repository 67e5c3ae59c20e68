"""Quantizers whose integers are added on the way, by their names in the literature."""

from jaxcomp import checks
from jaxcomp.codecs.quantizer import Quantizer
from jaxcomp.codecs.rotated import Rotated
from jaxcomp.quantize import levels, rounding, scales


def int_sgd(bits: int = 8, alpha: int | float = 1.0, bucket_size: int | None = None) -> Quantizer:
    """Integers `Int(x / step)` of one step for all workers, whose sum fits `bits` bits: IntSGD.

    `mean = step · Σ Int(xᵢ / step) / n`, rounded at random, with `step = √2 · rms / alpha` for the
    largest root mean square of all workers. The squared error of the mean is at most
    `d · step² / 4n`, which is `‖x‖² / (2n · alpha²)` for the worker with the largest norm. Under
    `Psum` a word has at least `32 // bits` sums, and `n` workers send integers up to
    `min(31, (2^(bits − 1) − 1) // n)`.

    Args:
        bits: width of a sum, 2 to 8.
        alpha: steps are so many times finer; elements are clipped so many times sooner.
        bucket_size: elements that share a step; None for one a leaf, as in the paper.

    Raises:
        ValueError: for another width, or an alpha or bucket size that is not positive; on use, for
            more workers than `2^(bits − 1) − 1`.

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
        over past updates, which a codec does not see. Where workers' noise is most of what they
        have, the mean is smaller by `√n`, and both are the same; this one needs no history. The
        largest norm is agreed on, not the mean of the squared ones, since a maximum has no order
        of rounding. What is clipped is lost: eight bits have room for `44 rms` up to 4 workers,
        `21 rms` at 8, and `1.4 rms` from 64 on. So the codec is declared neither unbiased nor
        contractive, and gets no residual. Integers beyond ±31, for which only fewer than 4 workers
        have room, would leave the steps of a bfloat16 leaf a single bit.
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
    """A rotation and a range that all workers share, whose sum is rotated back once: THC.

    Rotated, elements look Gaussian; they are clipped where a share `clipped` of those of the worker
    with the largest norm lies beyond, and rounded at random to `2^bits − 1` evenly spaced levels.
    Under `Psum`, integers are added in fields of `⌈log₂((2^bits − 2)·n + 1)⌉` bits.

    Args:
        bits: width of a code, 2 to 8.
        clipped: the share of elements that is clipped, above 0 and below 1.
        bucket_size: elements that share a norm; None for one a leaf, as in the paper.

    Raises:
        ValueError: for another width or share, or a bucket size that is not positive.

    Example:
        >>> thc(bits=4).codec.summable(workers=8).bits_per_element
        8.0

    References:
        Li et al., `THC: accelerating distributed deep learning using tensor homomorphic compression
        <https://arxiv.org/abs/2302.08545>`_, 2024.

    Note:
        The paper's levels are 16 of the integers from 0 to 30, chosen to fit the law, so that four
        bits go up to a server that looks them up, and eight come down. What is added on the way
        are those integers themselves, and all of them cost no more: `bits=5` has 31 levels, in
        eight bits up to 8 workers. Blocks of 4,096 are rotated in place of the whole vector. The
        clip biases, by little, and a worker whose norm is far below the largest is rounded
        coarsely: the codec is declared neither unbiased nor contractive, so it gets no residual,
        where the paper has one.
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
