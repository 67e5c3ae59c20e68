"""Decentralised methods: every worker has a model of its own, and mixes it with its neighbours'.

`params` stay where training began. Take the loss at `jaxcomp.view(params, state)`, and evaluate and
save `jaxcomp.consensus(params, state)`.
"""

from typing import Any

import optax

from jaxcomp.algorithms.types import Method, Rate
from jaxcomp.base import Codec, Feedback, Graph
from jaxcomp.feedback import Link, NoFeedback, Residual, Shift
from jaxcomp.feedback.steps import step_for
from jaxcomp.graphs import RandomPairs, Ring
from jaxcomp.layout import policy as policy_
from jaxcomp.layout.policy import Policy
from jaxcomp.misuse.whole_methods import whole
from jaxcomp.reducers.gossip import Gossip
from jaxcomp.transforms.gossip import gossip
from jaxcomp.types import AxisName, PyTree

Sent = Codec | Policy | Link
"""A codec with the method's own memory, or a link with another one."""


def neighbours(graph: Graph, codec: Sent, memory: Feedback | None = None) -> Gossip:
    """The reducer of a codec with this memory, or by default with a shift that suits it."""
    if isinstance(codec, Link):
        return Gossip(codec, graph)
    contractive = all(one.contractive for one in policy_.of(codec).codecs)
    if memory is None:
        memory = Shift(1.0 if contractive else step_for(codec))
    return Gossip(Link(codec, memory), graph)


