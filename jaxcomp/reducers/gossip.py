"""Gossip: every worker sends its payload to its neighbours, and mixes theirs with its own."""

import dataclasses
import functools
import warnings
from fractions import Fraction
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import UInt32

from jaxcomp import checks
from jaxcomp.backend import axes, xla
from jaxcomp.base import Codec, Collected, Costs, Graph, Reducer, ReducerFacts
from jaxcomp.codecs.identity import Identity
from jaxcomp.exchange import collectives, guarding, send
from jaxcomp.exchange.plan import Plan
from jaxcomp.feedback import Link
from jaxcomp.graphs import mixing
from jaxcomp.graphs.static import Ring
from jaxcomp.layout.policy import Policy
from jaxcomp.mesh.per_worker import PerWorker
from jaxcomp.numerics import noise, summing
from jaxcomp.theory import cost
from jaxcomp.types import Array, AxisName, Stacks
from jaxcomp.wire import buffer

_DRAW = 0x67726170
"""Folded into a round's key, so that the drawn graph is independent of the codecs' noise."""


class GossipMemory(NamedTuple):
    """The state of `Gossip`.

    Attributes:
        codec: the states of this worker's codecs.
        turn: the number of the next round's matrix, the same on all workers.
    """

    codec: PerWorker
    turn: UInt32[Array, ""]


@dataclasses.dataclass(frozen=True)
class Gossip(Reducer, public=("busiest",)):
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
    facts = ReducerFacts(same_on_all=False, excludes=True, composes=False)

    def __post_init__(self):
        if not isinstance(self.link, Link):
            object.__setattr__(self, "link", Link(self.link))
        checks.part("graph", self.graph, Graph)
        for codec in self._given.policy.codecs:
            facts = codec.facts
            if facts.agrees or facts.sided or facts.shaped:
                raise ValueError(
                    "`link` must have codecs that every worker uses by itself, for leaves of every "
                    f"shape, got {codec!r}; use a codec such as jaxcomp.qsgd_inf(bits=4)"
                )
        feedback = self._given.feedback
        if feedback.facts.accelerates or feedback.facts.needs_mean:
            raise ValueError(
                "`link` must have jaxcomp.NoFeedback(), jaxcomp.Residual() or jaxcomp.Shift(), "
                f"since gossip mixes parameters, got {feedback!r}"
            )

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

    def init(self, plan: Plan) -> GossipMemory:
        codec = PerWorker.wrap(send.init(plan.batches), "codec", plan.axis_name)
        return GossipMemory(codec, jnp.zeros((), jnp.uint32))

    def collect(
        self,
        plan: Plan,
        key: Array,
        message: Stacks,
        state: GossipMemory,
        weight: Array | None = None,
    ) -> Collected:
        if weight is not None:
            raise ValueError(
                "`gate` must be None with jaxcomp.Gossip; leave out silent workers with "
                "jaxcomp.graphs.Without(graph, silent)"
            )
        batches, axis_name, worker = plan.batches, plan.axis, lax.axis_index(plan.axis)
        graph = self._rounds(plan.workers)
        turn = _turn(graph, state.turn, key if self.graph.drawn else None)
        memory = send.Memory((), state.codec.own())
        own = send.send(key, batches, message, memory, worker, axis_name)
        heard = _heard(buffer.fuse(own.payloads), graph, turn, axis_name)
        sent, usable = self._usable(own.sent)
        part = sent
        for number in range(graph.sources.shape[1]):
            source = jnp.asarray(graph.sources)[turn, number, worker]
            given = buffer.split(heard[number], own.payloads)
            theirs, sound = self._usable(send.decode(key, batches, given, own.sides, source))
            # A copy: JAX may keep an array that it has narrowed where float64 was off.
            weights = jnp.asarray(graph.weights.copy(), jnp.result_type(float))
            times = weights[turn, number, worker]
            if not self.uplink.feedback.facts.mirrors:  # The sender keeps its weight for itself.
                times = jnp.where(sound & usable, times, 0)
            part = jax.tree.map(functools.partial(_mixed, times), part, sent, theirs)
        codecs = PerWorker.wrap(own.memory.codecs, "codec", axis_name)
        after = (state.turn + 1) % jnp.uint32(len(graph.sources))
        return Collected(part, sent, 1.0, GossipMemory(codecs, after))

    def _rounds(self, workers: int) -> mixing.Rounds:
        if self.uplink.feedback.facts.mirrors and len(self.graph.matrices(workers)) > 1:
            raise ValueError(
                "`graph` must not change from round to round with jaxcomp.Shift, whose mirror is a "
                f"sum with fixed weights, got {self.graph!r} with {self.uplink.feedback!r}; use "
                "jaxcomp.Residual(), jaxcomp.NoFeedback() or a graph such as "
                "jaxcomp.graphs.Exponential()"
            )
        return mixing.rounds(self.graph, workers)

    def _usable(self, stacks: Stacks) -> tuple[Stacks, Array]:
        """A decoded message, and whether all of it is finite.

        An unusable message adds nothing to the memory of a shift at both ends; without a mirror it
        stays, so that its sender sees it.
        """
        sound = guarding.all_finite(stacks) & _within(stacks)
        if self.uplink.feedback.facts.mirrors:
            stacks = jax.tree.map(lambda x: jnp.where(sound, x, 0), stacks)
        return stacks, sound

    def costs(self, plan: Plan) -> Costs:
        """A payload and a message for each neighbour, on average over rounds and workers."""
        messages = float(self.busiest(plan.workers))
        effort = cost.Effort(messages, encodes=1, decodes=1, adds=messages)
        degree = mixing.rounds(self.graph, plan.workers).degree
        return Costs(degree * plan.encoded_bytes, ((self.uplink, effort),))

    def busiest(self, workers: int) -> Fraction:
        """The messages of the busiest worker in a round, on average over the rounds.

        A round lasts as long as these.
        """
        found = mixing.rounds(self.graph, workers).messages
        return Fraction(sum(found), len(found))


