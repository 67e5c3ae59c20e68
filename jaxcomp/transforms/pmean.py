"""`pmean`: a compressed mean for programs without optax."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.backend import axes
from jaxcomp.base import Codec, Reducer
from jaxcomp.layout.policy import Policy
from jaxcomp.numerics import noise
from jaxcomp.transforms.mean import compressed_mean
from jaxcomp.types import AxisName, PyTree


def pmean(
    updates: PyTree,
    codec: "Codec | Policy | Reducer",
    axis_name: AxisName,
    key: Any,
    *,
    weight: Any = None,
    param_specs: PyTree | None = None,
) -> PyTree:
    """Like `jax.lax.pmean` of gradients, compressed by a codec without memory.

    It computes the mean that `compressed_mean` computes, for programs without optax. Codecs that
    need error feedback, such as `sign` and `top_k`, need memory from step to step, which only
    `compressed_mean` keeps.

    Args:
        updates: this worker's own gradients, as from `jaxcomp.value_and_grad`.
        codec: a codec, policy or reducer without memory, such as `jaxcomp.qsgd_inf(bits=4)`.
        axis_name: the mapped axis, or a tuple of them.
        key: the random key of this step: the number of the step, a `jax.random.key` or a raw key,
            the same on all workers. Every step needs a different key. Otherwise the rounding errors
            of the steps are not independent, and do not average out.
        weight: this worker's weight, such as its number of tokens; the mean is `Σ wᵢ·gᵢ / Σ wᵢ`.
        param_specs: as for `compressed_mean`.

    Raises:
        ValueError: outside of a mapped function, for a codec with memory, for a key that differs
            between workers, or for gradients that are summed already.

    Example:
        >>> import jaxcomp
        >>> def step(w, number, x):
        ...     loss, grad = jaxcomp.value_and_grad(lambda w, x: (x @ w).sum(), "data")(w, x)
        ...     return w - pmean(grad, jaxcomp.qsgd_inf(bits=4), "data", number)
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> step = jaxcomp.data_parallel(step, mesh, "data")
        >>> step(jnp.zeros((64, 64)), 0, jnp.ones((1, 64))).shape
        (64, 64)
    """
    axes.require(axis_name)
    if any(axes.varies(x, axis_name) for x in jax.tree.leaves(key)):
        raise ValueError(
            f"`key` must be the same on all workers of {axis_name!r}, such as the number of the "
            "step, got a key that differs between them"
        )
    tx = compressed_mean(codec, axis_name, param_specs=param_specs)
    missing = (
        f"`codec` must need no memory, got {codec!r}, which needs memory from step to step, "
        "such as a residual: use jaxcomp.compressed_mean, whose state keeps it"
    )
    return averaged(tx, updates, key, None, missing, weight=weight)[0]


def averaged(
    tx: Any, updates: PyTree, key: Any, state: Any, missing: str, **extra: Any
) -> tuple[PyTree, Any]:
    """The mean of a step with this key, and the next state.

    Args:
        tx: the `compressed_mean`.
        updates: this worker's own gradients.
        key: the number of the step or a random key; None for what the state says.
        state: the state; None for one without memory.
        missing: the error for a mean that needs memory, if there is none.
        extra: further arguments of the update.
    """
    if state is None:
        state = tx.init(updates)
        if jax.tree.leaves((state.memory, state.gate)):
            raise ValueError(missing)
    if key is not None:
        if jnp.ndim(key) == 0 and jnp.issubdtype(jnp.result_type(key), jnp.integer):
            state = state._replace(step=jnp.asarray(key).astype(jnp.uint32))
        else:
            state = state._replace(key=jnp.asarray(noise.words(key)))
    return tx.update(updates, state, **extra)
