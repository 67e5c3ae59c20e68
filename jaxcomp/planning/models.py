"""Shapes of models to plan for: a transformer of any number of parameters, and two known ones."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp import checks

_WIDTH = 64
"""Width of a decoder for each of its layers: GPT-2 has 12 layers of width 12 · 64."""
_IN_BLOCKS = 0.7
"""The fraction of the parameters in the blocks of small models, as in GPT-2 (0.68)."""
_VOCABULARY = 50_257
"""The fewest rows of the embedding of large models: those of GPT-2."""

Shapes = dict[str, Any]


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def transformer(parameters: int) -> Shapes:
    """A decoder like GPT-2 of exactly so many parameters.

    It has `L` layers of width `64 · L`, with the largest `L` for which the blocks take at most 70 %
    of the parameters or leave an embedding of at least 50,257 rows. A model that is too small for
    width 64 has one narrower layer. The embedding takes the rest; its last incomplete row is a
    vector.

    Args:
        parameters: how many.

    Returns:
        A tree of shapes, float32.

    Raises:
        ValueError: for less than one parameter.

    Example:
        >>> shapes = transformer(125_000_000)
        >>> shapes["block11"]["up"].shape, shapes["embedding"].shape
        ((768, 3072), (52010, 768))
    """
    checks.integer("parameters", parameters, 1)

    def fits(layers: int, width: int) -> bool:
        most = max(int(_IN_BLOCKS * parameters), parameters - _VOCABULARY * width)
        return _blocks(layers, width) <= most

    layers = 1
    while fits(layers + 1, _WIDTH * (layers + 1)):
        layers += 1
    width = _WIDTH * layers
    while width and not fits(layers, width):
        width -= 1
    if not width:
        return {"vector": _array(parameters)}
    left = parameters - _blocks(layers, width)
    found = _decoder(layers, width)
    rows, rest = divmod(left, width)
    found["embedding"] = _array(rows, width)
    return found | ({"rest": _array(rest)} if rest else {})


def gpt2() -> Shapes:
    """GPT-2, the small one: 124 million parameters.

    References:
        Radford, Wu, Child, Luan, Amodei and Sutskever, Language models are unsupervised multitask
        learners, 2019.
    """
    embeddings = {"embedding": _array(50_257, 768), "positions": _array(1024, 768)}
    return _decoder(12, 768) | embeddings


def resnet50() -> Shapes:
    """ResNet-50 for ImageNet: 25.6 million parameters, most in its convolutions.

    References:
        He, Zhang, Ren and Sun, `Deep residual learning <https://arxiv.org/abs/1512.03385>`_, 2015.
    """
    found: Shapes = {"stem": _convolution(7, 3, 64)}
    channels = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for block in range(blocks):
            parts = {
                "reduce": _convolution(1, channels, width),
                "middle": _convolution(3, width, width),
                "expand": _convolution(1, width, 4 * width),
            }
            if not block:
                parts["skip"] = _convolution(1, channels, 4 * width)
            found[f"stage{stage}_block{block}"] = parts
            channels = 4 * width
    found["classes"] = {"kernel": _array(channels, 1000), "bias": _array(1000)}
    return found


MODELS: Mapping[str, Callable[[], Shapes]] = {"gpt2": gpt2, "resnet50": resnet50}
"""Known models by name."""


def _decoder(layers: int, width: int) -> Shapes:
    """The blocks of a decoder and its last norm."""
    block = {
        "attention": _array(width, 3 * width),
        "attention_bias": _array(3 * width),
        "project": _array(width, width),
        "project_bias": _array(width),
        "up": _array(width, 4 * width),
        "up_bias": _array(4 * width),
        "down": _array(4 * width, width),
        "down_bias": _array(width),
        **{name: _array(width) for name in ("norm1", "norm1_bias", "norm2", "norm2_bias")},
    }
    blocks = {f"block{number}": dict(block) for number in range(layers)}
    return blocks | {"norm": _array(width), "norm_bias": _array(width)}


def _blocks(layers: int, width: int) -> int:
    """The parameters of `_decoder`."""
    return layers * (12 * width**2 + 13 * width) + 2 * width


def _convolution(side: int, into: int, out: int) -> Shapes:
    """A kernel, and the scale and offset of the batch norm behind it."""
    return {"kernel": _array(side, side, into, out), "scale": _array(out), "offset": _array(out)}
