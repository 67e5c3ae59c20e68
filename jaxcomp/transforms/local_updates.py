"""Local updates: workers train alone for a round of steps, and exchange how far they have moved."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import core

from jaxcomp import checks
from jaxcomp.backend import axes, conditional
from jaxcomp.base import Codec, Gate, Period, Reducer
from jaxcomp.feedback import Link
from jaxcomp.gates.periods import Constant, period as as_period
from jaxcomp.layout.policy import Policy
from jaxcomp.mesh.per_worker import PerWorker
from jaxcomp.misuse import optax_wrappers, own_gradients, places, uniform
from jaxcomp.numerics import noise
from jaxcomp.reducers import choose
from jaxcomp.reducers.dense import Dense
from jaxcomp.transforms import (
    fragments as fragments_,
    local_exchange as exchange_,
    local_steps as steps_,
    mean as mean_,
    remainder,
    weights,
    worker_round,
)
from jaxcomp.transforms.local_steps import FragmentState, LocalUpdatesState, RoundOf, Setup
from jaxcomp.transforms.wrappers import widened
from jaxcomp.types import Array, AxisName, PyTree


class LocalUpdates(optax.GradientTransformationExtraArgs):
    """The transformation that `local_updates` returns.

    Attributes:
        setup: its arguments.
    """

    setup: Setup


def local_updates(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation | None,
    axis_name: AxisName,
    *,
    every: "int | Period | Callable[[Array], Any]",
    reducer: "Codec | Policy | Link | Reducer | optax.GradientTransformation" = Dense(),
    keep_inner: bool = True,
    local_steps: Sequence[int] | None = None,
    synchronous: int = 0,
    fragments: fragments_.Fragments = 1,
    delay: int = 0,
    mix: float = 0.0,
    gate: Gate | None = None,
    key: Any = 0,
    guard: bool = True,
    param_specs: PyTree | None = None,
    stats: bool = False,
) -> LocalUpdates:
    """Workers take steps of their own, and exchange the sum of a round's steps, not gradients.

    With `φ` the centre (`params`, the same on all workers) and `θᵢ` a worker's own parameters,
    each step is `θᵢ ← θᵢ + inner(gᵢ)`; at the end of a round of `every` steps the outer optimizer
    steps `φ` by the mean of the pseudo-gradients `Δᵢ = φ − θᵢ`, and `θᵢ ← φ`. In all other steps
    the update is zero and no collective runs.

    Take gradients at the worker's own parameters: `jaxcomp.view(params, state)`. Evaluate and save
    `params`. The mean is that of `compressed_mean`, with its links, feedback, gates and defaults;
    the bytes that a device sends in a round are
    `jaxcomp.describe(reducer, params, workers=n).link_bytes`. Nothing that turns or scales updates
    may follow in a chain, because this includes both optimizers.

    A round may also run as one program: `jaxcomp.local_round`. In a step that is known to end a
    round, or to have no exchange, `tx.update(..., exchange=True)`, or False, leaves out the
    conditional, so that a program of local steps contains no collective; it must be a Python bool.
    `jaxcomp.steps_alone(state)` tells how many next steps have no exchange. If one is due in a step
    with False, all workers leave that step out.

    `tx.update(..., weight=w)` gives this worker a weight in the mean of an exchange, and in that of
    the gradients of a synchronous step.

    Args:
        inner: the optimizer of the local steps, such as `optax.adamw(4e-4)`.
        outer: the optimizer of the centre, such as `optax.sgd(0.7, 0.9, nesterov=True)`; None for
            plain averaging, `φ ← φ − mean Δ`.
        axis_name: the mapped axis of the workers, or a tuple of them.
        every: the steps of a round: a number; a schedule of the number of steps taken; or a
            `Period`, such as `jaxcomp.gates.AdaptivePeriod`.
        reducer: the mean of the pseudo-gradients: a codec, policy, link or reducer, as for
            `compressed_mean`; or a transformation whose updates are a mean, such as
            `jaxcomp.directional_mean(codec, axis_name)`, with its own `key`.
        keep_inner: whether the inner optimizer's state is kept after an exchange (DiLoCo); False
            begins every round with a new one (FedPAQ), whose optax schedules go on with the number
            of steps taken.
        local_steps: for each worker, how many of a round's steps it takes (`GenQSGD`), 0 for a
            worker that stalls; it leaves out the last ones. None for all of them.
        synchronous: the number of first steps in which workers average gradients, dense, before
            the inner optimizer sees them, as without this transformation (post-local SGD). Costs
            another state of the inner optimizer.
        fragments: the number of parts of about equal bytes in which the model is exchanged, one
            after another, evenly over the round (streaming DiLoCo); or a function from parameters
            to a tree of numbers, such as `jaxcomp.transforms.fragments.strided(4)`.
        delay: `τ`, how many steps after it was taken a pseudo-gradient moves the centre. With
            `mix=0` the steps in between are lost to the worker.
        mix: `α`, the share of its own parameters with which a worker goes on after an exchange:
            `θᵢ ← α θᵢ + (1 − α) φ`.
        gate: decides which workers take part in an exchange, as for `compressed_mean`.
        key: a seed or key, the same on all workers.
        guard: as for `compressed_mean`; also, a worker leaves out a step of its own that is not
            finite (`state.skipped` counts them), a worker whose pseudo-gradient is not finite goes
            back to the centre and sends zeros, and an exchange that would make the centre or the
            outer optimizer's state non-finite is lost (`lost` of the fragment's state counts both).
        param_specs: as for `compressed_mean`.
        stats: as for `compressed_mean`, for the last exchange.

    Returns:
        An optax transformation; its state is a `LocalUpdatesState`.

    Raises:
        ValueError: on construction, for arguments of the wrong kind; fragments or a delay without a
            constant number of steps, a number of steps that the fragments do not divide, or a delay
            as long as the time between two fragments; on use, without `params`, outside of a
            mapped axis, if `local_steps` is not a number for each worker, for a weight that the
            reducer does not take, or for `exchange=False` where an exchange is known to be due.

    Example:
        >>> import jaxcomp, optax
        >>> tx = local_updates(
        ...     optax.adamw(4e-4),
        ...     optax.sgd(0.7, momentum=0.9, nesterov=True),
        ...     "data",
        ...     every=30,
        ...     reducer=jaxcomp.qsgd_inf(bits=4),
        ... )

    References:
        Stich, `Local SGD converges fast and communicates little
        <https://arxiv.org/abs/1805.09767>`_, 2019; Douillard et al., `DiLoCo: distributed
        low-communication training of language models <https://arxiv.org/abs/2311.08105>`_, 2023.

    Note:
        Inner momentum and counters stay on their worker, as in DiLoCo; `keep_inner=False` begins
        anew. Parameters that a loss does not use still move by the inner optimizer's weight decay.
    """
    setup = _checked(
        Setup(
            inner=widened(transformation("inner", inner)),
            outer=optax.sgd(1.0) if outer is None else widened(transformation("outer", outer)),
            axis_name=axis_name,
            period=as_period(every),
            mean=_mean(reducer, axis_name, gate, key, guard, stats, param_specs),
            keep_inner=keep_inner,
            local_steps=None if local_steps is None else tuple(local_steps),
            synchronous=synchronous,
            fragments=fragments,
            delay=delay,
            mix=mix,
            guard=guard,
            seed=noise.words(key),
            param_specs=param_specs,
        )
    )

    def init_fn(params: PyTree) -> Any:
        optax_wrappers.check_wrappers()
        return _init(setup, params)

    def update_fn(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        exchange: bool | None = None,
        **extra: Any,
    ) -> tuple[PyTree, Any]:
        optax_wrappers.check_wrappers()
        return _update(setup, updates, state, params, exchange, extra)

    made = LocalUpdates(init_fn, update_fn)
    made.setup = setup
    return made


def _update(
    setup: Setup,
    updates: PyTree,
    state: Any,
    params: PyTree | None,
    exchange: bool | None,
    extra: dict[str, Any],
) -> tuple[PyTree, Any]:
    axis_name = setup.axis_name
    axes.require(axis_name)
    uniform.check_callers(axis_name)
    if params is None:
        raise ValueError(
            "`params` must be given to the update, which moves them at the end of a round, got "
            "None: use tx.update(grads, state, params)"
        )
    if not isinstance(state, LocalUpdatesState):
        raise ValueError(
            "`state` must be a LocalUpdatesState made by this transformation, got "
            f"{type(state).__name__}. Make it with jaxcomp.init_state(tx, params, mesh, "
            f"{axis_name!r})"
        )
    if isinstance(exchange, RoundOf):
        exchange = exchange.resolved(setup, len(state.fragments))
    if exchange is not None and not isinstance(exchange, bool):
        raise ValueError(
            f"`exchange` must be True, False or None, known when the step is traced, got "
            f"{exchange!r}; None decides while it runs"
        )
    places.check_shapes(updates, params, "parameters")
    updates = own_gradients.check(updates, axis_name)
    if setup.period != Constant(1):  # With one step a round, workers are always at the centre.
        places.check_view(updates, params, [each.offset for each in state.fragments])

    extra = dict(extra)
    weight, due = extra.pop("weight", None), None
    if weight is not None:
        _check_weighs(setup)
        weight = weights.number(weight)
    if exchange is False:
        due = state.left <= 0
        _check_due(setup, len(state.fragments), due)

    def alone(updates: PyTree, state: Any, params: PyTree) -> tuple[PyTree, Any]:
        state = steps_.alone(setup, updates, state, params, extra, due)
        return exchange_.exchange_due(setup, state, params, exchange, weight)

    if not setup.synchronous or exchange is False:
        return alone(updates, state, params)

    def together(updates: PyTree, state: Any, params: PyTree) -> tuple[PyTree, Any]:
        return exchange_.together(setup, updates, state, params, extra, weight)

    early = conditional.uniform(state.taken < setup.synchronous, axis_name)
    return conditional.either(early, together, alone, updates, state, params)


def _check_weighs(setup: Setup) -> None:
    """Raises a `ValueError` for a mean that takes no weight."""
    mean = setup.mean
    takes = isinstance(mean, optax.GradientTransformation)
    if takes and "weight" not in inspect.signature(mean.update).parameters:
        raise ValueError(
            "`weight` must be None with a `reducer` that is a transformation without weights; use "
            "jaxcomp.directional_mean(codec, axis_name), or give the codec or reducer itself"
        )


def _check_due(setup: Setup, number: int, due: Array) -> None:
    """Raises a `ValueError` if it is known that an exchange is due in this step."""
    period = setup.period
    ends = [end for pair in steps_.schedule(setup, number) for end in pair]
    always = isinstance(period, Constant) and period.k == len(set(ends or [period.k]))
    if always or not (isinstance(due, core.Tracer) or not bool(due)):
        raise ValueError(
            "`exchange` must not be False in a step in which an exchange is due, got False; "
            "jaxcomp.steps_alone(state) is the number of next steps in which none is, and "
            "exchange=None decides while the step runs"
        )


def transformation(name: str, tx: Any) -> optax.GradientTransformationExtraArgs:
    """Raises a `ValueError` unless `tx` is an optax transformation."""
    checks.transformation(name, tx)
    return optax.with_extra_args_support(tx)


def _checked(setup: Setup) -> Setup:
    checks.integer("synchronous", setup.synchronous, 0)
    checks.integer("delay", setup.delay, 0)
    checks.number("mix", setup.mix, 0.0, 1.0)
    most = setup.period.k if isinstance(setup.period, Constant) else None
    for steps in setup.local_steps or ():
        checks.integer("local_steps", steps, 0, most)
    if setup.local_steps is not None and not any(setup.local_steps):
        raise ValueError(
            f"`local_steps` must have a positive number, got {setup.local_steps}, which never train"
        )
    if not callable(setup.fragments):
        checks.integer("fragments", setup.fragments, 1)
    if isinstance(setup.fragments, int):
        steps_.schedule(setup, setup.fragments)
    return setup


def _mean(
    reducer: Any,
    axis_name: AxisName,
    gate: Gate | None,
    key: Any,
    guard: bool,
    stats: bool,
    param_specs: PyTree | None,
) -> mean_.Setup | optax.GradientTransformationExtraArgs:
    """The mean of the pseudo-gradients: the arguments of one, or a user's transformation."""
    if isinstance(reducer, optax.GradientTransformation):
        if gate is not None or stats or param_specs is not None:
            raise ValueError(
                "`reducer` must be a codec, policy, link or reducer beside gate, stats or "
                "param_specs, got a transformation: give these to the transformation, as in "
                "jaxcomp.compressed_mean(codec, axis_name, gate=...)"
            )
        return optax.with_extra_args_support(reducer)
    source = choose.link_or_reducer(reducer)
    if gate is not None:
        checks.part("gate", gate, Gate)
        gate.check(choose.feedback(source))  # Which may warn of what closed rounds lose.
    mean = mean_.Setup(source, axis_name, gate, noise.words(key), guard, stats)
    mean_.check(mean, param_specs)
    return mean


