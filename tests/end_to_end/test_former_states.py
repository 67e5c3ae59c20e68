"""Checkpoints of version 0.2 are read, and training goes on from them with the same bits."""

import json
import os
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from helpers.paths import TESTS
from helpers.suite import label
from test_digests import EVERYWHERE, FOUR, GOSSIP, MORE, SIGN, TOP, contents, machine, recorded

import jaxcomp

WRITE = bool(os.environ.get("JAXCOMP_WRITE_GOLDEN"))
PATH = TESTS / "golden" / "states"
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not WRITE and machine() != recorded(), reason=f"bits of {recorded()}"),
    pytest.mark.filterwarnings("ignore:.*is biased.*:UserWarning"),
]
LIKE = {"w": jnp.zeros((24, 64)), "b": jnp.zeros(30)}
RESIDUAL = jaxcomp.Link(SIGN, jaxcomp.Residual())


def mean(codec, axis="data", **settings):
    return optax.chain(jaxcomp.compressed_mean(codec, axis, key=5, **settings), optax.adam(0.1))


CASES = {
    "chosen, no memory": (FOUR, {}),
    "chosen, four workers": (RESIDUAL, {}),
    "chosen, two workers": (RESIDUAL, {"workers": 2}),
    "chosen, shift": (jaxcomp.Link(SIGN, jaxcomp.Shift()), {}),
    "gather, residual": (jaxcomp.Gather(RESIDUAL), {}),
    "gather, levels": (jaxcomp.Gather(jaxcomp.alq(bits=3)), {}),
    "two shots": (jaxcomp.TwoShot(RESIDUAL, RESIDUAL), {}),
    "two shots, shift": (jaxcomp.TwoShot(jaxcomp.Link(FOUR, jaxcomp.Shift(0.3))), {}),
    "summed": (jaxcomp.Psum(jaxcomp.thc(bucket_size=512)), {}),
    "hierarchy": (jaxcomp.Hierarchical(jaxcomp.Dense(), RESIDUAL), {}),
    "power iteration": (jaxcomp.PowerIteration(rank=2), {}),
    "medians": (jaxcomp.Robust(FOUR, jaxcomp.aggregates.CoordinateMedian()), {}),
    "credible": (jaxcomp.Robust(FOUR, jaxcomp.aggregates.Credible()), {}),
    "phases": (
        jaxcomp.ReducerSchedule(
            tuple((2 * at, jaxcomp.Link(c, jaxcomp.Residual())) for at, c in enumerate((TOP, MORE)))
        ),
        {},
    ),
    "gated": (RESIDUAL, {"gate": jaxcomp.gates.Every(2)}),
    "accumulated": (RESIDUAL, {"wrap": lambda tx: jaxcomp.accumulate(tx, "data", every=2)}),
    "local": (
        None,
        {
            "tx": jaxcomp.local_updates(
                optax.sgd(0.1, 0.9), None, "data", every=2, reducer=EVERYWHERE, key=5
            )
        },
    ),
    "gossip": (None, {"tx": jaxcomp.gossip(optax.sgd(0.1), GOSSIP["differences"][0], "data")}),
}


def made(name):
    """The transformation of a case, its mesh, and its axes."""
    codec, settings = CASES[name]
    settings = dict(settings)
    workers, wrap = settings.pop("workers", 4), settings.pop("wrap", lambda tx: tx)
    if name == "hierarchy":
        mesh = jax.make_mesh((2, 2), ("slow", "fast"), devices=jax.devices()[:4])
        return mean(codec, ("slow", "fast")), mesh, ("slow", "fast")
    mesh = jax.make_mesh((workers,), ("data",), devices=jax.devices()[:workers])
    return settings.pop("tx", None) or wrap(mean(codec, **settings)), mesh, "data"


def stepper(tx, mesh, axis):
    def step(params, state, target):
        at = jaxcomp.local(jaxcomp.view(params, state), axis)
        grads = jax.tree.map(lambda x, t: x - t[0].astype(x.dtype), at, target)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jaxcomp.data_parallel(step, mesh, axis)


def targets(seed, mesh):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal((mesh.size, *x.shape)), x.dtype), LIKE
    )


@pytest.mark.parametrize("name", CASES, ids=label)
def test_training_goes_on_from_a_state_of_version_0_2(name):
    tx, mesh, axis = made(name)
    step = stepper(tx, mesh, axis)
    params = jaxcomp.place(LIKE, mesh, axis)
    state = jaxcomp.init_state(tx, params, mesh, axis)
    file, digests = PATH / f"{name}.msgpack.z", PATH / "digests.json"
    if WRITE:
        for seed in range(3):
            params, state = step(params, state, targets(seed, mesh))
        file.write_bytes(zlib.compress(serialization.to_bytes((params, state)), 9))
    data = zlib.decompress(file.read_bytes())
    found = serialization.msgpack_restore(data)
    params, state = jaxcomp.restore_former(found, (params, state))
    for seed in range(3, 5):
        params, state = step(params, state, targets(seed, mesh))
    known = json.loads(digests.read_text()) if digests.exists() else {}
    if WRITE:
        known[name] = contents(params)
        digests.write_text(json.dumps(known, indent=1) + "\n")
    assert contents(params) == known[name]
