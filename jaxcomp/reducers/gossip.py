"""Gossip: every worker sends its payload to its neighbours, and mixes theirs with its own."""

import dataclasses
import functools
import warnings
from typing import cast

from jaxcomp import checks
from jaxcomp.base import Codec, Graph, Leg, Reducer
from jaxcomp.codecs.identity import Identity
from jaxcomp.exchange.combines import Mix
from jaxcomp.exchange.moves import Permute
from jaxcomp.feedback import Link
from jaxcomp.graphs import Ring
from jaxcomp.layout.policy import Policy


@dataclasses.dataclass(frozen=True)
class Gossip(Reducer):
    """Mixes the decoded messages of the neighbours in a graph: `partᵢ = Σⱼ wᵢⱼ · sentⱼ`.

    A message is one dense buffer for the whole model, and a round is one permutation of the workers
    for each neighbour: `k` payloads with `k` neighbours, however many workers there are. Nothing is
    sent to all, and no all-reduce runs. Leaves that the policy leaves dense travel in the same
    buffer, uncompressed.

    The results differ between workers, so `compressed_mean` refuses this reducer: it is an argument
    of `jaxcomp.gossip`, with which every worker has parameters of its own. With `Shift`, the mirror
    is `sᵢ = Σⱼ wᵢⱼ hⱼ`, which needs no copy of a neighbour's memory, but a graph that does not
    change.

    Sender and receivers alike leave out a message with an element that is not finite after
    decoding: its weight goes to the receiver's own message, and the sender does not mix in that
    round. So both ends of every edge know the same, without a message to all.

    Args:
        link: the link from each worker; a bare codec or policy means `Link(codec)`.
        graph: the graph, one of `jaxcomp.graphs`.

    Raises:
        ValueError: for a link or graph of another kind; for codecs whose workers agree on scales,
            or that need side information or leaves of a certain shape; for a feedback with
            momentum, and for a shift over a graph whose weights change; on use, for a graph of
            another number of workers, or one with which workers never agree.

    Example:
        >>> import jaxcomp
        >>> import jax.numpy as jnp
        >>> codec, like = jaxcomp.qsgd_inf(bits=4), jnp.zeros((64, 64))
        >>> ring = Gossip(codec, jaxcomp.graphs.Ring())
        >>> jaxcomp.wire_bytes(ring, like, workers=64) == 2 * jaxcomp.wire_bytes(codec, like)
        True

    References:
        Koloskova, Stich and Jaggi, `Decentralized stochastic optimization and gossip algorithms
        with compressed communication <https://arxiv.org/abs/1902.00340>`_, 2019.
    """

    link: "Link | Codec | Policy"
    graph: Graph = Ring()

    def __post_init__(self):
        if not isinstance(self.link, Link):
            object.__setattr__(self, "link", Link(self.link))
        checks.part("graph", self.graph, Graph)
        Mix().check(self._given)

    @property
    def _given(self) -> Link:
        return cast(Link, self.link)

    @functools.cached_property
    def uplink(self) -> Link:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The link of all leaves, those that the policy leaves dense included."""
        policy = self._given.policy
        whole = dataclasses.replace(policy, rest=policy.rest or Identity())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # `link` has warned already.
            return dataclasses.replace(self._given, codec=whole)

    @property
    def route(self) -> tuple[Leg, ...]:
        return (Leg(Permute(self.graph), self.uplink, Mix()),)
