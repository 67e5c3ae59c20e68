"""Every method trains over the devices of a mesh, with the bits of one device."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import federated
from jaxcomp.federated import methods

CLIENTS, STEPS = 4, 2
_draw = np.random.default_rng(11)
X = _draw.normal(size=(CLIENTS, STEPS, 3, 12)).astype(np.float32)
WIDTH = 96
PARAMS = {  # The matrix has over 1,024 elements: STC sends smaller ones dense.
    "w": _draw.normal(size=(12, WIDTH)).astype(np.float32),
    "b": np.zeros(WIDTH, np.float32),
}


def loss(params, x):
    def cell(h, row):  # A loop that begins with zeros, as in a recurrent network.
        return h + jnp.tanh(row @ params["w"] + params["b"]), None

    return jnp.sum(jax.lax.scan(cell, jnp.zeros(WIDTH), x)[0] ** 2)


def falling():
    return optax.cosine_decay_schedule(0.1, 10)


ALL = jaxcomp.Policy(jaxcomp.qsgd_inf(bits=4), min_size=0, min_ndim=0)
MADE = {
    "fedavg": lambda: federated.fedavg(loss, learning_rate=falling()),
    "fedpaq": lambda: federated.fedpaq(ALL, loss, learning_rate=falling(), participants=3),
    "genqsgd": lambda: federated.genqsgd(ALL, loss, learning_rate=0.1),
    "stc": lambda: federated.stc(loss, learning_rate=0.1, fraction=0.2),
    "fedvote": lambda: federated.fedvote(federated.Latent(loss)),
    "predictive_coding": lambda: federated.predictive_coding(loss),
    "kept adam": lambda: federated.Method(
        federated.LocalSteps(loss, optax.adam(0.01), keep=True),
        jaxcomp.Link(ALL, jaxcomp.Shift(0.2)),
        mean="all",
    ),
}


def test_every_method_is_here():
    public = inspect.getmembers(methods, inspect.isfunction)
    named = {n for n, f in public if f.__module__ == methods.__name__ and not n.startswith("_")}
    assert named == set(MADE) - {"kept adam"}


@pytest.mark.core("fedavg")
@pytest.mark.parametrize("name", MADE)
def test_two_devices_change_no_bit(name):
    method, found = MADE[name](), []
    for mesh in (None, jax.make_mesh((2,), ("clients",), devices=jax.devices()[:2])):
        sim = federated.Simulation(
            method, PARAMS, CLIENTS, lambda numbers, round: X[numbers], chunk=2, mesh=mesh
        )
        sim.run(2)
        found.append(sim.params)
    for one, two in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(one, two)
    assert np.abs(found[0]["w"] - PARAMS["w"]).max() > 1e-4
