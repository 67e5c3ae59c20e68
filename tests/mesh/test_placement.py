"""Where the arrays of a state lie after a step."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxcomp

X = jnp.ones((4, 64))


def compressed():
    return jaxcomp.compressed_mean(jaxcomp.sign(), "data", param_specs={"w": P("fsdp")})


MEMORY = {
    "accumulate": lambda: jaxcomp.accumulate(
        optax.chain(compressed(), optax.sgd(0.1)), "data", every=2
    ),
    "per_worker": lambda: optax.chain(jaxcomp.per_worker(optax.trace(0.9)), compressed()),
    "local_updates": lambda: jaxcomp.algorithms.local_sgd(
        jaxcomp.Dense(), "data", learning_rate=0.1, every=4
    ),
}
"""Transformations with memory of the parameters' shapes."""


def held(tree):
    """The number of bytes on the first device."""
    shards = [shard for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == jax.devices()[0])


@pytest.mark.core("local_updates-AxisType.Auto")
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, AxisType.Auto) for name in MEMORY), ("per_worker", None)]
)
def test_memory_stays_with_its_shards(name, kind):
    """In whatever tree the step has its parameters."""
    types = {} if kind is None else {"axis_types": (kind,) * 2}
    mesh, tx = jax.make_mesh((2, 4), ("data", "fsdp"), **types), MEMORY[name]()
    params = {"w": jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, P("fsdp")))}
    state = jaxcomp.init_state(tx, params, mesh, "data")

    def moved(params, state, x):
        at = jaxcomp.view(params, state)
        _, grads = jaxcomp.value_and_grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2), "data")(at, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def of_dict(held, x):
        params, state = moved(held["params"], held["memory"]["state"], x)
        return {"params": params, "memory": {"state": state}}

    def of_flax(train, x):
        params, state = moved(train.params, train.opt_state, x)
        return train.replace(params=params, opt_state=state)

    def unlike(held, x):
        return moved(*held, x)[1]

    flax = TrainState(step=0, apply_fn=None, params=params, tx=tx, opt_state=state)
    both = {"params": params, "memory": {"state": state}}
    found = [
        jaxcomp.data_parallel(of_dict, mesh, "data")(both, X)["memory"],
        jaxcomp.data_parallel(of_flax, mesh, "data")(flax, X).opt_state,
        jaxcomp.data_parallel(unlike, mesh, "data")((params, state), X),
        jaxcomp.place(state, mesh, "data"),
    ]
    assert [held(one) for one in found] == [held(state)] * 4


def test_memory_of_one_worker_keeps_its_shards():
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    like = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, P("fsdp")))
    alone = jaxcomp.per_worker(optax.trace(0.9)).init({"w": like})
    (memory,) = jax.tree.leaves(jaxcomp.place(alone, mesh, "data"))
    assert memory.shape == (2, 64, 64)
    assert memory.sharding.spec == P("data", "fsdp")
