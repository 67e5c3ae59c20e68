"""A worker that times one exchange of a large model: a mean of all workers, or a round of gossip.

Every repetition begins together, and ends where this worker's model has moved. Of a graph whose
rounds take turns, a repetition is all of them, and its seconds are those of one.
"""

import statistics
from collections.abc import Callable
from typing import Any

import group
import jax
import jax.numpy as jnp
import mean
import namespaces
import numpy as np
import optax
import traffic
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxcomp
from jaxcomp import Gossip, Link, NoFeedback, TwoShot, graphs
from jaxcomp.planning import planner, timing

DENSE = Link(jaxcomp.Policy(jaxcomp.codecs.Identity(), min_size=0, min_ndim=0), NoFeedback())
FOUR = Link(jaxcomp.qsgd_inf(bits=4), NoFeedback())
METHODS: dict[str, Callable[[int], Any]] = {
    "all-reduce, dense": lambda n: jaxcomp.Dense(),
    "two shots, 4-bit": lambda n: TwoShot(FOUR, FOUR),
    "ring, dense": lambda n: Gossip(DENSE, graphs.Ring()),
    "ring, 4-bit": lambda n: Gossip(FOUR, graphs.Ring()),
    "one peer, 4-bit": lambda n: Gossip(FOUR, graphs.OnePeer()),
    "exponential, 4-bit": lambda n: Gossip(FOUR, graphs.Exponential()),
    "ring without the slow link, 4-bit": lambda n: Gossip(FOUR, traffic.path(n)),
}
"""Of a number of workers."""


def moved(
    reducer: Any, grads: jax.Array, mesh: Mesh, meet: Callable[[], Any], repeats: int
) -> dict[str, Any]:
    """Seconds and bytes of one exchange."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    params = jax.jit(lambda: jnp.zeros(grads.shape[1:]), out_shardings=everywhere)()
    turns = len(reducer.graph.matrices(mesh.size)) if isinstance(reducer, Gossip) else 1
    program, held = (_gossiped if isinstance(reducer, Gossip) else _averaged)(
        reducer, params, grads, mesh
    )

    def run():
        for _ in range(turns):
            held[:] = program(*held, grads)
            jax.block_until_ready(held)

    found = group.timed(run, meet, repeats)
    found["seconds"] = [each / turns for each in found["seconds"]]
    costs = {name: found[name] / turns for name in ("sent", "user", "system", "pages")}
    like = jax.typeof(params)
    return {
        "reducer": repr(reducer),
        "link_bytes": jaxcomp.wire_bytes(reducer, like, workers=mesh.size),
        "collective_bytes": jaxcomp.collective_bytes(program),
        **found,
        **costs,
    }


def _averaged(reducer: Any, params: Any, grads: Any, mesh: Mesh) -> tuple[Any, list[Any]]:
    tx = jaxcomp.compressed_mean(reducer, group.AXIS)
    state = jaxcomp.init_state(tx, params, mesh, group.AXIS)

    def step(params, state, grads):
        found, state = tx.update(grads[0], state)
        return params + found, state

    many = jaxcomp.data_parallel(step, mesh, group.AXIS, donate_argnums=(0, 1))
    return many.lower(params, state, grads).compile(), [params, state]


def _gossiped(reducer: Gossip, params: Any, grads: Any, mesh: Mesh) -> tuple[Any, list[Any]]:
    tx = jaxcomp.gossip(optax.sgd(1.0), reducer, group.AXIS)
    state = jaxcomp.init_state(tx, params, mesh, group.AXIS)

    def step(params, state, grads):
        _, state = tx.update(grads[0], state, params)
        return params, state

    many = jaxcomp.data_parallel(step, mesh, group.AXIS, donate_argnums=(0, 1))
    return many.lower(params, state, grads).compile(), [params, state]


def message(mesh: Mesh, meet: Callable[[], Any]) -> dict[str, Any]:
    """Seconds of a few bytes to the next worker, after which all wait for theirs."""
    pairs = [(rank, (rank + 1) % mesh.size) for rank in range(mesh.size)]
    x, own = group.spread(mesh, np.ones(mesh.size, np.float32)[:1]), PartitionSpec(group.AXIS)
    mapped = jax.shard_map(
        lambda x: lax.ppermute(x, group.AXIS, pairs),
        mesh=mesh,
        in_specs=own,
        out_specs=own,
        check_vma=False,
    )
    compiled = jax.jit(mapped).lower(x).compile()
    return group.timed(lambda: jax.block_until_ready(compiled(x)), meet, 40, warm=3)


def clock(elements: int, meet: Callable[[], Any]) -> Callable[[Any], timing.Measured]:
    """Times `FOUR` on all workers at once, since they share the cores; copies take no time."""

    def measured(way: Any) -> timing.Measured:
        if not isinstance(way, Link) or way.policy.codec == DENSE.policy.codec:
            return timing.Measured(elements, 0.0, 0.0, 0.0, 0.0)
        return timing.measure(FOUR, elements, repeats=3, meet=meet, choose=statistics.median)

    return measured


def main() -> None:
    # As in local.py: the cache would bring one process to its programs before all others.
    jax.config.update("jax_enable_compilation_cache", False)
    own = group.place()
    mesh = group.join(own)
    meet, workers = group.meeting(mesh), mesh.size
    like = mean.like(own["elements"])
    gradient = np.random.default_rng(own["rank"]).standard_normal(like.shape, np.float32)
    step, _ = mean.without(gradient, meet, own["repeats"])
    small = message(mesh, meet)
    each, idle = statistics.median(small["seconds"]), statistics.median(step["seconds"])
    results: dict[str, Any] = {"elements": gradient.size, "methods": {}}
    results |= {"step": step, "message": small}
    rates = {name: own[name] and namespaces.bytes_a_second(own[name]) for name in ("rate", "slow")}
    links, times = {"shape": own["shape"], **rates}, clock(gradient.size, meet)
    grads = group.spread(mesh, gradient[None])
    for name in group.chosen(own, METHODS):
        reducer = METHODS[name](workers)
        found = moved(reducer, grads, mesh, meet, own["repeats"])
        price, _ = planner.price(reducer, like, (workers,), times)
        found |= traffic.forecast(reducer, like, links, each, price, workers)
        found["forecast"] += idle
        results["methods"][name] = found
        took = np.median(found["seconds"])
        group.say(own, f"{took:8.3f} s, forecast {found['forecast']:8.3f}  {name}")
    group.finish(own, results)


if __name__ == "__main__":
    main()