@whole
def dpsgd(
    codec: Sent,
    axis_name: AxisName,
    *,
    learning_rate: Rate,
    graph: Graph = Ring(),
    mixing: float = 1.0,
    inner: optax.GradientTransformation | None = None,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """D-PSGD: a step on each worker, then the weighted mean with its neighbours' models.

    `xᵢ ← Σⱼ wᵢⱼ (xⱼ − η gⱼ)`.

    Args:
        codec: the codec of the models; the paper's is `jaxcomp.codecs.Identity()`. A codec that
            loses something leaves the models apart by its error: use `choco_sgd` or `deepsqueeze`.
        axis_name: the mapped axis of the workers.
        learning_rate: `η`, a number or an optax schedule.
        graph: the graph of the workers.
        mixing: `γ`: the weights of all neighbours times `γ`.
        inner: another optimizer of the steps, in place of plain descent by `learning_rate`.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `gossip`.

    Raises:
        ValueError: for arguments of the wrong kind, or a codec that gossip cannot use.

    Example:
        >>> import jaxcomp
        >>> codec = jaxcomp.codecs.Identity()
        >>> tx = jaxcomp.algorithms.dpsgd(codec, "data", learning_rate=0.1)

    References:
        Lian et al., `Can decentralized algorithms outperform centralized algorithms?
        <https://arxiv.org/abs/1705.09056>`_, 2017.

    Note:
        Guarantee: for smooth losses and stochastic gradients, the rate of centralised SGD after
        enough steps. With a constant step, workers with different losses stay apart by `O(η)`. The
        paper mixes first and adds the step after it; this mixes the steps too.
    """
    step = optax.sgd(learning_rate) if inner is None else inner
    reducer = neighbours(graph, codec, NoFeedback())
    return gossip(step, reducer, axis_name, mixing=mixing, key=key, param_specs=param_specs)


@whole
def choco_sgd(
    codec: Sent,
    axis_name: AxisName,
    *,
    learning_rate: Rate,
    mixing: float,
    graph: Graph = Ring(),
    inner: optax.GradientTransformation | None = None,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """CHOCO-SGD: compressed differences from an estimate that all neighbours keep.

    `x ← x − η g`, `q = C(xᵢ − x̂ᵢ)`, `x̂ᵢ ← x̂ᵢ + q`, `sᵢ ← sᵢ + Σⱼ wᵢⱼ qⱼ`, `x ← x + γ (sᵢ − x̂ᵢ)`.

    Args:
        codec: `C`; a contractive codec, or an unbiased one, whose estimates take steps of
            `1/(1 + ω)`.
        axis_name: the mapped axis of the workers.
        learning_rate: `η`, a number or an optax schedule.
        mixing: `γ`: tune it. With the largest tenth of the elements on a ring of 16, 0.05 to 0.34
            converge and 0.5 diverges.
        graph: the graph of the workers, one that does not change.
        inner: another optimizer of the steps, in place of plain descent by `learning_rate`.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `gossip`.

    Raises:
        ValueError: for arguments of the wrong kind, a codec without a known variance, or a graph
            whose weights change.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.algorithms.choco_sgd(
        ...     jaxcomp.top_k(0.1), "data", learning_rate=0.1, mixing=0.2
        ... )

    References:
        Koloskova, Stich and Jaggi, `Decentralized stochastic optimization and gossip algorithms
        with compressed communication <https://arxiv.org/abs/1902.00340>`_, 2019.

    Note:
        Guarantee: for strongly convex losses, the rate of centralised SGD after enough steps; the
        theory's `γ` is far smaller than what works. A worker keeps `x̂ᵢ` and the sum `sᵢ`, not a
        copy for each neighbour. The published code mixes with the estimates before this step's
        message.
    """
    step = optax.sgd(learning_rate) if inner is None else inner
    reducer = neighbours(graph, codec)
    return gossip(step, reducer, axis_name, mixing=mixing, key=key, param_specs=param_specs)


@whole
def deepsqueeze(
    codec: Sent,
    axis_name: AxisName,
    *,
    learning_rate: Rate,
    mixing: float = 1.0,
    graph: Graph = Ring(),
    inner: optax.GradientTransformation | None = None,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """DeepSqueeze: the compression error of a model is added to the next message.

    `x ← x − η g`, `v = x + e`, `c = C(v)`, `e ← v − c`, `x ← x + γ Σⱼ wᵢⱼ (cⱼ − cᵢ)`.

    Args:
        codec: `C`, a contractive codec.
        axis_name: the mapped axis of the workers.
        learning_rate: `η`, a number or an optax schedule.
        mixing: `γ`; smaller for coarser codecs.
        graph: the graph of the workers, which may change from round to round.
        inner: another optimizer of the steps, in place of plain descent by `learning_rate`.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `gossip`.

    Raises:
        ValueError: for arguments of the wrong kind, or a codec whose residual would grow.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.algorithms.deepsqueeze(
        ...     jaxcomp.sign(), "data", learning_rate=0.1, mixing=0.3
        ... )

    References:
        Tang et al., `DeepSqueeze: decentralization meets error-compensated compression
        <https://arxiv.org/abs/1907.07346>`_, 2019.

    Note:
        Guarantee: for smooth losses, the rate of D-PSGD, whose steps it takes with
        `jaxcomp.codecs.Identity()` and `γ = 1`. Messages are offsets from where training began,
        which are smaller than the parameters.
    """
    step = optax.sgd(learning_rate) if inner is None else inner
    reducer, specs = neighbours(graph, codec, Residual()), param_specs
    return gossip(step, reducer, axis_name, mixing=mixing, key=key, param_specs=specs)


@whole
def dcd(
    codec: Sent,
    axis_name: AxisName,
    *,
    learning_rate: Rate,
    graph: Graph = Ring(),
    inner: optax.GradientTransformation | None = None,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """DCD-PSGD: a worker moves by the compressed difference, so that its neighbours know its model.

    `z = Σⱼ wᵢⱼ xⱼ − η g`, `xᵢ ← xᵢ + C(z − xᵢ)`.

    Args:
        codec: `C`, a precise codec of four bits or more: the error is not corrected, and coarse
            codecs make it diverge.
        axis_name: the mapped axis of the workers.
        learning_rate: `η`, a number or an optax schedule.
        graph: the graph of the workers, one that does not change.
        inner: another optimizer of the steps, in place of plain descent by `learning_rate`.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `gossip`.

    Raises:
        ValueError: for arguments of the wrong kind, a codec of variance 1 or more, or a graph whose
            weights change.

    Example:
        >>> import jaxcomp
        >>> codec = jaxcomp.qsgd_inf(bits=8)
        >>> tx = jaxcomp.algorithms.dcd(codec, "data", learning_rate=0.1)

    References:
        Tang et al., `Communication compression for decentralized training
        <https://arxiv.org/abs/1803.06443>`_, 2018.

    Note:
        Guarantee: for smooth losses and codecs that are precise enough for the graph, the rate of
        D-PSGD. A worker keeps `Σⱼ wᵢⱼ xⱼ`, not a copy for each neighbour.
    """
    step = optax.sgd(learning_rate) if inner is None else inner
    reducer, specs = neighbours(graph, codec, Shift()), param_specs
    return gossip(step, reducer, axis_name, stay=True, key=key, param_specs=specs)


@whole
def gradient_tracking(
    codec: Sent,
    axis_name: AxisName,
    *,
    learning_rate: Rate,
    mixing: float = 1.0,
    graph: Graph = Ring(),
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """Gradient tracking: workers also mix an estimate of the mean gradient, and step by it.

    `yᵢ ← Σⱼ wᵢⱼ yⱼ + gᵢ − gᵢ⁻`, `xᵢ ← Σⱼ wᵢⱼ (xⱼ − η yⱼ)`.

    Args:
        codec: the codec of both messages, sent as compressed differences as in `choco_sgd`; for
            uncompressed messages `jaxcomp.codecs.Identity()`.
        axis_name: the mapped axis of the workers.
        learning_rate: `η`, a number or an optax schedule.
        mixing: `γ`; smaller for coarser codecs.
        graph: the graph of the workers, one that does not change.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `gossip`.

    Raises:
        ValueError: for arguments of the wrong kind, a codec without a known variance, or a graph
            whose weights change.

    Example:
        >>> import jaxcomp
        >>> codec = jaxcomp.codecs.Identity()
        >>> tx = jaxcomp.algorithms.gradient_tracking(codec, "data", learning_rate=0.1)

    References:
        Nedić, Olshevsky and Shi, `Achieving geometric convergence for distributed optimization over
        time-varying graphs <https://arxiv.org/abs/1607.03218>`_ (DIGing), 2017; Liao et al., `A
        compressed gradient tracking method for decentralized optimization with linear convergence
        <https://arxiv.org/abs/2103.13748>`_, 2022.

    Note:
        Guarantee: with full gradients of smooth and strongly convex losses, linear convergence to
        the solution with a constant step, although workers differ. Sends twice the bytes of
        `dpsgd`. Both papers mix in slightly different orders; this mixes the step too, so that one
        exchange a step carries both messages.
    """
    reducer, step = neighbours(graph, codec), optax.sgd(learning_rate)
    return gossip(
        step, reducer, axis_name, mixing=mixing, tracking=True, key=key, param_specs=param_specs
    )


@whole
def noloco(
    codec: Sent,
    axis_name: AxisName,
    *,
    every: int = 50,
    inner: optax.GradientTransformation | None = None,
    learning_rate: Rate = 0.7,
    momentum: float = 0.5,
    graph: Graph = RandomPairs(),
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """NoLoCo: DiLoCo without an all-reduce; after a round each worker meets one other.

    `mᵢ ← α mᵢ + mean_pair(φ) − φᵢ − mean_pair(φ − θ)`, `φᵢ ← φᵢ + η mᵢ`, `θᵢ ← φᵢ`.

    Args:
        codec: the codec of the models; the paper's is `jaxcomp.codecs.Identity()`. A `Link` with
            `Residual()` suits a contractive codec.
        axis_name: the mapped axis of the workers.
        every: the steps of a round.
        inner: the optimizer of the local steps, whose state is kept; None for
            `optax.adam(4e-4, 0.9, 0.95)`.
        learning_rate: `η`, a number or an optax schedule of the rounds.
        momentum: `α`.
        graph: who meets whom.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `gossip`.

    Raises:
        ValueError: for arguments of the wrong kind.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.algorithms.noloco(jaxcomp.codecs.Identity(), "data", every=50)

    References:
        Kolehmainen et al., `NoLoCo: no-all-reduce low communication training method for large
        models <https://arxiv.org/abs/2506.10911>`_, 2025.

    Note:
        Guarantee: none is published for compressed messages. The published code has one factor,
        0.7, for the pair's pseudo-gradient and for its difference of slow parameters, so that their
        sum is the pair's mean of `θ` minus `φᵢ`: one message, of half the bytes. The constants of
        Adam are not the paper's.
    """
    step = optax.adam(4e-4, 0.9, 0.95) if inner is None else inner
    outer = optax.sgd(learning_rate, momentum)
    reducer = neighbours(graph, codec, NoFeedback())
    return gossip(
        step, reducer, axis_name, every=every, outer=outer, key=key, param_specs=param_specs
    )
