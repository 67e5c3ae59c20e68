"""Gates, which decide when, and which workers, communicate.

A gate gives the same answer on every worker, because it uses only shared information: the step's
key, a count, or exchanged flags. So its answer may guard collectives, and a closed round sends
nothing at all.
"""

from jaxcomp.gates.censored import Censored as Censored
from jaxcomp.gates.drawn import (
    Bernoulli as Bernoulli,
    Coin as Coin,
    SampledWorkers as SampledWorkers,
)
from jaxcomp.gates.periods import (
    AdaptivePeriod as AdaptivePeriod,
    Constant as Constant,
    Growing as Growing,
)
from jaxcomp.gates.timed import Always as Always, Every as Every, Phase as Phase
