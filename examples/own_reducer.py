"""A custom reducer, with the contract check of the library's own reducers."""

import dataclasses
import math

import jax
import jax.numpy as jnp

import jaxcomp
from jaxcomp.base import Collected


@dataclasses.dataclass(frozen=True)
class Wide(jaxcomp.Reducer):
    """The dense mean, added in float32 whatever the gradient's dtype: one all-reduce a leaf."""

    uplink = None  # No leaf is compressed: `dense` gets all of them.

    def collect(self, key, batches, message, state, axis_name, weight=None):
        share = 1.0 if weight is None else jax.lax.pmean(weight, axis_name)
        return Collected(part=message, sent=message, share=share, state=state)

    def dense(self, leaves, axis_name, weight=None):
        own = [leaf.astype(jnp.float32) * (1.0 if weight is None else weight) for leaf in leaves]
        means = [jax.lax.pmean(x, axis_name) for x in own]
        return [mean.astype(leaf.dtype) for mean, leaf in zip(means, leaves, strict=True)]

    def link_bytes(self, like, workers):
        size = 4 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(like))
        return math.ceil(2 * (workers - 1) * size / workers)  # A ring.


if __name__ == "__main__":
    jaxcomp.testing.check_reducer(Wide())
    print("Wide passes the contract")
