"""Psum: payloads are summed by an all-reduce."""

import dataclasses
from typing import cast

from jaxcomp.base import Codec, Leg, Reducer
from jaxcomp.exchange.combines import Sum
from jaxcomp.exchange.moves import AllReduce
from jaxcomp.feedback import Link
from jaxcomp.layout.policy import Policy


@dataclasses.dataclass(frozen=True)
class Psum(Reducer):
    """Decodes the sum of all payloads, with one all-reduce for each dtype of the payload.

    `mean = decode(Σ payloadᵢ) / n`: one device sends `2(n − 1)/n` of a payload and decodes one
    payload, for any number of workers. The codec must be linear, such as `random_k` and `Identity`,
    or have integers that can be added: a quantizer with `shared=True`, for which all workers first
    agree on the largest scale. Integers are sent in fields that hold the sum over all workers, so
    payloads widen with the logarithm of the number of workers, and no sum overflows.

    Sums of integers are exact. Between the CPUs of one process, floats are summed in the order of
    the workers, for every mapping; between several processes and on accelerators the all-reduce
    chooses the order, and results may differ by `n · ε · Σ|xᵢ|`. Floats of 16 bits are sent as
    such, and are added in float32 in the same cases as with `Dense`.

    Args:
        link: the link from each worker; a bare codec or policy means `Link(codec)`.

    Weights from gates multiply floats; for integers every weight must be 0 or 1. A worker of weight
    zero sends zeros, and does not influence the agreed scales.

    Raises:
        ValueError: if `link` is of another kind, or the payloads of a codec cannot be added; on
            use, if there are more workers than the fields of its integers can hold.

    Example:
        >>> import jaxcomp
        >>> import jax.numpy as jnp
        >>> like = {"w": jnp.zeros((1024, 1024))}
        >>> for workers in (2, 8, 64):
        ...     added = jaxcomp.wire_bytes(Psum(jaxcomp.thc()), like, workers)
        ...     print(added, jaxcomp.wire_bytes(jaxcomp.Gather(jaxcomp.thc()), like, workers))
        700416 526336
        1836800 3678976
        2755872 33096672

    Note:
        The payload bytes that `describe` shows are those for two workers, the fewest that
        communicate.
    """

    link: "Link | Codec | Policy"

    def __post_init__(self):
        if not isinstance(self.link, Link):
            object.__setattr__(self, "link", Link(self.link))
        Sum().check(self.link)

    @property
    def uplink(self) -> Link:
        return cast(Link, self.link)

    @property
    def route(self) -> tuple[Leg, ...]:
        return (Leg(AllReduce(), self.link, Sum()),)
