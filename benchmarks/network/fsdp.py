"""A worker that measures steps of sharded training of the byte model: seconds, bytes and memory.

Fully sharded, dense and compressed; and with a sharded optimizer, beside the same two shots with
a whole optimizer on every worker. All take the steps of Adam.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import byte_lm_model  # pyright: ignore[reportMissingImports]
import group
import jax
import numpy as np
import optax
import train
import training  # pyright: ignore[reportMissingImports]
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxcomp

AXIS = group.AXIS
EIGHT, FOUR = jaxcomp.qsgd_inf(bits=8), jaxcomp.qsgd_inf(bits=4)
BOTH = jaxcomp.TwoShot(train.TWO_SHOT, train.TWO_SHOT)
ADAM = optax.adam(train.RATE)
MODEL = byte_lm_model.ByteModel(train.LAYERS, train.WIDTH)


class Job(NamedTuple):
    """A step, and its arguments but the batch.

    Attributes:
        step: a jitted function from parameters, state and batch to new ones and the loss.
        params: the parameters.
        state: the state of the transformation.
        link_bytes: the bytes that a device sends in a step, by the library's count.
    """

    step: Callable[..., Any]
    params: Any
    state: Any
    link_bytes: int


def specs_of(like: Any, workers: int) -> Any:
    """Each matrix is split along its longest dimension that the workers divide."""

    def spec_of(leaf: Any) -> PartitionSpec:
        fits = [size if size % workers == 0 else 0 for size in leaf.shape]
        if leaf.ndim < 2 or not any(fits):
            return PartitionSpec()
        return PartitionSpec(*[None] * fits.index(max(fits)), AXIS)

    return jax.tree.map(spec_of, like)


def fully_sharded(weights: Any, gradients: Any, mesh: Mesh, tokens: np.ndarray) -> Job:
    like = jax.eval_shape(MODEL.init, jax.random.key(train.SEED), tokens)
    specs = specs_of(like, mesh.size)
    loss_and_grad = jaxcomp.fully_sharded(
        lambda params, *batch: training.loss_of(MODEL, params, batch),
        mesh,
        AXIS,
        specs,
        weights=weights,
        gradients=gradients,
    )
    # The moments lie as the parameters do.
    of_state = optax.tree_utils.tree_map_params(
        ADAM,
        lambda _, spec: spec,
        jax.eval_shape(ADAM.init, like),
        specs,
        transform_non_params=lambda _: PartitionSpec(),
    )
    homes: Any = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (specs, of_state))

    @functools.partial(jax.jit, out_shardings=homes)
    def begin() -> Any:
        params = MODEL.init(jax.random.key(train.SEED), tokens)
        return params, ADAM.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=(*homes, None))
    def step(params: Any, state: Any, batch: tuple) -> tuple:
        key = optax.tree.get(state, "count")  # The number of the step.
        loss, grads = loss_and_grad(params, *batch, key=key)
        updates, state = ADAM.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params, state = begin()
    return Job(step, params, state, sum(loss_and_grad.link_bytes(like)[AXIS]))


def replicated(reducer: Any, tx: Any, mesh: Mesh, tokens: np.ndarray) -> Job:
    lies = NamedSharding(mesh, PartitionSpec())
    params: Any = jax.jit(MODEL.init, out_shardings=lies)(jax.random.key(train.SEED), tokens)
    state = jaxcomp.init_state(tx, params, mesh, AXIS)
    step = training.build_step(MODEL, tx, mesh)
    return Job(step, params, state, jaxcomp.wire_bytes(reducer, params, mesh.size))


def whole_optimizer(reducer: Any, mesh: Mesh, tokens: np.ndarray) -> Job:
    tx = optax.chain(jaxcomp.compressed_mean(reducer, AXIS, key=train.SEED), ADAM)
    return replicated(reducer, tx, mesh, tokens)


def sharded_optimizer(mesh: Mesh, tokens: np.ndarray) -> Job:
    down = jaxcomp.Link(FOUR, jaxcomp.Residual())
    tx = jaxcomp.sharded_optimizer(ADAM, AXIS, FOUR, down, key=train.SEED)
    return replicated(BOTH, tx, mesh, tokens)


METHODS: dict[str, Callable[[Mesh, np.ndarray], Job]] = {
    "FSDP, dense": functools.partial(fully_sharded, None, None),
    "FSDP, 8-bit weights, 4-bit gradients": functools.partial(fully_sharded, EIGHT, FOUR),
    "dense": functools.partial(whole_optimizer, jaxcomp.Dense()),
    "two shots, 4-bit": functools.partial(whole_optimizer, BOTH),
    "sharded optimizer, 4-bit": sharded_optimizer,
}
BASES = {
    "FSDP, 8-bit weights, 4-bit gradients": "FSDP, dense",
    "two shots, 4-bit": "dense",
    "sharded optimizer, 4-bit": "two shots, 4-bit",
}
"""The method that each is compared with."""


def held(tree: Any) -> int:
    """Bytes of arrays on this device."""
    return sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(tree))


def run(
    method: Callable[[Mesh, np.ndarray], Job], own: dict[str, Any], mesh: Mesh, meet: Any
) -> dict[str, Any]:
    draw, _ = train.batches(own)
    rows = draw(1, train.SEED)
    job = method(mesh, rows[0][:1])
    batch = tuple(group.spread(mesh, half) for half in rows)
    memory = {"weights": held(job.params), "optimizer": held(job.state)}
    compiled = job.step.lower(job.params, job.state, batch).compile()
    carried = [job.params, job.state]

    def once() -> None:
        *carried[:], loss = compiled(*carried, batch)
        jax.block_until_ready((carried, loss))

    return {
        "link_bytes": job.link_bytes,
        "collective_bytes": jaxcomp.collective_bytes(compiled),
        "parameters": train.parameters(),
        "memory": memory,
        **group.timed(once, meet, own["repeats"], warm=2),
    }


def main() -> None:
    own = group.place()
    mesh = group.join(own)
    meet = group.meeting(mesh)
    found = {}
    for name in group.chosen(own, METHODS):
        found[name] = {"base": BASES.get(name, ""), **run(METHODS[name], own, mesh, meet)}
        took = ", ".join(f"{seconds:.3f}" for seconds in found[name]["seconds"])
        group.say(own, f"{took} s  {name}: {found[name]['memory']}")
    group.finish(own, {"methods": found})


if __name__ == "__main__":
    main()
