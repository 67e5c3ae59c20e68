"""Gather: every worker sends its payload to every other, and each decodes them all."""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import cast

import jax.numpy as jnp
from jax import lax

from jaxcomp import checks
from jaxcomp.backend import axes
from jaxcomp.base import Codec, Collected, Reducer
from jaxcomp.feedback import Link
from jaxcomp.layout.policy import Policy
from jaxcomp.mesh.per_worker import PerWorker
from jaxcomp.reducers import accounting, dense as dense_, payloads
from jaxcomp.theory import cost
from jaxcomp.types import Array, AxisName, Batches, PyTree, Stacks
from jaxcomp.wire import buffer, cost as wire_cost


@dataclasses.dataclass(frozen=True)
class Gather(Reducer):
    """The mean of all decoded payloads, by one all-gather for the whole model, or a few.

    One device sends `(n − 1)` payloads, so this pays for few workers or small payloads: b-bit
    codes beat a float32 all-reduce only if `b < 64 / n`.

    Args:
        link: the link from each worker; a bare codec or policy is `Link(codec)`.
        collectives: into how many all-gathers to split the payload, whole arrays each, so that the
            first can begin before the last gradient is there; None for four where there are at
            least four million elements, else one.
        over: "workers" for the mean over all workers, in which an element counts as zero where it
            was not sent; "senders" for that over the workers that sent it, as in DeMo, which is
            larger where few did. It is no mean of what was sent: it goes with sparsifiers, and with
            memories of a worker's own (`Residual`, `MomentumCorrection`).

    Raises:
        ValueError: if `link` is none of these, or `collectives` is not positive; with "senders",
            for a codec that sends every element, or a feedback that the receivers follow.
    """

    link: "Link | Codec | Policy"
    collectives: int | None = None
    over: str = "workers"

    def __post_init__(self):
        if self.collectives is not None:
            checks.integer("collectives", self.collectives, 1)
        if not isinstance(self.link, Link):
            object.__setattr__(self, "link", Link(self.link))
        checks.choice("over", self.over, ("workers", "senders"))
        if self.over == "senders":
            self._check_senders()

    def _check_senders(self) -> None:
        dense = [c for c in self.uplink.policy.codecs if not c.names_senders]
        if dense:
            raise ValueError(
                f"`over` must be 'workers' for codecs that send every element, got {dense[0]!r}; "
                "'senders' goes with sparsifiers such as jaxcomp.demo() or jaxcomp.top_k()"
            )
        if self.uplink.feedback.mirrors:
            raise ValueError(
                "`over` must be 'workers' under a feedback whose receivers follow the mean of "
                f"what was sent, got {self.uplink.feedback!r}; 'senders' goes with "
                "jaxcomp.Residual()"
            )

    @property
    def uplink(self) -> Link:
        return cast(Link, self.link)

    def init(self, batches: Batches, axis_name: AxisName) -> PerWorker:
        return PerWorker.wrap(payloads.init(batches), "codec", axis_name)

    def collect(
        self,
        key: Array,
        batches: Batches,
        message: Stacks,
        state: PerWorker,
        axis_name: AxisName,
        weight: Array | None = None,
    ) -> Collected:
        worker, workers = lax.axis_index(axis_name), axes.size(axis_name)
        own = payloads.encode(key, batches, message, state.own(), worker, axis_name, weight=weight)
        everything = (own.payloads, () if weight is None else (weight,))
        runs = accounting.collectives(self, batches)
        gathered, weights = buffer.gather(everything, axis_name, runs)
        total = weights[0] if weights else None
        return Collected(
            part=payloads.mean(key, batches, gathered, own.sides, total, workers, over=self.over),
            sent=payloads.decode(key, batches, own.payloads, own.sides, worker),
            share=1.0 if total is None else jnp.sum(total) * (1 / workers),
            state=PerWorker.wrap(own.states, "codec", axis_name),
        )

    def dense(
        self, leaves: Sequence[Array], axis_name: AxisName, weight: Array | None = None
    ) -> Sequence[Array]:
        return dense_.fused_mean(leaves, axis_name, weight)

    def efforts(self, batches: Batches, workers: int) -> tuple[tuple[Link, cost.Effort], ...]:
        """`n − 1` messages one after another in each all-gather, and `n` payloads to decode."""
        rounds = accounting.rounds(self, batches, wire_cost.payload_like(batches), workers)
        return ((self.uplink, cost.Effort(rounds, encodes=1, decodes=1, adds=workers - 1)),)

    def link_bytes(self, like: PyTree, workers: int) -> int:
        """`n − 1` payloads, what is agreed on first, and an all-reduce of the leaves left dense."""
        return accounting.link_bytes(self, like, workers)

    def batches_link_bytes(self, batches: Batches, workers: int) -> Fraction | int:
        """What of it the batches account for."""
        payload = buffer.fused_bytes(wire_cost.payload_like(batches))
        return (workers - 1) * payload + wire_cost.agreed_bytes(batches, workers)
