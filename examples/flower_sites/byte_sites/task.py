"""The model, the data of each site and the method: what the server and all sites agree on."""

import functools
from typing import Any, NamedTuple

import byte_lm_model
import jax
import numpy as np
import optax
import training

import jaxcomp
from jaxcomp import federated

BATCH, CONTEXT = 8, 64
WEIGHT_OF = federated.tokens_squared_per_step


class Task(NamedTuple):
    """The settings of a run.

    Attributes:
        method: "diloco", "streaming" or "sparseloco".
        seed: of the parameters and of the data.
        layers: of the model.
        width: of the model.
        steps: of a round.
    """

    method: str
    seed: int
    layers: int
    width: int
    steps: int

    @classmethod
    def of(cls, config: Any) -> "Task":
        """The settings in Flower's configuration of the run, or in a file."""
        return cls(*(config[name] for name in cls._fields))

    @property
    def model(self) -> byte_lm_model.ByteModel:
        return byte_lm_model.ByteModel(self.layers, self.width)

    def params(self) -> Any:
        """The parameters before the first round."""
        text = byte_lm_model.read_text()
        first = byte_lm_model.batch_of(text, 0, size=1, context=CONTEXT, seed=0)[0]
        return self.model.init(jax.random.key(self.seed), first)

    def build(self) -> federated.Method:
        """The method, the same on the server and at all sites."""
        loss = functools.partial(training.loss_of, self.model)
        inner, down = optax.adam(3e-3), jaxcomp.qsgd_inf(bits=8)
        if self.method == "sparseloco":
            codec = jaxcomp.chunk_top_k()
            return federated.sparseloco(codec, loss, inner=inner, down=down)
        codec = jaxcomp.Link(jaxcomp.blockwise(bits=4), jaxcomp.Residual())
        if self.method == "streaming":
            return federated.streaming_diloco(
                codec,
                loss,
                fragments=2,
                delay=self.steps // 4,
                inner=inner,
                momentum=0.6,
                down=down,
            )
        return federated.diloco(codec, loss, inner=inner, momentum=0.6, down=down)

    def data(self, number: int, taken: int) -> Any:
        """The batches of a site's next round."""
        text, seed = byte_lm_model.read_text(), 1000 * self.seed + number + 1
        batches = [
            byte_lm_model.batch_of(text, taken + step, size=BATCH, context=CONTEXT, seed=seed)
            for step in range(self.steps)
        ]
        return tuple(np.stack(parts) for parts in zip(*batches, strict=True))

    def tokens(self, steps: int) -> int:
        """How many tokens a site reports for so many steps."""
        return BATCH * CONTEXT * steps

    def score(self, params: Any) -> float:
        """The loss on the text that is held out, in bits per byte."""
        text = byte_lm_model.validation_of(byte_lm_model.read_text(), CONTEXT)
        return float(byte_lm_model.bits_per_byte(self.model, params, text))
