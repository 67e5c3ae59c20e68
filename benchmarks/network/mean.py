"""A worker that times means of one large gradient, and the links and codecs that they use.

Every repetition begins together and ends where this worker has the mean, added to its parameters;
the gradient stays the same, the parameters and the memory are given away and come back.
"""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import group
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxcomp
from jaxcomp import Gather, Link, NoFeedback, Residual, TwoShot
from jaxcomp.planning import planner, timing

CODECS = {f"{bits}-bit": Link(jaxcomp.qsgd_inf(bits=bits), NoFeedback()) for bits in (8, 4, 2)}
CODECS["1-bit"] = Link(jaxcomp.sign(), Residual())
SPARSE = {
    "top_k 1 %": jaxcomp.top_k(fraction=0.01),
    "threshold 1 %": jaxcomp.threshold(2.6, fraction=0.01),  # 0.93 % of normal values exceed it.
    "sidco 0.1 %": jaxcomp.sidco(fraction=0.001),
}
METHODS: dict[str, Any] = {
    "dense float32": jaxcomp.Dense(),
    "dense bfloat16": jaxcomp.Dense(dtype="bfloat16"),
    **{f"gather, {name}": Gather(link) for name, link in CODECS.items()},
    **{f"two shots, {name}": TwoShot(link, link) for name, link in CODECS.items()},
    **SPARSE,
    "PowerSGD rank 4": jaxcomp.PowerIteration(rank=4),
    "default for qsgd_inf(bits=4)": jaxcomp.qsgd_inf(bits=4),
    "default for sign()": jaxcomp.sign(),
}
MIB = 2**20


def like(elements: int) -> jax.ShapeDtypeStruct:
    """The gradient."""
    return jax.ShapeDtypeStruct(group.matrix(elements), np.float32)


def picked(method: Any, like: Any, workers: int) -> Any:
    """The reducer of a method."""
    return jaxcomp.choose_reducer(method, like, workers)


def mean_of(
    method: Any, grads: jax.Array, mesh: Mesh, meet: Callable[[], Any], repeats: int
) -> dict[str, Any]:
    """Seconds and bytes of one method."""
    tx = jaxcomp.compressed_mean(method, group.AXIS)

    def step(params, state, grads):
        mean, state = tx.update(grads[0], state)
        return params + mean, state

    everywhere = NamedSharding(mesh, PartitionSpec())
    params = jax.jit(lambda: jnp.zeros(grads.shape[1:]), out_shardings=everywhere)()
    shape = jax.typeof(params)
    state = jaxcomp.init_state(tx, params, mesh, group.AXIS)
    many = jaxcomp.data_parallel(step, mesh, group.AXIS, donate_argnums=(0, 1))
    compiled = many.lower(params, state, grads).compile()
    held = [params, state]
    del params, state

    def run():
        held[:] = jax.block_until_ready(compiled(*held, grads))

    by_collective = jaxcomp.collective_bytes(compiled)
    return {
        "reducer": repr(picked(method, shape, mesh.size)),
        "link_bytes": jaxcomp.wire_bytes(method, shape, workers=mesh.size),
        "collective_bytes": by_collective,
        **group.timed(run, meet, repeats, warm=2),
    }


def wire_speed(mesh: Mesh, meet: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Times collectives without computation: of a few bytes for the latency, of many for the speed.

    `size` is the bytes that one worker puts in.
    """
    many = 4 * MIB
    own = PartitionSpec(group.AXIS)

    def gather(x):
        return lax.all_gather(x, group.AXIS, tiled=True)

    def exchange(x):
        return lax.all_to_all(x, group.AXIS, 0, 0, tiled=True)

    def total(x):
        return lax.psum(x, group.AXIS)

    def measure(body, size, dtype, lie, times):
        x = group.spread(mesh, np.ones(size // np.dtype(dtype).itemsize, dtype))
        mapped = jax.shard_map(body, mesh=mesh, in_specs=own, out_specs=lie, check_vma=False)
        compiled = jax.jit(mapped).lower(x).compile()
        times = group.timed(lambda: jax.block_until_ready(compiled(x)), meet, times, warm=3)
        return {"size": size, **times}

    return {
        "psum, small": measure(total, 4, np.float32, PartitionSpec(), 40),
        "psum, large": measure(total, 2 * many, np.float32, PartitionSpec(), repeats),
        "all_gather, small": measure(gather, mesh.size, np.uint8, own, 40),
        "all_gather, large": measure(gather, many, np.uint8, own, repeats),
        "all_to_all, small": measure(exchange, mesh.size, np.uint8, own, 40),
        "all_to_all, large": measure(exchange, many, np.uint8, own, repeats),
    }


def work(
    elements: int, processes: int, meet: Callable[[], Any], repeats: int
) -> dict[str, dict[str, float]]:
    """Times the codecs for the link model, on all workers at once: they share the cores."""
    found: dict[str, dict[str, float]] = {}

    def clock(way: Any) -> timing.Measured:
        measured = timing.measure(
            way, elements, repeats=repeats, meet=meet, choose=statistics.median
        )
        found[repr(way)] = dataclasses.asdict(measured)
        return measured

    for method in METHODS.values():
        reducer = picked(method, like(elements), processes)
        planner.price(reducer, like(elements), (processes,), clock)
    return found


def without(
    gradient: np.ndarray, meet: Callable[[], Any], repeats: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A step without a mean, and a copy of the gradient."""
    target, add = np.empty_like(gradient), jax.jit(jnp.add, donate_argnums=0)
    held, grads = [jnp.zeros_like(gradient)], jnp.asarray(gradient)

    def step():
        held[:] = [jax.block_until_ready(add(*held, grads))]

    copy = group.timed(lambda: np.copyto(target, gradient), meet, repeats)
    return group.timed(step, meet, repeats), copy


def main() -> None:
    own = group.place()
    mesh = group.join(own)
    meet, repeats = group.meeting(mesh), own["repeats"]
    shape = like(own["elements"]).shape
    gradient = np.random.default_rng(own["rank"]).standard_normal(shape, np.float32)
    results: dict[str, Any] = {"elements": gradient.size, "methods": {}}
    if not own["methods"]:
        results["wire"] = wire_speed(mesh, meet, repeats)
        results["step"], results["copy"] = without(gradient, meet, repeats)
        if own["work"]:
            results["work"] = work(gradient.size, mesh.size, meet, repeats)
    grads = group.spread(mesh, gradient[None])
    for name in group.chosen(own, METHODS):
        found = mean_of(METHODS[name], grads, mesh, meet, repeats)
        results["methods"][name] = found
        group.say(own, f"{np.median(found['seconds']):8.3f} s  {name}")
    group.finish(own, results)


if __name__ == "__main__":
    main()
