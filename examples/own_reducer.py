"""Custom compressed reducers, with the contract check of the library's own reducers."""

import dataclasses

import jax
import jax.numpy as jnp

import jaxcomp
from jaxcomp.exchange import send
from jaxcomp.reducers import AllGather, AllToAll, Average, Combine, Join, Leg, Outcome


@dataclasses.dataclass(frozen=True)
class HalfDown(jaxcomp.Reducer):
    """Sends payloads up, and the mean down in half of its bytes."""

    up: jaxcomp.Link

    @property
    def route(self):
        down = jaxcomp.Link(jaxcomp.cast("bfloat16"), jaxcomp.Residual())
        return Leg(AllToAll(), self.up, Average()), Leg(AllGather(), down, Join())


@dataclasses.dataclass(frozen=True)
class OneByOne(Combine):
    """The mean of all messages, of which one at a time is decoded."""

    def run(self, stage, key, heard, sent, state):
        n = stage.workers
        weights = jnp.ones(n) if heard.weights is None else heard.weights

        def add(total, number):
            payload = jax.tree.map(lambda x: x[number], heard.payloads)
            message = send.decode(key, stage.batches, payload, sent.sides, number)
            w = weights[number]
            pairs = zip(total, message, strict=True)
            return [t + jnp.where(w == 0, 0, w * x) for t, x in pairs], None

        zeros = [jnp.zeros(like.shape, jnp.float32) for like in stage.likes]
        total, _ = jax.lax.scan(add, zeros, jnp.arange(n))
        pairs = zip(total, stage.likes, strict=True)
        value = tuple((t / n).astype(like.dtype) for t, like in pairs)
        return Outcome(value, sent.sent, heard.share, state)


@dataclasses.dataclass(frozen=True)
class Frugal(jaxcomp.Reducer):
    """Gathers all payloads, and decodes one at a time: the memory of one message, not of all."""

    link: jaxcomp.Link

    @property
    def route(self):
        return (Leg(AllGather(), self.link, OneByOne()),)


if __name__ == "__main__":
    link = jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual())
    jaxcomp.testing.check_reducer(HalfDown(link), downlink_tolerance=1e-2)
    jaxcomp.testing.check_reducer(Frugal(link))
    print("HalfDown and Frugal pass the contract")
