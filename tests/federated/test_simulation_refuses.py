"""Wrong use of a simulation and of its parts is an error that says what would work."""

import jax
import numpy as np
import optax
import pytest
from helpers import clients as world

import jaxcomp
from jaxcomp import aggregates, federated


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clients": 0}, "`clients` must be at least 1"),
        ({"chunk": 0}, "`chunk` must be at least 1"),
        ({"weights": np.zeros(world.CLIENTS)}, "`weights` must be 40 positive numbers"),
        ({"method": 3}, "`method` must be"),
        ({"faults": 0.2}, "`faults` must be"),
        ({"table": 3}, "`table` must be 'memory', 'device' or a folder"),
        ({"mesh": jax.make_mesh((1,), ("c",)), "table": "device"}, "`table` must be 'memory'"),
    ],
)
def test_refuses(settings, message):
    given = {
        "method": world.METHOD,
        "params": world.params(),
        "clients": world.CLIENTS,
        "batches": world.batches,
        **settings,
    }
    with pytest.raises(ValueError, match=message):
        federated.Simulation(**given)


def test_warns_if_no_leaf_is_compressed():
    """The default policy sends small leaves dense; an exact codec is dense by name."""

    def simulated(codec):
        method = federated.Method(world.METHOD.work, codec)
        return federated.Simulation(method, np.zeros(16, np.float32), 4, world.batches)

    with pytest.warns(UserWarning, match=r"compresses no leaf .* \('1-D, below min_ndim=2'\)"):
        simulated(jaxcomp.qsgd_inf(bits=4))
    simulated(jaxcomp.Policy(jaxcomp.qsgd_inf(bits=4), min_size=0, min_ndim=0))
    simulated(jaxcomp.codecs.Identity())


def test_refuses_data_of_another_shape():
    sim = federated.Simulation(
        world.METHOD, world.params(), world.CLIENTS, lambda n, r: world.X[n, 0, 0, 0]
    )
    with pytest.raises(ValueError, match=r"`batches` must give arrays \[24 clients, steps, …\]"):
        sim.round()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: federated.Uplink(jaxcomp.terngrad(shared=True)),
            "all clients would have to agree",
        ),
        (lambda: federated.Uplink(3), "`link` must be a codec"),
        (
            lambda: federated.Uplink(
                jaxcomp.Link(jaxcomp.demo(), jaxcomp.Aggregated(jaxcomp.Residual(0.9)))
            ),
            "needs the mean of all",
        ),
        (
            lambda: federated.Uplink(
                jaxcomp.Link(jaxcomp.sign(), jaxcomp.Shift(absent="left out"))
            ),
            "remembers absent clients",
        ),
        (
            lambda: federated.Method(world.WORK, jaxcomp.Link(jaxcomp.sign(), jaxcomp.Shift())),
            "`mean` must be 'all' with a Shift",
        ),
        (
            lambda: federated.Method(world.WORK, jaxcomp.qsgd(), mean="some"),
            "`mean` must be one of",
        ),
        (
            lambda: federated.Method(
                world.WORK, jaxcomp.qsgd(), down=jaxcomp.Link(jaxcomp.sign(), jaxcomp.Shift())
            ),
            "`down` must have jaxcomp.Residual",
        ),
        (
            lambda: federated.Method(
                world.WORK,
                jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual()),
                aggregate=aggregates.CoordinateMedian(),
            ),
            r"`up` must have jaxcomp.NoFeedback\(\) with an aggregate that is not linear",
        ),
        (
            lambda: federated.Method(
                world.WORK, jaxcomp.qsgd(), aggregate=aggregates.CoordinateMedian(), mean="all"
            ),
            "`mean` must be 'participants'",
        ),
        (lambda: federated.LocalSteps(3, optax.sgd(1.0)), "`loss` must be a function"),
        (lambda: federated.LocalSteps(world.loss, 0.1), "`optimizer` must be an optax"),
        (lambda: federated.Faults(lost=1.5), "`lost` must be a number from 0"),
        (lambda: federated.Faults(old=0.5), "`longest` must be positive"),
        (lambda: federated.Exactly(0), "`r` must be at least 1"),
        (lambda: federated.Independently(0.0), "`p` must be a positive number"),
        (lambda: federated.Exactly(9).expected(8), "`r` must be at most the number of clients"),
    ],
)
def test_parts_refuse(make, message):
    with pytest.raises(ValueError, match=message):
        make()
