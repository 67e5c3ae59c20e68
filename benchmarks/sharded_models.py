"""Tasks of `sharded_training.py`, and a model of equal blocks that can be split over workers.

The blocks of the byte model have the parameters of `byte_lm_model.Block`, stacked over the layers,
and those of the perceptron are the same without attention. A block can be told how to run its two
parts, attention and perceptron, and so be split over workers.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import reporting  # It makes the examples importable, too.

# isort: split
import byte_lm_model  # pyright: ignore[reportMissingImports]
import train_digits  # pyright: ignore[reportMissingImports]

del reporting
WIDTH, LAYERS = 128, 2
CONTEXT, WINDOWS = 32, 16
IMAGES = 128
HELD_OUT = 512
"""Windows or images."""


class Task(NamedTuple):
    """What a network learns.

    Attributes:
        model: a flax module of the examples, from inputs to logits.
        init: the parameters of a model of equal blocks, from a key and their number.
        batches: of a run, given its steps and its seed.
        held_out: inputs and targets of the final loss.
        rate: the peak learning rate of Adam.
    """

    model: Any
    init: Callable[[jax.Array, int], Any]
    batches: Callable[[int, int], Iterator[tuple]]
    held_out: tuple
    rate: float


def digits() -> Task:
    data = train_digits.load()

    def batches(steps: int, seed: int) -> Iterator[tuple]:
        order = np.random.default_rng(seed)
        for _ in range(steps):
            chosen = order.permutation(len(data.train[0]))[:IMAGES]
            yield data.train[0][chosen], data.train[1][chosen]

    held_out = tuple(part[:HELD_OUT] for part in data.test)
    return Task(train_digits.MODEL, perceptron_params, batches, held_out, 1e-3)


def bytes_() -> Task:
    text = byte_lm_model.read_text()
    last = len(text.validation) - CONTEXT - 1
    starts = np.linspace(0, last, HELD_OUT).astype(np.int64)

    def batches(steps: int, seed: int) -> Iterator[tuple]:
        for step in range(1, steps + 1):
            yield byte_lm_model.batch_of(text, step, size=WINDOWS, context=CONTEXT, seed=seed)

    model = byte_lm_model.ByteModel(LAYERS, WIDTH)
    held_out = byte_lm_model.windows(text.validation, starts, CONTEXT)
    return Task(model, transformer_params, batches, held_out, 3e-3)


def transformer_params(key: jax.Array, layers: int) -> Any:
    """The parameters of `byte_lm_model.ByteModel`, those of its blocks stacked."""
    model = byte_lm_model.ByteModel(layers, WIDTH)
    found: Any = model.init(key, np.zeros((1, CONTEXT), np.int32))["params"]
    blocks = [found[f"block_{number}"] for number in range(layers)]
    return {
        "first": {"kernel": found["embedding"]["kernel"]},
        "blocks": jax.tree.map(lambda *each: jnp.stack(each), *blocks),
        "last": {"scale": found["before_logits"]["scale"], "kernel": found["logits"]["kernel"]},
    }


def perceptron_params(key: jax.Array, layers: int) -> Any:
    first, up, down, last = jax.random.split(key, 4)
    draw, scale = jax.nn.initializers.lecun_normal(), jnp.ones(WIDTH)
    stack = jax.nn.initializers.lecun_normal(batch_axis=0)
    return {
        "first": {"kernel": draw(first, (64, WIDTH))},
        "blocks": {
            "before_perceptron": {"scale": jnp.ones((layers, WIDTH))},
            "up": {"kernel": stack(up, (layers, WIDTH, 4 * WIDTH))},
            "down": {"kernel": stack(down, (layers, 4 * WIDTH, WIDTH)) / layers},
        },
        "last": {"scale": scale, "kernel": draw(last, (WIDTH, 10))},
    }


def enter(own: Any, inputs: jax.Array) -> jax.Array:
    """The rows of tokens, or of images."""
    if jnp.issubdtype(inputs.dtype, jnp.integer):
        return own["kernel"][inputs]
    return inputs @ own["kernel"]


def attention(own: Any, h: jax.Array) -> jax.Array:
    """Causal attention with as many heads as the parameters have."""
    query, key, value = (
        (h @ own[name]["kernel"]).reshape(*h.shape[:-1], -1, byte_lm_model.HEAD)
        for name in ("query", "key", "value")
    )
    query, key = byte_lm_model.rotate(query), byte_lm_model.rotate(key)
    found = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return found.reshape(*h.shape[:-1], -1) @ own["attended"]["kernel"]


def perceptron(own: Any, h: jax.Array) -> jax.Array:
    return jax.nn.gelu(h @ own["up"]["kernel"]) @ own["down"]["kernel"]


class Output(NamedTuple):
    """The result of a part of a block, and what it adds to the loss."""

    value: jax.Array
    cost: Any = 0.0


Run = Callable[[Callable[[Any, jax.Array], jax.Array], Any, jax.Array, Any], Output]
"""How a part of a block is run: from the part, its parameters, its input and its layer."""


def alone(part: Callable[..., jax.Array], own: Any, h: jax.Array, layer: Any) -> Output:
    """Runs a part on this worker."""
    del layer
    return Output(part(own, h))


def block(own: Any, x: jax.Array, layer: Any = 0, run: Run = alone) -> Output:
    """One layer: its parts, each on normalised inputs and added to them."""
    cost: Any = 0.0
    for part, name in ((attention, "before_attention"), (perceptron, "before_perceptron")):
        if name in own:
            found = run(part, own, normalised(own[name]["scale"], x), layer)
            x, cost = x + found.value, cost + found.cost
    return Output(x, cost)


def loss_of_last(own: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
    logits = normalised(own["scale"], x) @ own["kernel"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def loss_of(params: Any, inputs: jax.Array, targets: jax.Array, run: Run = alone) -> jax.Array:
    """The loss of the whole model, and what its parts add to it."""
    x, cost = enter(params["first"], inputs), 0.0
    for layer in range(len(params["blocks"]["up"]["kernel"])):
        own = jax.tree.map(lambda leaf, at=layer: leaf[at], params["blocks"])
        x, more = block(own, x, layer, run)
        cost += more
    return loss_of_last(params["last"], x, targets) + cost


def normalised(scale: jax.Array, x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale
