from jaxcomp.base import (
    Combine as Combine,
    Heard as Heard,
    Leg as Leg,
    Move as Move,
    Outcome as Outcome,
)
from jaxcomp.exchange.aggregated import Aggregation as Aggregation
from jaxcomp.exchange.combines import (
    Average as Average,
    Each as Each,
    Join as Join,
    Mix as Mix,
    Sum as Sum,
)
from jaxcomp.exchange.moves import (
    AllGather as AllGather,
    AllReduce as AllReduce,
    AllToAll as AllToAll,
    Permute as Permute,
)
