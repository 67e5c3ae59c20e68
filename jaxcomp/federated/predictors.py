"""Predictors of clients' updates from the parameters that all have seen."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp import checks
from jaxcomp.backend import xla
from jaxcomp.base.interface import Interface
from jaxcomp.federated.side import Side
from jaxcomp.types import Array, PyTree


class Predictor(Interface, abstract=True):
    """A frozen dataclass that predicts an update `φ − θ` from the rounds before.

    Its state follows from the server's parameters of all rounds, so that server and clients have
    the same. Predictions are in the sign of a gradient, as updates are.
    """

    def init(self, params: PyTree) -> PyTree:
        """The state before the first round; `()` for none."""
        del params
        return ()

    @abc.abstractmethod
    def predict(self, state: PyTree, params: PyTree) -> PyTree:
        """The predicted update of a client that begins at these parameters."""

    def learn(self, state: PyTree, before: PyTree, after: PyTree) -> PyTree:
        """The state once the parameters went from `before` to `after`."""
        del before, after
        return state


@dataclasses.dataclass(frozen=True)
class Unchanged(Predictor):
    """Predicts the parameters of the last round: an update of zero.

    Example:
        >>> Unchanged().predict((), jnp.ones(2))
        Array([0., 0.], dtype=float32)
    """

    def predict(self, state: PyTree, params: PyTree) -> PyTree:
        del state
        return jax.tree.map(jnp.zeros_like, params)


class MeanStepState(NamedTuple):
    """The last steps along a leading axis, the latest first, and their number."""

    steps: PyTree
    seen: Array


@dataclasses.dataclass(frozen=True)
class MeanStep(Predictor):
    """Predicts the mean of the server's last steps, zero before there are so many.

    Args:
        number: how many steps.

    Raises:
        ValueError: for a number that is not positive.
    """

    number: int = 3

    def __post_init__(self):
        checks.integer("number", self.number, 1)

    def init(self, params: PyTree) -> MeanStepState:
        steps = jax.tree.map(lambda x: jnp.zeros((self.number, *x.shape), x.dtype), params)
        return MeanStepState(steps, jnp.zeros((), jnp.int32))

    def predict(self, state: MeanStepState, params: PyTree) -> PyTree:
        def mean(steps: Array, like: Array) -> Array:
            total = functools.reduce(jnp.add, list(steps))
            found = xla.block_fma(total * jnp.asarray(1 / self.number, total.dtype))
            return jnp.where(state.seen >= self.number, found, 0).astype(like.dtype)

        return jax.tree.map(mean, state.steps, params)

    def learn(self, state: MeanStepState, before: PyTree, after: PyTree) -> MeanStepState:
        def push(steps: Array, old: Array, new: Array) -> Array:
            return jnp.concatenate([(old - new)[None], steps[:-1]])

        steps = jax.tree.map(push, state.steps, before, after)
        return MeanStepState(steps, jnp.minimum(state.seen + 1, self.number))


class AdamStepState(NamedTuple):
    """The decaying means of the server's steps and of their squares."""

    mean: PyTree
    square: PyTree


@dataclasses.dataclass(frozen=True)
class AdamStep(Predictor):
    """Predicts a step of Adam that takes the server's steps for gradients: `rate · m / (√v + eps)`.

    `m` and `v` are decaying means of the steps and of their squares, without a correction of their
    beginning.

    Args:
        rate: the length of the step.
        b1: the decay of `m`, in [0, 1).
        b2: the decay of `v`, in [0, 1).
        eps: added to `√v`.

    Raises:
        ValueError: for numbers outside these ranges.
    """

    rate: float = 1e-3
    b1: float = 0.8
    b2: float = 0.9
    eps: float = 1e-4

    def __post_init__(self):
        checks.positive("rate", self.rate)
        checks.decay("b1", self.b1)
        checks.decay("b2", self.b2)
        checks.positive("eps", self.eps)

    def init(self, params: PyTree) -> AdamStepState:
        return AdamStepState(*(jax.tree.map(jnp.zeros_like, params) for _ in range(2)))

    def predict(self, state: AdamStepState, params: PyTree) -> PyTree:
        del params

        def step(mean: Array, square: Array) -> Array:
            return self.rate * (mean / (jnp.sqrt(square) + self.eps))

        return jax.tree.map(step, *state)

    def learn(self, state: AdamStepState, before: PyTree, after: PyTree) -> AdamStepState:
        def mixed(decay: float, old: Array, new: Array) -> Array:
            return xla.block_fma(decay * old) + xla.block_fma((1 - decay) * new)

        step = jax.tree.map(jnp.subtract, before, after)
        mean = jax.tree.map(functools.partial(mixed, self.b1), state.mean, step)
        square = jax.tree.map(lambda v, g: mixed(self.b2, v, g * g), state.square, step)
        return AdamStepState(mean, square)


class RegressionState(NamedTuple):
    """The coefficient and the bias of every parameter, and the states of their optimizers."""

    slope: PyTree
    bias: PyTree
    optimizers: PyTree


