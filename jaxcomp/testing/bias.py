"""Checks of the average error of unbiased and contractive codecs."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.base import Codec
from jaxcomp.numerics import noise
from jaxcomp.testing import programs
from jaxcomp.testing.programs import SEED
from jaxcomp.types import Array


def assert_unbiased(codec: Codec, x: Array, *, draws: int = 2048) -> None:
    """Checks that the mean of `roundtrip(x)` over many keys is `x`, within six standard errors.

    Args:
        codec: the codec.
        x: the input.
        draws: how many keys, rounded up to a multiple of 128.

    Raises:
        AssertionError: naming the element that is furthest off.
    """
    x = jnp.asarray(x).reshape(-1).astype(jnp.float32)
    x = x / jnp.maximum(jnp.max(jnp.abs(x)), jnp.finfo(jnp.float32).tiny)

    draws = -(-draws // programs.MANY) * programs.MANY
    first, second, largest = np.zeros(x.size), np.zeros(x.size), 0.0
    for start in range(0, draws, programs.MANY):
        _, y = programs.many(
            codec, programs.keys(start), jnp.broadcast_to(x, (programs.MANY, x.size))
        )
        off = np.asarray(y - x, np.float64)
        first += off.sum(0)
        second += (off * off).sum(0)
        largest = max(largest, np.abs(off).max())
    bias = first / draws
    spread = np.sqrt(np.maximum(second / draws - bias**2, 0))
    error = spread / np.sqrt(draws) + 2.0**-18
    # Events less likely than 6 / draws may never have been drawn: allow for their weight.
    unseen = 6 / draws * float(largest)
    worst = int(np.argmax(np.abs(bias) / (6 * error + unseen)))
    if np.abs(bias[worst]) > 6 * error[worst] + unseen:
        raise AssertionError(
            f"{codec!r} must be unbiased: over {draws} keys element {worst} = {x[worst]:.5f} is "
            f"off by {bias[worst]:+.2e} on average, {np.abs(bias[worst]) / error[worst]:.1f} "
            "standard errors"
        )
    total = float(np.sqrt((error**2).sum()))
    if abs(bias.sum()) > 6 * total + unseen:
        raise AssertionError(
            f"{codec!r} must be unbiased: the sum of all elements is off by {bias.sum():+.2e} on "
            f"average, {abs(bias.sum()) / total:.1f} standard errors"
        )


def assert_contractive(codec: Codec, x: Array, *, draws: int = 16) -> None:
    """Checks that the mean of `‖roundtrip(x) − x‖²` over keys is below `‖x‖²`.

    Raises:
        AssertionError: with the measured ratio.
    """
    x = jnp.asarray(x).reshape(-1).astype(jnp.float32)
    keys = jnp.concatenate([programs.keys(start) for start in range(0, draws, programs.MANY)])[
        :draws
    ]
    for name, row in {"x": x, "x**3": x**3, **inputs(x.size)}.items():
        y = jnp.stack([programs.compiled(codec, key, row)[1] for key in keys])
        ratio = float(jnp.mean(jnp.sum((y - row) ** 2, 1)) / jnp.sum(row**2))
        if not ratio < 1:
            raise AssertionError(
                f"{codec!r} must be contractive: its error on {name} is {ratio:.4f} of the input's "
                "energy, and feedback on it would grow"
            )


def inputs(size: int) -> dict[str, Array]:
    """Gradients whose elements differ in size over a bucket.

    Args:
        size: the number of elements.

    Returns:
        By name: a tenth of the scale in the second half; one element in 61 and nothing else; one
        single element; a constant.
    """
    x, place = gaussian(size), jnp.arange(size)
    return {
        "a tenth of the scale in the second half": jnp.where(place < size // 2, 10 * x, x),
        "one element in 61": jnp.where(place % 61 == 7, x, 0),
        "one element": jnp.zeros(size).at[size // 3].set(1.0),
        "a constant": jnp.ones(size),
    }


def assert_every_part_arrives(
    codec: Codec, size: int = 700, *, parts: int = 8, draws: int = 256
) -> None:
    """Checks that every part of an input decodes to its own size on average.

    It checks `E⟨x̂ₚ, xₚ⟩ = ‖xₚ‖²` for each of `parts` contiguous parts `p` of the `inputs`, within
    six standard errors. A scale fitted to a whole bucket would decode its small parts too large.

    Args:
        codec: an unbiased codec.
        size: elements of an input; use several times the codec's bucket size.
        parts: the number of contiguous parts of an input.
        draws: the number of keys, rounded up to a multiple of 128.

    Raises:
        AssertionError: with the input and the part that is furthest off.

    Example:
        >>> import jaxcomp
        >>> assert_every_part_arrives(jaxcomp.qsgd_inf(bits=4))
    """
    draws = -(-draws // programs.MANY) * programs.MANY
    for name, x in inputs(size).items():
        rows = jnp.broadcast_to(x, (programs.MANY, size))
        found = [
            np.asarray(programs.many(codec, programs.keys(start), rows)[1], np.float64)
            for start in range(0, draws, programs.MANY)
        ]
        y, real = np.concatenate(found), np.asarray(x, np.float64)
        begins = np.linspace(0, size, parts, endpoint=False).astype(int)
        energy = np.add.reduceat(real * real, begins)
        gain = np.add.reduceat(y * real, begins, axis=1)[:, energy > 0] / energy[energy > 0]
        mean, spread = gain.mean(0), gain.std(0)
        # Events less likely than 6 / draws may never have been drawn in a part: allow for their
        # weight, as seen in any part.
        allowed = 6 * (spread / np.sqrt(draws) + 2.0**-18 + np.abs(gain - 1).max() / draws)
        worst = int(np.argmax(np.abs(mean - 1) / allowed))
        if np.abs(mean[worst] - 1) > allowed[worst]:
            raise AssertionError(
                f"{codec!r} must be unbiased: of {name}, part {worst} of {mean.size} comes back "
                f"{mean[worst]:.4f} times as large over {draws} keys, where 1 ± "
                f"{allowed[worst]:.4f} is allowed; all parts: {np.round(mean, 3)}"
            )


def assert_feedback_sends_all(
    codec: Codec, size: int = 700, *, parts: int = 8, steps: int = 4096
) -> None:
    """Checks that with a residual, every part of a constant gradient is sent sooner or later.

    For `eₜ₊₁ = eₜ + g − C(eₜ + g)` with the `inputs` as `g`, at least half of the sum of each of
    `parts` contiguous parts of `g` must have been sent within `steps` steps.

    Args:
        codec: a contractive codec.
        size: elements of an input; use several times the codec's bucket size.
        parts: the number of contiguous parts of an input.
        steps: the largest number of steps.

    Raises:
        AssertionError: with the input and the part of which least was sent.

    Example:
        >>> import jaxcomp
        >>> assert_feedback_sends_all(jaxcomp.sign())
    """
    begins = np.linspace(0, size, parts, endpoint=False).astype(int)
    for name, g in inputs(size).items():
        residual, taken, share = jnp.zeros(size), 0, np.zeros(parts)
        real = np.asarray(g, np.float64)
        energy = np.add.reduceat(real * real, begins)
        for until in (2 ** np.arange(4, 64)).tolist():
            until = min(until, steps)
            for step in range(taken, until):
                message = g + residual
                key = noise.fold(noise.raw(SEED), jnp.uint32(step))
                residual = message - programs.compiled(codec, key, message)[1]
            taken = until
            # The residual holds the unsent part.
            left = np.add.reduceat(np.asarray(residual, np.float64) * real, begins)
            share = 1 - left[energy > 0] / energy[energy > 0] / taken
            if share.min() > 0.5 or taken == steps:
                break
        if not share.min() > 0.5:
            raise AssertionError(
                f"{codec!r} must send all of what a residual keeps: of {name}, part "
                f"{int(np.argmin(share))} of {share.size}, {share.min():.3f} was sent in {taken} "
                "steps"
            )


def gaussian(size: int) -> Array:
    """The standard input of the checks."""
    return jax.random.normal(jax.random.key(SEED), (size,))
