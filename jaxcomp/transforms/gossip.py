"""Gossip: workers have parameters of their own, and mix them with those of their neighbours."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp import checks
from jaxcomp.backend import axes, conditional
from jaxcomp.base import Codec, Reducer
from jaxcomp.exchange import guarding
from jaxcomp.feedback import Link
from jaxcomp.layout import masked
from jaxcomp.layout.policy import Policy
from jaxcomp.mesh import kinds, per_worker
from jaxcomp.mesh.per_worker import PerWorker
from jaxcomp.misuse import optax_wrappers, own_gradients, places, uniform
from jaxcomp.numerics import counting, noise
from jaxcomp.reducers.gossip import Gossip
from jaxcomp.transforms import (
    gossip_rounds as rounds_,
    sharded,
    view as view_,
    weights,
    worker_round,
)
from jaxcomp.transforms.gossip_rounds import Models, Setup
from jaxcomp.transforms.local_updates import transformation
from jaxcomp.transforms.wrappers import widened
from jaxcomp.types import Array, AxisName, PyTree

_WEIGHTS = (
    "workers mix their models by the weights of the graph; jaxcomp.local_updates, whose exchanges "
    "take a mean, obeys it"
)
"""Why workers of gossip take no weight."""


@kinds.MEANS.register
@kinds.DISPLACED.register
@kinds.STEPS.register
class GossipState(NamedTuple):
    """State of `gossip`.

    Attributes:
        gossip_key: the raw key of the codecs' noise and of drawn graphs.
        taken: the number of steps, up to 2³¹ − 1.
        mixed: the number of rounds of gossip so far, modulo 2³².
        inner: each worker's state of the inner optimizer.
        skipped: how many steps each worker left out, because they were not finite.
        offset: each worker's parameters minus `params`, at least in float32.
        memory: the links' memory and the state of the reducer; with `Shift`, marked with its graph.
        slow: the offset of each worker's slow parameters and the state of the outer optimizer, or
            `()`.
        tracked: the mixed estimate of the mean gradient and the last gradient, or `()`.
    """

    gossip_key: Array
    taken: Array
    mixed: Array
    inner: PerWorker
    skipped: PerWorker
    offset: PerWorker
    memory: Any
    slow: Any = ()
    tracked: Any = ()

    def here(self, params: PyTree) -> PyTree:
        """This worker's parameters, for the centre `params`."""
        return worker_round.here(params, self.offset.own())


