from jaxcomp import (
    adapters as adapters,
    aggregates as aggregates,
    algorithms as algorithms,
    base as base,
    codecs as codecs,
    collectives as collectives,
    federated as federated,
    gates as gates,
    graphs as graphs,
    optimizers as optimizers,
    planning as planning,
    reducers as reducers,
    telemetry as telemetry,
    testing as testing,
    theory as theory,
    weights as weights,
)
from jaxcomp.base import (
    Aggregate as Aggregate,
    Codec as Codec,
    Feedback as Feedback,
    Gate as Gate,
    Graph as Graph,
    Period as Period,
    Reducer as Reducer,
)
from jaxcomp.collectives.fully_sharded import fully_sharded as fully_sharded
from jaxcomp.collectives.shard import gathered as gathered, second_copy as second_copy
from jaxcomp.feedback import (
    Aggregated as Aggregated,
    Link as Link,
    MomentumCorrection as MomentumCorrection,
    NoFeedback as NoFeedback,
    Residual as Residual,
    Shift as Shift,
)
from jaxcomp.layout.policy import Policy as Policy, Rule as Rule
from jaxcomp.layout.trees import decode as decode, encode as encode, roundtrip as roundtrip
from jaxcomp.mesh.data_parallel import data_parallel as data_parallel, init_state as init_state
from jaxcomp.mesh.gradients import local as local, value_and_grad as value_and_grad
from jaxcomp.mesh.hybrid import hybrid_mesh as hybrid_mesh
from jaxcomp.mesh.on_mesh import on_mesh as on_mesh
from jaxcomp.mesh.per_worker import PerWorker as PerWorker, state_specs as state_specs
from jaxcomp.mesh.place import place as place
from jaxcomp.mesh.resizing import resize_workers as resize_workers
from jaxcomp.mesh.targets import restore_target as restore_target
from jaxcomp.messages import (
    MessageError as MessageError,
    from_bytes as from_bytes,
    message_limit as message_limit,
    to_bytes as to_bytes,
)
from jaxcomp.planning.description import Description as Description, describe as describe
from jaxcomp.planning.planner import plan as plan
from jaxcomp.recipes.coded import (
    ecsq as ecsq,
    elias_qsgd as elias_qsgd,
    huffman_nuqsgd as huffman_nuqsgd,
)
from jaxcomp.recipes.floats import (
    alq as alq,
    amq as amq,
    mx as mx,
    natural as natural,
    natural_dithering as natural_dithering,
    nuqsgd as nuqsgd,
)
from jaxcomp.recipes.guided import visible as visible, wyner_ziv as wyner_ziv
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
    chunk_top_k as chunk_top_k,
    demo as demo,
    dgc as dgc,
    fastsgd as fastsgd,
    random_k as random_k,
    sidco as sidco,
    threshold as threshold,
    top_k as top_k,
)
from jaxcomp.recipes.stages import msc as msc
from jaxcomp.recipes.summable import int_sgd as int_sgd, thc as thc
from jaxcomp.recipes.votes import Vote as Vote
from jaxcomp.reducers.choose import choose_reducer as choose_reducer, wire_bytes as wire_bytes
from jaxcomp.reducers.dense import Dense as Dense
from jaxcomp.reducers.gather import Gather as Gather
from jaxcomp.reducers.gossip import Gossip as Gossip
from jaxcomp.reducers.hierarchical import Hierarchical as Hierarchical
from jaxcomp.reducers.power import PowerIteration as PowerIteration
from jaxcomp.reducers.psum import Psum as Psum
from jaxcomp.reducers.robust import Robust as Robust
from jaxcomp.reducers.schedule import ReducerSchedule as ReducerSchedule
from jaxcomp.reducers.two_shot import TwoShot as TwoShot
from jaxcomp.transforms.accumulated import accumulate as accumulate
from jaxcomp.transforms.clipping import clip_local as clip_local
from jaxcomp.transforms.compressed_value_and_grad import (
    compressed_value_and_grad as compressed_value_and_grad,
)
from jaxcomp.transforms.directional import directional_mean as directional_mean
from jaxcomp.transforms.freezing import freeze as freeze
from jaxcomp.transforms.gossip import consensus as consensus, gossip as gossip
from jaxcomp.transforms.grafting import graft as graft
from jaxcomp.transforms.leaves import dense_leaves as dense_leaves
from jaxcomp.transforms.local_updates import local_updates as local_updates
from jaxcomp.transforms.mean import compressed_mean as compressed_mean
from jaxcomp.transforms.overlapped import Overlapped as Overlapped
from jaxcomp.transforms.pmean import pmean as pmean
from jaxcomp.transforms.rounds import local_round as local_round, steps_alone as steps_alone
from jaxcomp.transforms.sharded_optimizer import sharded_optimizer as sharded_optimizer
from jaxcomp.transforms.snapshots import variance_reduced as variance_reduced
from jaxcomp.transforms.view import view as view
from jaxcomp.transforms.wrappers import per_worker as per_worker, skip_nonfinite as skip_nonfinite
from jaxcomp.types import Key as Key
from jaxcomp.wire.hlo import collective_bytes as collective_bytes

__version__: str
