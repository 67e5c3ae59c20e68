"""Shifts where clients come and go and count differently: exact, and the mirror is their mean."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import federated

CLIENTS, ROUNDS = 20, 160
_draw = np.random.default_rng(7)
TARGETS = {
    "kernel": _draw.normal(size=(CLIENTS, 1, 16, 64)).astype(np.float32),
    "bias": _draw.normal(3, 1, size=(CLIENTS, 1, 9)).astype(np.float32),
}
"""The optimum of each client's loss; "bias" is sent dense."""
WEIGHTS = np.where(np.arange(CLIENTS) < 3, 30.0, 1.0)
TOP = jaxcomp.top_k(fraction=0.25)
QSGD = jaxcomp.qsgd_inf(bits=2, bucket_size=64)
EF21 = jaxcomp.Link(TOP, jaxcomp.Shift())
DIANA = jaxcomp.Link(QSGD, jaxcomp.Shift(1 / (1 + QSGD.variance_bound(64))))
OLD = federated.Faults(lost=0.2, old=0.5, longest=2)


def loss(params, target):
    return sum(0.5 * jnp.sum((params[k] - target[k]) ** 2) for k in params)


@pytest.mark.core("ef21 weighted")
@pytest.mark.parametrize(
    ("link", "sampling", "weights", "faults"),
    [
        (EF21, federated.Independently(0.2), None, federated.Faults()),
        (EF21, federated.Exactly(10), WEIGHTS, federated.Faults()),
        (DIANA, federated.Independently(0.2), None, federated.Faults()),
        (DIANA, federated.Everyone(), WEIGHTS, OLD),
    ],
    ids=["ef21", "ef21 weighted", "diana", "diana weighted, late and lost"],
)
def test_shifts_reach_the_weighted_optimum(link, sampling, weights, faults):
    work = federated.LocalSteps(loss, optax.sgd(0.2))
    method = federated.Method(work, link, mean="all", sampling=sampling)
    sim = federated.Simulation(
        method,
        jax.tree.map(lambda x: jnp.zeros(x.shape[2:]), TARGETS),
        CLIENTS,
        lambda numbers, round: {k: x[numbers] for k, x in TARGETS.items()},
        weights=weights,
        faults=faults,
        chunk=CLIENTS,
    )
    sim.run(ROUNDS)
    share = np.ones(CLIENTS) / CLIENTS if weights is None else weights / weights.sum()
    for name, targets in TARGETS.items():
        best = np.einsum("n,n...->...", share, targets[:, 0].astype(np.float64))
        assert np.linalg.norm(sim.params[name] - best) < 1e-2 * np.linalg.norm(best), name
    own = sim.table.read(np.arange(CLIENTS)).memory
    for kept, held in zip((own.feedback, own.dense), sim.state.mirror, strict=True):
        mean = np.einsum("n,n...->...", share, kept.own[0].astype(np.float64))
        assert np.abs(kept.own[0]).max() > 0.1
        np.testing.assert_allclose(held.mirror[0], mean, atol=2e-6)
