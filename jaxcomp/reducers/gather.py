"""Gather: every worker sends its payload to all others, and each decodes all payloads."""

import dataclasses
from typing import cast

from jaxcomp import checks
from jaxcomp.base import Codec, Leg, Reducer
from jaxcomp.exchange import trips
from jaxcomp.exchange.combines import Average
from jaxcomp.exchange.moves import AllGather
from jaxcomp.feedback import Link
from jaxcomp.layout.policy import Policy


@dataclasses.dataclass(frozen=True)
class Gather(Reducer):
    """Averages all decoded payloads, with one all-gather for the whole model, or a few.

    One device sends `(n − 1)` payloads, so it suits few workers or small payloads: `b`-bit codes
    send less than a float32 all-reduce only if `b < 64 / n`.

    Args:
        link: the link from each worker; a bare codec or policy means `Link(codec)`.
        collectives: the number of all-gathers that the payload is split into, in whole arrays, so
            that the first can start before the last gradient is computed; None for four if there
            are at least four million elements, else one.
        delay: seconds that a message takes one way. Where they are long against the bytes, every
            worker sends to all others at once, and waits once; else messages go one after another.
            None for what is assumed: 0.5 ms between CPUs of several processes, else nothing.
        over: "workers" for the mean over all workers, in which unsent elements count as zero;
            "senders" for the mean over the workers that sent an element, as in DeMo, which is
            larger if few did. "senders" needs a sparsifier, and a feedback without a mirror
            (`Residual`, `MomentumCorrection`), because its result is not the mean of the messages.

    Raises:
        ValueError: if `link` is of another kind, `collectives` is not positive, or `delay` is
            negative; with "senders", for a codec that sends every element, or a feedback with a
            mirror.
    """

    link: "Link | Codec | Policy"
    collectives: int | None = None
    over: str = "workers"
    delay: float | None = None

    def __post_init__(self):
        if self.collectives is not None:
            checks.integer("collectives", self.collectives, 1)
        trips.check(self.delay)
        if not isinstance(self.link, Link):
            object.__setattr__(self, "link", Link(self.link))
        checks.choice("over", self.over, ("workers", "senders"))
        Average(self.over).check(self.link)

    @property
    def uplink(self) -> Link:
        return cast(Link, self.link)

    @property
    def route(self) -> tuple[Leg, ...]:
        return (Leg(AllGather(self.collectives, self.delay), self.link, Average(self.over)),)
