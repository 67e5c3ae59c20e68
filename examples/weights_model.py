"""A small transformer that adds, for `weights.py`: the same forward pass in JAX and in numpy.

Nothing here imports JAX: a reader computes with numpy alone. `xp` is `jax.numpy` or `numpy`.
"""

from typing import Any

import numpy as np

DIGITS, ANSWER, PROMPT, VOCABULARY = 2, 3, 6, 12
PLUS, EQUALS = 10, 11
HEADS = 4


def init(width: int, layers: int, seed: int) -> dict[str, np.ndarray]:
    """Parameters by name, float32."""
    draw = np.random.default_rng(seed)

    def normal(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rows**-0.5 * draw.normal(size=(rows, columns))).astype(np.float32)

    params = {
        "tokens": normal(VOCABULARY, width),
        "positions": normal(PROMPT + ANSWER - 1, width),
        "head": normal(width, VOCABULARY),
    }
    for layer in range(layers):
        params[f"{layer}/qkv"] = normal(width, 3 * width)
        params[f"{layer}/out"] = normal(width, width, layers**-0.5)
        params[f"{layer}/up"] = normal(width, 4 * width)
        params[f"{layer}/down"] = normal(4 * width, width, layers**-0.5)
    return params


def logits(xp: Any, params: Any, tokens: Any) -> Any:
    """Scores of the next token at every position, [batch, length, vocabulary]."""
    batch, length = tokens.shape
    x = params["tokens"][tokens] + params["positions"][:length]
    width = x.shape[-1]
    future = xp.asarray(np.triu(np.full((length, length), -1e9, np.float32), 1))
    for layer in range(sum(name.endswith("/qkv") for name in params)):
        qkv = _norm(xp, x) @ params[f"{layer}/qkv"]
        qkv = qkv.reshape(batch, length, 3, HEADS, width // HEADS).transpose(2, 0, 3, 1, 4)
        scores = qkv[0] @ qkv[1].swapaxes(-1, -2) * (width // HEADS) ** -0.5 + future
        scores = xp.exp(scores - scores.max(-1, keepdims=True))
        seen = (scores / scores.sum(-1, keepdims=True)) @ qkv[2]
        x = x + seen.swapaxes(1, 2).reshape(batch, length, width) @ params[f"{layer}/out"]
        x = x + xp.maximum(_norm(xp, x) @ params[f"{layer}/up"], 0) @ params[f"{layer}/down"]
    return _norm(xp, x) @ params["head"]


def problems(draw: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts such as `37+58=` as tokens, and their answers: the lowest digit first."""
    a, b = draw.integers(0, 10**DIGITS, (2, count))
    signs = np.full((2, count), [[PLUS], [EQUALS]])
    prompts = np.stack([a // 10, a % 10, signs[0], b // 10, b % 10, signs[1]], 1)
    answers = np.stack([(a + b) // 10**place % 10 for place in range(ANSWER)], 1)
    return prompts.astype(np.int32), answers.astype(np.int32)


def answer(params: dict[str, np.ndarray], prompts: np.ndarray, draw: Any) -> np.ndarray:
    """Samples answers with numpy."""
    tokens = prompts
    for _ in range(ANSWER):
        scores = logits(np, params, tokens)[:, -1]
        noise = draw.gumbel(size=scores.shape)
        tokens = np.concatenate([tokens, np.argmax(scores + noise, -1)[:, None]], 1)
    return tokens[:, PROMPT:]


def _norm(xp: Any, x: Any) -> Any:
    return x * (xp.mean(x * x, -1, keepdims=True) + 1e-6) ** -0.5
