"""Step sizes of a `Shift`, from the variance of its codec."""

from typing import Any

from jaxcomp.base import Codec
from jaxcomp.layout import policy as policy_
from jaxcomp.layout.policy import Policy


def require_unbiased(*codecs: Any) -> None:
    """Raises a `ValueError` if one of these codecs is biased; reducers are passed over."""
    policies = [policy_.of(codec) for codec in codecs if isinstance(codec, Codec | Policy)]
    biased = [one for policy in policies for one in policy.codecs if not one.unbiased]
    if biased:
        raise ValueError(
            f"`codec` must be unbiased, such as jaxcomp.qsgd() or jaxcomp.random_k(), got "
            f"{biased[0]!r}; jaxcomp.algorithms.ef21 takes contractive ones"
        )


def step_for(codec: Codec | Policy, share: float = 1.0) -> float:
    """`share / (1 + ω)`, with `ω` the largest relative variance of these codecs.

    Raises:
        ValueError: for a biased codec, or one without a variance bound for buckets of any size.

    Example:
        >>> from jaxcomp.recipes.sparsifiers import random_k
        >>> step_for(random_k(fraction=0.25, bucket_size=64))
        0.25
    """
    require_unbiased(codec)
    worst = 0.0
    for one in policy_.of(codec).codecs:
        sizes = [one.bucket_size or size for size in (2, 2**20)]  # None means buckets of any size.
        least, most = (one.variance_bound(size) for size in sizes)
        if least is None or least != most:
            raise ValueError(
                f"`step` must be a number of at most 1/(1 + ω) for {one!r}, whose variance ω has "
                "no known bound for buckets of any size, got None"
            )
        worst = max(worst, least)
    return share / (1 + worst)
