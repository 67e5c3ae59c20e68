from jaxcomp.feedback.aggregated import Aggregated as Aggregated
from jaxcomp.feedback.link import Link as Link, default as default
from jaxcomp.feedback.momentum import (
    MomentumCorrection as MomentumCorrection,
    MomentumState as MomentumState,
)
from jaxcomp.feedback.residual import (
    NoFeedback as NoFeedback,
    Residual as Residual,
    ResidualState as ResidualState,
)
from jaxcomp.feedback.shift import Shift as Shift
