"""Adam with ever rarer updates of the variance, then local steps with a frozen variance."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp import checks
from jaxcomp.backend import conditional
from jaxcomp.exchange import guarding
from jaxcomp.mesh import kinds
from jaxcomp.mesh.per_worker import PerWorker
from jaxcomp.misuse import own_gradients
from jaxcomp.numerics import addition, counting
from jaxcomp.optimizers import means, moments, rates
from jaxcomp.types import Array, AxisName, PyTree

_Mean = optax.GradientTransformationExtraArgs


@kinds.DISPLACED.register
@kinds.STEPS.register
class ZeroOneAdamState(NamedTuple):
    """State of `step_by_zero_one_adam`; moments and offsets are at least in float32.

    Attributes:
        count: the number of steps.
        total: the sum of the learning rates since the last communication.
        mu: the first moment at the last communication.
        nu: the second moment; frozen from step `freeze_step` on.
        drift: each worker's own first moment minus `mu`.
        offset: each worker's own parameters minus the centre; `jaxcomp.view` adds it.
        dense: the state of the mean in steps that update the variance.
        compressed: the state of the mean in all other rounds.
    """

    count: Array
    total: Array
    mu: PyTree
    nu: PyTree
    drift: PerWorker
    offset: PerWorker
    dense: Any
    compressed: Any


class _Own(NamedTuple):
    """The part of the state that is a worker's own."""

    drift: PyTree
    offset: PyTree


class _Given(NamedTuple):
    """The input of a step; `total` includes the step's own rate."""

    grads: PyTree
    state: ZeroOneAdamState
    own: _Own
    params: PyTree | None
    step: Array
    rate: Array
    total: Array
    renewals: Array
    frozen: Array


class _Taken(NamedTuple):
    """The next state and the change of the centre."""

    updates: PyTree
    total: Array
    mu: PyTree
    nu: PyTree
    own: _Own
    dense: Any
    compressed: Any


@dataclasses.dataclass(frozen=True)
class Intervals:
    """The intervals of variance updates, and of communications after local steps.

    Args:
        renewals: the number of variance updates before their interval doubles.
        double_every: the number of steps before the interval between communications doubles.
        max_interval: the largest number of local steps between communications; 1 communicates in
            every step.

    Raises:
        ValueError: for numbers that are not positive.
    """

    renewals: int = 16
    double_every: int = 32678
    max_interval: int = 16

    def __post_init__(self):
        for name in ("renewals", "double_every", "max_interval"):
            checks.integer(name, getattr(self, name), 1, counting.LAST)


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The arithmetic of a step, given its mean."""

    adam: moments.Adam
    weight_decay: float

    def renew(self, given: _Given, mean: PyTree, after: Any) -> _Taken:
        """A step with a dense mean, which updates the variance."""
        state = given.state
        mu, nu = self.adam.first(mean, state.mu), self.adam.second(mean, state.nu)
        change = self._change(given, self.adam.unbiased(mu, given.step), nu)
        none = jnp.zeros_like(given.total)
        return _Taken(change, none, mu, nu, given.own, after, state.compressed)

    def alone(self, given: _Given) -> _Taken:
        """A local step."""
        state, m = given.state, self._moment(given)
        drift = jax.tree.map(jnp.subtract, m, state.mu)
        step = self._against(given, m, state.nu, given.rate)
        own = _Own(drift, jax.tree.map(jnp.add, given.own.offset, step))
        own = guarding.where_finite(guarding.all_finite(own), own, given.own)
        still = jax.tree.map(jnp.zeros_like, state.mu)
        return _Taken(still, given.total, state.mu, state.nu, own, state.dense, state.compressed)

    def message(self, given: _Given) -> PyTree:
        """The message for the codec: gradients, or the mean of a worker's moments.

        Moments are weighted by their learning rates: a worker's offset is minus their weighted sum,
        divided by `D`.
        """
        idle = given.total == 0
        total = jnp.where(idle, 1, given.total)

        def mean(o: Array, d: Array, m: Array) -> Array:
            weighted = given.rate.astype(m.dtype) * m - o * d
            return jnp.where(idle, m, weighted / total.astype(m.dtype))

        scale = self.adam.root(given.state.nu, given.renewals)
        averages = jax.tree.map(mean, given.own.offset, scale, self._moment(given))
        averages = guarding.cast_like(moments.mask(averages, given.state.nu), given.grads)
        return guarding.where_finite(given.frozen, averages, given.grads)

    def met(self, given: _Given, mean: PyTree, after: Any) -> _Taken:
        """A step with a compressed mean, of gradients or of moments."""
        state = given.state
        mean = guarding.cast_like(mean, state.mu)
        fed = self.adam.first(mean, state.mu)
        mu = guarding.where_finite(given.frozen, moments.mask(mean, state.nu), fed)
        moved = guarding.where_finite(given.frozen, mu, self.adam.unbiased(mu, given.step))
        change = self._change(given, moved, state.nu)
        own = jax.tree.map(jnp.zeros_like, given.own)
        none = jnp.zeros_like(given.total)
        return _Taken(change, none, mu, state.nu, own, state.dense, after)

    def _moment(self, given: _Given) -> PyTree:
        """This worker's own first moment, after its gradient."""
        before = jax.tree.map(jnp.add, given.state.mu, given.own.drift)
        return self.adam.first(given.grads, before)

    def _change(self, given: _Given, m: PyTree, nu: PyTree) -> PyTree:
        """The change of the centre, with weight decay, by all rates since the last exchange."""
        change = self._against(given, m, nu, given.total)
        if not self.weight_decay:
            return change
        share = given.total * self.weight_decay
        return jax.tree.map(
            lambda c, x: c - share.astype(c.dtype) * x.astype(c.dtype), change, given.params
        )

    def _against(self, given: _Given, m: PyTree, nu: PyTree, rate: Array) -> PyTree:
        """A step of this learning rate against a moment."""
        step = jax.tree.map(jnp.divide, moments.mask(m, nu), self.adam.root(nu, given.renewals))
        return jax.tree.map(lambda d: -rate.astype(d.dtype) * d, step)


