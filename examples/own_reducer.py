"""A custom compressed reducer, with the contract check of the library's own reducers."""

import dataclasses

import jax
import jax.numpy as jnp

import jaxcomp
from jaxcomp.base import Collected, Costs
from jaxcomp.exchange import collectives, send


@dataclasses.dataclass(frozen=True)
class OneByOne(jaxcomp.Reducer):
    """Gathers all payloads, and decodes one at a time: the memory of one message, not of all."""

    uplink: jaxcomp.Link

    def init(self, plan):
        return jaxcomp.PerWorker.wrap(send.init(plan.batches), "codec", plan.axis_name)

    def collect(self, plan, key, message, state, weight=None):
        worker, memory = jax.lax.axis_index(plan.axis), send.Memory((), state.own())
        own = send.send(key, plan.batches, message, memory, worker, plan.axis, weight=weight)
        weight = jnp.float32(1) if weight is None else weight
        payloads, weights = collectives.all_gather((own.payloads, weight), plan.axis)

        def added(total, number):
            one = jax.tree.map(lambda x: x[number], payloads)
            sent = send.decode(key, plan.batches, one, own.sides, number)
            w = weights[number]
            pairs = zip(total, sent, strict=True)
            return [t + jnp.where(w == 0, 0, w * x) for t, x in pairs], None

        zeros = [jnp.zeros(like.shape, jnp.float32) for like in plan.likes]
        total, _ = jax.lax.scan(added, zeros, jnp.arange(plan.workers))
        part = [(t / plan.workers).astype(x.dtype) for t, x in zip(total, own.sent, strict=True)]
        codecs = jaxcomp.PerWorker.wrap(own.memory.codecs, "codec", plan.axis_name)
        return Collected(tuple(part), own.sent, weights.mean(), codecs)

    def costs(self, plan):
        return Costs((plan.workers - 1) * (plan.encoded_bytes + 4) + plan.agreed_bytes)


if __name__ == "__main__":
    link = jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual())
    jaxcomp.testing.check_reducer(OneByOne(link))
    print("OneByOne passes the contract")
