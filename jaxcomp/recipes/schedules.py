"""Schedules of papers, as data."""

from jaxcomp import checks
from jaxcomp.reducers.schedule import piecewise_constant

_QUARTERS = (0.25, 0.0625, 0.015625, 0.004, 0.001)


def dgc_warmup(
    fraction: float, steps_per_epoch: int, *, epochs: int = 5, schedule: str = "exponential"
) -> tuple[tuple[int, float], ...]:
    """Deep Gradient Compression's warm-up, which sends fewer elements in each epoch.

    "exponential", the default of the published code, sends `fraction^((e+1)/(epochs+1))` in epoch
    `e`; "quarters", the paper's list, sends 25 %, 6.25 %, 1.5625 %, 0.4 % and 0.1 %. Neither sends
    less than `fraction`.

    Args:
        fraction: the fraction of elements that is sent from epoch `epochs` on, in (0, 1].
        steps_per_epoch: the number of steps in an epoch.
        epochs: the number of epochs of the warm-up; at most 5 for "quarters".
        schedule: "exponential" or "quarters".

    Returns:
        Pairs of a phase's first step and its fraction, for `jaxcomp.ReducerSchedule`.

    Raises:
        ValueError: for a fraction outside (0, 1], another schedule, or numbers out of range.

    Example:
        >>> for start, fraction in dgc_warmup(0.001, steps_per_epoch=100):
        ...     print(start, round(fraction, 4))
        0 0.3162
        100 0.1
        200 0.0316
        300 0.01
        400 0.0032
        500 0.001
        >>> dgc_warmup(0.004, steps_per_epoch=100, schedule="quarters")
        ((0, 0.25), (100, 0.0625), (200, 0.015625), (300, 0.004))

    References:
        Lin et al., `Deep gradient compression <https://arxiv.org/abs/1712.01887>`_, 2018.

    Note:
        Epochs with the same fraction are one phase, so there may be fewer phases than epochs.
    """
    checks.fraction(fraction)
    checks.integer("steps_per_epoch", steps_per_epoch, 1)
    checks.choice("schedule", schedule, ("exponential", "quarters"))
    checks.integer("epochs", epochs, 0, len(_QUARTERS) if schedule == "quarters" else None)
    if schedule == "quarters":
        early = [max(share, fraction) for share in _QUARTERS[:epochs]]
    else:
        early = [fraction ** ((epoch + 1) / (epochs + 1)) for epoch in range(epochs)]
    return piecewise_constant([*early, fraction], every=steps_per_epoch)
