from jaxcomp.optimizers.adagrad import prox_adagrad as prox_adagrad, rda_adagrad as rda_adagrad
from jaxcomp.optimizers.adaptive import adaptive_server as adaptive_server
from jaxcomp.optimizers.delayed import delayed_nesterov as delayed_nesterov
from jaxcomp.optimizers.one_bit_adam import scale_by_one_bit_adam as scale_by_one_bit_adam
from jaxcomp.optimizers.projections import (
    average as average,
    averaged as averaged,
    projected as projected,
)
from jaxcomp.optimizers.regularizers import (
    L1 as L1,
    GroupLasso as GroupLasso,
    L1Ball as L1Ball,
    L2Ball as L2Ball,
    SquaredL2 as SquaredL2,
)
from jaxcomp.optimizers.zero_one_adam import step_by_zero_one_adam as step_by_zero_one_adam
