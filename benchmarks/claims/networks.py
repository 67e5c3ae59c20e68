"""Two small networks, and a driver that trains them by a method, with all runs in one program.

The CNN learns handwritten digits, the GRU the bytes of Python's standard library. A method is one
program, a scan over steps, that trains five runs at once: first one for each learning rate, with
a seed of their own, then twenty seeds at the rate with the lowest loss on validation data. Runs
with the same seed have the same initial parameters, the same batches and the same test data,
whatever the method, and are compared in pairs. Scores are taken on data that neither trains nor
chooses.
"""

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import images
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import reporting  # noqa: F401  It makes the examples importable, too.
from rich.progress import track

import jaxcomp

# isort: split
import byte_lm_model  # pyright: ignore[reportMissingImports]

AXIS = "workers"
AT_ONCE, SEEDS = 5, 20
TUNING = SEEDS  # The first seed that chooses the rate.
VALIDATION, TEST = 400, 1000  # Images that choose the rate, and that are scored.
SYMBOLS, EMBEDDED, HIDDEN, CONTEXT = 128, 48, 80, 16

Rate = Callable[[Any], Any]
"""A learning rate by step."""

Method = Callable[[Rate, Any], Any]
"""From a rate and a key: an optimizer that takes the gradients of a worker."""


class Task(NamedTuple):
    """What a network learns.

    Attributes:
        name: of the network.
        init: initial parameters from a key.
        logits: from parameters and inputs.
        batch: inputs and targets from the training data, a key and the number of examples.
        data: training, validation and test data; or all data, of which `split` makes these.
        better: 1 if a higher score is better, -1 if a lower one is.
        unit: of the score.
        split: `split(data, seed)`, where each seed has other test data; None where all have the
            same.
    """

    name: str
    init: Callable[[Any], Any]
    logits: Callable[[Any, Any], Any]
    batch: Callable[[Any, Any, int], Any]
    data: Any
    better: int
    unit: str
    split: Callable[[Any, Any], tuple[Any, Any, Any]] | None = None

    def loss(self, params: Any, batch: Any) -> Any:
        """The mean cross entropy of a batch."""
        inputs, targets = batch
        logits = self.logits(params, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def score(self, params: Any, batch: Any) -> Any:
        """Accuracy in percent, or bits a byte."""
        if self.better < 0:
            return self.loss(params, batch) / math.log(2)
        inputs, targets = batch
        return 100 * jnp.mean(self.logits(params, inputs).argmax(-1) == targets)


def normal(key: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Kernels with variance `2 / inputs`, and zero biases."""
    keys = jax.random.split(key, len(shapes))
    return {
        name: jnp.zeros(shape)
        if len(shape) == 1
        else jax.random.normal(key, shape) * math.sqrt(2 / shape[0])
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def patches(x: Any, stride: int) -> Any:
    """The 3 × 3 neighbours of each pixel as channels: a convolution is then one product."""
    side = x.shape[1]
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    parts = [
        x[:, row : row + side : stride, column : column + side : stride]
        for row in range(3)
        for column in range(3)
    ]
    return jnp.concatenate(parts, axis=-1)


_CNN = {
    "conv0": (9, 16),
    "conv0_bias": (16,),
    "conv1": (144, 32),
    "conv1_bias": (32,),
    "dense": (512, 32),
    "dense_bias": (32,),
    "head": (32, 10),
    "head_bias": (10,),
}


def _cnn_logits(params: Any, pixels: Any) -> Any:
    x = pixels.reshape(-1, images.SIDE, images.SIDE, 1)
    x = jax.nn.relu(patches(x, 2) @ params["conv0"] + params["conv0_bias"])
    x = jax.nn.relu(patches(x, 2) @ params["conv1"] + params["conv1_bias"])
    x = jax.nn.relu(x.reshape(len(x), -1) @ params["dense"] + params["dense_bias"])
    return x @ params["head"] + params["head_bias"]


@functools.cache
def cnn() -> Task:
    """Two convolutions and two layers of 21,546 parameters in all, on 5,000 images of MNIST.

    Each seed trains on 3,600 others, and is tested on 1,000 others.
    """

    def batch(data: Any, key: Any, size: int) -> Any:
        rows = jax.random.randint(key, (size,), 0, len(data[0]))
        return data[0][rows], data[1][rows]

    def split(data: Any, seed: Any) -> tuple[Any, Any, Any]:
        order = jax.random.permutation(jax.random.key(seed), len(data[0]))
        ends = (TEST, TEST + VALIDATION)
        test, validation, train = (tuple(x[rows] for x in data) for rows in jnp.split(order, ends))
        return train, validation, test

    data = tuple(map(jnp.asarray, images.load()))
    init = functools.partial(normal, shapes=_CNN)
    return Task("CNN", init, _cnn_logits, batch, data, 1, "%", split)


_GRU = {
    "embedding": (SYMBOLS, EMBEDDED),
    "input": (EMBEDDED, 3 * HIDDEN),
    "hidden": (HIDDEN, 3 * HIDDEN),
    "bias": (3 * HIDDEN,),
    "head": (HIDDEN, SYMBOLS),
    "head_bias": (SYMBOLS,),
}


def _gru_logits(params: Any, tokens: Any) -> Any:
    # A product, not a look-up, whose gradient would be a slow scatter.
    embedded = jax.nn.one_hot(tokens, SYMBOLS) @ params["embedding"]
    given = embedded @ params["input"] + params["bias"]

    def step(state: Any, now: Any) -> tuple[Any, Any]:
        before = state @ params["hidden"]
        gates = jax.nn.sigmoid(now[:, : 2 * HIDDEN] + before[:, : 2 * HIDDEN])
        reset, update = gates[:, :HIDDEN], gates[:, HIDDEN:]
        new = jnp.tanh(now[:, 2 * HIDDEN :] + reset * before[:, 2 * HIDDEN :])
        state = update * state + (1 - update) * new
        return state, state

    first = jnp.zeros((len(tokens), HIDDEN))
    _, states = jax.lax.scan(step, first, given.swapaxes(0, 1))
    return states.swapaxes(0, 1) @ params["head"] + params["head_bias"]


def _gru_init(key: Any) -> Any:
    params = normal(key, _GRU)
    smaller = {"head": 0.2, "hidden": 0.7, "input": 0.7}  # Gates and logits begin undecided.
    return {name: smaller.get(name, 1.0) * leaf for name, leaf in params.items()}


@functools.cache
def gru() -> Task:
    """A gated recurrent unit of 47,472 parameters, on windows of source text; ASCII symbols."""
    text = byte_lm_model.read_text()
    windows = byte_lm_model.validation_of(text, CONTEXT)
    validation, test = (
        tuple(jnp.asarray(np.minimum(part[first::2], SYMBOLS - 1)) for part in windows)
        for first in (0, 1)
    )
    train = jnp.asarray(np.minimum(text.train, SYMBOLS - 1))

    def batch(data: Any, key: Any, size: int) -> Any:
        starts = jax.random.randint(key, (size,), 0, len(data) - CONTEXT)
        cut = data[starts[:, None] + jnp.arange(CONTEXT + 1)].astype(jnp.int32)
        return cut[:, :-1], cut[:, 1:]

    return Task("GRU", _gru_init, _gru_logits, batch, (train, validation, test), -1, "bits a byte")


def shapes(task: Task) -> Any:
    """The parameters' shapes and dtypes."""
    return jax.eval_shape(task.init, jax.random.key(0))


def flat(task: Task) -> Task:
    """The same task with all parameters as one leaf."""
    one = task.init(jax.random.key(0))
    _, apart = jax.flatten_util.ravel_pytree(one)

    def init(key: Any) -> Any:
        return {"all": jax.flatten_util.ravel_pytree(task.init(key))[0]}

    return task._replace(init=init, logits=lambda p, x: task.logits(apart(p["all"]), x))


def everywhere(codec: jaxcomp.Codec) -> jaxcomp.Policy:
    """The codec for every leaf, however small."""
    return jaxcomp.Policy(codec, min_size=0, min_ndim=0)


def mean(way: Any, inner: Callable[[Rate], Any] | None = None) -> Method:
    """A compressed mean, then an optimizer of the rate: by default SGD with momentum."""

    def make(rate: Rate, key: Any) -> Any:
        optimizer = (inner or momentum)(rate)
        return optax.chain(jaxcomp.compressed_mean(way, AXIS, key=key), optimizer)

    return make


def momentum(rate: Rate) -> Any:
    return optax.sgd(rate, 0.9)


def cosine(steps: int, warmup: int) -> Rate:
    """Linear warm-up to one, then half a cosine to zero."""
    return optax.warmup_cosine_decay_schedule(0.0, 1.0, warmup, steps)


class Plan(NamedTuple):
    """How a method is trained.

    Attributes:
        steps: of each run.
        rates: the grid of peak rates, five.
        workers: simulated.
        size: examples of a worker's batch.
        schedule: from 0 to 1, by step; None for `cosine` with a twentieth of warm-up.
        probe: numbers of each step, from the state, the centre and the worker's parameters.
        ledger: numbers of the final state, of all workers.
        seeds: that are scored, a multiple of five.
        tuning: seeds that choose the rate by their mean loss; none of them is scored.
    """

    steps: int
    rates: Sequence[float]
    workers: int = 4
    size: int = 8
    schedule: Rate | None = None
    probe: Any = lambda state, centre, own: {}
    ledger: Any = lambda state: {}
    seeds: int = SEEDS
    tuning: int = 1


def runner(method: Method, task: Task, plan: Plan) -> Callable[[Any, Any, Any], Any]:
    """From rates, as many seeds, and data: numbers of each run."""
    shape = plan.schedule or cosine(plan.steps, max(plan.steps // 20, 1))
    numbers = jnp.arange(plan.workers)

    def one(peak: Any, seed: Any, data: Any) -> dict[str, Any]:
        key = jax.random.key(seed)
        data = task.split(data, seed) if task.split else data
        params = task.init(jax.random.fold_in(key, 0))
        tx = method(lambda step: peak * shape(step), jax.random.fold_in(key, 1))

        def worker(params: Any, state: Any, number: Any, at: Any) -> tuple[Any, Any, Any]:
            drawn = jax.random.fold_in(jax.random.fold_in(key, 2 + at), number)
            batch = task.batch(data[0], drawn, plan.size)
            own = jaxcomp.local(jaxcomp.view(params, state), AXIS)
            loss, grads = jax.value_and_grad(task.loss)(own, batch)
            updates, state = tx.update(grads, state, params)
            told = {"train": loss, **plan.probe(state, params, own)}
            return optax.apply_updates(params, updates), state, told

        everyone = jax.vmap(worker, axis_name=AXIS, in_axes=(0, 0, 0, None))

        def step(carry: Any, at: Any) -> tuple[Any, Any]:
            params, state, told = everyone(carry[0], carry[1], numbers, at)
            return (params, state), jax.tree.map(lambda x: x.mean(), told)

        stacked = jax.tree.map(lambda x: jnp.stack([x] * plan.workers), params)
        state = jax.vmap(lambda _: tx.init(params), axis_name=AXIS)(numbers)
        (params, state), told = jax.lax.scan(step, (stacked, state), jnp.arange(plan.steps))
        end = jax.tree.map(lambda x: x[0], params)
        late = told.pop("train")[-max(plan.steps // 10, 1) :].mean()
        means = jax.tree.map(lambda x: x.mean(), told)
        scores = {"score": task.score(end, data[2]), "loss": task.loss(end, data[2])}
        means |= plan.ledger(state)
        return {"choice": task.loss(end, data[1]), "train": late, **scores, **means}

    return jax.jit(jax.vmap(one, (0, 0, None)))


def train(method: Method, task: Task, plan: Plan) -> dict[str, Any]:
    """The results of each seed at the best rate of the grid.

    Returns:
        `rate`; `grid`, the validation loss of each rate; `edge`, whether the best rate is the first
        or the last; lists over seeds: `score`, `loss` (of test data), `train` (of the last tenth of
        steps), the probe's means over steps and the ledger; and `seconds` for all runs.
    """
    if len(plan.rates) != AT_ONCE:
        raise ValueError(f"`rates` must be {AT_ONCE}, as many as run at once, got {plan.rates}")
    start, run = time.perf_counter(), runner(method, task, plan)
    rates = jnp.asarray(plan.rates, jnp.float32)
    tuned = [
        run(rates, jnp.full(AT_ONCE, TUNING + at), task.data)["choice"] for at in range(plan.tuning)
    ]
    losses = np.nan_to_num(np.mean(np.asarray(tuned, np.float64), 0), nan=1e9, posinf=1e9)
    best = int(np.argmin(losses))
    parts = [
        run(jnp.full(AT_ONCE, rates[best]), first + jnp.arange(AT_ONCE), task.data)
        for first in range(0, plan.seeds, AT_ONCE)
    ]
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    grid = {
        f"{rate:g}": float(f"{loss:.4g}") for rate, loss in zip(plan.rates, losses, strict=True)
    }
    kept = {
        name: [float(f"{x:.5g}") for x in np.asarray(value, np.float64)]
        for name, value in found.items()
        if name != "choice"
    }
    seconds = round(time.perf_counter() - start, 1)
    edge = best in (0, AT_ONCE - 1)
    return {"rate": plan.rates[best], "grid": grid, "edge": edge, **kept, "seconds": seconds}


def compare(methods: Mapping[str, Method], task: Task, plan: Plan) -> dict[str, Any]:
    """Each method trained alike; `better` and `unit` tell how to read scores."""
    found = {
        name: train(method, task, plan)
        for name, method in track(methods.items(), description=task.name)
    }
    return {"better": task.better, "unit": task.unit, "methods": found}


def bits(way: Any, task: Task, workers: int | None = None) -> float:
    """Bits an element of a worker's payload, of all leaves."""
    like = shapes(task)
    size = sum(leaf.size for leaf in jax.tree.leaves(like))
    return round(8 * jaxcomp.wire_bytes(way, like, workers) / size, 4)
