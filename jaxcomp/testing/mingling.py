"""Runs of decentralised methods, on workers simulated by `vmap`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.mesh import per_worker
from jaxcomp.mesh.per_worker import PerWorker
from jaxcomp.transforms.gossip import GossipState
from jaxcomp.transforms.view import view
from jaxcomp.types import Array, PyTree

Gradient = Callable[[Array], Array]


def mingle(
    tx: Any,
    oracle: Callable[[Array, Array], tuple[Gradient, Gradient]],
    measure: Callable[[Array], PyTree],
    *,
    workers: int,
    size: int,
    steps: int,
    start: Array | None = None,
    axis_name: str = "workers",
) -> tuple[PyTree, GossipState]:
    """Runs a transformation of `jaxcomp.gossip`, and measures all workers' models after each step.

    Args:
        tx: the transformation; the parameters are `{"x": [1, size]}`, and begin at zero.
        oracle: from a worker's number and the step's to that worker's gradient of a minibatch, and
            of all its data, as functions of `[size]`.
        measure: from the models, `[workers, size]`, to arrays.
        workers: the number of workers.
        size: the number of parameters.
        steps: the number of steps.
        start: the models to start from, `[workers, size]`; None for zeros.
        axis_name: the axis given to `tx`.

    Returns:
        The measurements, with a leading axis of steps, and the final state.

    Example:
        >>> import jaxcomp, optax
        >>> tx = jaxcomp.gossip(optax.sgd(0.5), jaxcomp.codecs.Identity(), "workers")
        >>> to_own = lambda worker, step: (lambda x: x - worker, lambda x: x - worker)
        >>> spread = lambda models: jnp.mean(models)
        >>> found, _ = mingle(tx, to_own, spread, workers=4, size=2, steps=20)
        >>> round(float(found[-1]), 3)
        1.5
    """
    dtype = jnp.result_type(float)
    params = {"x": jnp.zeros((1, size), dtype)}

    def one(state: Any, worker: Array, step: Array) -> Any:
        batch, everything = oracle(worker, step)

        def grad_fn(at: PyTree) -> PyTree:
            return {"x": batch(at["x"][0])[None]}

        def full_grad_fn(at: PyTree) -> PyTree:
            return {"x": everything(at["x"][0])[None]}

        grads = grad_fn(view(params, state))
        given = {"grad_fn": grad_fn, "full_grad_fn": full_grad_fn}
        return tx.update(grads, state, params, **given)[1]

    @jax.jit
    def run() -> tuple[PyTree, Any]:
        split = jax.tree_util.tree_map_with_path(
            lambda path, _: 0 if per_worker.marked(path) else None, tx.init(params)
        )
        begin = jax.vmap(tx.init, None, split, axis_name=axis_name, axis_size=workers)
        state = begin(params)
        if start is not None:
            # Workers start from these models, which the others do not know.
            offset = PerWorker({"x": jnp.asarray(start, dtype)[:, None, None]}, "offset")
            slow = state.slow if state.slow == () else state.slow._replace(offset=offset)
            state = state._replace(offset=offset, slow=slow)
        everyone = jax.vmap(one, in_axes=(split, 0, None), out_axes=split, axis_name=axis_name)

        def step(state: Any, number: Array) -> tuple[Any, PyTree]:
            state = everyone(state, jnp.arange(workers), number)
            return state, measure(state.offset.tree["x"][:, 0, 0])

        state, found = jax.lax.scan(step, state, jnp.arange(steps))
        return found, state

    return run()
