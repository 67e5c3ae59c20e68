"""Microbatches that pass through stages on workers, one stage after another."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.backend import axes
from jaxcomp.base import Codec
from jaxcomp.collectives.moves import ppermute
from jaxcomp.layout.policy import Policy
from jaxcomp.types import Array, AxisName


def pass_on(
    stage: Callable[[Array], Array],
    batches: Array,
    axis_name: AxisName,
    codec: "Codec | Policy | None",
    *,
    key: Any = None,
    site: Any = 0,
    back: "Codec | Policy | None" = None,
) -> Array:
    """The last stage's result for each microbatch; zeros on all other stages.

    In tick `t` stage `i` computes microbatch `t − i`, and sends the result to stage `i + 1`.

    Args:
        stage: this worker's stage, which keeps the shape of its input.
        batches: microbatches `[number, …]`, of which the first stage uses its own.
        axis_name: the mapped axis of the stages.
        codec: the codec of what they send.
        key: the key of the step.
        site: the number or name of the call.
        back: the codec of the gradients.
    """
    n, own = lax.axis_size(axis_name), lax.axis_index(axis_name)
    ring = [(i, i + 1) for i in range(n - 1)]

    def tick(arrived: Array, numbered: tuple[Array, Array]) -> tuple[Array, Array]:
        time, batch = numbered
        out = stage(jnp.where(own == 0, batch, arrived))
        sent = ppermute(out, axis_name, codec, perm=ring, key=key, site=(site, time), back=back)
        return sent, jnp.where(own == n - 1, out, 0)

    idle = jnp.zeros((n - 1, *batches.shape[1:]), batches.dtype)
    feed = jnp.concatenate([batches, idle])
    like, _ = jax.eval_shape(tick, batches[0], (jnp.int32(0), feed[0]))
    _, found = lax.scan(tick, axes.zeros(like), (jnp.arange(len(feed)), feed))
    return found[n - 1 :]
