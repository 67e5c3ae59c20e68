"""Reducers, and the legs of which they consist.

`Gather`, `TwoShot` and the other reducers are names of `jaxcomp`; here is what a reducer of your
own is made of.
"""

from jaxcomp.base import (
    Combine as Combine,
    Combined as Combined,
    Heard as Heard,
    Leg as Leg,
    Move as Move,
)
from jaxcomp.exchange.aggregated import Aggregated as Aggregated
from jaxcomp.exchange.combines import (
    Each as Each,
    Join as Join,
    Mean as Mean,
    Mix as Mix,
    Total as Total,
)
from jaxcomp.exchange.moves import (
    AllGather as AllGather,
    AllReduce as AllReduce,
    AllToAll as AllToAll,
    Permute as Permute,
)
