"""The model of `scale.py`: a byte-level transformer that computes in bfloat16.

Parameters are float32. Those of all blocks are stacked, and the blocks are a loop, so that a
program is as long for twelve of them as for one. In the backward pass each block is computed again.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import reporting  # It makes the examples importable, too.

import byte_lm_model  # isort: skip  # pyright: ignore[reportMissingImports]

del reporting


class Model(NamedTuple):
    """A decoder-only transformer from bytes to the next ones.

    Attributes:
        layers: the number of blocks.
        width: the elements of a token.
        head: the elements of an attention head, which divide the width.
        attention: "cudnn" or "xla", the implementation of `jax.nn.dot_product_attention`.
    """

    layers: int
    width: int
    head: int
    attention: str = "xla"

    def likes(self) -> Any:
        """The shapes of the parameters, and the scale of each draw over `1 / √inputs`; None: ones.

        The residual path starts small, so that its sum does not grow with depth.
        """
        layers, width = self.layers, self.width
        small = (2 * layers) ** -0.5
        return {
            "embedding": {"kernel": ((256, width), 16.0)},
            "blocks": {
                "before_attention": ((layers, width), None),
                **dict.fromkeys(("query", "key", "value"), ((layers, width, width), 1.0)),
                "attended": ((layers, width, width), small),
                "before_perceptron": ((layers, width), None),
                "up": ((layers, width, 4 * width), 1.0),
                "down": ((layers, 4 * width, width), small),
            },
            "last": {"scale": ((width,), None), "kernel": ((width, 256), 0.5)},
        }

    def shapes(self) -> Any:
        return _each(lambda shape, _: jax.ShapeDtypeStruct(shape, jnp.float32), self.likes())

    def init(self, seed: int) -> Any:
        """The first parameters, drawn by numpy: the same on every platform."""
        draw = np.random.default_rng(seed)

        def one(shape: tuple[int, ...], scale: float | None) -> np.ndarray:
            if scale is None:
                return np.ones(shape, np.float32)
            return draw.standard_normal(shape, np.float32) * np.float32(scale * shape[-2] ** -0.5)

        return _each(one, self.likes())

    def loss(self, params: Any, inputs: Any, targets: Any, whole: "Whole | None" = None) -> Any:
        """The mean loss in nats; `whole` makes parameters of the parts that a worker stores."""
        whole = whole or (lambda tree, site: tree)
        # One-hot rows: the gradient of a look-up is a scatter, whose order of sums is not fixed.
        rows = jax.nn.one_hot(inputs, 256, dtype=jnp.bfloat16)
        x = rows @ narrow(whole(params["embedding"], "embedding"))["kernel"]

        @jax.checkpoint
        def layer(x: jax.Array, given: tuple[Any, Any]) -> tuple[jax.Array, None]:
            own, number = given
            return self.block(narrow(whole(own, ("blocks", number))), x), None

        x, _ = jax.lax.scan(layer, x, (params["blocks"], jnp.arange(self.layers)))
        last = narrow(whole(params["last"], "last"))
        logits = (normalised(x, last["scale"]) @ last["kernel"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def block(self, own: Any, x: jax.Array) -> jax.Array:
        """Causal attention and a perceptron, each on normalised inputs and added to them."""
        h = normalised(x, own["before_attention"])
        heads = (*h.shape[:-1], self.width // self.head, self.head)
        query, key, value = ((h @ own[name]).reshape(heads) for name in ("query", "key", "value"))
        found = attend(
            byte_lm_model.rotate(query), byte_lm_model.rotate(key), value, self.attention
        )
        x = x + found.reshape(x.shape) @ own["attended"]
        h = normalised(x, own["before_perceptron"])
        return x + jax.nn.gelu(h @ own["up"]) @ own["down"]


def _each(f: Callable[..., Any], likes: Any) -> Any:
    return jax.tree.map(lambda like: f(*like), likes, is_leaf=lambda x: isinstance(x, tuple))


Whole = Callable[[Any, Any], Any]
"""From a worker's part of some parameters, and the name of the place, to the parameters."""


def attend(query: Any, key: Any, value: Any, implementation: Any) -> jax.Array:
    query, key = (x.astype(value.dtype) for x in (query, key))
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=True, implementation=implementation
    )


def fastest_attention(workers: int, windows: int, context: int, model: Model) -> str:
    """cuDNN's if it accepts the shapes, mapped over the workers, with gradients; else XLA's."""
    if jax.devices()[0].platform not in ("gpu", "cuda"):
        return "xla"
    shape = (workers, windows, context, model.width // model.head, model.head)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def total(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return attend(query, key, value, "cudnn").astype(jnp.float32).sum()

    try:
        jax.jit(jax.vmap(jax.grad(total, argnums=(0, 1, 2)))).lower(x, x, x).compile()
    except Exception as error:
        print(f"cuDNN's attention refuses {shape}: {str(error).strip().partition(chr(10))[0]}")
        return "xla"
    return "cudnn"


def narrow(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


def normalised(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * scale