def _init(setup: Setup, params: PyTree) -> LocalUpdatesState:
    zero, axis_name = jnp.zeros((), jnp.int32), setup.axis_name
    parts = fragments_.split(setup.fragments, params, params)
    steps_.schedule(setup, len(parts))
    state = LocalUpdatesState(
        taken=zero,
        waited=jnp.zeros_like(zero),
        left=jnp.zeros_like(zero),
        period=setup.period.init(),
        inner=PerWorker.wrap(setup.inner.init(params), "local", axis_name),
        skipped=PerWorker.wrap(jnp.zeros_like(zero), "local", axis_name),
        fragments=tuple(
            _begun(setup, part, mean)
            for part, mean in zip(parts, steps_.means(setup, params), strict=True)
        ),
        shared=setup.inner.init(params) if setup.synchronous else (),
    )
    return state._replace(left=steps_.left(setup, len(parts), state))


def _begun(setup: Setup, part: PyTree, mean: optax.GradientTransformation) -> FragmentState:
    rest = remainder.nothing(part)
    return FragmentState(
        offset=PerWorker.wrap(worker_round.start(part), "offset", setup.axis_name),
        mean=mean.init(part),
        outer=setup.outer.init(remainder.exact(part, rest)),
        lost=PerWorker.wrap(jnp.zeros((), jnp.int32), "local", setup.axis_name),
        rest=rest,
        pending=jax.tree.map(jnp.zeros_like, part) if setup.delay else (),
        anchor=jax.tree.map(jnp.array, part) if setup.mix == 1 else (),
    )
