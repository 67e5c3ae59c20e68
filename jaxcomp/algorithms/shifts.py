"""Methods that send changes through contractive codecs, and are exact in the end."""

from typing import Any

import optax

from jaxcomp import checks
from jaxcomp.algorithms.types import Method, Over, Rate
from jaxcomp.base import Codec
from jaxcomp.codecs.identity import Identity
from jaxcomp.feedback import Link, Shift
from jaxcomp.gates import Censored
from jaxcomp.layout import policy as policy_
from jaxcomp.layout.policy import Policy
from jaxcomp.misuse.callers import whole
from jaxcomp.reducers.gather import Gather
from jaxcomp.reducers.two_shot import TwoShot
from jaxcomp.transforms.mean import compressed_mean
from jaxcomp.transforms.wrappers import per_worker
from jaxcomp.types import AxisName, PyTree


@whole
def ef21(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    learning_rate: Rate,
    over: Over = Gather,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """Sends contractively compressed changes of the gradient, and is exact in the end.

    `c = C(gᵢ − hᵢ)`, `hᵢ ← hᵢ + c`, `x ← x − γ · mean hᵢ`.

    Args:
        codec: a contractive codec, such as `top_k` or `sign`.
        axis_name: the mapped axis of the workers.
        learning_rate: `γ`; the theory's is `1/(L + L̃·√(β/θ))`, `θ = 1 − √δ'`, `β = δ'/θ`, where
            `δ' = 1 − δ` is what the codec leaves of a message's energy.
        over: the reducer of the link.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as of `compressed_mean`.

    Raises:
        ValueError: for a codec that is not contractive: one that is unbiased only, or neither.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.algorithms.ef21(jaxcomp.top_k(fraction=0.01), "data", learning_rate=0.1)

    References:
        Richtárik, Sokolov and Fatkhullin, `EF21: a new, simpler, theoretically better, and
        practically faster error feedback <https://arxiv.org/abs/2106.05203>`_, 2021.

    Note:
        Guarantee: `O(1/T)` for smooth losses, linear under the Polyak–Łojasiewicz condition, with
        full gradients, whatever the workers disagree on; with stochastic ones, up to their noise
        (`ef21_sgdm`). Memories begin at zero, so that the first message is `C(∇f(x⁰))`: that
        is the paper's start, `g⁰ = C(∇f(x⁰))`.
    """
    mean = compressed_mean(over(Link(codec, Shift())), axis_name, key=key, param_specs=param_specs)
    return optax.chain(mean, optax.sgd(learning_rate))


@whole
def ef21_sgdm(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    learning_rate: Rate,
    eta: float = 0.1,
    over: Over = Gather,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """`ef21` on a local moving average of stochastic gradients.

    `vᵢ ← (1 − η) vᵢ + η gᵢ`, `c = C(vᵢ − hᵢ)`, `hᵢ ← hᵢ + c`, `x ← x − γ · mean hᵢ`.

    Args:
        codec: a contractive codec.
        axis_name: the mapped axis of the workers.
        learning_rate: `γ`.
        eta: `η`, in (0, 1]; one is `ef21`.
        over: the reducer of the link.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as of `compressed_mean`.

    Raises:
        ValueError: for a codec that is not contractive.

    Example:
        >>> import jaxcomp
        >>> codec = jaxcomp.top_k(fraction=0.01)
        >>> tx = jaxcomp.algorithms.ef21_sgdm(codec, "data", learning_rate=0.1)

    References:
        Fatkhullin, Tyurin and Richtárik, `Momentum provably improves error feedback
        <https://arxiv.org/abs/2305.15155>`_, 2023.

    Note:
        Guarantee: for smooth losses, the optimal order for stochastic gradients, without large
        batches or bounds on how workers disagree. The average and the memories start at zero, where
        the paper starts both with the first gradients.
    """
    checks.share("eta", eta)
    local = per_worker(optax.ema(1 - eta, debias=False))
    mean = compressed_mean(over(Link(codec, Shift())), axis_name, key=key, param_specs=param_specs)
    return optax.chain(local, mean, optax.sgd(learning_rate))


@whole
def ef21_bc(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    learning_rate: Rate,
    down: Codec | Policy | None = None,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """`ef21` in both directions: changes go up, and changes of their mean come down.

    `c = C(gᵢ − hᵢ)`, `hᵢ ← hᵢ + c`; `b = C'(mean hᵢ − H)`, `H ← H + b`, `x ← x − γ · H`.

    Args:
        codec: of the way up, contractive.
        axis_name: the mapped axis of the workers.
        learning_rate: `γ`.
        down: of the way down, contractive; None for the same.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as of `compressed_mean`.

    Raises:
        ValueError: for a codec that is not contractive, or that cannot be shared out.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.algorithms.ef21_bc(jaxcomp.sign(), "data", learning_rate=0.1)

    References:
        Fatkhullin et al., `EF21 with bells & whistles: six algorithmic extensions of modern error
        feedback <https://arxiv.org/abs/2110.03294>`_, 2021.

    Note:
        Guarantee: as `ef21`, with shorter steps for the second loss. Every worker is the server of
        a share of the elements, and remembers `d/n` more for it. All memories begin at zero.
    """
    reducer = TwoShot(Link(codec, Shift()), Link(down or codec, Shift()))
    mean = compressed_mean(reducer, axis_name, key=key, param_specs=param_specs)
    return optax.chain(mean, optax.sgd(learning_rate))


@whole
def cd_adam(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    learning_rate: Rate,
    down: Codec | Policy | None = None,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """Communication-compressed AMSGrad: `ef21` in both directions before the adaptive step.

    `H` as of `ef21_bc`, then `m ← β₁m + (1 − β₁)H`, `v ← β₂v + (1 − β₂)H²`, `v̂ ← max(v̂, v)`,
    `x ← x − γ · m/(√v̂ + ε)`.

    Args:
        codec: of the way up, contractive.
        axis_name: the mapped axis of the workers.
        learning_rate: a number or an optax schedule.
        down: of the way down, contractive; None for the same.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to its root.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as of `compressed_mean`.

    Raises:
        ValueError: for a codec that is not contractive, or that cannot be shared out.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.algorithms.cd_adam(jaxcomp.sign(), "data", learning_rate=1e-3)

    References:
        Wang, Lin and Chen, `Communication-compressed adaptive gradient method for distributed
        nonconvex optimization <https://arxiv.org/abs/2111.00705>`_, 2022.

    Note:
        Guarantee: for smooth losses, convex or not, the order of AMSGrad without compression.
        Memories begin at zero, so the first `1/δ` steps see small gradients, which the largest
        second moment remembers. `optax.amsgrad` takes the largest of the moments that are corrected
        for bias, the published code of the raw ones, corrected afterwards. That code compresses all
        parameters as one vector, this each bucket; its weight decay is `optax.add_decayed_weights`
        between the mean and the moments. Where gradients differ much in size, one bit may learn
        nothing at the learning rate of AMSGrad, and four (`blockwise(bits=4)`) do.
    """
    reducer = TwoShot(Link(codec, Shift()), Link(down or codec, Shift()))
    mean = compressed_mean(reducer, axis_name, key=key, param_specs=param_specs)
    return optax.chain(mean, optax.amsgrad(learning_rate, b1, b2, eps))


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
    """Heavy-ball descent in which a worker is silent while its gradient has hardly changed.

    Worker `m` sends `δ = gₘ − hₘ` if `‖δ‖² > ε₁ ‖xᵏ − xᵏ⁻¹‖²` with `ε₁ = c/γ²`, else nothing, and
    the last gradient that it sent stands for it; `x ← x − γ·h + β (xᵏ − xᵏ⁻¹)`.

    Args:
        codec: of the changes, contractive; None sends them whole, for every leaf.
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
        Guarantee: linear for strongly convex losses and full gradients, as the heavy ball; with
        `Lₘ² ≤ ε₁` a worker never sends twice in a row (derived here; the paper has at least half of
        the messages saved under conditions that could not be read). The rule is the paper's, its
        defaults are from memory, the best `ε₁` it leaves open, and its sum over workers is a mean
        here, so its `ε₁` has a factor of `1/n²` besides. The noise of stochastic gradients is never
        silent. `state[0].gate.messages` counts what was sent; bytes are saved only in steps where
        all are silent.
    """
    checks.positive("learning_rate", learning_rate)
    checks.decay("momentum", momentum)
    given = policy_.everywhere(Identity()) if codec is None else codec
    gate = Censored(censoring / learning_rate**2)
    mean = compressed_mean(Gather(Link(given, Shift())), axis_name, gate=gate, key=key)
    return optax.chain(mean, optax.sgd(learning_rate, momentum=momentum or None))


@whole
def lag(
    axis_name: AxisName, *, learning_rate: float, censoring: float = 0.1, key: Any = 0
) -> Method:
    """Lazily aggregated gradients: `censored_heavy_ball` without momentum.

    Args:
        axis_name: the mapped axis of the workers.
        learning_rate: as of `censored_heavy_ball`.
        censoring: as of `censored_heavy_ball`.
        key: a seed or key, the same on all workers.

    Raises:
        ValueError: as `censored_heavy_ball`.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.algorithms.lag("data", learning_rate=0.1)

    References:
        Chen et al., `LAG: lazily aggregated gradient for communication-efficient distributed
        learning <https://arxiv.org/abs/1805.09965>`_, 2018.

    Note:
        Guarantee: the order of gradient descent, linear for strongly convex losses, with full
        gradients. The paper's rule compares with several of the last steps; this with one.
    """
    return censored_heavy_ball(
        None, axis_name, learning_rate=learning_rate, momentum=0.0, censoring=censoring, key=key
    )


@whole
def clag(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    learning_rate: float,
    censoring: float = 0.1,
    key: Any = 0,
) -> Method:
    """Compressed lazy aggregation: `lag` whose changes are sent through a contractive codec.

    Args:
        codec: a contractive codec.
        axis_name: the mapped axis of the workers.
        learning_rate: as of `censored_heavy_ball`; in theory that of `ef21`, or shorter.
        censoring: as of `censored_heavy_ball`.
        key: a seed or key, the same on all workers.

    Raises:
        ValueError: for a codec that is not contractive, and as `censored_heavy_ball`.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.algorithms.clag(jaxcomp.top_k(0.1), "data", learning_rate=0.1)

    References:
        Richtárik et al., `3PC: three point compressors for communication-efficient distributed
        training and a better theory for lazy aggregation <https://arxiv.org/abs/2202.00998>`_,
        2022.

    Note:
        Guarantee: the paper's is that of `ef21`, for a trigger that compares with the change of the
        worker's own gradient, `‖δ‖² > ζ‖∇fᵢ(xᵏ) − ∇fᵢ(xᵏ⁻¹)‖²`. This compares with the step, as the
        censored heavy ball does, which is not covered by it.
    """
    return censored_heavy_ball(
        codec, axis_name, learning_rate=learning_rate, momentum=0.0, censoring=censoring, key=key
    )
