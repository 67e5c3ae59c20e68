"""The methods of `scale.py`: eight workers on one device, simulated by `jax.vmap`.

A method that averages gradients keeps one copy of the parameters and of AdamW, as all workers have
the same; one with local steps keeps those of each worker. Fully sharded training keeps each
worker's part. `jaxcomp.fully_sharded` needs a mesh with a device for each worker, since it is a
`jax.shard_map`: under `vmap` the same exchange is `jaxcomp.collectives.all_gather`, with codecs for
both ways.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from scale_model import Model

import jaxcomp
from jaxcomp import algorithms, collectives

AXIS, WORKERS = "workers", 8
WEIGHTS, GRADIENTS = jaxcomp.qsgd_inf(bits=8), jaxcomp.qsgd_inf(bits=4)
SPARSE = jaxcomp.Policy(jaxcomp.chunk_top_k(), min_size=0, min_ndim=0)
ONE_PERCENT = jaxcomp.top_k(fraction=0.01)
MUON_RATE = 0.02
"""The peak rate of Muon's matrices, which are orthogonal; AdamW's rate is for the rest."""

Batch = tuple[jax.Array, jax.Array]
"""Bytes and the ones that follow them, `[workers, windows, context]` each."""


class Task(NamedTuple):
    """What every method trains.

    Attributes:
        model: the model.
        rate: the peak of AdamW's learning rate.
        warm: the steps until the peak.
        every: the steps of a round of methods with local steps.
        seed: of the parameters and of all noise.
    """

    model: Model
    rate: float
    warm: int
    every: int
    seed: int

    def schedule(self, peak: float) -> optax.Schedule:
        """Up to the peak, then down with the root of the steps: no step depends on the last."""

        def at(taken: Any) -> Any:
            step = taken + 1.0
            return peak * jnp.minimum(step / self.warm, jnp.sqrt(self.warm / step))

        return at

    def adamw(self) -> optax.GradientTransformation:
        return optax.adamw(self.schedule(self.rate), 0.9, 0.95, weight_decay=0.1)


class Way(NamedTuple):
    """A method on the task.

    Attributes:
        begin: makes what a step carries on, from the first parameters.
        step: from that, a batch and the number of the step to that and the mean loss in nats.
        last: the same for the last step of a round; None if all steps are alike.
        centre: the parameters that are evaluated.
        sent: the bytes that a worker sends in a step, on average over a round.
    """

    begin: Callable[[Any], Any]
    step: Callable[[Any, Batch, Any], tuple[Any, jax.Array]]
    last: Callable[[Any, Batch, Any], tuple[Any, jax.Array]] | None
    centre: Callable[[Any], Any]
    sent: float


def everyone(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (WORKERS, *x.shape)), tree)


def first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def mapped(f: Callable[..., Any], in_axes: Any = 0) -> Callable[..., Any]:
    return jax.vmap(f, in_axes=in_axes, axis_name=AXIS, axis_size=WORKERS)


def averaged(reducer: Any, task: Task) -> Way:
    """The mean of gradients in every step."""
    tx, mean = task.adamw(), jaxcomp.compressed_mean(reducer, AXIS, key=task.seed)

    def begin(params: Any) -> Any:
        memory = mapped(lambda _: mean.init(params))(jnp.arange(WORKERS))
        return params, tx.init(params), memory

    def step(carried: Any, batch: Batch, number: Any) -> tuple[Any, jax.Array]:
        del number  # The mean's state counts steps.
        params, state, memory = carried
        loss, grads = mapped(jax.value_and_grad(task.model.loss), (None, 0, 0))(params, *batch)
        means, memory = mapped(mean.update)(grads, memory)
        updates, state = tx.update(first(means), state, params)
        return (optax.apply_updates(params, updates), state, memory), loss.mean()

    return Way(begin, step, None, lambda carried: carried[0], sent(reducer, task.model.shapes()))


def sent(reducer: Any, like: Any) -> float:
    return float(jaxcomp.wire_bytes(reducer, like, workers=WORKERS))


def local(make: Callable[[Task], Any], reducer: Any, task: Task) -> Way:
    """Rounds of steps of each worker's own; `make` gives the method, which has this reducer."""
    tx = make(task)

    def begin(params: Any) -> Any:
        return everyone(params), mapped(lambda _: tx.init(params))(jnp.arange(WORKERS))

    def step(exchange: bool, carried: Any, batch: Batch, number: Any) -> tuple[Any, jax.Array]:
        del number  # The state counts steps.

        def one(params: Any, state: Any, inputs: Any, targets: Any) -> tuple[Any, Any, Any]:
            own = jaxcomp.local(jaxcomp.view(params, state), AXIS)
            loss, grads = jax.value_and_grad(task.model.loss)(own, inputs, targets)
            updates, state = tx.update(grads, state, params, exchange=exchange)
            return optax.apply_updates(params, updates), state, loss

        *carried, loss = mapped(one)(*carried, *batch)
        return tuple(carried), loss.mean()

    alone, last = (functools.partial(step, exchange) for exchange in (False, True))
    a_round = sent(reducer, task.model.shapes())
    return Way(begin, alone, last, lambda carried: first(carried[0]), a_round / task.every)


