"""`compressed_mean`: the mean of the workers' gradients, as an optax transformation."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp import checks
from jaxcomp.backend import axes
from jaxcomp.base import Codec, Gate, Reducer
from jaxcomp.exchange import gating, reduce as reduce_
from jaxcomp.exchange.stepping import SteppedMemory, Stepper
from jaxcomp.feedback import Link
from jaxcomp.layout.policy import Policy
from jaxcomp.mesh import kinds, pmapped
from jaxcomp.misuse import optax_wrappers, own_gradients, places, uniform
from jaxcomp.numerics import noise
from jaxcomp.reducers import choose
from jaxcomp.transforms import groups, leaves as leaves_, sharded, stats as stats_, weights
from jaxcomp.types import Array, AxisName, PyTree

TELL = "tell_nonfinite"
"""The extra argument by which `skip_nonfinite` asks a mean for NaN in a step that is not finite, so
that what follows cannot hide it: the sign of Inf is finite."""

_EXCHANGES = (
    "jaxcomp.compressed_mean exchanges in every step; jaxcomp.local_updates obeys it, and a gate "
    "such as jaxcomp.gates.Every(4) leaves out rounds"
)
"""Why a mean does not take the argument `exchange` of `local_updates`."""


class GateState(NamedTuple):
    """The state of a gate and the counts of its rounds; the same on every worker.

    Attributes:
        gate_key: the gate's raw random key.
        state: the gate's own state.
        rounds: the number of open rounds so far.
        messages: the number of messages that all workers sent in them.

    Both counts stop at 2³² − 1; `messages` of 1,024 workers gets there after four million rounds.
    """

    gate_key: Array
    state: PyTree
    rounds: Array
    messages: Array


@kinds.MEANS.register
class CompressedMeanState(NamedTuple):
    """State of `compressed_mean`.

    Attributes:
        key: the raw key that every step's noise is derived from.
        step: the number of steps, modulo 2³²; after that the noise repeats.
        memory: the state of the links and of the reducer, and of an optimizer between them.
        stats: `Stats` of the last step, or `()`.
        gate: `GateState` under a gate, or `()`.
    """

    key: Array
    step: Array
    memory: Any
    stats: Any
    gate: Any = ()


class Setup(NamedTuple):
    """The arguments of `compressed_mean`.

    Attributes:
        source: the link or reducer.
        axis_name: the axes of the workers.
        gate: the gate, or None.
        seed: the raw key.
        guard: whether memory survives a step that is not finite.
        stats: whether the state keeps statistics, and of which groups.
        tell: whether a non-finite mean becomes NaN, as `TELL` asks.
        stepper: the optimizer between the two ways of `jaxcomp.sharded_optimizer`, or None.
        extra: the further arguments of the update, for that optimizer.
    """

    source: Link | Reducer
    axis_name: AxisName
    gate: Gate | None
    seed: Any
    guard: bool
    stats: groups.Grouping
    tell: bool = False
    stepper: Stepper | None = None
    extra: Any = None


def compressed_mean(
    codec: "Codec | Policy | Link | Reducer",
    axis_name: AxisName,
    *,
    gate: Gate | None = None,
    key: Any = 0,
    guard: bool = True,
    param_specs: PyTree | None = None,
    stats: groups.Grouping = False,
) -> optax.GradientTransformationExtraArgs:
    """Replaces local gradients by the compressed mean over the workers of a mapped axis.

    Chain it before the optimizer, inside `jax.shard_map`, `jax.pmap`, `jax.vmap(axis_name=...)`
    or a step wrapped by `jaxcomp.data_parallel`. The gradients must be local: differentiate the
    loss at `jaxcomp.local(params, axis_name)`, and do not average the loss before you do.

    `tx.update(..., weight=w)` gives this worker a weight, such as its number of tokens: the mean is
    `Σ wᵢ·gᵢ / Σ wᵢ`.

    The defaults are (`jaxcomp.describe` shows the choice):

    * a codec or policy without feedback gets `Residual()` if the codec is contractive (biased,
      with an error smaller than its input), and no feedback otherwise;
    * a link without a reducer uses `Gather` or, if it moves fewer bytes for this number of
      workers, `TwoShot` with the same codec on the downlink, or `Psum` if payloads can be added
      (`choose_reducer` tells);
    * a codec without a policy leaves one-dimensional leaves and leaves of fewer than 1,024
      elements dense, in their own dtype.

    Args:
        codec: a codec, a `Policy`, a `Link` or a reducer such as `Dense()`.
        axis_name: the mapped axis, or a tuple of them. Where `jax.vmap` maps some of them within
            each device, as in `jax.pmap(jax.vmap(step, axis_name="batch"), axis_name="device")`
            with `("device", "batch")`, a device averages the gradients of its lanes first, and
            sends one message: a worker is a device.
        gate: decides when, and which workers, communicate, such as `jaxcomp.gates.Every(4)`; None
            for all workers in every step. A closed round sends nothing over the links (a
            hierarchical reducer still uses the fast axes). Its mean is zero or, with `Shift`, the
            shift that all workers already have; the feedback keeps each worker's unsent message,
            for dense leaves too. Some gates need the parameters: `tx.update(grads, state, params)`.
            `state.gate` counts rounds and messages. `jaxcomp.ReducerSchedule` counts open rounds.
        key: a seed, a raw `uint32[2]` key or a `jax.random.key`; the same on all workers.
        guard: True keeps all memory, and the gate's state, unchanged on all workers in a step whose
            mean is not finite: `skip_nonfinite` then skips the whole step. Residuals and momenta of
            finite gradients stay finite, because they saturate. A saturated shift would differ from
            its mirror. So if one worker's shift leaves the range of its dtype, the mean is NaN on
            all workers, and the step is undone like any other; this costs four bytes beside the
            dense leaves. A non-finite message on a non-participating worker does not update that
            worker's feedback state.
        param_specs: how the parameters are sharded over the other axes of the mesh: a tree of
            `PartitionSpec` like them, or a prefix of one, in which None means replicated. Each
            device then compresses and sends only its own shard (`docs/sharded.md`). A policy
            decides by the shape of the shard, so its `min_size` counts the shard's elements. A leaf
            that is replicated over some of the axes is split over those first, and gathered again
            afterwards. Needs automatic axes, as `jaxcomp.data_parallel` makes them. If all axes are
            manual, gradients are local shards already, and None is right.
        stats: True keeps `Stats` of the last step in the state, over all shards; its bytes are
            those of one device. "rules", or a function from a leaf's path to the name of its group,
            keeps them by groups of leaves too: "rules" has a group for each rule of the policy.

    Returns:
        An optax transformation. Its state holds the memory of each worker in `PerWorker`.

    Raises:
        ValueError: on construction, for arguments of the wrong kind; in `init` outside of a mapped
            axis, if memory depends on the number of workers; on use, outside of a mapped axis, for
            gradients that are already averaged over it, for a loss that was averaged before it was
            differentiated, for leaves that are not floating, for a `weight` with a reducer that
            computes no weighted mean, such as `Vote` and `Robust`, or within
            `optax.apply_if_finite`, `conditionally_transform` or `MultiSteps`.

    Example:
        >>> import jaxcomp
        >>> tx = optax.chain(
        ...     jaxcomp.compressed_mean(jaxcomp.qsgd_inf(bits=4), axis_name="data"),
        ...     optax.adamw(3e-4),
        ... )
    """
    source = choose.link_or_reducer(codec)
    if gate is not None:
        checks.part("gate", gate, Gate)
        gate.check(choose.feedback(source))  # Which may warn of what closed rounds lose.
    setup = Setup(source, axis_name, gate, noise.words(key), guard, stats)
    check(setup, param_specs)
    return transformation(setup, param_specs)


def check(given: Setup, param_specs: PyTree) -> None:
    """Raises a `ValueError` for arguments of the wrong kind, or that do not go together."""
    source, axis_name, gate = given.source, given.axis_name, given.gate
    for reducer in choose.candidates(source):
        if not reducer.facts.same_on_all:
            raise ValueError(
                "`codec` must be a reducer that gives every worker the same mean, or the "
                f"replicated parameters would differ without notice, got {reducer!r}; with "
                "jaxcomp.gossip(inner, reducer, axis_name) every worker has parameters of its own"
            )
        if gate is not None:
            gating.check(gate, reducer, whole=param_specs is None)
    names = axes.names(axis_name)
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"`axis_name` must be the name of a mapped axis, or a tuple of them, got {axis_name!r}"
        )
    sharded.check_specs(param_specs, axis_name)
    checks.flag("guard", given.guard)
    groups.check(given.stats, source)


def transformation(
    given: Setup, param_specs: PyTree | None, *, trusted: bool = False
) -> optax.GradientTransformationExtraArgs:
    """The transformation of these arguments, which `check` accepts.

    With `trusted` its callers have checked where it is called, and the shapes of updates.
    """
    axis_name = given.axis_name

    def init_fn(params: PyTree) -> Any:
        optax_wrappers.check_wrappers()
        params, (setup, _) = _trained(params), _over_devices(given)
        fresh = functools.partial(_fresh, setup, params)
        if param_specs is None:
            return fresh(params)
        return sharded.init(fresh, params, param_specs, setup.axis_name)

    def update_fn(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        weight: Array | float | None = None,
        **extra: Any,
    ) -> tuple[PyTree, Any]:
        if not trusted:
            optax_wrappers.check_wrappers()
            axes.require(axis_name)
            uniform.check_callers(axis_name)
            if "exchange" in extra:
                weights.refuse("exchange", extra, _EXCHANGES)
        _check_state(state)
        setup, lanes = _over_devices(given)
        params = _trained(params)
        if not trusted:
            places.check_shapes(updates, params, "parameters")
        updates = own_gradients.check(updates, setup.axis_name)
        if weight is not None:
            updates = weights.weigh(setup.source, updates, weight, axis_name)
        if lanes:  # A device averages the gradients of its lanes first.
            updates = jax.lax.pmean(updates, lanes)
            state, params = axes.first((state, params), lanes)
        rest = {name: value for name, value in extra.items() if name != TELL}
        setup = setup._replace(tell=TELL in extra, extra=rest)
        step = functools.partial(_step, setup)
        if param_specs is not None:
            used = params if setup.stepper else ()
            return sharded.update(step, updates, state, used, param_specs, setup.axis_name)
        sharded.warn_if_gathered(setup.source, setup.axis_name)
        return step(updates, state, params)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _step(
    setup: Setup, updates: PyTree, state: Any, params: PyTree, shards: tuple[str, ...] = ()
) -> tuple[PyTree, CompressedMeanState]:
    """A step on all gradients, or on one device's shard of a sharded model."""
    plan = choose.plan(setup.source, updates, setup.axis_name)
    choose.warn_of_bytes(setup.source, plan)
    key, memory, gated, stepping = noise.fold(state.key, state.step), state.memory, None, None
    if setup.stepper is not None:
        memory = state.memory.reduction
        held, extra = state.memory.optimizer, setup.extra or {}
        stepping = reduce_.Stepping(setup.stepper, params, held, extra)
    if setup.gate is not None:
        gate_key = noise.fold(state.gate.gate_key, state.step)
        gated = reduce_.Gated(setup.gate, gate_key, state.gate.state, params)
    result = reduce_.reduce(
        plan, key, updates, memory,
        gated=gated, stepping=stepping, guard=setup.guard, everywhere=shards, tell=setup.tell,
    )  # fmt: skip
    counted, measured, after = state.gate, (), result.state
    if result.participation is not None:
        counted = _counted(counted, result.gate, result.participation)
    if setup.stats:
        before = memory.reducer
        measured = stats_.measure(setup.stats, plan, key, before, updates, result, shards)
    if setup.stepper is not None:
        after = SteppedMemory(after, result.stepped)
    return result.mean, CompressedMeanState(state.key, state.step + 1, after, measured, counted)


