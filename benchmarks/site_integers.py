"""A task in whole numbers for `site_rounds.py`, so that what sites gave can be added up exactly."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp
from jaxcomp import federated

FEATURES = 4096
WEIGHT_OF = None


def loss(params: Any, batch: Any) -> Any:
    """Its gradient is minus the batch, whatever the parameters are."""
    return -jnp.sum(params["w"] * batch)


class Task(NamedTuple):
    """The settings of a run.

    Attributes:
        seed: of the data.
        steps: of a round.
    """

    seed: int
    steps: int

    @classmethod
    def of(cls, config: Any) -> "Task":
        return cls(*(config[name] for name in cls._fields))

    def params(self) -> Any:
        return {"w": np.zeros(FEATURES, np.float32)}

    def build(self) -> federated.Method:
        """A site sends a tenth of its sum, and keeps the rest; the server takes a quarter of all.

        Sums of messages of four sites, whose weights are one, are exact in float32.
        """
        codec = jaxcomp.Policy(jaxcomp.top_k(fraction=0.1), min_size=0, min_ndim=1)
        work = federated.LocalSteps(loss, optax.sgd(1.0))
        link = jaxcomp.Link(codec, jaxcomp.Residual())
        return federated.Method(work, link, mean="all", staleness=0.0)

    def data(self, number: int, taken: int) -> Any:
        return np.stack([self.batch(number, taken + step) for step in range(self.steps)])

    def batch(self, number: int, step: int) -> np.ndarray:
        """Small whole numbers."""
        draw = np.random.default_rng((self.seed, number, step))
        return draw.integers(-3, 4, FEATURES).astype(np.float32)

    def tokens(self, steps: int) -> int:
        return steps

    def score(self, params: Any) -> float:
        return float(np.abs(params["w"]).max())
