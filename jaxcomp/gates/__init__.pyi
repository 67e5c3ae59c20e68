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
