"""Lower bounds on the convergence of methods with compressed messages, up to constants."""

import math

from jaxcomp import checks


def compressed_rate(
    rounds: int,
    workers: int,
    *,
    smoothness: float,
    gap: float,
    noise: float = 0.0,
    omega: float | None = None,
    delta: float | None = None,
) -> float:
    """A lower bound on the expected squared gradient norm of any method, on smooth losses.

    `σ √(LΔ / (nT)) + (1 + ω) LΔ / T` for unbiased codecs of variance `ω`, and
    `σ √(LΔ / (nT)) + LΔ / (δT)` for contractions of `δ`, without constants.

    Args:
        rounds: `T`, the number of one-stage messages of each worker.
        workers: `n`.
        smoothness: `L`.
        gap: `Δ`, the initial loss minus the minimum.
        noise: `σ`, the standard deviation of a worker's gradient.
        omega: `ω`, or
        delta: `δ`, in (0, 1]; one of the two.

    Raises:
        ValueError: for numbers out of range, or both or neither of `omega` and `delta`.

    Example:
        >>> round(compressed_rate(1000, 8, smoothness=1.0, gap=1.0, delta=0.1), 4)
        0.01

    References:
        Huang et al., `Lower bounds and nearly optimal algorithms in distributed learning with
        communication compression <https://arxiv.org/abs/2206.03665>`_, 2022.

    Note:
        The form of the bounds is from memory of the paper; `jaxcomp.algorithms.neolithic`
        comes to them up to logarithms.
    """
    checks.integer("rounds", rounds, 1)
    checks.integer("workers", workers, 1)
    for name, value in (("smoothness", smoothness), ("gap", gap), ("noise", noise)):
        checks.number(name, value, 0.0)
    if (omega is None) == (delta is None):
        raise ValueError(
            "exactly one of `omega`, an unbiased codec's variance, and `delta`, a contraction's "
            f"parameter, must be given, got omega={omega!r} and delta={delta!r}"
        )
    if omega is not None:
        checks.number("omega", omega, 0.0)
        slowed = 1 + omega
    else:
        assert delta is not None  # Checked above.
        checks.positive("delta", delta)
        checks.number("delta", delta, 0.0, 1.0)
        slowed = 1 / delta
    return noise * math.sqrt(smoothness * gap / (workers * rounds)) + (
        slowed * smoothness * gap / rounds
    )
