from jaxcomp.planning.budget import spend as spend
from jaxcomp.planning.fsdp import plan_fsdp as plan_fsdp
from jaxcomp.planning.sites import plan_sites as plan_sites
from jaxcomp.planning.spending import LeafSpending as LeafSpending, Spending as Spending
from jaxcomp.planning.timing import measure as measure
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
from jaxcomp.theory.site_rounds import SitesPlan as SitesPlan