def step_by_zero_one_adam(
    learning_rate: optax.ScalarOrSchedule,
    dense: optax.GradientTransformation,
    compressed: optax.GradientTransformation,
    axis_name: AxisName,
    *,
    freeze_step: int,
    renewals: int = 16,
    double_every: int = 32678,
    max_interval: int = 16,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """0/1 Adam: rare dense means, then local steps with compressed communication.

    With `D = √v̂ + ε`, `γ` the learning rate and `x` the parameters, which are the centre:

    * Up to step `freeze_step`, some steps are Adam on the dense mean of the gradients, and only
      these update `v`; their interval doubles after every `renewals` of them. In the steps between,
      `m` is updated with the compressed mean, and `x ← x − γm̂/D`.
    * Afterwards each worker takes local steps, `mᵢ ← b1·mᵢ + (1 − b1)·gᵢ`, `oᵢ ← oᵢ − γmᵢ/D`, with
      its loss taken at `x + oᵢ`. They communicate after 1, 2, 4, … steps, up to `max_interval`; the
      interval doubles every `double_every` steps. Then `m` becomes the compressed mean of
      `−oᵢ·D/Σγ`, which is the mean of the moments since the last communication, and
      `x ← x − Σγ·m/D`, `mᵢ ← m` and `oᵢ ← 0`.

    The updates are zero between two communications. Take the loss at `jaxcomp.view(params, state)`
    and pass local gradients. In a chain, only transformations that do not change updates may
    follow.

    Args:
        learning_rate: `γ`, or a schedule of it.
        dense: the mean that updates the variance, such as `compressed_mean(Dense(), axis_name)`.
        compressed: the mean for everything else, with error feedback if its codec is biased.
        axis_name: the mapped axis of both.
        freeze_step: the last step that may update the variance: usually the end of the learning
            rate's warm-up.
        renewals: the number of variance updates before their interval doubles.
        double_every: the number of steps before the interval between communications doubles.
        max_interval: the largest number of local steps between communications; 1 communicates in
            every step.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: `ε`.
        weight_decay: applied to the centre, times the learning rate, at every communication.

    Raises:
        ValueError: for a mean that is not a transformation, or settings out of range; on use,
            without `params` if there is weight decay.

    Example:
        >>> import jaxcomp
        >>> link = jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual())
        >>> tx = step_by_zero_one_adam(
        ...     3e-4,
        ...     dense=jaxcomp.compressed_mean(jaxcomp.Dense(), "data"),
        ...     compressed=jaxcomp.compressed_mean(jaxcomp.TwoShot(link, link), "data"),
        ...     axis_name="data",
        ...     freeze_step=5000,
        ... )

    References:
        Lu et al., `Maximizing communication efficiency for large-scale training via 0/1 Adam
        <https://arxiv.org/abs/2202.06009>`_, 2022.

    Note:
        As in the published code, error feedback is reset when the variance is frozen, since its
        memory is in other units afterwards. Differences from the published code:

        * Workers send the mean of their moments; the published code sends `oᵢ·D` and divides by
          `Σγ` afterwards. With error feedback both are the same while learning rates are constant.
          When they fall, the published code's residual of longer steps becomes a momentum that is
          too large: on quadratics, with one bit and a cosine schedule, its error ended at 6e-2,
          here at 3e-4.
        * Moments are bias-corrected as in Adam up to `freeze_step`, the second by the number of its
          updates, and the corrected variance is frozen; the published code never corrects.
        * Step `freeze_step` is the last that may update the variance; the published code compares
          after the step, so there it is `freeze_step + 1`.
        * Variance updates follow the paper's `2^⌊j/κ⌋`, and communications are counted from
          `freeze_step`; the published code uses the steps that the interval divides, which shifts
          some of them.
        * Weight decay is applied when workers communicate, by the rates since the last
          communication; in the published code it is applied in each local step, and then counts as
          momentum.
        * A worker skips a local step with a non-finite gradient. In a step with communication, all
          workers see it in the updates.
        * An element without a gradient at the variance updates so far does not move: one bit cannot
          represent zero, and it would be divided by `ε` alone.
    """
    adam = moments.Adam(freeze_step, b1, b2, eps)
    intervals = Intervals(renewals, double_every, max_interval)
    return by_zero_one_adam(
        learning_rate, dense, compressed, axis_name, adam, intervals, weight_decay
    )


def by_zero_one_adam(
    learning_rate: optax.ScalarOrSchedule,
    dense: optax.GradientTransformation,
    compressed: optax.GradientTransformation,
    axis_name: AxisName,
    adam: moments.Adam,
    intervals: Intervals,
    weight_decay: float,
) -> optax.GradientTransformationExtraArgs:
    """`step_by_zero_one_adam`, with its settings in groups."""
    checks.rate(learning_rate)
    exact, lossy = means.check("dense", dense), means.check("compressed", compressed)
    checks.number("weight_decay", weight_decay, 0.0)
    rule = _Rule(adam, weight_decay)

    def init_fn(params: PyTree) -> Any:
        return _fresh(params, exact, lossy, axis_name)

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        if weight_decay and params is None:
            raise ValueError(
                "`params` must be given to the update, since `weight_decay` needs them, got None: "
                "use tx.update(grads, state, params)"
            )
        updates = own_gradients.check(updates, axis_name)

        step = counting.after(state.count)
        rate = rates.at(learning_rate, state.count).astype(state.total.dtype)
        renews, times = moments.interval(jnp.minimum(step, adam.freeze_step), intervals.renewals)
        frozen = conditional.uniform(step > adam.freeze_step, axis_name)
        meets = _meets(step - adam.freeze_step, intervals.double_every, intervals.max_interval)
        own, total = _Own(state.drift.own(), state.offset.own()), state.total + rate
        given = _Given(updates, state, own, params, step, rate, total, times, frozen)
        go = conditional.uniform(jnp.where(frozen, meets, ~renews), axis_name)
        exchange = functools.partial(_exchange, rule, lossy, extra)
        otherwise = functools.partial(_otherwise, rule, exact, extra)
        taken = conditional.either(go, exchange, otherwise, given, step == adam.freeze_step + 1)
        return guarding.cast_like(taken.updates, updates), _state_after(taken, step, axis_name)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _fresh(params: PyTree, exact: _Mean, lossy: _Mean, axis_name: AxisName) -> ZeroOneAdamState:
    """The state before the first step."""

    def zeros() -> PyTree:
        return jax.tree.map(addition.zeros, params)

    return ZeroOneAdamState(
        count=jnp.zeros((), jnp.int32),
        total=jnp.zeros(()),
        mu=zeros(),
        nu=zeros(),
        drift=PerWorker.wrap(zeros(), "momentum", axis_name),
        offset=PerWorker.wrap(zeros(), "offset", axis_name),
        dense=exact.init(params),
        compressed=lossy.init(params),
    )


def _state_after(taken: _Taken, step: Array, axis_name: AxisName) -> ZeroOneAdamState:
    return ZeroOneAdamState(
        count=step,
        total=taken.total,
        mu=taken.mu,
        nu=taken.nu,
        drift=PerWorker.wrap(taken.own.drift, "momentum", axis_name),
        offset=PerWorker.wrap(taken.own.offset, "offset", axis_name),
        dense=taken.dense,
        compressed=taken.compressed,
    )


def _exchange(rule: _Rule, lossy: _Mean, extra: dict, given: _Given, first: Array) -> _Taken:
    """A step with a compressed mean: one for both phases, so that its codec is compiled once."""
    memory = means.forget(lossy, first, given.state.compressed, given.state.mu)
    mean, after = lossy.update(rule.message(given), memory, given.params, **extra)
    return rule.met(given, mean, after)


def _otherwise(rule: _Rule, exact: _Mean, extra: dict, given: _Given, first: Array) -> _Taken:
    """A local step if the variance is frozen, else a step with a dense mean."""
    del first

    def renew(given: _Given) -> _Taken:
        mean, after = exact.update(given.grads, given.state.dense, given.params, **extra)
        return rule.renew(given, mean, after)

    return conditional.either(given.frozen, rule.alone, renew, given)


def _meets(local_step: Array, double_every: int, max_interval: int) -> Array:
    """Whether workers communicate after this step, counted from 1 after the freeze."""
    doublings = jnp.clip((local_step - 1) // double_every, 0, 30)
    interval = jnp.minimum(jnp.left_shift(jnp.int32(1), doublings), max_interval)
    return local_step % interval == 0
