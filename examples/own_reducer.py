"""A custom reducer, with the contract check of the library's own reducers."""

import dataclasses

import jax
import jax.numpy as jnp

import jaxcomp
from jaxcomp.base import Collected, Costs, ReducerFacts


@dataclasses.dataclass(frozen=True)
class Wide(jaxcomp.Reducer):
    """The dense mean, added in float32 whatever the gradient's dtype: one all-reduce a leaf."""

    uplink = None  # No leaf is compressed: `dense` gets all of them.
    facts = ReducerFacts(dtype="float32")

    def collect(self, plan, key, message, state, weight=None):
        share = 1.0 if weight is None else jax.lax.pmean(weight, plan.axis_name)
        return Collected(part=message, sent=message, share=share, state=state)

    def dense(self, leaves, axis_name, weight=None):
        own = [leaf.astype(jnp.float32) * (1.0 if weight is None else weight) for leaf in leaves]
        means = [jax.lax.pmean(x, axis_name) for x in own]
        return [mean.astype(leaf.dtype) for mean, leaf in zip(means, leaves, strict=True)]

    def costs(self, plan):
        return Costs(link_bytes=0)  # Of compressed leaves; the plan counts the dense ones.


if __name__ == "__main__":
    jaxcomp.testing.check_reducer(Wide())
    print("Wide passes the contract")
