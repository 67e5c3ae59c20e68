from jaxcomp.theory.ceo import (
    CeoAllocation as CeoAllocation,
    ceo_allocation as ceo_allocation,
    ceo_range as ceo_range,
    ceo_rate as ceo_rate,
    ceo_symmetric_rate as ceo_symmetric_rate,
    ceo_unbinned_rate as ceo_unbinned_rate,
)
from jaxcomp.theory.ceo_costs import (
    CeoBlocks as CeoBlocks,
    TotalCost as TotalCost,
    ceo_total_cost as ceo_total_cost,
    ceo_vector as ceo_vector,
)
from jaxcomp.theory.ceo_region import (
    ceo_achievable as ceo_achievable,
    ceo_distortion as ceo_distortion,
)
from jaxcomp.theory.correlation import (
    GradientStatistics as GradientStatistics,
    Spread as Spread,
    gradient_statistics as gradient_statistics,
    sign_entropy as sign_entropy,
)
from jaxcomp.theory.magnitudes import Law as Law, LawFits as LawFits, fit_laws as fit_laws