def _over_devices(setup: Setup) -> tuple[Setup, tuple[str, ...]]:
    """The mean over devices, and the axes of `jax.vmap` on each, whose lanes it averages first.

    A reducer with tiers of axes of its own sees all of them.
    """
    axis_name = setup.axis_name
    tiers = isinstance(setup.source, Reducer) and setup.source.facts.tiers is not None
    lanes = axes.lanes(axis_name) if axes.bound(axis_name) and not tiers else ()
    if not lanes:
        return setup, ()
    return setup._replace(axis_name=axes.without(axis_name, lanes)), lanes


def _fresh(setup: Setup, whole: PyTree, params: PyTree) -> CompressedMeanState:
    """The state before the first step, for all parameters or for one device's shard of them."""
    source, gate = setup.source, setup.gate
    leaves_.warn(source, params)
    return CompressedMeanState(
        key=jnp.array(setup.seed),  # A copy: this one may be donated.
        step=jnp.zeros((), jnp.uint32),
        memory=_memory(setup, whole, params),
        stats=stats_.nothing(setup.stats, source, params) if setup.stats else (),
        gate=() if gate is None else _closed(gate, setup.seed, params),
    )


def _memory(setup: Setup, whole: PyTree, params: PyTree) -> PyTree:
    """The memory before the first step, with that of the optimizer between the two ways."""
    memory = choose.memory(setup.source, params, setup.axis_name, gated=setup.gate is not None)
    if setup.stepper is None:
        return memory
    plan = choose.plan(setup.source, params, setup.axis_name)
    return SteppedMemory(memory, setup.stepper.init(plan, whole))


