"""A custom feedback: error feedback whose memory is clipped, with the contract check."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxcomp
from jaxcomp.base import FeedbackFacts, sent_later


@sent_later("rest")  # `resize_workers` adds to it what a downlink has not sent.
class ClippedState(NamedTuple):
    rest: tuple


@dataclasses.dataclass(frozen=True)
class Clipped(jaxcomp.Feedback):
    """Error feedback that keeps at most `most` of each element: `e ← clip(p − C(p), ±most)`."""

    most: float = 1.0
    facts = FeedbackFacts(bounded=True, keeps_unsent=True)

    def init(self, like, part_like):
        return ClippedState(jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like))

    def compensate(self, x, state):
        return jax.tree.map(lambda g, e: g + e.astype(g.dtype), x, state.rest), state

    def update(self, message, sent, part, share, weight, state):
        def rest(p, c):
            arrived = c if weight is None else jnp.where(weight == 0, 0, c)
            return jnp.clip((p - arrived).astype(jnp.float32), -self.most, self.most)

        return part, ClippedState(jax.tree.map(rest, message, sent))

    def unsent(self, state):
        return state.rest


if __name__ == "__main__":
    jaxcomp.testing.check_feedback(Clipped(most=10.0))
    print("Clipped passes the contract")