def sparseloco(task: Task) -> Any:
    return algorithms.sparseloco(SPARSE, AXIS, every=task.every, inner=task.adamw(), key=task.seed)


def muloco(task: Task) -> Any:
    """With Muon for the matrices of the blocks, AdamW for the rest, as its authors do."""

    def dimensions(path: Any, leaf: Any) -> Any:
        hidden = path[0].key == "blocks" and leaf.ndim == 3
        return optax.contrib.MuonDimensionNumbers(1, 2) if hidden else None

    muon = optax.contrib.muon(
        task.schedule(MUON_RATE),
        beta=0.9,
        nesterov=False,
        adam_b2=0.99,
        adam_learning_rate=task.schedule(task.rate),
        muon_weight_dimension_numbers=functools.partial(
            jax.tree_util.tree_map_with_path, dimensions
        ),
    )
    return algorithms.muloco(
        ONE_PERCENT,
        AXIS,
        learning_rate=MUON_RATE,
        every=task.every,
        inner=muon,
        key=task.seed,
    )


def gathered(codec: Any, decay: float) -> Any:
    """The reducer of both methods with local steps."""
    return jaxcomp.Gather(jaxcomp.Link(codec, jaxcomp.Residual(decay)))


def fully_sharded(task: Task) -> Way:
    """Weights gathered in 8 bits where a block uses them, gradients scattered in 4 bits."""
    tx = task.adamw()

    def split(params: Any) -> Any:
        """Each worker's part; of stacked leaves, that of each layer."""

        def cut(path: Any, x: Any) -> Any:
            at = int(path[0].key == "blocks")
            parts = x.reshape(*x.shape[:at], WORKERS, -1, *x.shape[at + 1 :])
            return jnp.moveaxis(parts, at, 0)

        return jax.tree_util.tree_map_with_path(cut, params)

    def join(parts: Any) -> Any:
        def put(path: Any, x: Any) -> Any:
            at = int(path[0].key == "blocks")
            x = jnp.moveaxis(x, 0, at)
            return x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :])

        return jax.tree_util.tree_map_with_path(put, parts)

    def begin(params: Any) -> Any:
        parts = split(params)
        return parts, tx.init(parts)

    def step(carried: Any, batch: Batch, number: Any) -> tuple[Any, jax.Array]:
        parts, state = carried

        def whole(own: Any, site: Any) -> Any:
            return collectives.all_gather(own, AXIS, WEIGHTS, key=number, site=site, back=GRADIENTS)

        def loss(own: Any, inputs: Any, targets: Any) -> Any:
            return task.model.loss(own, inputs, targets, whole) / WORKERS

        losses, grads = mapped(jax.value_and_grad(loss))(parts, *batch)
        updates, state = tx.update(grads, state, parts)
        return (optax.apply_updates(parts, updates), state), losses.sum()

    like = jax.eval_shape(lambda params: first(split(params)), task.model.shapes())
    layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), like["blocks"])

    def bytes_of(tree: Any) -> collectives.LinkBytes:
        return collectives.wire_bytes(
            collectives.all_gather, tree, WEIGHTS, WORKERS, back=GRADIENTS
        )

    ends = sum(sum(bytes_of(like[name])) for name in ("embedding", "last"))
    of_layer = bytes_of(layer)  # Its weights are gathered again in the backward pass.
    total = ends + task.model.layers * (2 * of_layer.forward + of_layer.backward)
    return Way(begin, step, None, lambda carried: join(carried[0]), float(total))


STACKED = jaxcomp.Rule("blocks/*", jaxcomp.codecs.LowRank(rank=8, stacked_axes=1))
METHODS: dict[str, Callable[[Task], Way]] = {
    "dense": functools.partial(averaged, jaxcomp.Dense()),
    "dense bfloat16": functools.partial(averaged, jaxcomp.Dense(dtype="bfloat16")),
    "qsgd_inf 4-bit": functools.partial(averaged, jaxcomp.qsgd_inf(bits=4)),
    "eden 1-bit": functools.partial(averaged, jaxcomp.eden(bits=1)),
    "PowerSGD rank 8": functools.partial(
        averaged, jaxcomp.PowerIteration(rank=8, rules=(STACKED,))
    ),
    "SparseLoCo": functools.partial(local, sparseloco, gathered(SPARSE, 0.95)),
    "FSDP 8/4 bits": fully_sharded,
    "MuLoCo 1 %": functools.partial(local, muloco, gathered(ONE_PERCENT, 0.9)),
}
"""The baselines first, the slowest step last."""