def _trained(params: PyTree) -> PyTree:
    """The parameters to differentiate; `optax.lookahead` stores slow parameters beside them."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def _check_state(state: Any) -> None:
    if not isinstance(state, CompressedMeanState):
        raise ValueError(
            "`state` must be a CompressedMeanState made by this transformation, got "
            f"{type(state).__name__}. Make it with "
            "jaxcomp.init_state(tx, params, mesh, axis_name). From the state of an optimizer that "
            "was trained without compression, or a checkpoint that was restored without a target, "
            "make it with jaxcomp.graft(tx, state, params, mesh, axis_name). A target for a "
            "restore is jaxcomp.restore_target(tx, params, mesh, axis_name)."
        )
    if jnp.ndim(state.step):
        raise ValueError(
            f"`state` must have a step that is a number, got one of shape {state.step.shape}, as "
            f"in a state of jax.pmap, {pmapped.ADVICE}."
        )


def _closed(gate: Gate, seed: Any, params: PyTree) -> GateState:
    zero = jnp.zeros((), jnp.uint32)
    return GateState(jnp.array(seed), gate.init(params), zero, jnp.zeros_like(zero))


def _counted(before: GateState, state: PyTree, participation: gating.Participation) -> GateState:
    return GateState(
        gate_key=before.gate_key,
        state=state,
        rounds=_raised(before.rounds, participation.go.astype(jnp.uint32)),
        messages=_raised(before.messages, participation.senders),
    )


def _raised(count: Array, by: Array) -> Array:
    """A count that saturates at its largest value instead of wrapping around."""
    return count + jnp.minimum(by, jnp.uint32(2**32 - 1) - count)
