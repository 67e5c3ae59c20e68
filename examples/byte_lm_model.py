"""Model and data of `byte_lm.py`: a small transformer, and Python's standard library as text."""

import functools
import hashlib
import math
import os
import pathlib
import sysconfig
import zlib
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import training

HEAD = 32  # Elements of an attention head: the width is a multiple of it.
NOT_READ = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
VALIDATION_WINDOWS = 128  # Evenly over the files that are held out.


class Block(nn.Module):
    """Causal attention and a perceptron, each on normalised inputs and added to them."""

    width: int
    layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # The residual path starts small, so that its sum does not grow with depth.
        small = nn.initializers.variance_scaling(0.5 / self.layers, "fan_in", "truncated_normal")

        def dense(name: str, width: int = self.width, init: Any = nn.linear.default_kernel_init):
            return nn.Dense(width, use_bias=False, kernel_init=init, name=name)

        h = nn.RMSNorm(name="before_attention")(x)
        heads = (*h.shape[:-1], self.width // HEAD, HEAD)
        query, key, value = (dense(name)(h).reshape(heads) for name in ("query", "key", "value"))
        attended = jax.nn.dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        x = x + dense("attended", init=small)(attended.reshape(x.shape))

        h = nn.RMSNorm(name="before_perceptron")(x)
        h = nn.gelu(dense("up", 4 * self.width)(h))
        return x + dense("down", init=small)(h)


class ByteModel(nn.Module):
    """A decoder-only transformer from bytes to the logits of the next ones."""

    layers: int
    width: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        # A product with one-hot rows, not a look-up: the gradient of that is a scatter, which
        # accelerators sum in no fixed order, and a resumed run could not repeat an unbroken one.
        table = nn.Dense(self.width, use_bias=False, name="embedding")
        x = table(jax.nn.one_hot(tokens, 256))
        for number in range(self.layers):
            x = Block(self.width, self.layers, name=f"block_{number}")(x)
        x = nn.RMSNorm(name="before_logits")(x)
        init = nn.initializers.normal(0.02)  # Nearly uniform at first: a loss of eight bits.
        return nn.Dense(256, use_bias=False, kernel_init=init, name="logits")(x)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions: the rotation angle of each pair of elements grows with the position."""
    half = x.shape[-1] // 2
    pace = 10_000.0 ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[-3])[:, None, None] * pace
    a, b = x[..., :half], x[..., half:]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Text(NamedTuple):
    """Bytes to train on and to validate on, of different files; `digest` is of both."""

    train: np.ndarray
    validation: np.ndarray
    digest: str


def read_text() -> Text:
    """Python's standard library without its tests, from this interpreter.

    About every twentieth file, chosen by its name alone, is held out.

    Raises:
        FileNotFoundError: if Python is installed without its sources.
    """
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    paths: list[pathlib.Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - NOT_READ
        paths += [pathlib.Path(folder, name) for name in files if name.endswith(".py")]
    parts: tuple[list[bytes], list[bytes]] = [], []
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        parts[zlib.crc32(name.encode()) % 20 == 0].append(path.read_bytes())
    train, validation = (b"\0".join(part) for part in parts)
    if not train or not validation:
        raise FileNotFoundError(f"the standard library has no sources (*.py) in {root}")
    digest = hashlib.sha256(train + b"\0" + validation).hexdigest()[:16]
    return Text(np.frombuffer(train, np.uint8), np.frombuffer(validation, np.uint8), digest)


def batch_of(
    text: Text, step: int, *, size: int, context: int, seed: int, rows: Any = slice(None)
) -> tuple:
    """The batch of one step: drawn by the seed and the step alone, so there is nothing to store.

    Returns:
        Bytes and the ones that follow them, `[size, context]` each, or some `rows` of those.
    """
    draw = np.random.default_rng((seed, step))
    starts = draw.integers(len(text.train) - context, size=size)
    return windows(text.train, starts[rows], context)


def validation_of(text: Text, context: int) -> tuple:
    """The same windows for every run, as `[VALIDATION_WINDOWS, context]` twice."""
    last = len(text.validation) - context - 1
    starts = np.linspace(0, last, VALIDATION_WINDOWS).astype(np.int64)
    return windows(text.validation, starts, context)


def windows(text: np.ndarray, starts: np.ndarray, context: int) -> tuple:
    cut = text[starts[:, None] + np.arange(context + 1)].astype(np.int32)
    return cut[:, :-1], cut[:, 1:]


@functools.partial(jax.jit, static_argnums=0)
def bits_per_byte(model: nn.Module, params: Any, batch: Any) -> jax.Array:
    """The mean loss over all positions of all windows, the first ones of a window included."""
    few = jax.tree.map(lambda x: x.reshape(-1, 32, x.shape[-1]), batch)  # At once; memory is short.
    losses = jax.lax.map(lambda part: training.loss_of(model, params, part), few)
    return losses.mean() / math.log(2)
