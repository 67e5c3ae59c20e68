"""Forecasts: which bytes a step sends, how long it takes, and whether compression pays."""

from jaxcomp.planning.timing import measure as measure
from jaxcomp.theory.cost import Network as Network
