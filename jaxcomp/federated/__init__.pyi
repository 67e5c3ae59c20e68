from jaxcomp.federated.between_sites import (
    diloco as diloco,
    muloco as muloco,
    pulseloco as pulseloco,
    sparseloco as sparseloco,
    streaming_diloco as streaming_diloco,
    tokens_squared_per_step as tokens_squared_per_step,
)
from jaxcomp.federated.control import (
    ControlledParams as ControlledParams,
    add_control as add_control,
)
from jaxcomp.federated.drift import (
    fedprox as fedprox,
    proximal as proximal,
    scaffold as scaffold,
)
from jaxcomp.federated.faults import Faults as Faults
from jaxcomp.federated.latent import Latent as Latent
from jaxcomp.federated.method import Method as Method
from jaxcomp.federated.methods import (
    fedavg as fedavg,
    fedpaq as fedpaq,
    fedvote as fedvote,
    genqsgd as genqsgd,
    predictive_coding as predictive_coding,
    stc as stc,
)
from jaxcomp.federated.predictors import (
    AdamStep as AdamStep,
    MeanStep as MeanStep,
    Predictor as Predictor,
    Predictors as Predictors,
    Regression as Regression,
    Unchanged as Unchanged,
)
from jaxcomp.federated.sampling import (
    Everyone as Everyone,
    Exactly as Exactly,
    Independently as Independently,
    Sampling as Sampling,
)
from jaxcomp.federated.server_steps import (
    fedadam as fedadam,
    fedbuff as fedbuff,
    fedyogi as fedyogi,
)
from jaxcomp.federated.side import NoSide as NoSide, Side as Side
from jaxcomp.federated.sides import (
    GlobalModel as GlobalModel,
    History as History,
    LastMean as LastMean,
)
from jaxcomp.federated.simulation import Report as Report, Simulation as Simulation
from jaxcomp.federated.uplink import Uplink as Uplink
from jaxcomp.federated.work import LocalSteps as LocalSteps
