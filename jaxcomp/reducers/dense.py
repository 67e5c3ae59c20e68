"""The uncompressed mean: the baseline, and the fallback."""

import dataclasses

from jax import lax

from jaxcomp import checks
from jaxcomp.base import Costs, Outcome, Reducer, ReducerFacts
from jaxcomp.exchange import trips
from jaxcomp.exchange.plan import Plan
from jaxcomp.theory import cost
from jaxcomp.types import Array, Stacks


@dataclasses.dataclass(frozen=True)
class Dense(Reducer):
    """The mean of the gradients by an all-reduce.

    Args:
        dtype: the dtype in which elements are sent, such as "bfloat16"; None for their own.
        delay: seconds that a message takes one way. Where they are long against the bytes, every
            worker sends to all others at once; else an all-reduce sends one message after another.
            None for what is assumed: 0.5 ms between CPUs of several processes, else nothing.

    Note:
        Floats of 16 bits are added in float32 and rounded once. If the platform's all-reduce does
        not do that, as for float16 and on a CPU, they are sent in two shots, an all-to-all and an
        all-gather, of the same bytes; `link_bytes` counts those. On an accelerator, bfloat16 uses
        the platform's all-reduce, which adds in bfloat16 and sends up to `4(n − 1)` bytes less,
        since slices need not be of whole elements. A sum of float32 or float64 that exceeds the
        largest number of its dtype is infinite, as in `jax.lax.pmean`: the mean of `n` workers is
        finite if the sum of each element is.
    """

    dtype: str | None = None
    delay: float | None = None
    uplink = None

    def __post_init__(self):
        checks.choice("dtype", self.dtype, (None, "float32", "bfloat16", "float16"))
        trips.check(self.delay)

    @property
    def facts(self) -> ReducerFacts:
        return ReducerFacts(dtype=self.dtype, delay=self.delay)

    def collect(
        self, plan: Plan, key: Array, message: Stacks, state: tuple, weight: Array | None = None
    ) -> Outcome:
        share = 1.0 if weight is None else lax.pmean(weight, plan.axis)
        return Outcome(message, message, share, state)  # No leaf is compressed.

    def costs(self, plan: Plan) -> Costs:
        """No compressed leaves; the efforts of an all-reduce and of the casts around it."""
        return Costs(0, ((self, cost.Effort(plan.dense_messages, encodes=1)),))
