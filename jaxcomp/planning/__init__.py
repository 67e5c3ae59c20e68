"""Forecasts of a step's bytes and time, of the gain from compression, and its limits."""

from jaxcomp.planning.budget import spend as spend
from jaxcomp.planning.fsdp import plan_fsdp as plan_fsdp
from jaxcomp.planning.sites import plan_sites as plan_sites
from jaxcomp.planning.spending import LeafSpending as LeafSpending, Spending as Spending
from jaxcomp.planning.timing import measure as measure
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
from jaxcomp.theory.cost import Network as Network
from jaxcomp.theory.fedpaq import (
    Clients as Clients,
    FedpaqPlan as FedpaqPlan,
    Smooth as Smooth,
    fedpaq_longest as fedpaq_longest,
    fedpaq_round as fedpaq_round,
    fedpaq_time as fedpaq_time,
    plan_fedpaq as plan_fedpaq,
)
from jaxcomp.theory.genqsgd import Loss as Loss, Machine as Machine, plan_genqsgd as plan_genqsgd
from jaxcomp.theory.local_rounds import Round as Round, Rounds as Rounds, rounds as rounds
from jaxcomp.theory.magnitudes import Law as Law, LawFits as LawFits, fit_laws as fit_laws
from jaxcomp.theory.site_rounds import SitesPlan as SitesPlan
