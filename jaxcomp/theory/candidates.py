"""One way to average, with its cost and its error."""

import dataclasses

from jaxcomp.theory import cost

HIGH_ERROR = 0.9
"""The relative error of a message from which on a plan does not recommend it."""

BIASED_ERROR = 0.2
"""That of codecs that need a residual, such as signs: Adam may need a lower learning rate."""


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to take the mean.

    Args:
        name: its name.
        price: its cost on the slow link, and its work on a device.
        dense: whether it sends every element, at full or half precision.
        error: the mean squared error over the mean square of one message; None if not known.
        low_rank: whether it sends matrices of low rank, whose error on a random one says little.
        fast: its cost on the fast links within a host, if there are any.
        spread: the relative spread of the timed work.
        biased: whether its codec needs a residual.
        local: whether it is what a method of local steps sends, and no mean of gradients.
    """

    name: str
    price: cost.Price
    dense: bool = False
    error: float | None = None
    low_rank: bool = False
    fast: cost.Price = cost.Price()
    spread: float = 0.0
    biased: bool = False
    local: bool = False

    @property
    def high(self) -> bool:
        """Whether the error of a message is nearly as large as a random vector, or larger."""
        return self.error is not None and self.error >= HIGH_ERROR

    @property
    def risky(self) -> bool:
        """Whether its error is high, though neither low rank nor a method's own message."""
        limit = BIASED_ERROR if self.biased else HIGH_ERROR
        return (self.error or 0.0) >= limit and not (self.low_rank or self.local)

    @property
    def mark(self) -> str:
        """A sign beside a high error."""
        return "!" if self.risky else "~" if self.high else ""
