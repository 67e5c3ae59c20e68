"""The result of `spend`: a policy, its bytes and its error, leaf by leaf."""

import dataclasses

from jaxcomp import tables
from jaxcomp.base import Codec
from jaxcomp.layout.policy import Policy
from jaxcomp.planning.columns import PATH, SHAPE
from jaxcomp.tables import Column


@dataclasses.dataclass(frozen=True)
class LeafSpending:
    """The codec of one leaf, its bits and its error.

    Attributes:
        path: the path of the leaf.
        shape: the shape of the leaf.
        name: the name of the codec among those to choose from; "dense" for none.
        codec: the codec of the leaf; None for dense.
        bits_per_element: the leaf's bits per element.
        variance: the mean square of the leaf's elements.
        error: `‖x̂ − x‖² / ‖x‖²` of the leaf; 0.0 for a leaf of zeros.
    """

    path: str
    shape: tuple[int, ...]
    name: str
    codec: Codec | None
    bits_per_element: float
    variance: float
    error: float


_COLUMNS = (
    PATH,
    SHAPE,
    Column("codec", "name"),
    Column("bits/elem", "bits_per_element", ".2f", right=True),
    Column("variance", "variance", ".2g", right=True),
    Column("error", "error", ".2g", right=True),
)


@dataclasses.dataclass(frozen=True)
class Uniform:
    """One codec for all leaves: its name, its bytes and its predicted error."""

    name: str
    bytes: int
    error: float


@dataclasses.dataclass(frozen=True)
class Spending:
    """The policy that `spend` finds, with its bytes and its error; `print` it.

    Attributes:
        policy: the policy, for `compressed_mean`, `describe` or `wire_bytes`.
        leaves: one line for each leaf.
        budget: the bytes that a step may send.
        bytes: the bytes that a step sends with this policy.
        error: the predicted `Σ‖x̂ − x‖² / Σ‖x‖²` of one worker's message, over all leaves.
        uniform: of the codecs that fit into the budget if all leaves share one, the one with the
            smallest error; None if none fits.
        workers: the number of workers; None if bytes are those of a payload.
    """

    policy: Policy
    leaves: tuple[LeafSpending, ...]
    budget: int
    bytes: int
    error: float
    uniform: Uniform | None = None
    workers: int | None = None

    def to_json(self) -> str:
        """All attributes as JSON; the policy and codecs are the text that builds them."""
        found = tables.attributes(self, "policy", "budget", "bytes", "error", "workers")
        found["uniform"] = None if self.uniform is None else vars(self.uniform)
        found["leaves"] = [vars(leaf) for leaf in self.leaves]
        return tables.to_json(found, default=repr)

    def __str__(self) -> str:
        where = "in a worker's payload"
        if self.workers is not None:
            where = f"over a device's link, of {self.workers} workers"
        said = f"{self.bytes:,} of {self.budget:,} bytes {where}: error {self.error:.3g}"
        other = "no codec fits into the budget if all leaves share it"
        if self.uniform is not None:
            one = self.uniform
            other = f"{one.name} for all leaves: {one.bytes:,} bytes, error {one.error:.3g}"
        return "\n".join([tables.text(_COLUMNS, self.leaves), "", said, other])
