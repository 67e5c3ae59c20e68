"""One of several processes that publish weights together.

    python tests/helpers/publishers.py HOST:PORT PROCESSES NUMBER FOLDER

`weights/test_several_processes.py` starts it, and has the arrays that readers must get.
"""

import contextlib
import sys

import numpy as np

VERSIONS = 4
RULES = {"skips": (), "snapshot_every": 100}
MOVES = 8


def arrays(step):
    """A matrix that is sharded, a vector that is replicated, and a number."""
    draw = np.random.default_rng(2)
    moves = step // MOVES + draw.integers(0, MOVES, (16, 50)) * step
    return {
        "sharded": (draw.standard_normal((16, 50)) + 1e-7 * moves).astype(np.float32),
        "replicated": np.linspace(1, 2, 300, dtype=np.float32) + np.float32(step),
        "number": np.int32(step),
    }


class Full(OSError):
    """A disk is full."""


def full(name, parts):
    """Fails as `Store.write_new` does."""
    raise Full(28, "No space left on device")


def main(address, processes, number, folder):
    """Publishes all versions."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxcomp.weights import Publisher

    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(address, processes, number, initialization_timeout=200)
    mesh = jax.make_mesh((2 * processes,), ("data",))
    split = {"sharded": PartitionSpec("data"), "replicated": PartitionSpec()}

    def place(name, array):
        sharding = NamedSharding(mesh, split.get(name, PartitionSpec()))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    for begin in (0, VERSIONS // 2):  # The second publisher takes over.
        with Publisher(folder, **RULES) as publisher:
            for step in range(begin, begin + VERSIONS // 2):
                params = {name: place(name, leaf) for name, leaf in arrays(step).items()}
                publisher.publish(params, step)
                publisher.flush()
            if number == 0 and begin:  # Its disk is full; the other process does not know.
                publisher._writer._store.write_new, write = full, publisher._writer._store.write_new
                publisher.publish(params, VERSIONS)
                with contextlib.suppress(Full):
                    publisher.flush()
                publisher._writer._store.write_new = write
            elif begin:
                publisher.publish(params, VERSIONS)
                publisher.flush()
            if begin:
                params = {name: place(name, leaf) for name, leaf in arrays(VERSIONS + 1).items()}
                publisher.publish(params, VERSIONS + 1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
