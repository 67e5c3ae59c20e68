"""Runs methods on problems and networks: one curve of errors each, and the bits that were sent.

`solve` takes a problem whose solution is known, with workers simulated by `vmap`; `train` takes a
network, with workers on simulated devices. `feedback.py`, `methods.py`, `networks.py` and
`signs.py` are tables of cases over these two.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import reporting  # It makes the examples importable, too.
from rich.progress import track

import jaxcomp
from jaxcomp.testing import problems

AXIS, DEVICES = "workers", 8


class Prices(NamedTuple):
    """Bits of messages.

    Attributes:
        up: a worker's message.
        down: the answer; 0 for a gather, in which each worker decodes the messages of all.
        whole: a dense gradient.
        workers: their number.
    """

    up: float
    down: float
    whole: float
    workers: int

    def spent(self, state: Any) -> Any:
        """Bits that a worker has sent and received, from the counts in the state.

        A mean without a gate counts steps, one with a gate counts messages and rounds. The mean
        that optimizers call `dense`, and MARINA `full`, sends whole gradients.
        """
        total = jnp.zeros(())
        for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=_counts):
            if not _counts(node):
                continue
            names = {getattr(part, "name", None) for part in path}
            if "dense" in names:  # A mean in two shots, like the compressed one.
                total += 2 * self.whole * node.step
            elif "full" in names:
                total += self.whole * node.step
            elif node.gate != ():
                sent = node.gate.messages / self.workers
                total += self.up * sent + self.down * node.gate.rounds
            else:
                total += (self.up + self.down) * node.step
        return total


def _counts(node: Any) -> bool:
    return {"memory", "gate", "step"} <= set(getattr(node, "_fields", ()))


def price(codec: jaxcomp.Policy, size: int) -> float:
    """Bits of a message of float64 leaves of these sizes, from its payload."""
    like = {"x": jax.ShapeDtypeStruct((1, size), jnp.float64)}
    return 8.0 * jaxcomp.wire_bytes(codec, like)


def everywhere(codec: jaxcomp.Codec) -> jaxcomp.Policy:
    return jaxcomp.Policy(codec, min_size=0, min_ndim=0)


class Way(NamedTuple):
    """A method on a problem.

    Attributes:
        tx: the transformation.
        prices: of its messages; None if they are not counted.
        exact: whether theory says that it reaches the solution although workers disagree.
        averaged: whether it answers with the mean of its iterates.
    """

    tx: Any
    prices: Prices | None = None
    exact: bool = True
    averaged: bool = False


def stepped(make: Callable[..., Any], codec: Any, rate: Any, **given: Any) -> Any:
    """A method with this rate; one that returns a mean is followed by descent.

    One with stages takes the mean of as many gradients.
    """
    if "learning_rate" in inspect.signature(make).parameters:
        return make(codec, AXIS, learning_rate=rate, **given)
    tx = optax.chain(make(codec, AXIS, **given), optax.sgd(rate))
    return jaxcomp.accumulate(tx, AXIS, every=given["stages"]) if "stages" in given else tx


class Curve(NamedTuple):
    """Errors, and bits sent by a worker, after each step, and the final state."""

    errors: np.ndarray
    bits: np.ndarray
    params: Any
    alike: bool
    exact: bool


class LedgerState(NamedTuple):
    """State of a method, the number of steps, and after each step the bits and the error."""

    inner: Any
    step: Any
    bits: Any
    error: Any


def kept(way: Way, problem: Any, steps: int) -> Any:
    """The same transformation, with a ledger of each step in its state."""
    inner: Any = optax.with_extra_args_support(way.tx)

    def init_fn(params: Any) -> Any:
        empty = jnp.zeros(steps)
        return LedgerState(inner.init(params), jnp.zeros((), jnp.int32), empty, empty)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, after = inner.update(updates, state.inner, params, **extra)
        bits = way.prices.spent(after) if way.prices else 0.0
        new = optax.apply_updates(params, updates)
        point: Any = jaxcomp.optimizers.average(after) if way.averaged else new
        error, at = problem.error(point["x"][0]), state.step
        return updates, LedgerState(
            after, at + 1, state.bits.at[at].set(bits), state.error.at[at].set(error)
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def solve(problem: Any, way: Way, steps: int) -> Curve:
    """Takes steps on a problem whose solution is known, from zero and with full gradients."""
    run = problems.descend(kept(way, problem, steps), problem, steps, AXIS)
    errors, bits = (np.asarray(column[0]) for column in (run.state.error, run.state.bits))
    return Curve(errors, bits, run.params, run.alike, way.exact)


def solve_all(title: str, problem: Any, ways: Mapping[str, Way], steps: int) -> dict[str, Curve]:
    return {
        name: solve(problem, way, steps) for name, way in track(ways.items(), description=title)
    }


class Task(NamedTuple):
    """What a network learns.

    Attributes:
        model: a flax module from inputs to logits.
        batches: of a run, given its steps and its seed.
        score: of parameters, on held-out data.
        metric: the name of the score.
        every: steps from score to score.
    """

    model: Any
    batches: Callable[[int, int], Iterator[tuple]]
    score: Callable[[Any], float] | None = None
    metric: str = "loss"
    every: int = 1


class Training(NamedTuple):
    """The loss of each step, some (step, score), and the bytes of a step by collective."""

    losses: list[float]
    curve: list[tuple[int, float]]
    sent: dict[str, int]


def train(task: Task, tx: Any, steps: int, seed: int = 0) -> Training:
    """Trains a network from the parameters and on the batches that belong to the seed."""
    import training  # pyright: ignore[reportMissingImports]

    mesh = training.make_mesh(jax.devices()[:DEVICES])
    first = next(task.batches(1, seed))
    params: Any = jax.jit(task.model.init)(jax.random.key(seed), first[0][:1])
    state = jaxcomp.init_state(tx, params, mesh, training.AXIS)
    params = jaxcomp.place(params, mesh, training.AXIS)
    build = training.build_step(task.model, tx, mesh)
    step = build.lower(params, state, training.put(first, mesh)).compile()
    losses, curve = [], []
    for number, rows in enumerate(task.batches(steps, seed), start=1):
        params, state, loss = step(params, state, training.put(rows, mesh))
        losses.append(float(loss))  # On a few cores, simulated devices must not queue up steps.
        if task.score and (number % task.every == 0 or number == steps):
            curve.append((number, task.score(training.first_copy(params))))
    return Training(losses, curve, jaxcomp.collective_bytes(step))


def options(doc: str | None, **given: Any) -> Any:
    """Reads the command line of a program that trains networks, and makes its devices."""
    found = reporting.options(doc, "out/convergence", **given)
    jax.config.update("jax_num_cpu_devices", DEVICES)
    return found
