"""Methods that compress gradient differences with contractive codecs and converge exactly."""

from typing import Any

import optax

from jaxcomp import checks
from jaxcomp.algorithms.types import Method, Over
from jaxcomp.base import Codec
from jaxcomp.codecs.identity import Identity
from jaxcomp.feedback import Link, Shift
from jaxcomp.gates import Censored
from jaxcomp.layout import policy as policy_
from jaxcomp.layout.policy import Policy
from jaxcomp.misuse.whole_methods import whole
from jaxcomp.reducers.gather import Gather
from jaxcomp.reducers.two_shot import TwoShot
from jaxcomp.transforms.mean import compressed_mean
from jaxcomp.transforms.wrappers import per_worker, widened
from jaxcomp.types import AxisName, PyTree


def ef21(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    over: Over = Gather,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """Compresses gradient differences with a contractive codec, and converges exactly.

    `c = C(gᵢ − hᵢ)`, `hᵢ ← hᵢ + c`; returns `mean hᵢ`.

    Args:
        codec: a contractive codec, such as `top_k` or `sign`.
        axis_name: the mapped axis of the workers.
        over: the reducer of the link.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for a codec that is not contractive, such as one that is only unbiased.

    Example:
        >>> import jaxcomp, optax
        >>> mean = jaxcomp.algorithms.ef21(jaxcomp.top_k(fraction=0.01), "data")
        >>> tx = optax.chain(mean, optax.sgd(0.1))

    References:
        Richtárik, Sokolov and Fatkhullin, `EF21: a new, simpler, theoretically better, and
        practically faster error feedback <https://arxiv.org/abs/2106.05203>`_, 2021.

    Note:
        Guarantee: with full gradients, `O(1/T)` for smooth losses and linear convergence under the
        Polyak–Łojasiewicz condition, for heterogeneous workers too; with stochastic gradients, up
        to their noise (`ef21_sgdm` avoids that). In theory the learning rate is
        `1/(L + L̃·√(β/θ))`, `θ = 1 − √δ'`, `β = δ'/θ`, where `δ' = 1 − δ` is the fraction of a
        message's energy that the codec loses. Memories start at zero, so the first message is
        `C(∇f(x⁰))`, which is the paper's `g⁰`.
    """
    reducer = over(Link(codec, Shift()))
    return compressed_mean(reducer, axis_name, key=key, param_specs=param_specs)


def ef21_sgdm(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    eta: float = 0.1,
    over: Over = Gather,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """`ef21` on a local moving average of stochastic gradients.

    `vᵢ ← (1 − η) vᵢ + η gᵢ`, `c = C(vᵢ − hᵢ)`, `hᵢ ← hᵢ + c`; returns `mean hᵢ`.

    Args:
        codec: a contractive codec.
        axis_name: the mapped axis of the workers.
        eta: `η`, in (0, 1]; `η = 1` is `ef21`.
        over: the reducer of the link.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for a codec that is not contractive.

    Example:
        >>> import jaxcomp, optax
        >>> mean = jaxcomp.algorithms.ef21_sgdm(jaxcomp.top_k(fraction=0.01), "data")
        >>> tx = optax.chain(mean, optax.sgd(0.1))

    References:
        Fatkhullin, Tyurin and Richtárik, `Momentum provably improves error feedback
        <https://arxiv.org/abs/2305.15155>`_, 2023.

    Note:
        Guarantee: for smooth losses, the optimal order for stochastic gradients, without large
        batches or bounds on heterogeneity. The average and the memories start at zero; the paper
        starts both with the first gradients.
    """
    checks.share("eta", eta)
    local = per_worker(widened(optax.ema(1 - eta, debias=False)))
    mean = compressed_mean(over(Link(codec, Shift())), axis_name, key=key, param_specs=param_specs)
    return optax.chain(local, mean)


def ef21_bc(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    down: Codec | Policy | None = None,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """`ef21` in both directions: compressed differences on the uplink and on the downlink.

    `c = C(gᵢ − hᵢ)`, `hᵢ ← hᵢ + c`; `b = C'(mean hᵢ − H)`, `H ← H + b`; returns `H`.

    Args:
        codec: the uplink codec, contractive.
        axis_name: the mapped axis of the workers.
        down: the downlink codec, contractive; None for `codec`.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for a codec that is not contractive, or that cannot be split over the workers.

    Example:
        >>> import jaxcomp, optax
        >>> mean = jaxcomp.algorithms.ef21_bc(jaxcomp.sign(), "data")
        >>> tx = optax.chain(mean, optax.sgd(0.1))

    References:
        Fatkhullin et al., `EF21 with bells & whistles: six algorithmic extensions of modern error
        feedback <https://arxiv.org/abs/2110.03294>`_, 2021.

    Note:
        Guarantee: as for `ef21`, with a smaller learning rate because of the second compression.
        Each worker is the server of `d/n` elements, and stores the server's memory for those. All
        memories start at zero.
    """
    reducer = TwoShot(Link(codec, Shift()), Link(down or codec, Shift()))
    return compressed_mean(reducer, axis_name, key=key, param_specs=param_specs)


def cd_adam(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    down: Codec | Policy | None = None,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """Communication-compressed AMSGrad: `ef21` in both directions before the adaptive step.

    `H` from `ef21_bc`, then `m ← β₁m + (1 − β₁)H`, `v ← β₂v + (1 − β₂)H²`, `v̂ ← max(v̂, v)`;
    returns `m/(√v̂ + ε)`, like `optax.scale_by_amsgrad`.

    Args:
        codec: the uplink codec, contractive.
        axis_name: the mapped axis of the workers.
        down: the downlink codec, contractive; None for `codec`.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for a codec that is not contractive, or that cannot be split over the workers.

    Example:
        >>> import jaxcomp, optax
        >>> scaled = jaxcomp.algorithms.cd_adam(jaxcomp.sign(), "data")
        >>> tx = optax.chain(scaled, optax.scale_by_learning_rate(1e-3))

    References:
        Wang, Lin and Chen, `Communication-compressed adaptive gradient method for distributed
        nonconvex optimization <https://arxiv.org/abs/2111.00705>`_, 2022.

    Note:
        Guarantee: for smooth losses, convex or not, the order of AMSGrad without compression.
        Memories start at zero, so the first `1/δ` steps see small estimates of the gradient, which
        affect the second moment. Optax takes the maximum of the bias-corrected moments;
        the published code takes that of the raw moments, and corrects it afterwards. The published
        code compresses all parameters as one vector; this method compresses each bucket. For its
        weight decay, chain `ef21_bc`, `optax.add_decayed_weights` and `optax.amsgrad`. If
        gradients differ much in size, one bit may fail to train at AMSGrad's learning rate;
        four bits (`blockwise(bits=4)`) train.
    """
    reducer = TwoShot(Link(codec, Shift()), Link(down or codec, Shift()))
    mean = compressed_mean(reducer, axis_name, key=key, param_specs=param_specs)
    return optax.chain(mean, widened(optax.scale_by_amsgrad(b1, b2, eps)))


@whole
def censored_heavy_ball(
    codec: Codec | Policy | None,
    axis_name: AxisName,
    *,
    learning_rate: float,
    momentum: float = 0.4,
    censoring: float = 0.1,
    key: Any = 0,
) -> Method:
    """Heavy-ball descent in which a worker does not send while its gradient hardly changes.

    Worker `m` sends `δ = gₘ − hₘ` if `‖δ‖² > ε₁ ‖xᵏ − xᵏ⁻¹‖²` with `ε₁ = c/γ²`. Otherwise it sends
    nothing, and its last sent gradient is used: `x ← x − γ·h + β (xᵏ − xᵏ⁻¹)`.

    Args:
        codec: the codec of the differences, contractive; None sends every leaf uncompressed.
        axis_name: the mapped axis of the workers.
        learning_rate: `γ`, a number, since `ε₁` depends on it; `1/L`.
        momentum: `β`; zero is LAG (`jaxcomp.algorithms.lag`).
        censoring: `c`; `β + √c` should be below one.
        key: a seed or key, the same on all workers.

    Raises:
        ValueError: for a learning rate, momentum or threshold out of range; on use, without
            `params`.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.algorithms.censored_heavy_ball(None, "data", learning_rate=0.1)

    References:
        Chen, Blum and Sadler, `Communication-efficient federated learning using censored heavy ball
        descent <https://arxiv.org/abs/2209.11944>`_, 2022.

    Note:
        Guarantee: linear for strongly convex losses and full gradients, like the heavy ball. With
        `Lₘ² ≤ ε₁` a worker never sends twice in a row (derived here; the paper saves at least half
        of the messages, under conditions that we could not read). The rule is the paper's; its
        defaults are from memory, and it leaves the best `ε₁` open. The paper sums over workers,
        while we average, so the paper's `ε₁` has a further factor of `1/n²`. With stochastic
        gradients, the noise makes workers send all the time. `state[0].gate.messages` counts the
        messages sent; bytes are saved only in steps in which no worker sends.
    """
    checks.positive("learning_rate", learning_rate)
    checks.decay("momentum", momentum)
    given = policy_.everywhere(Identity()) if codec is None else codec
    mean = clag(given, axis_name, threshold=censoring / learning_rate**2, key=key)
    return optax.chain(mean, widened(optax.sgd(learning_rate, momentum=momentum or None)))


@whole
def lag(
    axis_name: AxisName, *, learning_rate: float, censoring: float = 0.1, key: Any = 0
) -> Method:
    """Lazily aggregated gradients: `censored_heavy_ball` without momentum.

    Args:
        axis_name: the mapped axis of the workers.
        learning_rate: as for `censored_heavy_ball`.
        censoring: as for `censored_heavy_ball`.
        key: a seed or key, the same on all workers.

    Raises:
        ValueError: for the same reasons as `censored_heavy_ball`.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.algorithms.lag("data", learning_rate=0.1)

    References:
        Chen et al., `LAG: lazily aggregated gradient for communication-efficient distributed
        learning <https://arxiv.org/abs/1805.09965>`_, 2018.

    Note:
        Guarantee: with full gradients, the order of gradient descent, linear for strongly convex
        losses. The paper's rule compares with several of the last steps; this rule uses one.
    """
    return censored_heavy_ball(
        None, axis_name, learning_rate=learning_rate, momentum=0.0, censoring=censoring, key=key
    )


def clag(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    threshold: float,
    key: Any = 0,
) -> Method:
    """Compressed lazy aggregation: `ef21` in which a worker does not send small differences.

    Worker `m` sends `C(δ)`, `δ = gₘ − hₘ`, and `hₘ ← hₘ + C(δ)`, if `‖δ‖² > ε₁ ‖xᵏ − xᵏ⁻¹‖²`;
    returns `mean hₘ`.

    Args:
        codec: a contractive codec.
        axis_name: the mapped axis of the workers.
        threshold: `ε₁`, about a tenth of the square of the loss's smoothness. At a constant
            learning rate `γ`, `c/γ²` is the threshold of `lag`.
        key: a seed or key, the same on all workers.

    Raises:
        ValueError: for a codec that is not contractive, or a negative threshold; on use, without
            `params`.

    Example:
        >>> import jaxcomp, optax
        >>> mean = jaxcomp.algorithms.clag(jaxcomp.top_k(0.1), "data", threshold=10.0)
        >>> tx = optax.chain(mean, optax.sgd(0.1))

    References:
        Richtárik et al., `3PC: three point compressors for communication-efficient distributed
        training and a better theory for lazy aggregation <https://arxiv.org/abs/2202.00998>`_,
        2022.

    Note:
        Guarantee: the paper proves the rate of `ef21` for a trigger that compares with the change
        of the worker's own gradient, `‖δ‖² > ζ‖∇fᵢ(xᵏ) − ∇fᵢ(xᵏ⁻¹)‖²`. This method compares with
        the step, as the censored heavy ball does, and the proof does not cover that. In theory the
        learning rate is at most that of `ef21`.
    """
    reducer = Gather(Link(codec, Shift()))
    return compressed_mean(reducer, axis_name, gate=Censored(threshold), key=key)
