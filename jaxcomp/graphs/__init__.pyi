from jaxcomp.graphs.mixing import degree as degree, spectral_gap as spectral_gap
from jaxcomp.graphs.static import (
    Complete as Complete,
    Exponential as Exponential,
    Mixing as Mixing,
    Ring as Ring,
    Torus as Torus,
    metropolis as metropolis,
)
from jaxcomp.graphs.varying import (
    Alternating as Alternating,
    OnePeer as OnePeer,
    RandomPairs as RandomPairs,
    Without as Without,
)
