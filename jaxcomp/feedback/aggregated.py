"""A residual of what all workers have sent, not of what this one has."""

import dataclasses
import functools

import jax

from jaxcomp import checks
from jaxcomp.base import FeedbackFacts, WrappedFeedback
from jaxcomp.feedback.residual import Residual
from jaxcomp.types import Array, PyTree


@dataclasses.dataclass(frozen=True)
class Aggregated(WrappedFeedback):
    """Subtracts the mean of the messages of all workers from the memory, not this worker's own.

    `p = g + e`, send `C(p)`, `e ← decay · (p − mean C(p))`. The mean of the workers' memories is
    that of `Residual`; each also keeps what it has and the others have not.

    Args:
        feedback: the residual, which has the decay and the dtype.

    Raises:
        ValueError: unless `feedback` is a `Residual`; on use, for a reducer that gives a device a
            part of the mean only.

    Example:
        >>> import jaxcomp
        >>> link = jaxcomp.Link(jaxcomp.demo(), Aggregated(jaxcomp.Residual(decay=0.999)))
        >>> mean = jaxcomp.compressed_mean(jaxcomp.Gather(link, over="senders"), "data")

    Note:
        No published method does this: DeMo and DisTrO subtract what the worker itself has sent,
        which is `Residual`, and ended closer to the target in our run. A worker that is unlike the
        others keeps what differs for as long as it decays, so use a decay below one.
    """

    feedback: Residual

    def __post_init__(self):
        checks.part("feedback", self.feedback, Residual)

    @functools.cached_property
    def facts(self) -> FeedbackFacts:  # pyright: ignore[reportIncompatibleVariableOverride]
        return dataclasses.replace(self.feedback.facts, needs_mean=True)

    def update(
        self,
        message: PyTree,
        sent: PyTree,
        part: PyTree,
        share: Array | float,
        weight: Array | None,
        state: PyTree,
    ) -> tuple[PyTree, PyTree]:
        del weight  # Those who did not take part know the mean, too.
        shapes = [[x.shape for x in jax.tree.leaves(tree)] for tree in (part, sent)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"`feedback={self!r}` needs a reducer that gives every device the whole mean, such "
                f"as jaxcomp.Gather, got parts of shapes {shapes[0]} of {shapes[1]}"
            )
        return self.feedback.update(message, part, part, share, None, state)