def gossip(
    inner: optax.GradientTransformation,
    reducer: "Gossip | Codec | Policy | Link",
    axis_name: AxisName,
    *,
    mixing: float = 1.0,
    every: int = 1,
    rounds: "int | Callable[[Array], Any]" = 1,
    outer: optax.GradientTransformation | None = None,
    prox: Callable[[PyTree, Array], PyTree] | None = None,
    tracking: bool = False,
    stay: bool = False,
    key: Any = 0,
    guard: bool = True,
    param_specs: PyTree | None = None,
    gate: None = None,
) -> optax.GradientTransformationExtraArgs:
    """Decentralised training: each worker steps alone, then mixes its model with its neighbours'.

    With `θᵢ` a worker's own parameters, a step is `θᵢ ← θᵢ + inner(gᵢ)` and then
    `θᵢ ← θᵢ + γ Σⱼ wᵢⱼ (θ̂ⱼ − θ̂ᵢ)`, where `θ̂ⱼ` is what the neighbours know of worker `j`: its
    decoded message, or with `Shift` the memory that its messages have moved. The mean over all
    workers moves by the mean step only, since the matrix of the weights is doubly stochastic.

    No value is known to all workers, so `params` stay where training began, and the updates are
    zero: what a worker has learned is its offset in the state. Take gradients at
    `jaxcomp.view(params, state)`; evaluate and save `jaxcomp.consensus(params, state)`. Nothing
    may follow in a chain.

    Args:
        inner: the optimizer of a worker's own steps, such as `optax.sgd(0.1)`.
        reducer: a `jaxcomp.Gossip`; a codec, policy or link means `Gossip(reducer)`, on a ring.
        axis_name: the mapped axis of the workers.
        mixing: `γ` in (0, 1], the step of the mixing. Smaller ones allow coarser codecs.
        every: the number of steps from one exchange to the next.
        rounds: the rounds of gossip in an exchange: a number, or a function from the number of
            steps before this one to a number (multi-consensus). All rounds are one compiled loop.
        outer: the optimizer of each worker's slow parameters `φᵢ`, which an exchange moves by the
            pseudo-gradient `φᵢ − Σⱼ wᵢⱼ θ̂ⱼ`; then `θᵢ ← φᵢ`. None for plain mixing. It sees both
            in the offset's dtype, at least float32.
        prox: a function from a worker's parameters, at least in float32, and the number of steps
            before this one, to parameters, applied after the mixing, such as a soft threshold.
        tracking: whether workers also mix estimates of the mean gradient, `yᵢ ← Σⱼ wᵢⱼ yⱼ + gᵢ −
            gᵢ⁻`, which the inner optimizer sees in place of gradients. Doubles the message.
        stay: whether a worker moves only to what its neighbours know, `θᵢ ← θ̂ᵢ`, after mixing with
            the estimates of the last exchange (DCD). Needs a link with `Shift`.
        key: a seed or key, the same on all workers.
        guard: leaves out a worker's own step that is not finite (`state.skipped` counts them), and
            a mixing whose result is not finite.
        param_specs: how the parameters are sharded over the other axes of the mesh, as for
            `compressed_mean`: each device mixes its own shard. Not for graphs that draw their
            rounds. Of a message that is not finite, only the shard that has it is left out.
        gate: None, since no worker hears all others: use `every`, or `jaxcomp.graphs.Without`.

    Returns:
        An optax transformation; its state is a `GossipState`.

    Raises:
        ValueError: on construction, for arguments of the wrong kind or out of range, `stay`
            without a link with `Shift`, `outer` or `stay` with `tracking`, a graph that draws its
            rounds with `param_specs`, or a codec whose feedback does not suit it; on use, without
            `params`, outside of a mapped axis, for gradients that are already averaged, or for a
            `weight` or `exchange`, which only means obey.

    Example:
        >>> import jaxcomp, optax
        >>> link = jaxcomp.Link(jaxcomp.top_k(0.1), jaxcomp.Shift())  # CHOCO-SGD.
        >>> ring = jaxcomp.Gossip(link, jaxcomp.graphs.Ring())
        >>> tx = gossip(optax.sgd(0.1), ring, "data", mixing=0.2)

    References:
        Lian et al., `Can decentralized algorithms outperform centralized algorithms?
        <https://arxiv.org/abs/1705.09056>`_, 2017; Koloskova, Stich and Jaggi, `Decentralized
        stochastic optimization and gossip algorithms with compressed communication
        <https://arxiv.org/abs/1902.00340>`_, 2019.

    Note:
        The first message is that of a worker's offset, so all workers must begin at the same
        `params`, as they do under `jaxcomp.init_state`. A step that is not finite stays on its
        worker, which goes on mixing; there is no value that all workers could decide by.
    """
    setup = _checked(
        Setup(
            inner=widened(transformation("inner", inner)),
            outer=None if outer is None else widened(transformation("outer", outer)),
            reducer=Gossip(reducer) if isinstance(reducer, Codec | Policy | Link) else reducer,
            axis_name=axis_name,
            mixing=mixing,
            every=every,
            rounds=rounds,
            prox=prox,
            tracking=tracking,
            stay=stay,
            guard=guard,
            param_specs=param_specs,
        ),
        gate,
    )
    seed = noise.words(key)

    def init_fn(params: PyTree) -> Any:
        optax_wrappers.check_wrappers()
        return _init(setup, seed, params)

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        optax_wrappers.check_wrappers()
        axes.require(axis_name)
        uniform.check_callers(axis_name)
        if params is None or not isinstance(state, GossipState):
            raise ValueError(
                "`params` and the state of this transformation must be given to the update: use "
                f"tx.update(grads, state, params), got {type(params).__name__} and a state "
                f"{type(state).__name__}; make the state with jaxcomp.init_state(tx, params, mesh, "
                f"{axis_name!r})"
            )
        updates = _own(updates, state, params, extra, axis_name)
        if param_specs is None:
            sharded.warn_if_gathered(setup.reducer, axis_name)
        return jax.tree.map(jnp.zeros_like, params), _step(setup, updates, state, params, extra)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _own(
    updates: PyTree, state: GossipState, params: PyTree, extra: dict[str, Any], axis_name: AxisName
) -> PyTree:
    """The gradients, if they are this worker's own, at its own parameters, and nothing else."""
    weights.refuse("weight", extra, _WEIGHTS)
    weights.refuse("exchange", extra, "`every` tells in which steps workers mix their models")
    places.check_shapes(updates, params, "parameters")
    updates = own_gradients.check(updates, axis_name)
    places.check_view(updates, params, state.offset)
    return updates


