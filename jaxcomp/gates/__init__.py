"""When, and who, communicates.

A gate answers alike on every worker, from what all of them know: the step's key, a count, or flags
that they exchange. So its answer may guard collectives, and a closed round sends nothing at all.
"""

from jaxcomp.gates.censored import Censored as Censored
from jaxcomp.gates.drawn import (
    Bernoulli as Bernoulli,
    Coin as Coin,
    SampledWorkers as SampledWorkers,
)
from jaxcomp.gates.timed import Always as Always, Every as Every, Phase as Phase
