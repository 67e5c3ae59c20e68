"""Forecasts of a step's bytes and time, and of the gain from compression."""

from jaxcomp.planning.timing import measure as measure
from jaxcomp.theory.cost import Network as Network
from jaxcomp.theory.genqsgd import (
    Loss as Loss,
    Machine as Machine,
    plan_genqsgd as plan_genqsgd,
)
from jaxcomp.theory.rounds import Round as Round, Rounds as Rounds, rounds as rounds