def consensus(params: PyTree, state: PyTree) -> PyTree:
    """The mean of all workers' parameters under `gossip`: what to evaluate and save.

    Call it outside of the mapped function, jitted or not, on the state with its axis of workers;
    it reads every worker's offset once, which training itself never does. With any other
    transformation the workers have the same parameters, and `params` are returned.

    Args:
        params: the parameters that were given to the updates.
        state: the state of the transformation.

    Raises:
        ValueError: for the state of `gossip` inside the mapped function, where a device has only
            one worker's offset.

    Example:
        >>> import jaxcomp, optax
        >>> tx = gossip(optax.sgd(0.1), jaxcomp.qsgd_inf(bits=4), "data")
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> w = {"w": jnp.ones((8, 8))}
        >>> consensus(w, jaxcomp.init_state(tx, w, mesh, "data"))["w"].shape
        (8, 8)
    """
    return view_.in_boxes(_consensus, params, state)


def _consensus(params: PyTree, state: PyTree) -> PyTree:
    nodes = jax.tree.leaves(
        state, is_leaf=lambda node: isinstance(node, GossipState) or view_.is_split(node)
    )
    for node in nodes:
        if view_.is_split(node):
            params = view_.in_parts(_consensus, params, node)
        if not isinstance(node, GossipState):
            continue
        if axes.varying_axes(node.skipped.tree):
            raise ValueError(
                "`state` must be that of all workers, outside of the mapped function, got one "
                "worker's; inside of it, jaxcomp.view(params, state) is this worker's model"
            )
        means = jax.tree.map(lambda by: jnp.mean(by, axis=0), node.offset.tree)
        own = worker_round.here(masked.visible_part(params, means), means)
        params = view_.complete(own, params)
    return params


def _checked(setup: Setup, gate: object) -> Setup:
    if gate is not None:
        raise ValueError(
            "`gate` must be None, since no worker of a graph hears all others, got "
            f"{gate!r}; use every=2 for exchanges in every second step, or "
            "jaxcomp.graphs.Without(graph, silent=(3,)) for workers that stay silent"
        )
    checks.part("reducer", setup.reducer, Reducer)
    reducer: Any = setup.reducer
    if not isinstance(reducer, Gossip):
        raise ValueError(
            "`reducer` must be a jaxcomp.Gossip, or a codec or link for one on a ring, got "
            f"{reducer!r}; jaxcomp.compressed_mean takes reducers whose mean is the same on all "
            "workers"
        )
    checks.number("mixing", setup.mixing, 0.0, 1.0)
    checks.positive("mixing", setup.mixing)
    checks.integer("every", setup.every, 1, counting.LAST)
    if not callable(setup.rounds):
        checks.integer("rounds", setup.rounds, 1)
    if setup.prox is not None and not callable(setup.prox):
        raise ValueError(
            "`prox` must be a function from parameters and the number of steps to parameters, got "
            f"{setup.prox!r}"
        )
    if setup.stay and not reducer.uplink.feedback.facts.mirrors:
        raise ValueError(
            "`stay` must be False without jaxcomp.Shift, whose memory is what neighbours know, got "
            f"{reducer.uplink.feedback!r}; use jaxcomp.Link(codec, jaxcomp.Shift())"
        )
    sharded.check_specs(setup.param_specs, setup.axis_name)
    if setup.param_specs is not None and reducer.graph.drawn:
        raise ValueError(
            "`param_specs` must be None with a graph that draws its rounds, whose shards would "
            f"draw different ones, got {reducer.graph!r}; use jaxcomp.graphs.OnePeer()"
        )
    if setup.tracking and (setup.outer is not None or setup.stay or setup.every > 1):
        raise ValueError(
            "`tracking` must be False with an `outer` optimizer, `stay` or `every` above 1, which "
            "would mix the estimates of the gradient at other times than the parameters"
        )
    return setup


