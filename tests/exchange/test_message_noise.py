"""Which noise the messages of one step are rounded with."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp
from jaxcomp.base import Codec
from jaxcomp.exchange import legs
from jaxcomp.exchange.plan import Plan
from jaxcomp.numerics import noise

LEAF = jnp.zeros((4, 8))


@dataclasses.dataclass(frozen=True)
class Seeds(Codec):
    """Sends the seed of each bucket's noise in place of its elements."""

    bucket_size: int = 8
    unbiased = True

    def encode(self, key, x, count, state):
        seed = noise.seeds(key.own, key.first, len(x))[0] >> 8  # Exact in float32.
        return jnp.broadcast_to(seed[:, None], x.shape).astype(jnp.float32), state

    def decode(self, key, payload, like, side=None):
        return payload.astype(like.dtype)


EVERYTHING = jaxcomp.Policy(Seeds(), min_size=0, min_ndim=0)


def test_all_messages_of_two_shots_have_different_noise():
    """Those of every worker, in both directions."""
    reducer = jaxcomp.TwoShot(EVERYTHING, Seeds())

    def sent(message):
        plan, key = Plan.of(reducer, LEAF, "data"), noise.raw(0)
        got = legs.collect(plan, key, (message,), legs.init(plan))
        return got.sent[0], legs.spread(plan, key, got.value, got.state)[0][0]

    up, down = jax.jit(jax.vmap(sent, axis_name="data"))(jnp.zeros((2, 4, 8)))
    assert np.unique(up).size == 8
    assert np.unique(down).size == 4
    assert np.intersect1d(up, down).size == 0


def test_all_slices_of_two_levels_have_different_noise():
    """One message for each bucket, half of them from each device on the fast axis."""
    reducer = jaxcomp.Hierarchical(outer=jaxcomp.Gather(EVERYTHING))
    tx = jaxcomp.compressed_mean(reducer, ("slow", "fast"))
    step = jax.vmap(lambda grads: tx.update(grads, tx.init(LEAF))[0], axis_name="fast")
    seeds = jax.jit(jax.vmap(step, axis_name="slow"))(jnp.zeros((1, 2, *LEAF.shape)))
    assert np.unique(seeds).size == 4
