"""Five ways to share the training of a model among workers, each with codecs on what it sends.

Each function returns a `Way`: the first parameters of a seed, a step, the final loss, and the bytes
that one device sends in a step. Workers are simulated devices or, where that is as faithful, a
mapped axis.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import sharded_models as models
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from sharded_models import Output, Task

import jaxcomp
from jaxcomp import collectives

# isort: split
import training  # pyright: ignore[reportMissingImports]

AXIS, WORKERS = "workers", 4
IDENTITY = jaxcomp.codecs.Identity()
BALANCE = 0.01
"""Weight of the loss that spreads tokens evenly over the experts."""
SPARE = 1.5
"""Capacity of an expert, divided by the tokens that it gets on average."""


class Way(NamedTuple):
    """How workers train one model.

    Attributes:
        begin: the parameters and the optimizer's state, from a key.
        step: from these, a batch and a key to these and the loss of the batch.
        final: the loss of parameters on held-out data, without compression.
        sent: the bytes that one device sends in a step.
    """

    begin: Callable[[jax.Array], tuple[Any, Any]]
    step: Callable[..., tuple[Any, Any, jax.Array]]
    final: Callable[[Any, tuple], jax.Array]
    sent: int


Gradient = Callable[..., tuple[jax.Array, Any]]
"""From parameters, a batch and a key to the loss and the gradients."""


def stepped(gradient: Gradient, tx: optax.GradientTransformation) -> Callable[..., Any]:
    """A step of the optimizer on the parameters as they lie."""

    @jax.jit
    def step(params: Any, state: Any, batch: tuple, key: jax.Array) -> tuple:
        loss, grads = gradient(params, batch, key)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def mesh() -> Mesh:
    kinds = (AxisType.Auto,)
    return jax.make_mesh((WORKERS,), (AXIS,), axis_types=kinds, devices=jax.devices()[:WORKERS])


def put(tree: Any, where: Mesh, specs: Any) -> Any:
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(where, spec)), tree, specs)


def split(tree: Any) -> Any:
    """A batch as one part for each worker."""
    return jax.tree.map(lambda x: x.reshape(WORKERS, -1, *x.shape[1:]), tree)


def model_loss(task: Task, params: Any, batch: tuple) -> jax.Array:
    return training.loss_of(task.model, params, batch)


def example(task: Task) -> tuple:
    return next(task.batches(1, 0))


# Fully sharded: each device stores a part of every weight.


def shards(like: Any) -> Any:
    """The specs of parameters, split along the longest dimension that the workers divide."""

    def spec_of(leaf: Any) -> PartitionSpec:
        fits = [n if n % WORKERS == 0 else 0 for n in leaf.shape]
        if math.prod(leaf.shape) < 1024 or not any(fits):
            return PartitionSpec()
        return PartitionSpec(*[None] * fits.index(max(fits)), AXIS)

    return jax.tree.map(spec_of, like)


def fully_sharded(
    task: Task, tx: optax.GradientTransformation, weights: Any, gradients: Any
) -> Way:
    inputs, where = example(task)[0][:1], mesh()
    like = jax.eval_shape(task.model.init, jax.random.key(0), inputs)
    specs = shards(like)
    found = jaxcomp.fully_sharded(
        lambda params, *batch: model_loss(task, params, batch),
        where,
        AXIS,
        specs,
        weights=weights,
        gradients=gradients,
    )

    def begin(key: jax.Array) -> tuple[Any, Any]:
        params = put(task.model.init(key, inputs), where, specs)
        return params, tx.init(params)

    def gradient(params: Any, batch: tuple, key: jax.Array) -> tuple[jax.Array, Any]:
        return found(params, *batch, key=key)

    final = jax.jit(functools.partial(model_loss, task))
    return Way(begin, stepped(gradient, tx), final, sum(found.link_bytes(like)[AXIS]))


# Sharded optimizer: each worker has a replica of the weights and a part of the optimizer.


def sharded_optimizer(
    task: Task, tx: optax.GradientTransformation, up: Any, down: jaxcomp.Link
) -> Way:
    inputs = example(task)[0][:1]
    like = jax.eval_shape(task.model.init, jax.random.key(0), inputs)
    up = up if isinstance(up, jaxcomp.Link) else jaxcomp.Link(up, jaxcomp.NoFeedback())
    both = jaxcomp.sharded_optimizer(tx, AXIS, up, down)
    mapped = functools.partial(jax.vmap, axis_name=AXIS)

    @jax.jit
    def begin(key: jax.Array) -> tuple[Any, Any]:
        params: Any = task.model.init(key, inputs)
        params = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), params)
        return params, mapped(both.init)(params)

    # Its noise depends on the seed of the optimizer and on the step, so the key is not used.
    def of_worker(params: Any, state: Any, batch: tuple) -> tuple:
        loss, grads = jax.value_and_grad(model_loss, argnums=1)(task, params, batch)
        updates, state = both.update(grads, state, params)
        return optax.apply_updates(params, updates), state, lax.pmean(loss, AXIS)

    @jax.jit
    def step(params: Any, state: Any, batch: tuple, key: jax.Array) -> tuple:
        del key
        params, state, loss = mapped(of_worker)(params, state, split(batch))
        return params, state, loss[0]

    @jax.jit
    def final(params: Any, batch: tuple) -> jax.Array:
        return model_loss(task, jax.tree.map(lambda x: x[0], params), batch)

    ways = jaxcomp.TwoShot(up, down)
    return Way(begin, step, final, jaxcomp.wire_bytes(ways, like, WORKERS))


# Tensor parallel: each device computes with a part of every matrix of a block.


def columns(like: Any) -> Any:
    """The specs of a model of blocks: heads and hidden features are split."""
    by_name = {
        **dict.fromkeys(("query", "key", "value", "up"), PartitionSpec(None, None, AXIS)),
        **dict.fromkeys(("attended", "down"), PartitionSpec(None, AXIS)),
    }

    def spec_of(path: Any, leaf: Any) -> PartitionSpec:
        del leaf
        return by_name.get(path[1].key, PartitionSpec())

    return jax.tree_util.tree_map_with_path(spec_of, like)


def tensor_parallel(task: Task, tx: optax.GradientTransformation, codec: Any) -> Way:
    """`pvary` and `psum` at both ends of attention and of the perceptron."""
    where = mesh()

    def init(key: jax.Array) -> Any:
        return task.init(key, models.LAYERS)

    like = jax.eval_shape(init, jax.random.key(0))
    specs = columns(like)

    def loss(params: Any, batch: tuple, key: jax.Array) -> jax.Array:
        def run(part: Any, own: Any, h: jax.Array, layer: Any) -> Output:
            site = (part.__name__, layer)
            h = collectives.pvary(h, AXIS, codec, key=key, site=("in", *site))
            found = part(own, h)
            return Output(collectives.psum(found, AXIS, codec, key=key, site=("out", *site)))

        return models.loss_of(params, *batch, run=run)

    gradient = jax.shard_map(
        jax.value_and_grad(loss),
        mesh=where,
        in_specs=(specs, PartitionSpec(), PartitionSpec()),
        out_specs=(PartitionSpec(), specs),
    )

    def begin(key: jax.Array) -> tuple[Any, Any]:
        params = put(init(key), where, specs)
        return params, tx.init(params)

    rows = activations(task)
    one = collectives.wire_bytes(collectives.psum, rows, codec, WORKERS).forward
    one += collectives.wire_bytes(collectives.pvary, rows, codec, WORKERS).backward
    parts = sum(name in like["blocks"] for name in ("attended", "down"))
    final = jax.jit(lambda params, batch: models.loss_of(params, *batch))
    return Way(begin, stepped(gradient, tx), final, models.LAYERS * parts * one)


def activations(task: Task, parts: int = 1) -> jax.ShapeDtypeStruct:
    """The activations of so small a part of a batch."""
    inputs, targets = example(task)
    size = len(inputs) // parts
    return jax.ShapeDtypeStruct((size, *targets.shape[1:], models.WIDTH), jnp.float32)


# Experts: each worker has its own tokens and one of the perceptrons that share each block.


def capacity(tokens: int) -> int:
    return math.ceil(SPARE * tokens / WORKERS)


def experts(task: Task, tx: optax.GradientTransformation, dispatch: Any, combine: Any) -> Way:
    """Each token is sent to one expert and back."""

    def begin(key: jax.Array) -> tuple[Any, Any]:
        """The experts have a leading axis, the rest is the same on all workers."""
        every = [task.init(one, models.LAYERS) for one in jax.random.split(key, WORKERS)]
        blocks = every[0].pop("blocks")
        routers = 0.02 * jax.random.normal(key, (models.LAYERS, models.WIDTH, WORKERS))
        blocks["router"] = {"kernel": routers}
        others = [one["blocks"] for one in every[1:]]
        own = {
            name: jax.tree.map(
                lambda *x: jnp.stack(x), blocks.pop(name), *(one[name] for one in others)
            )
            for name in ("up", "down")
        }
        params = {"experts": own, "common": {**every[0], "blocks": blocks}}
        return params, tx.init(params)

    def loss(
        codecs: tuple, balance: float, own: Any, common: Any, batch: tuple, key: jax.Array
    ) -> jax.Array:
        params = {**common, "blocks": {**common["blocks"], **own}}
        return models.loss_of(params, *batch, run=routed(codecs, balance, key))

    mapped = functools.partial(jax.vmap, in_axes=(0, None, 0, None), axis_name=AXIS)

    def of_worker(own: Any, common: Any, batch: tuple, key: jax.Array) -> tuple:
        objective = functools.partial(loss, (dispatch, combine), BALANCE)
        # The transposed collectives bring what all workers' losses need from this worker.
        value, (mine, shared) = jax.value_and_grad(objective, argnums=(0, 1))(
            own, common, batch, key
        )
        mine = jax.tree.map(lambda g: g / WORKERS, mine)
        return lax.pmean(value, AXIS), mine, lax.pmean(shared, AXIS)

    def gradient(params: Any, batch: tuple, key: jax.Array) -> tuple[jax.Array, Any]:
        value, mine, shared = mapped(of_worker, out_axes=(None, 0, None))(
            params["experts"], params["common"], split(batch), key
        )
        return value, {"experts": mine, "common": shared}

    @jax.jit
    def final(params: Any, batch: tuple) -> jax.Array:
        dense = functools.partial(loss, (None, None), 0.0)
        own, common = params["experts"], params["common"]
        return mapped(dense)(own, common, split(batch), jnp.zeros(2, jnp.uint32)).mean()

    tokens = math.prod(activations(task, WORKERS).shape[:-1])
    rows = (WORKERS * capacity(tokens), models.WIDTH)
    like = jax.ShapeDtypeStruct(rows, jnp.float32)
    both = [
        sum(collectives.wire_bytes(collectives.all_to_all, like, codec, WORKERS, **CUT))
        for codec in (dispatch, combine)
    ]
    return Way(begin, stepped(gradient, tx), final, models.LAYERS * sum(both))


CUT: Any = {"split_axis": 0, "concat_axis": 0}


def routed(codecs: tuple, balance: float, key: jax.Array) -> models.Run:
    """Runs perceptrons as experts, of which each token chooses one."""
    dispatch, combine = codecs

    def run(part: Any, own: Any, h: jax.Array, layer: Any) -> Output:
        if part is not models.perceptron:
            return Output(part(own, h))
        tokens = h.reshape(-1, h.shape[-1])
        chances = jax.nn.softmax(tokens @ own["router"]["kernel"])
        chosen = jax.nn.one_hot(chances.argmax(-1), WORKERS)
        place = ((jnp.cumsum(chosen, axis=0) - 1) * chosen).sum(-1).astype(jnp.int32)
        room = capacity(len(tokens))
        # One-hot rows; of those that find no room, zeros.
        slot = jax.nn.one_hot(place, room)[:, None, :] * chosen[:, :, None]
        slot = slot.reshape(len(tokens), -1)
        there = collectives.all_to_all(
            slot.T @ tokens, AXIS, dispatch, key=key, site=("to", layer), **CUT
        )
        back = collectives.all_to_all(
            part(own, there), AXIS, combine, key=key, site=("from", layer), **CUT
        )
        found = chances.max(-1, keepdims=True) * (slot @ back)
        uneven = WORKERS * jnp.sum(chosen.mean(0) * chances.mean(0))
        return Output(found.reshape(h.shape), balance * uneven)

    return run


# Pipeline: each device has one block, and passes activations on to the next.

FORWARD = [(stage, stage + 1) for stage in range(WORKERS - 1)]


def pipeline(task: Task, tx: optax.GradientTransformation, codec: Any) -> Way:
    """As many microbatches as stages, one after another through all of them."""

    def begin(key: jax.Array) -> tuple[Any, Any]:
        params = task.init(key, WORKERS)
        return params, tx.init(params)

    def loss(own: Any, ends: Any, batch: tuple, key: jax.Array) -> jax.Array:
        inputs, targets = split(batch)
        stage, entered = lax.axis_index(AXIS), models.enter(ends["first"], inputs)

        def tick(arrived: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
            fresh = entered[jnp.minimum(number, WORKERS - 1)]
            x = models.block(own, jnp.where(stage == 0, fresh, arrived)).value
            sent = collectives.ppermute(x, AXIS, codec, perm=FORWARD, key=key, site=number)
            return sent, x

        _, left = lax.scan(tick, jnp.zeros_like(entered[0]), jnp.arange(2 * WORKERS - 1))
        found = models.loss_of_last(ends["last"], left[WORKERS - 1 :], targets)
        return jnp.where(stage == WORKERS - 1, found, 0.0)

    def of_stage(own: Any, ends: Any, batch: tuple, key: jax.Array) -> tuple:
        value, (mine, ends) = jax.value_and_grad(loss, argnums=(0, 1))(own, ends, batch, key)
        return lax.psum(value, AXIS), mine, lax.psum(ends, AXIS)

    def gradient(params: Any, batch: tuple, key: jax.Array) -> tuple[jax.Array, Any]:
        ends = {name: params[name] for name in ("first", "last")}
        mapped = jax.vmap(
            of_stage, in_axes=(0, None, None, None), out_axes=(None, 0, None), axis_name=AXIS
        )
        value, mine, ends = mapped(params["blocks"], ends, batch, key)
        return value, {**ends, "blocks": mine}

    like = activations(task, WORKERS)
    sent = WORKERS * sum(
        collectives.wire_bytes(collectives.ppermute, like, codec, WORKERS, perm=FORWARD)
    )
    final = jax.jit(lambda params, batch: models.loss_of(params, *batch))
    return Way(begin, stepped(gradient, tx), final, sent)
