"""Means over steps, by one of several processes: they must not depend on how many there are.

    python tests/processes.py HOST:PORT PROCESSES NUMBER DEVICES FILE

`end_to_end/test_multiprocess.py` starts it. A worker is a device; FILE gets what each holds at the
end.
"""

import pathlib
import pickle
import sys

import jax
import numpy as np
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
    return found, state


def main(address, processes, number, devices, file):
    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(address, processes, number, initialization_timeout=200)
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    own = range(number * devices, (number + 1) * devices)
    found = {name: means(one, mesh, own) for name, one in {**EXACT, **ROUNDED}.items()}
    held = {
        worker: jax.tree.map(lambda leaf, at=at: np.asarray(leaf.addressable_data(at)), found)
        for at, worker in enumerate(own)
    }
    pathlib.Path(file).write_bytes(pickle.dumps(held))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5])
