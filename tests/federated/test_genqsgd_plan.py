"""GenQSGD and its planner agree: the planned training meets the error with the planned bits."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp
from jaxcomp import federated
from jaxcomp.planning import Loss, Machine, plan_genqsgd

SIZE, RATE, NOISE = 64, 0.02, 2.0
LOSS = Loss(SIZE, gap=2.0, gradient=3.0, smoothness=1.0, noise=NOISE, learning_rate=RATE)
"""A quadratic of smoothness 1, from a point at the distance 2."""
UP, DOWN = 4, 8
LEVELS = {bits: 2 ** (bits - 1) - 1 for bits in (UP, DOWN)}


@pytest.mark.full
def test_a_planned_training_meets_its_error():
    slow = Machine(2, cycles=1e8, frequency=5e8, power=1.5, rate=5e4, levels=LEVELS[UP])
    fast = Machine(2, cycles=1e8, frequency=4e9, power=1.5, rate=5e4, levels=LEVELS[UP])
    server = Machine(1, cycles=100, frequency=3e9, power=20, rate=7.5e7, levels=LEVELS[DOWN])
    plan = plan_genqsgd(LOSS, [slow, fast], server, error=1.5, seconds=100, per_class=True)
    assert plan.steps[0] > plan.steps[1]  # A step of a fast machine takes more joules.
    assert plan.error <= 1.5
    own = np.repeat(plan.steps, 2)

    def loss(w, x):
        return jnp.mean(jnp.sum((w - x) ** 2, axis=-1)) / 2

    def batches(numbers, round):
        draw = np.random.default_rng(round)
        x = draw.normal(size=(4, max(own), plan.batch, SIZE)) * NOISE / SIZE**0.5
        return x[numbers].astype(np.float32)

    everywhere = {"min_size": 0, "min_ndim": 0}
    up, down = (
        jaxcomp.Policy(jaxcomp.qsgd(bits=bits, bucket_size=None), **everywhere)
        for bits in (UP, DOWN)
    )
    method = federated.genqsgd(up, loss, learning_rate=RATE, down=down)
    start = jnp.full(SIZE, 2 / SIZE**0.5)
    sim = federated.Simulation(method, start, 4, batches, steps=lambda numbers, _: own[numbers])
    squares = []
    for _ in range(plan.rounds):
        squares.append(float(jnp.sum(sim.params**2)))
        sim.round()
    assert np.mean(squares) <= plan.error
    assert squares[-1] < 0.5 * squares[0]
    # A code of ours has the level zero, too.
    bits = 8 * sim.ledger.up / plan.rounds / 4
    assert bits == pytest.approx(LOSS.bits(LEVELS[UP]), rel=0.05)
