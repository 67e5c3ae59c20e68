"""Methods with residuals and signs: the compression error of a message is sent later."""

from typing import Any

import optax

from jaxcomp import checks
from jaxcomp.algorithms.types import Method, Over
from jaxcomp.base import Codec
from jaxcomp.feedback import Link, Residual, default
from jaxcomp.layout import policy as policy_
from jaxcomp.layout.policy import Policy
from jaxcomp.recipes.quantizers import sign
from jaxcomp.recipes.stages import msc
from jaxcomp.recipes.votes import Vote
from jaxcomp.reducers.gather import Gather
from jaxcomp.reducers.two_shot import TwoShot
from jaxcomp.transforms.mean import compressed_mean
from jaxcomp.transforms.wrappers import per_worker, widened
from jaxcomp.types import AxisName, PyTree


def ef_sgd(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    over: Over = Gather,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """SGD with error feedback: the compression error is added to the next message (EF, EF14).

    `p = g + e`, send `C(p)`, `e ← p − C(p)`; returns `mean C(p)`.

    Args:
        codec: a contractive codec, or a `Policy` of them.
        axis_name: the mapped axis of the workers.
        over: the reducer of the link.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for a codec whose residual would grow.

    Example:
        >>> import jaxcomp, optax
        >>> mean = jaxcomp.algorithms.ef_sgd(jaxcomp.top_k(fraction=0.01), "data")
        >>> tx = optax.chain(mean, optax.sgd(0.1))

    References:
        Seide et al., `1-bit stochastic gradient descent and its application to data-parallel
        distributed training of speech DNNs
        <https://research.microsoft.com/apps/mobile/Publication.aspx?id=230137>`_, 2014; Stich and
        Karimireddy, `The error-feedback framework <https://arxiv.org/abs/1909.05350>`_, 2020.

    Note:
        Guarantee: the rate of SGD up to higher-order terms. With full gradients and heterogeneous
        workers it reaches a neighbourhood of the solution, which shrinks with the learning rate;
        `ef21` reaches the solution. The papers store `γg` with the learning rate `γ`; this stores
        `g`, which is the same as long as `γ` is constant.
    """
    reducer = over(Link(codec, Residual()))
    return compressed_mean(reducer, axis_name, key=key, param_specs=param_specs)


def ef_signsgd(
    axis_name: AxisName,
    *,
    bucket_size: int | None = 512,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """`ef_sgd` with one bit an element: signs, scaled by the mean magnitude of their bucket.

    `C(p) = (‖p‖₁/d) · sign(p)` in each bucket of `d`, with error `(1 − ‖p‖₁²/(d‖p‖²))·‖p‖²`.

    Args:
        axis_name: the mapped axis of the workers.
        bucket_size: elements that share a magnitude; None for a whole leaf, as in the paper.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for a bucket size that is not positive.

    Example:
        >>> import jaxcomp, optax
        >>> tx = optax.chain(jaxcomp.algorithms.ef_signsgd("data"), optax.sgd(0.1))

    References:
        Karimireddy et al., `Error feedback fixes SignSGD and other gradient compression schemes
        <https://arxiv.org/abs/1901.09847>`_, 2019.

    Note:
        Guarantee: as for `ef_sgd`. The paper has one worker; here the scaled signs of all workers
        are averaged. The paper scales a whole layer at once, and its sign of zero is zero; here the
        one bit of zero means plus.
    """
    return ef_sgd(sign(bucket_size), axis_name, key=key, param_specs=param_specs)


def signsgd(
    axis_name: AxisName,
    *,
    momentum: float = 0.0,
    up: Any = None,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """SignSGD with majority vote, one bit an element each way; with momentum, signum.

    `mᵢ ← momentum · mᵢ + (1 − momentum) · gᵢ`; returns `sign(Σ sign(mᵢ))`, so that the learning
    rate is the size of every element's step.

    Args:
        axis_name: the mapped axis of the workers.
        momentum: the decay of each worker's own momentum, in [0, 1).
        up: a `jaxcomp.Vote`, which chooses the leaves that are voted on; None for the default.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for an invalid axis name, or a momentum out of range; `jaxcomp.Vote` refuses
            codecs that do not send one sign bit an element.

    Example:
        >>> import jaxcomp, optax
        >>> tx = optax.chain(jaxcomp.algorithms.signsgd("data", momentum=0.9), optax.sgd(1e-3))

    References:
        Bernstein et al., `signSGD with majority vote is communication efficient and fault tolerant
        <https://arxiv.org/abs/1810.05291>`_, 2019.

    Note:
        Guarantee: for smooth losses, the order of SGD in the mean of `‖∇f‖₁`, if the noise of each
        gradient element is unimodal and symmetric; with heterogeneous workers it need not
        converge. A tie, and the sign of zero, are decided at random.
    """
    checks.decay("momentum", momentum)
    local = per_worker(widened(optax.ema(momentum, debias=False))) if momentum else optax.identity()
    mean = compressed_mean(
        Vote() if up is None else up, axis_name, key=key, param_specs=param_specs
    )
    return optax.chain(local, mean)


def double_squeeze(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    down: Codec | Policy | None = None,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """Error feedback in both directions.

    `pᵢ = gᵢ + eᵢ`, send `C(pᵢ)`, `eᵢ ← pᵢ − C(pᵢ)`; `q = mean C(pᵢ) + e`, send back `C'(q)`,
    `e ← q − C'(q)`; returns `C'(q)`.

    Args:
        codec: the uplink codec, contractive.
        axis_name: the mapped axis of the workers.
        down: the downlink codec, contractive; None for `codec`.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for a codec whose residual would grow, or that cannot be split over the workers.

    Example:
        >>> import jaxcomp, optax
        >>> mean = jaxcomp.algorithms.double_squeeze(jaxcomp.sign(), "data")
        >>> tx = optax.chain(mean, optax.sgd(0.1))

    References:
        Tang et al., `DoubleSqueeze: parallel stochastic gradient descent with double-pass
        error-compensated compression <https://arxiv.org/abs/1905.05957>`_, 2019.

    Note:
        Guarantee: with bounded compression error, the order of SGD for stochastic gradients, with
        a linear speed-up in the number of workers; with full gradients and heterogeneous workers it
        reaches only a neighbourhood, as `ef_sgd` does. Each worker is the server of `d/n` elements,
        and keeps the server's residual for those.
    """
    reducer = TwoShot(Link(codec, Residual()), Link(down or codec, Residual()))
    return compressed_mean(reducer, axis_name, key=key, param_specs=param_specs)


def neolithic(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    stages: int,
    down: Codec | Policy | None = None,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """Multi-stage compression of accumulated gradients, in both directions.

    Returns `M(mean M(gᵢ))`, with `M` the `R`-stage compression of the codec
    (`jaxcomp.codecs.Chained`). In the paper `gᵢ` is the mean of `R` gradients, which
    `jaxcomp.accumulate` around the chain computes.

    Args:
        codec: the uplink codec of every stage, unbiased or contractive.
        axis_name: the mapped axis of the workers.
        stages: `R`, about `ln(…)/δ`, so that `(1 − δ)^R` is below the noise of the gradients.
        down: the downlink codec; None for `codec`.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for fewer than one stage, or a codec that cannot be split over the workers.

    Example:
        >>> import jaxcomp, optax
        >>> mean = jaxcomp.algorithms.neolithic(jaxcomp.sign(), "data", stages=4)
        >>> tx = jaxcomp.accumulate(optax.chain(mean, optax.sgd(0.1)), "data", every=4)

    References:
        Huang et al., `Lower bounds and nearly optimal algorithms in distributed learning with
        communication compression <https://arxiv.org/abs/2206.03665>`_, 2022.

    Note:
        Guarantee: for smooth losses and stochastic gradients, the lower bounds of
        `jaxcomp.theory.rates.compressed_rate` up to logarithms. The method and the choice of `R`
        are reconstructed from the abstract and later work. We do not know whether the first version
        has error feedback as well. Here the error that remains after all stages of a contractive
        codec goes into a residual, so full gradients reach only a neighbourhood. Compare runs by
        bits, not by steps. `R` stages of `top_k(k)` equal one `top_k(R·k)`.
    """
    ways = (policy_.of(way).map(lambda c: msc(c, stages)) for way in (codec, down or codec))
    up, back = (Link(way, default(way)) for way in ways)
    return compressed_mean(TwoShot(up, back), axis_name, key=key, param_specs=param_specs)
