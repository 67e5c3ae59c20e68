"""Clients over the devices of several processes: the bits of one process."""

import clients as world
import pytest


@pytest.mark.full
@pytest.mark.parametrize("rounds", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_two_processes_change_no_bit(rounds):
    said = world.in_two_processes(rounds, "many")
    alone = world.simulation()
    alone.run(rounds)
    assert said == [world.digest(alone.params)] * 2
