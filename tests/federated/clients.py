"""Clients for tests of federated training: a small network, and data that differ between them."""

import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp
from jaxcomp import federated

CLIENTS, STEPS, BATCH, FEATURES, WIDTH, LABELS = 40, 3, 4, 8, 64, 5

_draw = np.random.default_rng(0)
X = _draw.normal(size=(CLIENTS, STEPS, BATCH, FEATURES)).astype(np.float32)
Y = (
    X @ _draw.normal(size=(FEATURES, LABELS)) + _draw.normal(size=(CLIENTS, 1, 1, LABELS)) * 0.5
).argmax(-1)
Y = Y.astype(np.int32)


def params():
    draw = np.random.default_rng(1)
    return {
        "hidden": jnp.asarray(draw.normal(size=(FEATURES, WIDTH)) / 3, jnp.float32),
        "bias": jnp.zeros(WIDTH),
        "out": jnp.asarray(draw.normal(size=(WIDTH, LABELS)) / 8, jnp.float32),
    }


def loss(params, batch):
    x, y = batch
    h = jax.nn.relu(x @ params["hidden"] + params["bias"])
    logits = jax.nn.log_softmax(h @ params["out"])
    return -jnp.mean(jnp.take_along_axis(logits, y[:, None], axis=1))


def batches(numbers, round):
    del round
    return X[numbers], Y[numbers]


POLICY = jaxcomp.Policy(jaxcomp.top_k(fraction=0.1), min_size=100)
"""Compresses both kernels, and sends the bias dense."""

DOWN = jaxcomp.Policy(jaxcomp.blockwise(bits=8), min_size=0, min_ndim=0)
"""Compresses every leaf."""

WORK = federated.LocalSteps(loss, optax.sgd(0.2))

METHOD = federated.Method(
    WORK,
    jaxcomp.Link(POLICY, jaxcomp.Residual()),
    down=jaxcomp.Link(DOWN, jaxcomp.Residual()),
    sampling=federated.Exactly(24),
)
"""Compressed with memory in both directions, over samples of the clients."""

FAULTS = federated.Faults(lost=0.2)


def simulation(method=METHOD, **settings):
    settings = {"faults": FAULTS, "chunk": 8, **settings}
    return federated.Simulation(method, params(), CLIENTS, batches, **settings)


def digest(tree) -> str:
    """SHA-256 of all bytes of a tree."""
    leaves = [np.ascontiguousarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
    return hashlib.sha256(b"".join(leaves)).hexdigest()


def main(address, processes, number, rounds):
    """One of several processes of a simulation; prints the digest of the parameters."""
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, int(processes), int(number), initialization_timeout=200)
    sim = simulation(mesh=jax.make_mesh((int(processes),), ("clients",)), chunk=4)
    sim.run(int(rounds))
    print("digest", digest(sim.params), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