@dataclasses.dataclass(frozen=True)
class Regression(Predictor):
    """Predicts the parameters as `b + a⊙φ`, an Ornstein–Uhlenbeck process fitted as rounds go by.

    Each round `a` and `b` take a step of AdamW on `‖b + a⊙φ − φ⁺‖²`.

    Args:
        slope: `a` before the first round; `b` is zero.
        rates: the learning rates of `a` and of `b`.
        weight_decay: that of AdamW.

    Raises:
        ValueError: for rates that are not positive, or a negative weight decay.
    """

    slope: float = 0.99
    rates: tuple[float, float] = (1e-3, 1e-4)
    weight_decay: float = 1e-3

    def __post_init__(self):
        checks.number("slope", self.slope, 0.0)
        if not isinstance(self.rates, tuple) or len(self.rates) != 2:
            raise ValueError(f"`rates` must be two learning rates, got {self.rates!r}")
        for rate in self.rates:
            checks.positive("rates", rate)
        checks.number("weight_decay", self.weight_decay, 0.0)

    def _optimizers(self) -> tuple[optax.GradientTransformation, ...]:
        return tuple(optax.adamw(rate, weight_decay=self.weight_decay) for rate in self.rates)

    def init(self, params: PyTree) -> RegressionState:
        slope = jax.tree.map(lambda x: jnp.full_like(x, self.slope), params)
        bias = jax.tree.map(jnp.zeros_like, params)
        both = zip(self._optimizers(), (slope, bias), strict=True)
        return RegressionState(slope, bias, tuple(tx.init(tree) for tx, tree in both))

    def predict(self, state: RegressionState, params: PyTree) -> PyTree:
        return jax.tree.map(jnp.subtract, params, self._end(state, params))

    def learn(self, state: RegressionState, before: PyTree, after: PyTree) -> RegressionState:
        error = jax.tree.map(lambda end, new: 2 * (end - new), self._end(state, before), after)
        grads = jax.tree.map(jnp.multiply, error, before), error
        trees, states = [], []
        for tx, grad, own, tree in zip(
            self._optimizers(), grads, state.optimizers, (state.slope, state.bias), strict=True
        ):
            updates, own = tx.update(grad, own, tree)
            trees.append(optax.apply_updates(tree, updates))
            states.append(own)
        return RegressionState(trees[0], trees[1], tuple(states))

    def _end(self, state: RegressionState, params: PyTree) -> PyTree:
        """The predicted parameters."""

        def end(a: Array, b: Array, x: Array) -> Array:
            return b + xla.block_fma(a * x)

        return jax.tree.map(end, state.slope, state.bias, params)


@dataclasses.dataclass(frozen=True)
class Predictors(Side):
    """A guess from each of several predictors, of which a codec takes the best.

    Their states follow from the server's parameters, and are kept once, on the server, in a
    simulation. In the field a client computes them from the parameters of every round. One that is
    new, or missed more rounds than that is worth, is sent the states with the parameters: 11
    numbers a parameter by default. The ledger of a simulation counts both.

    Args:
        bank: the predictors.

    Raises:
        ValueError: for no predictor, or parts of another kind.

    Example:
        >>> import jaxcomp
        >>> up = jaxcomp.federated.Uplink(jaxcomp.codecs.BestOf(), Predictors())

    References:
        Yue, Jin, Wong and Dai, `Communication-efficient federated learning via predictive coding
        <https://arxiv.org/abs/2108.00918>`_, 2022; constants of the authors' `code
        <https://github.com/KAI-YUE/Predictive-Coding-FL>`_.

    Note:
        Divisions and roots may differ in their last bits between kinds of devices, and with them
        the guesses; a decoded value is then off by as much.
    """

    bank: tuple[Predictor, ...] = (Unchanged(), MeanStep(), AdamStep(), Regression())

    def __post_init__(self):
        if not isinstance(self.bank, tuple) or not self.bank:
            raise ValueError(
                "`bank` must be a tuple of predictors, such as (Unchanged(), MeanStep()), got "
                f"{self.bank!r}"
            )
        for predictor in self.bank:
            checks.part("bank", predictor, Predictor)

    def shared(self, params: PyTree) -> PyTree:
        return tuple(predictor.init(params) for predictor in self.bank)

    def at_client(self, shared: PyTree, own: PyTree, params: PyTree) -> PyTree:
        del own
        return _predicting(self)(shared, params)

    def at_server(self, shared: PyTree, row: PyTree, params: PyTree) -> PyTree:
        del row
        return _predicting(self)(shared, params)

    def learn(self, shared: PyTree, before: PyTree, after: PyTree) -> PyTree:
        each = zip(self.bank, shared, strict=True)
        return tuple(predictor.learn(state, before, after) for predictor, state in each)


@functools.lru_cache(maxsize=64)
def _predicting(side: Predictors) -> Callable[[PyTree, PyTree], PyTree]:
    """The predictions of all, along a leading axis."""

    def predict(states: Any, params: PyTree) -> PyTree:
        each = zip(side.bank, states, strict=True)
        found = [predictor.predict(state, params) for predictor, state in each]
        return jax.tree.map(lambda *xs: jnp.stack(xs), *found)

    # Client and server must get the same bits from two programs.
    return xla.compile_separately(predict)
