"""Methods whose workers take steps of their own, and exchange what a round of them has moved."""

import functools
from collections.abc import Sequence
from typing import Any

import optax

from jaxcomp import checks
from jaxcomp.algorithms.types import Mean, Method, Rate
from jaxcomp.base import Codec, Reducer
from jaxcomp.feedback import Link
from jaxcomp.gates.drawn import SampledWorkers
from jaxcomp.gates.periods import AdaptivePeriod
from jaxcomp.layout.policy import Policy
from jaxcomp.misuse.whole_methods import whole
from jaxcomp.recipes.unbiased_links import unbiased_link, unbiased_links
from jaxcomp.reducers.two_shot import TwoShot
from jaxcomp.transforms.local_updates import local_updates
from jaxcomp.types import AxisName, PyTree

_anew = functools.partial(local_updates, outer=None, keep_inner=False)
"""Federated rounds: averages, and inner optimizers that begin anew, but for their schedules."""


@whole
def local_sgd(
    codec: Mean,
    axis_name: AxisName,
    *,
    learning_rate: Rate,
    every: int,
    momentum: float | None = None,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """Local SGD: workers take `every` steps of SGD, then average their models.

    `θᵢ ← θᵢ − γ gᵢ`; at the end of a round `φ ← φ − mean C(φ − θᵢ)`, `θᵢ ← φ`.

    Args:
        codec: the codec of the pseudo-gradients, or a reducer such as `jaxcomp.Dense()`.
        axis_name: the mapped axis of the workers.
        learning_rate: `γ`, a number or an optax schedule of the steps.
        every: the steps of a round.
        momentum: of the local steps; each worker keeps its own velocity.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for a number of steps that is not positive.

    Example:
        >>> import jaxcomp
        >>> codec = jaxcomp.qsgd_inf(bits=4)
        >>> tx = jaxcomp.algorithms.local_sgd(codec, "data", learning_rate=0.1, every=8)

    References:
        Stich, `Local SGD converges fast and communicates little
        <https://arxiv.org/abs/1805.09767>`_, 2019. With a constant period and dense averages this
        is CPSGD of Jiang and Agrawal (see `adpsgd`).

    Note:
        Guarantee: the rate of mini-batch SGD while `every` is at most about `√(T/n)/n` in `T` steps
        on `n` workers. Take the loss at `jaxcomp.view(params, state)`. Velocities are not averaged.
    """
    inner = optax.sgd(learning_rate, momentum)
    return local_updates(
        inner, None, axis_name, every=every, reducer=codec, key=key, param_specs=param_specs
    )


cpsgd = local_sgd
"""Constant-period averaging, which is local SGD."""


@whole
def post_local_sgd(
    codec: Mean,
    axis_name: AxisName,
    *,
    learning_rate: Rate,
    synchronous: int,
    every: int = 16,
    momentum: float | None = None,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """Post-local SGD: synchronous steps up to the first drop of the learning rate, then local SGD.

    Args:
        codec: the codec of the pseudo-gradients; the synchronous steps are dense.
        axis_name: the mapped axis of the workers.
        learning_rate: a number or an optax schedule of the steps.
        synchronous: the number of steps before the first local round.
        every: the steps of a round.
        momentum: of all steps; the first round begins with the shared velocity.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for a number of steps that is negative, or a round without steps.

    Example:
        >>> import jaxcomp
        >>> rate = optax.piecewise_constant_schedule(0.1, {1000: 0.1})
        >>> tx = jaxcomp.algorithms.post_local_sgd(
        ...     jaxcomp.Dense(), "data", learning_rate=rate, synchronous=1000, momentum=0.9
        ... )

    References:
        Lin et al., `Don't use large mini-batches, use local SGD
        <https://arxiv.org/abs/1808.07217>`_, 2020.

    Note:
        Guarantee: none beyond that of `local_sgd`. Before the switch the parameters are those of
        `optax.sgd` after a dense mean, up to rounding, as in the authors' code, which averages
        models there; of 16-bit parameters, those with a float32 copy.
    """
    return local_updates(
        optax.sgd(learning_rate, momentum),
        None,
        axis_name,
        every=every,
        reducer=codec,
        synchronous=synchronous,
        key=key,
        param_specs=param_specs,
    )


@whole
def adpsgd(
    codec: Mean,
    axis_name: AxisName,
    *,
    learning_rate: Rate,
    warmup: int,
    start: int = 4,
    momentum: float | None = None,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """ADPSGD: local SGD whose rounds grow as the variance of the workers' models allows.

    `jaxcomp.gates.AdaptivePeriod` has the rule.

    Args:
        codec: the codec of the pseudo-gradients, or a reducer; the paper's is `jaxcomp.Dense()`.
        axis_name: the mapped axis of the workers.
        learning_rate: a number or an optax schedule of the steps.
        warmup: the number of rounds that measure the variance to keep.
        start: the steps of such a round.
        momentum: of the local steps; each worker keeps its own velocity.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for settings that are not positive.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.algorithms.adpsgd(
        ...     jaxcomp.Dense(), "data", learning_rate=0.1, warmup=250
        ... )

    References:
        Jiang and Agrawal, `Adaptive periodic averaging: a practical approach to reducing
        communication in distributed learning <https://arxiv.org/abs/2007.06134>`_, 2020.

    Note:
        Guarantee: that of local SGD with the longest period used. An exchange sends one more
        number, the variance.
    """
    return local_updates(
        optax.sgd(learning_rate, momentum),
        None,
        axis_name,
        every=AdaptivePeriod(learning_rate, warmup, start),
        reducer=codec,
        key=key,
        param_specs=param_specs,
    )


@whole
def fedpaq(
    codec: Mean,
    axis_name: AxisName,
    *,
    learning_rate: Rate,
    every: int,
    participants: int | None = None,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """FedPAQ: rounds of SGD, of which some workers send the quantised difference.

    `φ ← φ + (1/r) Σ_{i∈S} Q(θᵢ − φ)` with `|S| = r`, after `every` steps from `θᵢ = φ`.

    Args:
        codec: an unbiased codec, such as `jaxcomp.qsgd(bits=2)`; or a `Link` or reducer, for a
            biased codec with feedback.
        axis_name: the mapped axis of the workers.
        learning_rate: a number or an optax schedule of the number of steps, over all rounds. The
            theorem's rate, constant in a round, is `lambda t: 4 / (mu * (t // every * every + 1))`.
        every: the steps of a round.
        participants: `r`, drawn anew for each round; None for all workers.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for a biased codec, or a number of steps or participants that is not positive;
            on use, for more participants than workers.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.algorithms.fedpaq(
        ...     jaxcomp.qsgd(bits=2), "data", learning_rate=0.1, every=5, participants=3
        ... )

    References:
        Reisizadeh et al., `FedPAQ: a communication-efficient federated learning method with
        periodic averaging and quantization <https://arxiv.org/abs/1909.13014>`_, 2020.

    Note:
        Guarantee: for strongly convex losses `O(τ/T)` with decreasing rates, for smooth ones
        `O(1/√T)` with `τ` up to about `√T`. Workers that do not take part compute as well, and send
        the same bytes: participation is statistical here.
    """
    return _anew(
        optax.sgd(learning_rate),
        axis_name=axis_name,
        every=every,
        reducer=codec if isinstance(codec, Reducer) else unbiased_link("codec", codec),
        gate=None if participants is None else SampledWorkers(participants),
        key=key,
        param_specs=param_specs,
    )


@whole
def genqsgd(
    codec: Codec | Policy | Link,
    axis_name: AxisName,
    *,
    learning_rate: Rate,
    local_steps: Sequence[int],
    down: Codec | Policy | Link | None = None,
    key: Any = 0,
    param_specs: PyTree | None = None,
) -> Method:
    """GenQSGD: each worker takes its own number of steps, and both directions are quantised.

    `φ ← φ + Q₀(mean Qᵢ(θᵢ − φ))`, after `Kᵢ` steps from `θᵢ = φ`.

    Args:
        codec: `Qᵢ`, an unbiased codec; or a `Link`, for a biased codec with feedback.
        axis_name: the mapped axis of the workers.
        learning_rate: a number or an optax schedule of the number of steps, over all rounds; with
            `K` the largest `Kᵢ`, `lambda t: rate(t // K)` is one of the rounds.
        local_steps: `Kᵢ` for each worker; a round has as many steps as the largest.
        down: `Q₀`, of the same kinds; None for `codec`.
        key: a seed or key, the same on all workers.
        param_specs: how the parameters are sharded, as for `compressed_mean`.

    Raises:
        ValueError: for a biased codec, or numbers of steps none of which is positive; on use,
            unless there is a number for each worker.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.algorithms.genqsgd(
        ...     jaxcomp.qsgd(bits=4), "data", learning_rate=0.1, local_steps=[4] * 4 + [2] * 4
        ... )

    References:
        Li, Cui and Lau, `Optimization-based GenQSGD for federated edge learning
        <https://arxiv.org/abs/2111.00526>`_, 2021.

    Note:
        Guarantee: for smooth losses, the bound that `jaxcomp.planning.plan_genqsgd` minimises cost
        under. A worker with fewer steps waits for the others, so unequal numbers model a cost but
        save no time here. The server's quantiser works on slices of the mean, bucket by bucket.
    """
    checks.sequence("local_steps", local_steps)
    return _anew(
        optax.sgd(learning_rate),
        axis_name=axis_name,
        every=max(local_steps, default=0),
        reducer=TwoShot(*unbiased_links(codec, down)),
        local_steps=local_steps,
        key=key,
        param_specs=param_specs,
    )
