"""What the ledger of a simulation counts, beside what a server sends."""

import clients as world
import numpy as np

from jaxcomp import federated


def test_a_round_that_moved_nothing_sends_nothing_to_those_who_follow():
    """Where no message arrives, clients that were there before catch up for no bytes."""
    sim = world.few(faults=federated.Faults(lost=0.999))
    reports = sim.run(6)
    whole = sum(leaf.nbytes for leaf in map(np.asarray, sim.params.values()))
    assert [report.accepted for report in reports] == [0] * 6
    assert sim.ledger.down == world.FEW * whole  # Each of them once, when it is first asked.
