"""Communication-compressed training in JAX: gradient compression as optax transformations."""

from jaxcomp import gates as gates, testing as testing
from jaxcomp.codecs.ballot import Ballot as Ballot
from jaxcomp.codecs.combinators import (
    Chained as Chained,
    Clipped as Clipped,
    Contractive as Contractive,
)
from jaxcomp.codecs.cosine import Cosine as Cosine
from jaxcomp.codecs.rotated import Rotated as Rotated
from jaxcomp.description import Description as Description, describe as describe
from jaxcomp.feedback import (
    Link as Link,
    MomentumCorrection as MomentumCorrection,
    NoFeedback as NoFeedback,
    Residual as Residual,
    Shift as Shift,
)
from jaxcomp.gates import (
    Always as Always,
    Bernoulli as Bernoulli,
    Censored as Censored,
    Coin as Coin,
    Every as Every,
    Phase as Phase,
    Sampled as Sampled,
)
from jaxcomp.identity import Identity as Identity
from jaxcomp.measuring import measure as measure
from jaxcomp.mesh import (
    data_parallel as data_parallel,
    init_state as init_state,
    local as local,
    place as place,
)
from jaxcomp.planning import plan as plan
from jaxcomp.policy import Policy as Policy, Rule as Rule
from jaxcomp.protocols import (
    Codec as Codec,
    Feedback as Feedback,
    Gate as Gate,
    Key as Key,
    Reducer as Reducer,
)
from jaxcomp.recipes.floats import (
    alq as alq,
    amq as amq,
    mx as mx,
    natural as natural,
    natural_dithering as natural_dithering,
    nuqsgd as nuqsgd,
)
from jaxcomp.recipes.quantizers import (
    averaged_ternary as averaged_ternary,
    blockwise as blockwise,
    cast as cast,
    qsgd as qsgd,
    qsgd_inf as qsgd_inf,
    sign as sign,
    terngrad as terngrad,
    threshold_ternary as threshold_ternary,
)
from jaxcomp.recipes.rotations import (
    drive as drive,
    dsc as dsc,
    eden as eden,
    ndsc as ndsc,
    rotated_uniform as rotated_uniform,
)
from jaxcomp.recipes.schedules import dgc_warmup as dgc_warmup
from jaxcomp.recipes.sparsifiers import (
    demo as demo,
    dgc as dgc,
    fastsgd as fastsgd,
    random_k as random_k,
    sidco as sidco,
    threshold as threshold,
    top_k as top_k,
)
from jaxcomp.recipes.sums import int_sgd as int_sgd, thc as thc
from jaxcomp.recipes.votes import Vote as Vote
from jaxcomp.reducers.cheapest import Cheapest as Cheapest
from jaxcomp.reducers.dense import Dense as Dense
from jaxcomp.reducers.gather import Gather as Gather
from jaxcomp.reducers.hierarchical import Hierarchical as Hierarchical
from jaxcomp.reducers.low_rank import LowRank as LowRank
from jaxcomp.reducers.phases import Phases as Phases
from jaxcomp.reducers.power import PowerIteration as PowerIteration
from jaxcomp.reducers.psum import Psum as Psum
from jaxcomp.reducers.two_shot import TwoShot as TwoShot
from jaxcomp.theory.cost import Network as Network
from jaxcomp.transforms.clipping import clip_local as clip_local
from jaxcomp.transforms.mean import (
    compressed_mean as compressed_mean,
    dense_leaves as dense_leaves,
)
from jaxcomp.transforms.wrappers import per_worker as per_worker, skip_nonfinite as skip_nonfinite
from jaxcomp.trees import decode as decode, encode as encode, roundtrip as roundtrip
from jaxcomp.wire import collective_bytes as collective_bytes, wire_bytes as wire_bytes
from jaxcomp.workers import (
    PerWorker as PerWorker,
    resize_workers as resize_workers,
    state_specs as state_specs,
)

__version__ = "0.1.0"
