"""Means and local rounds, by one of several processes: they must not depend on how many there are.

    python tests/helpers/processes.py HOST:PORT PROCESSES NUMBER DEVICES FILE

`end_to_end/test_multiprocess.py` starts it. A worker is a device; FILE gets what each holds at the
end.
"""

import pathlib
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jaxcomp

STEPS = 3
PARAMS = {
    "w": np.zeros((37, 53), np.float32),
    "v": np.zeros((11, 13, 5), np.float32),
    "b": np.zeros(523, np.float32),
}


def everything(codec, feedback=None):
    """A link that compresses leaves of any size."""
    policy = jaxcomp.Policy(codec, min_size=0, min_ndim=0)
    return jaxcomp.Link(policy, feedback or jaxcomp.NoFeedback())


SIGN = everything(jaxcomp.sign(), jaxcomp.Residual())
EXACT = {
    "gather": jaxcomp.Gather(SIGN),
    "two shots": jaxcomp.TwoShot(SIGN, jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual())),
    "IntSGD": jaxcomp.Psum(everything(jaxcomp.int_sgd(bucket_size=512))),
}
ROUNDED = {
    "dense": jaxcomp.Dense(),
    "random_k": jaxcomp.Psum(everything(jaxcomp.random_k(fraction=0.1, bucket_size=512))),
}
TIMES = {"dense": 1, "random_k": 10}  # As large as they were, gradients are sent.


def gradients(step, workers):
    """Those of some of the workers, stacked; each has its own."""
    draws = [np.random.default_rng((step, worker)) for worker in workers]
    return {
        name: np.stack([draw.standard_normal(leaf.shape) for draw in draws]).astype(leaf.dtype)
        for name, leaf in PARAMS.items()
    }


def means(reducer, mesh, own):
    """The mean of each step and the state at the end; `own` are the workers of this process."""
    tx = jaxcomp.compressed_mean(reducer, "data", key=5)
    split = NamedSharding(mesh, PartitionSpec("data"))

    def update(state, grads):
        return tx.update(jax.tree.map(lambda g: g[0], grads), state)

    step = jaxcomp.data_parallel(update, mesh, "data")
    state = jaxcomp.init_state(tx, PARAMS, mesh, "data")
    found = []
    for number in range(STEPS):
        grads = jax.make_array_from_process_local_data(split, gradients(number, own))
        mean, state = step(state, grads)
        found.append(mean)
    # Placing what comes next compares it between the processes, over the same connections.
    return jax.block_until_ready((found, state))


def local_rounds(mesh, own):
    """Two rounds and a half of local steps, whose exchanges run beside them."""
    tx = jaxcomp.local_updates(
        optax.adam(0.1),
        optax.sgd(0.7, 0.9),
        "data",
        every=4,
        fragments=2,
        delay=1,
        mix=0.5,
        reducer=EXACT["gather"],
    )

    def to_target(params, target):
        apart = jax.tree.map(lambda x, y: x - y[0], params, target)
        return sum((x**2).sum() for x in jax.tree.leaves(apart)) / 2

    split = NamedSharding(mesh, PartitionSpec("data"))
    params = jaxcomp.place(jax.tree.map(jnp.asarray, PARAMS), mesh, "data")
    for leaf in jax.tree.leaves(params):  # As orbax asks for them.
        assert len(leaf.addressable_shards) == len(own)
    state = jaxcomp.init_state(tx, params, mesh, "data")
    with jaxcomp.Overlapped(tx, jax.value_and_grad(to_target), mesh, "data") as run:
        for number in range(9):
            target = jax.make_array_from_process_local_data(split, gradients(number, own))
            params, state, _ = run(params, state, target)
        return jax.block_until_ready((params, run.settle(state)))


def main(address, processes, number, devices, file):
    jax.config.update("jax_num_cpu_devices", 2 * devices)
    jax.distributed.initialize(address, processes, number, initialization_timeout=200)
    workers = [device for device in jax.devices() if device.id % (2 * devices) < devices]
    mesh = jax.make_mesh((len(workers),), ("data",), devices=workers)
    own = range(number * devices, (number + 1) * devices)
    found = {name: means(one, mesh, own) for name, one in {**EXACT, **ROUNDED}.items()}
    found["local rounds"] = local_rounds(mesh, own)
    held = {
        worker: jax.tree.map(lambda leaf, at=at: np.asarray(leaf.addressable_data(at)), found)
        for at, worker in enumerate(own)
    }
    pathlib.Path(file).write_bytes(pickle.dumps(held))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5])