def _init(setup: Setup, seed: Any, params: PyTree) -> GossipState:
    axis_name, zero = setup.axis_name, jnp.zeros((), jnp.int32)
    offset = worker_round.start(params)
    slow: Any = ()
    if setup.outer is not None:
        started = rounds_.Slow(offset, setup.outer.init(worker_round.exact(params, offset)))
        slow = rounds_.Slow(
            PerWorker.wrap(started.offset, "offset", axis_name),
            PerWorker.wrap(started.outer, "local", axis_name),
        )
    tracked: Any = ()
    if setup.tracking:
        tracked = PerWorker.wrap(rounds_.Tracked(offset, offset), "local", axis_name)
    return GossipState(
        gossip_key=jnp.array(seed),  # A copy: this one may be donated.
        taken=zero,
        mixed=jnp.zeros((), jnp.uint32),
        inner=PerWorker.wrap(setup.inner.init(params), "local", axis_name),
        skipped=PerWorker.wrap(jnp.zeros_like(zero), "local", axis_name),
        offset=PerWorker.wrap(offset, "offset", axis_name),
        memory=rounds_.begin(setup, params),
        slow=slow,
        tracked=tracked,
    )


def _step(
    setup: Setup, grads: PyTree, state: GossipState, params: PyTree, extra: dict[str, Any]
) -> GossipState:
    """A worker's own step, and the exchange after it."""
    axis_name, own = setup.axis_name, per_worker.unwrap(state)
    here = worker_round.here(params, own.offset)
    estimate, tracked, spoilt = grads, own.tracked, jnp.zeros((), jnp.int32)
    if setup.tracking:
        tracked, spoilt = _tracked(setup, own.tracked, grads)
        estimate = jax.tree.map(lambda y, g: y.astype(g.dtype), tracked.estimate, grads)
    moved, inner, taken = worker_round.step(
        setup.inner, estimate, own.inner, here, own.offset, guard=setup.guard, extra=extra
    )
    models = Models(moved, rounds_.own_memory(setup, state.memory), own.slow, tracked)
    models, mixed = _exchange(setup, models, state, params)

    def wrap(tree: PyTree, kind: str) -> PerWorker:
        return PerWorker.wrap(tree, kind, axis_name)

    slow = models.slow
    if setup.outer is not None:
        slow = rounds_.Slow(wrap(slow.offset, "offset"), wrap(slow.outer, "local"))
    return GossipState(
        gossip_key=state.gossip_key,
        taken=counting.after(state.taken, setup.every),
        mixed=mixed,
        inner=wrap(inner, "local"),
        skipped=wrap(own.skipped + jnp.where(taken, spoilt, 1), "local"),
        offset=wrap(models.offset, "offset"),
        memory=rounds_.store_memory(setup, models.memory),
        slow=slow,
        tracked=wrap(models.tracked, "local") if setup.tracking else (),
    )


def _tracked(setup: Setup, before: Any, grads: PyTree) -> tuple[Any, Array]:
    """The estimate of the mean gradient, and one for a gradient that is not finite.

    Such a gradient does not enter the estimate.
    """
    now = jax.tree.map(lambda g, last: g.astype(last.dtype), grads, before.last)
    spoilt = jnp.zeros((), jnp.int32)
    if setup.guard:
        sound = guarding.all_finite(now)
        now, spoilt = guarding.where_finite(sound, now, before.last), jnp.where(sound, 0, 1)
    change = jax.tree.map(jnp.subtract, now, before.last)
    return rounds_.Tracked(jax.tree.map(jnp.add, before.estimate, change), now), spoilt


def _exchange(
    setup: Setup, models: Models, state: GossipState, params: PyTree
) -> tuple[Models, Array]:
    """The models after this step's exchange, if one is due, and the number of rounds so far."""

    def talk(models: Models, mixed: Array, params: PyTree) -> tuple[Models, Array]:
        return rounds_.exchange(setup, models, params, state.gossip_key, state.taken, mixed)

    if setup.every == 1:
        return talk(models, state.mixed, params)
    due = conditional.uniform(state.taken % setup.every == setup.every - 1, setup.axis_name)
    return conditional.either(
        due, talk, lambda models, mixed, _: (models, mixed), models, state.mixed, params
    )
