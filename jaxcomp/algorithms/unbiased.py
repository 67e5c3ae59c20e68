"""Methods with unbiased codecs: shifts, gradient differences, and a preserved model."""

from typing import Any

import optax

from jaxcomp import checks
from jaxcomp.algorithms.types import Method, Over, Rate
from jaxcomp.base import Codec
from jaxcomp.feedback import Link, Residual, Shift
from jaxcomp.feedback.steps import require_unbiased, step_for
from jaxcomp.gates import Bernoulli, Coin
from jaxcomp.layout.policy import Policy
from jaxcomp.misuse.whole_methods import whole
from jaxcomp.reducers.gather import Gather
from jaxcomp.reducers.two_shot import TwoShot
from jaxcomp.transforms.differences import compressed_differences
from jaxcomp.transforms.mean import compressed_mean
from jaxcomp.transforms.view import preserved_center
from jaxcomp.types import AxisName, PyTree


def diana(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    step: float | None = None,
    over: Over = Gather,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """Compresses each gradient's difference from a learned shift with an unbiased codec.

    `c = Q(gᵢ − hᵢ)`, `hᵢ ← hᵢ + a·c`; returns `h + mean c` with `h = mean hᵢ` before it moves.

    Args:
        codec: an unbiased codec of relative variance `ω`.
        axis_name: the mapped axis of the workers.
        step: `a`, at most `1/(1 + ω)`; None for that.
        over: the reducer of the link.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for a biased codec, a step that is too long, or None where `ω` is not known.

    Example:
        >>> import jaxcomp, optax
        >>> mean = jaxcomp.algorithms.diana(jaxcomp.qsgd(bits=2), "data")
        >>> tx = optax.chain(mean, optax.sgd(0.1))

    References:
        Mishchenko et al., `Distributed learning with compressed gradient differences
        <https://arxiv.org/abs/1901.09269>`_, 2019.

    Note:
        Guarantee: for smooth and strongly convex losses and full gradients, linear convergence to
        the solution, for heterogeneous workers too; with stochastic gradients, up to their noise.
        The learning rate is about `1/(L + 6ωL/n)`, from memory of the paper. The paper quantises
        blocks by a chosen norm; this takes any unbiased codec. Memories start at zero.
    """
    memory = Shift(step_for(codec) if step is None else step)
    reducer = over(Link(codec, memory))
    return compressed_mean(reducer, axis_name, key=key, param_specs=param_specs)


def marina(codec: Codec | Policy, axis_name: AxisName, *, p: float, key: Any = 0) -> Method:
    """Compressed differences of gradients at two points, with an occasional full gradient.

    `v ← mean gᵢ(x)` with probability `p`, else `v ← v + mean Q(gᵢ(x) − gᵢ(x⁻))`; returns `v`.

    Args:
        codec: an unbiased codec.
        axis_name: the mapped axis of the workers.
        p: the probability of a full gradient, in (0, 1]; about the ratio of the payload's bytes to
            those of a dense gradient.
        key: a seed or key, the same on all workers.

    Raises:
        ValueError: for a biased codec; on use, without `params` or `grad_fn`.

    Example:
        >>> import jaxcomp, optax
        >>> mean = jaxcomp.algorithms.marina(jaxcomp.random_k(0.1), "data", p=0.1)
        >>> tx = optax.chain(mean, optax.sgd(0.1))

        `tx.update(grads, state, params, grad_fn=lambda p: jax.grad(loss)(p, batch))`

    References:
        Gorbunov et al., `MARINA: faster non-convex distributed learning with compression
        <https://arxiv.org/abs/2102.07845>`_, 2021.

    Note:
        Guarantee: with full gradients, `O(1/T)` for smooth losses, convex or not, and linear
        convergence under the Polyak–Łojasiewicz condition; when it appeared, the least
        communication known. All workers draw the same coin, so steps without a full gradient run
        no dense mean. The first step sends the full gradient. The learning rate is about
        `1/(L + L̃·√((1 − p)ω/(p·n)))`, from memory of the paper.
    """
    require_unbiased(codec)
    return compressed_differences(Gather(Link(codec)), axis_name, restart=Coin(p), key=key)


def artemis(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    down: Codec | Policy | None = None,
    p: float = 1.0,
    step: float | None = None,
    absent: str = "remembered",
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """Unbiased codecs in both directions, an uplink memory, and partial participation.

    `c = Q(gᵢ − hᵢ)`, `hᵢ ← hᵢ + a·c`; returns `Q'(h + Σ_S c / (p·n))`, then `h ← h + a · Σ_S c / n`
    over the workers `S` that take part.

    Args:
        codec: the uplink codec, unbiased.
        axis_name: the mapped axis of the workers.
        down: the downlink codec, unbiased; None for `codec`.
        p: probability that a worker takes part.
        step: `a`, at most `1/(1 + ω)`; None for `1/(2(1 + ω))`.
        absent: "remembered", the paper's second variant (PP2), or "left out", its first (PP1). PP1
            stalls, and here it has an uncompressed downlink.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for biased codecs, a probability out of range, a step that is too long, or None
            where `ω` is not known.

    Example:
        >>> import jaxcomp, optax
        >>> mean = jaxcomp.algorithms.artemis(jaxcomp.qsgd(bits=2), "data", p=0.5)
        >>> tx = optax.chain(mean, optax.sgd(0.1))

    References:
        Philippenko and Dieuleveut, `Bidirectional compression in heterogeneous settings for
        distributed or federated learning with partial participation
        <https://arxiv.org/abs/2006.14591>`_, 2020.

    Note:
        Guarantee: for smooth and strongly convex losses, linear convergence up to a noise that
        depends only on the gradients' variance at the solution, not on heterogeneity. By default
        memories move by `1/(2(1 + ω))` of `c`, as in the published code. The published code moves
        the mirror by `1/p` of that for each participant, so its mirror differs from the mean of the
        memories before convergence; here the mirror always equals that mean. Memories start at
        zero; the published code starts with the first gradients if all workers participate.
        Non-participants need no later catch-up, because every worker receives every downlink
        message.
    """
    checks.share("p", p)
    if absent != "remembered" and down is not None:
        raise ValueError(f"`down` must be None where the absent are {absent!r}, got {down!r}")
    a = step_for(codec, 0.5) if step is None else step
    up = Link(codec, Shift(a, absent=absent))
    reducer = TwoShot(up, Link(down or codec)) if absent == "remembered" else Gather(up)
    gate = Bernoulli(p) if p < 1 else None
    return compressed_mean(reducer, axis_name, gate=gate, key=key, param_specs=param_specs)


def dore(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    down: Codec | Policy,
    step: float | None = None,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """`diana` on the uplink, and error feedback on the downlink.

    `ĝ` from `diana`, `q = ĝ + e`, send back `C'(q)`, `e ← q − C'(q)`; returns `C'(q)`.

    Args:
        codec: the uplink codec, unbiased.
        axis_name: the mapped axis of the workers.
        down: the downlink codec, contractive.
        step: the step size of the memory; None for `1/(2(1 + ω))`.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for a biased uplink codec, a downlink codec whose residual would grow, a `step`
            that is too long, or a `step` of None if `ω` is not known.

    Example:
        >>> import jaxcomp, optax
        >>> mean = jaxcomp.algorithms.dore(jaxcomp.qsgd(bits=2), "data", down=jaxcomp.sign())
        >>> tx = optax.chain(mean, optax.sgd(0.1))

    References:
        Liu et al., `A double residual compression algorithm for efficient distributed learning
        <https://arxiv.org/abs/1910.07561>`_, 2020.

    Note:
        Guarantee: for smooth and strongly convex losses, linear convergence to a neighbourhood that
        depends only on the gradients' noise. The residual is that of the mean gradient, as in the
        published code of Artemis; the paper's residual is that of the model's step, with factors
        that are one here.
    """
    memory = Shift(step_for(codec, 0.5) if step is None else step)
    reducer = TwoShot(Link(codec, memory), Link(down, Residual()))
    return compressed_mean(reducer, axis_name, key=key, param_specs=param_specs)


@whole
def mcm(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    learning_rate: Rate,
    down: Codec | Policy | None = None,
    p: float = 1.0,
    step: float | None = None,
    down_step: float | None = None,
    own: bool = False,
    key: Any = 0,
) -> Method:
    """Compresses both directions at the rate of uplink compression alone.

    The server keeps the exact model, and sends a compressed one:
    `x ← x − γ ĝ` with `ĝ` from `diana`, from gradients at `x̂` (`jaxcomp.view(params, state)`);
    `Ω = Q'(x − H)`, `x̂ = H + Ω`, `H ← H + b·Ω`.

    Args:
        codec: the uplink codec, unbiased.
        axis_name: the mapped axis of the workers.
        learning_rate: `γ`.
        down: the downlink codec, unbiased; None for `codec`.
        p: probability that a worker takes part.
        step: `a`, the step size of the uplink memory, at most `1/(1 + ω)`; None for
            `1/(2(1 + ω))`.
        down_step: `b`; None for `1/(2(1 + ω'))`.
        own: True for a separate downlink message to every worker (Rand-MCM).
        key: a seed or key, the same on all workers.

    Raises:
        ValueError: for biased codecs, a probability out of range, a step that is too long, or None
            where `ω` is not known.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.algorithms.mcm(jaxcomp.qsgd(bits=2), "data", learning_rate=0.1)

    References:
        Philippenko and Dieuleveut, `Preserved central model for faster bidirectional compression in
        distributed settings <https://arxiv.org/abs/2102.12528>`_, 2021.

    Note:
        Guarantee: for smooth and convex losses, that of uplink compression alone, to the first
        order in `γ`. The defaults of both step sizes are those of the published code. `params` is
        the preserved model: evaluate and save it. Every device stores it, so here the downlink is
        computed and not sent; `H` starts at the initial parameters. With `p < 1`, the memories of
        absent workers stay in the mean, as in `artemis`, and all workers receive the model.
    """
    checks.share("p", p)
    way = down or codec
    a = step_for(codec, 0.5) if step is None else step
    b = step_for(way, 0.5) if down_step is None else down_step
    gate = Bernoulli(p) if p < 1 else None
    mean = compressed_mean(Gather(Link(codec, Shift(a))), axis_name, gate=gate, key=key)
    center = preserved_center(way, axis_name, step=b, own=own, key=key)
    return optax.chain(mean, optax.sgd(learning_rate), center)


@whole
def rand_mcm(
    codec: Codec | Policy,
    axis_name: AxisName,
    *,
    learning_rate: Rate,
    down: Codec | Policy | None = None,
    p: float = 1.0,
    step: float | None = None,
    down_step: float | None = None,
    key: Any = 0,
) -> Method:
    """`mcm` with a separate downlink message for each worker, so that errors average out.

    Args:
        codec: the uplink codec, unbiased.
        axis_name: the mapped axis of the workers.
        learning_rate: `γ`.
        down: the downlink codec, unbiased; None for `codec`.
        p: probability that a worker takes part.
        step: as for `mcm`.
        down_step: the step size of the downlink memory; None for `1/(2(1 + ω'))`.
        key: a seed or key, the same on all workers.

    Raises:
        ValueError: for the same reasons as `mcm`.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.algorithms.rand_mcm(jaxcomp.qsgd(bits=2), "data", learning_rate=0.1)

    References:
        See `mcm`.

    Note:
        Guarantee: as for `mcm`. This is the variant with one server memory for each worker; the
        variants with a single memory, or with restarts, are not implemented.
    """
    given: Any = {"down": down, "p": p, "step": step, "down_step": down_step, "key": key}
    return mcm(codec, axis_name, learning_rate=learning_rate, own=True, **given)
