"""Clients for tests of federated training: a small network, and data that differ between them."""

import dataclasses
import hashlib
import os
import pathlib
import re
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp
from jaxcomp import federated
from jaxcomp.federated import block

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATIENCE = 240  # Seconds, of a machine that is busy with other tests.
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


class Spread:
    """In place of a simulation's program: the clients of a block over four workers of a map."""

    beside = 1

    def __init__(self, sim, mode):
        def each(*given):
            return block.run(sim.method, *given, turn=0, chunk=2, axis_name="c")

        on = {"in_axes": (None, None, 0, 0, 0), "axis_name": "c"}
        self.run = jax.jit(jax.vmap(each, **on)) if mode == "vmap" else jax.pmap(each, **on)

    def __call__(self, turn, known, total, *given):
        assert turn == 0
        size = len(given[0].numbers)
        order = np.arange(size).reshape(-1, 4, 2).swapaxes(0, 1).reshape(4, -1)
        done = self.run(known, total, *jax.tree.map(lambda x: np.asarray(x)[order], given))
        totals = [jax.tree.map(lambda x, n=n: np.asarray(x[n]), done.total) for n in range(4)]
        assert len({digest(total) for total in totals}) == 1
        back = np.argsort(order.reshape(-1))
        rows = jax.tree.map(
            lambda x: np.asarray(x).reshape(size, *x.shape[2:])[back],
            (done.own, done.sent, done.accepted, done.losses),
        )
        return block.Done(totals[0], *rows, None)


FEW = 3
"""Clients where each is a process of its own."""

FEW_METHOD = dataclasses.replace(METHOD, sampling=federated.Exactly(2))


def few(**settings):
    """A simulation of few clients, of which one stays away in every round, and some are lost."""
    settings = {"faults": FAULTS, "chunk": 1, "messages": 1_000, **settings}
    return federated.Simulation(FEW_METHOD, params(), FEW, batches, **settings)


def in_two_processes(rounds, which):
    """The digests of two `jax.distributed` processes, each with the half of the clients."""
    with socket.create_server(("localhost", 0)) as found:
        address = f"localhost:{found.getsockname()[1]}"
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    running = [
        subprocess.Popen(
            [sys.executable, __file__, address, "2", str(number), str(rounds), which],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        )
        for number in range(2)
    ]
    try:
        said = [process.communicate(timeout=PATIENCE)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], said
    return [re.search(r"digest (\w+)", text)[1] for text in said]


def main(address, processes, number, rounds, which):
    """One of several processes of a simulation; prints the digest of the parameters."""
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, int(processes), int(number), initialization_timeout=200)
    mesh = jax.make_mesh((int(processes),), ("clients",))
    sim = few(mesh=mesh) if which == "few" else simulation(mesh=mesh, chunk=4)
    sim.run(int(rounds))
    print("digest", digest(sim.params), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
