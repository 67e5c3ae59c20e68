"""The training of `examples/weights.py`: on problems with their answers, then by REINFORCE."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import weights_model as model

PROMPTS, GROUP, EXAMPLES = 32, 8, 128


class Trainer:
    """The model with its optimizer: steps on examples, then on its own answers."""

    def __init__(self, width: int, layers: int, seed: int):
        self.params = jax.device_put(model.init(width, layers, seed))
        self._draw, self._key = np.random.default_rng(seed), jax.random.key(seed)
        self._start(optax.adam(optax.linear_schedule(0.0, 2e-3, 30)))

    def _start(self, tx: optax.GradientTransformation) -> None:
        self._state = tx.init(self.params)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params: Any, state: Any, prompts: Any, answers: Any, advantage: Any) -> Any:
            loss, grads = jax.value_and_grad(surprise)(params, prompts, answers, advantage)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        self._step = step

    def learn(self) -> None:
        """A step on problems with their answers."""
        prompts, answers = model.problems(self._draw, EXAMPLES)
        self._train(prompts, answers, np.ones(EXAMPLES, np.float32))

    def start_reinforcing(self, rate: float) -> None:
        """Goes on with a new optimizer."""
        self._start(optax.adam(rate))

    def reinforce(self) -> float:
        """A step on answers of the model, by their advantage in their group; returns the reward."""
        prompts, right = model.problems(self._draw, PROMPTS)
        prompts, right = (np.repeat(x, GROUP, axis=0) for x in (prompts, right))
        answers, reward = self._answer(prompts, right)
        groups = reward.reshape(PROMPTS, GROUP)
        spread = groups.std(1, keepdims=True) + 1e-4
        self._train(prompts, answers, ((groups - groups.mean(1, keepdims=True)) / spread).ravel())
        return float(reward.mean())

    def reward(self, count: int = 256) -> float:
        """The part of right answers to new problems."""
        return float(self._answer(*model.problems(self._draw, count))[1].mean())

    def _answer(self, prompts: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self._key, key = jax.random.split(self._key)
        answers = np.asarray(sample(self.params, key, prompts))
        return answers, np.all(answers == right, 1).astype(np.float32)

    def _train(self, prompts: np.ndarray, answers: np.ndarray, advantage: np.ndarray) -> None:
        self.params, self._state, _ = self._step(
            self.params, self._state, prompts, answers, advantage
        )


def surprise(params: Any, prompts: Any, answers: Any, advantage: Any) -> Any:
    """The cross-entropy of answers, each weighted by its advantage."""
    tokens = jnp.concatenate([prompts, answers[:, :-1]], 1)
    scores = model.logits(jnp, params, tokens)[:, model.PROMPT - 1 :]
    each = optax.softmax_cross_entropy_with_integer_labels(scores, answers).sum(1)
    return jnp.mean(advantage * each)


@jax.jit
def sample(params: Any, key: Any, prompts: Any) -> Any:
    """Answers to prompts, a digit after the other."""
    tokens = prompts
    for each in jax.random.split(key, model.ANSWER):
        digit = jax.random.categorical(each, model.logits(jnp, params, tokens)[:, -1])
        tokens = jnp.concatenate([tokens, digit[:, None].astype(tokens.dtype)], 1)
    return tokens[:, model.PROMPT :]