def _turn(graph: mixing.Rounds, turn: Array, key: Array | None) -> Array:
    """The number of this round's matrix, drawn with the key if there is one."""
    number = turn if key is None else noise.fold(key, _DRAW)[0]
    return (number % jnp.uint32(len(graph.sources))).astype(jnp.int32)


def _heard(words: Array, graph: mixing.Rounds, turn: Array, axis_name: AxisName) -> Array:
    """`[messages, words]`: the buffers that this worker receives, of this round's neighbours."""
    most, words = graph.sources.shape[1], axes.vary(words, axis_name)

    def branch(sources: np.ndarray, messages: int) -> Array:
        found = collectives.permute(words, sources[:messages].tolist(), axis_name)
        # Of weight zero, in the places of further neighbours.
        return jnp.concatenate([found] + [words[None]] * (most - messages))

    rounds = list(zip(graph.sources, graph.messages, strict=True))
    if len(rounds) == 1:
        return branch(*rounds[0])
    return lax.switch(turn, [functools.partial(branch, *one) for one in rounds])


def _within(stacks: Stacks) -> Array:
    """Whether no element is the largest number of its dtype, at which decoding saturates."""
    within = [jnp.all(jnp.abs(x) < jnp.finfo(x.dtype).max) for x in stacks]
    return functools.reduce(jnp.logical_and, within, jnp.asarray(np.True_))


def _mixed(weight: Array, part: Array, own: Array, theirs: Array) -> Array:
    """`part + weight · (theirs − own)`: the differences of an edge cancel in the mean.

    The product is not fused with the sum, which would round differently from program to program.
    """
    wide = summing.wide(part.dtype)
    apart = theirs.astype(wide) - own.astype(wide)
    by = xla.block_fma(jnp.where(weight == 0, 0, apart * weight.astype(wide)))
    return (part.astype(wide) + by).astype(part.dtype)
