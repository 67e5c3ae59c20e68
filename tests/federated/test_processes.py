"""Clients over several processes, or over workers of a map: the bits of one process."""

import pytest
from helpers import clients as world


@pytest.mark.full
@pytest.mark.parametrize("rounds", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_two_processes_change_no_bit(rounds):
    said = world.in_two_processes(rounds, "many")
    alone = world.simulation()
    alone.run(rounds)
    assert said == [world.digest(alone.params)] * 2


@pytest.mark.core("2-pmap")
@pytest.mark.parametrize("mode", ["vmap", "pmap"])
@pytest.mark.parametrize("rounds", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_mapping_modes_change_no_bit(mode, rounds):
    alone, spread = world.simulation(chunk=2), world.simulation(chunk=8)
    spread._program = world.Spread(spread, mode)
    alone.run(rounds)
    spread.run(rounds)
    assert world.digest(alone.params) == world.digest(spread.params)
    assert world.digest(alone.table.arrays()) == world.digest(spread.table.arrays())
