from jaxcomp.algorithms.adaptive import one_bit_adam as one_bit_adam, zero_one_adam as zero_one_adam
from jaxcomp.algorithms.composite import (
    dgd_def as dgd_def,
    dq_psgd as dq_psgd,
    qcmd_adagrad as qcmd_adagrad,
    qrda_adagrad as qrda_adagrad,
)
from jaxcomp.algorithms.decentralised import (
    choco_sgd as choco_sgd,
    dcd as dcd,
    deepsqueeze as deepsqueeze,
    dpsgd as dpsgd,
    gradient_tracking as gradient_tracking,
    noloco as noloco,
)
from jaxcomp.algorithms.finite_sums import dpsvrg as dpsvrg, dspg as dspg, qsvrg as qsvrg
from jaxcomp.algorithms.local_methods import (
    adpsgd as adpsgd,
    cpsgd as cpsgd,
    fedpaq as fedpaq,
    genqsgd as genqsgd,
    local_sgd as local_sgd,
    post_local_sgd as post_local_sgd,
)
from jaxcomp.algorithms.model_parallel import (
    experts as experts,
    loco as loco,
    pipeline as pipeline,
    qsdp as qsdp,
    sdp4bit as sdp4bit,
    tensor_parallel as tensor_parallel,
    zero_pp as zero_pp,
)
from jaxcomp.algorithms.outer_steps import (
    demo_sgd as demo_sgd,
    diloco as diloco,
    muloco as muloco,
    sparseloco as sparseloco,
    streaming_diloco as streaming_diloco,
)
from jaxcomp.algorithms.residuals import (
    double_squeeze as double_squeeze,
    ef_sgd as ef_sgd,
    ef_signsgd as ef_signsgd,
    neolithic as neolithic,
    signsgd as signsgd,
)
from jaxcomp.algorithms.shifts import (
    cd_adam as cd_adam,
    censored_heavy_ball as censored_heavy_ball,
    clag as clag,
    ef21 as ef21,
    ef21_bc as ef21_bc,
    ef21_sgdm as ef21_sgdm,
    lag as lag,
)
from jaxcomp.algorithms.unbiased import (
    artemis as artemis,
    diana as diana,
    dore as dore,
    marina as marina,
    mcm as mcm,
    rand_mcm as rand_mcm,
)
from jaxcomp.transforms.differences import compressed_differences as compressed_differences
from jaxcomp.transforms.view import (
    displaced_mean as displaced_mean,
    preserved_center as preserved_center,
)
