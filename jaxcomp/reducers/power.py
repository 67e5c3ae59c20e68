"""Power iteration: all workers find a low rank approximation of their mean together."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp import checks, feedback as feedback_
from jaxcomp.backend import axes
from jaxcomp.base import Codec, Collected, Feedback, Reducer
from jaxcomp.codecs import low_rank
from jaxcomp.codecs.low_rank import LowRank
from jaxcomp.feedback import Link, Residual
from jaxcomp.layout import policy as policy_, trees
from jaxcomp.layout.policy import Policy, Rule
from jaxcomp.numerics import noise, orthonormal
from jaxcomp.reducers import accounting, dense as dense_, packing
from jaxcomp.reducers.dense import Dense
from jaxcomp.reducers.gather import Gather
from jaxcomp.theory import cost
from jaxcomp.types import Array, AxisName, Batches, PyTree, Stacks

_Pairs: TypeAlias = list[tuple[Any, Any]]
"""The left and the right factors of each batch."""

_Mean: TypeAlias = Callable[[int, Stacks], tuple[Stacks, Stacks, PyTree]]
"""A round's number and vectors ↦ their mean, this worker's as they arrived, the round's state."""


class PowerState(NamedTuple):
    """What the next step goes on from; the same on all workers but for a codec's own memory.

    Attributes:
        left: `[n, rank, rows]` for each batch, or `()` if they are not kept from step to step.
        right: `[n, rank, cols]` for each batch.
        turn: 0 or 1, which factor of a batch the next step renews; `()` if it is always both.
        rounds: what the exchange of each round remembers.
    """

    left: tuple[Array, ...]
    right: tuple[Array, ...]
    turn: Any
    rounds: tuple[PyTree, ...]


@dataclasses.dataclass(frozen=True)
class PowerIteration(Reducer):
    """PowerSGD: the mean of the workers' matrices, projected on the few directions that matter.

    `P = orth(Σ Mᵢ Q / n)`, `Q = Σ Mᵢᵀ P / n`, and the mean is `P Qᵀ`. The next step starts from
    this `Q`, so that over the steps the iteration converges to the leading singular vectors. Each
    sum is one all-reduce for the whole model, whose bytes do not grow with the workers. What the
    projection leaves out stays in each worker's residual, `Mᵢ − P Pᵀ Mᵢ`.

    Leaves of one shape are one batch of matrices. `LowRank` says which matrix a leaf is, and when
    it is left dense because its factors would save too little.

    Args:
        rank: columns of a factor.
        min_ratio: a leaf is left dense unless both its factors, as 32-bit floats, take so many
            times fewer bytes.
        alternate: renew only one of the two factors in each step, in turns, by a single all-reduce:
            `P = Σ Mᵢ Q / n` with the orthonormalised `Q` of the step before, and the other way
            round in the next. Some batches begin with `P`, others with `Q`, as it balances the
            steps best; the all-reduce has room for the larger of both.
        factors: how factors travel: None for 32-bit floats; "bfloat16" to halve them; or a codec
            with buckets, whose payloads are gathered, which pays for few workers.
        rules: leaves that get another `LowRank`, or None for dense; as in `Policy`.
        feedback: the workers' memory.

    Raises:
        ValueError: for an argument out of range, a rule with a codec that is not a `LowRank`, or a
            codec of factors without buckets.

    Example:
        >>> import jaxcomp
        >>> stacked = LowRank(rank=4, stacked_axes=1)
        >>> reducer = PowerIteration(rank=4, rules=(Rule("blocks/*", stacked), Rule("head", None)))
        >>> tx = jaxcomp.compressed_mean(reducer, axis_name="data")

    References:
        Vogels, Karimireddy and Jaggi, `PowerSGD <https://arxiv.org/abs/1905.13727>`_, 2019;
        `alternate` is that of the authors' later `code <https://github.com/epfml/powersgd>`_.

    Note:
        A worker keeps what its own projection lost, as in the paper's Algorithm 2 and, of the
        public implementations, the authors' experiments with one product a step
        (`HalfRankKReducer`); their package and `RankKReducer` keep the difference from the mean
        that came back, which has the same mean over the workers. Vectors that depend on those
        before them are zero in `P`, where the authors add an epsilon or complete the basis, and a
        zero in `Q` does not replace what was there, so a step of zeros does no harm. Between steps
        `Q` is kept with columns of length one, which changes nothing but rounding. Compression
        begins with the first step, where the authors' code can send the first ones dense. All
        workers compute `P` for themselves from the same sum: on devices that round differently,
        replicas would drift apart in the last bits. A mean of bfloat16 is rounded to bfloat16,
        which no residual sees. Products of matrices are added in an order that XLA picks by their
        shapes, so under `vmap` the last bits may differ from those of other ways of mapping.
        Products with factors, and their sums over the workers, are float32 and must be finite.
    """

    rank: int = 4
    min_ratio: int | float = 2.0
    alternate: bool = False
    factors: "str | Codec | None" = None
    rules: tuple[Rule, ...] = ()
    feedback: Feedback = Residual()
    for_small_leaves = (
        'jaxcomp.PowerIteration(rules=(jaxcomp.Rule("*", jaxcomp.codecs.LowRank(rank=1, '
        "min_ratio=1)),)) "
        "compresses every matrix whose factors are smaller"
    )

    def __post_init__(self):
        if not isinstance(self.alternate, bool):
            raise ValueError(f"`alternate` must be True or False, got {self.alternate!r}")
        if not isinstance(self.factors, Codec) or isinstance(self.factors, type):
            checks.choice("factors", self.factors, (None, "bfloat16"))
        elif self.factors.bucket_size is None:
            raise ValueError(
                "`factors` must be a codec with buckets, since it encodes those of all leaves "
                f"together; give it a bucket_size, got {self.factors!r}"
            )
        for codec in self.uplink.policy.codecs:
            if not isinstance(codec, LowRank):
                raise ValueError(
                    "`rules` must give leaves a jaxcomp.codecs.LowRank, or None for dense, got "
                    f"{codec!r}; other codecs need another reducer, such as jaxcomp.Gather"
                )

    @functools.cached_property
    def uplink(self) -> Link:
        """Which leaf is which matrix, and the workers' memory."""
        codec = LowRank(rank=self.rank, min_ratio=self.min_ratio)
        return Link(Policy(codec, rules=self.rules), self.feedback)

    def init(self, batches: Batches, axis_name: AxisName) -> PowerState:
        pairs = _factors(batches)
        return PowerState(
            left=tuple(low_rank.start(left) for left, _ in pairs) if self.alternate else (),
            right=tuple(low_rank.start(right) for _, right in pairs),
            turn=jnp.zeros((), jnp.int32) if self.alternate else (),
            rounds=tuple(
                self._exchange.init(accounting.plan(self._exchange, vectors).batches, axis_name)
                for vectors in self._rounds(batches)
            ),
        )

    def collect(
        self,
        key: Array,
        batches: Batches,
        message: Stacks,
        state: PowerState,
        axis_name: AxisName,
        weight: Array | None = None,
    ) -> Collected:
        def mean(number: int, vectors: Stacks) -> tuple[Stacks, Stacks, PyTree]:
            round_key = noise.fold(key, number)
            return self._mean(round_key, vectors, state.rounds[number], axis_name, weight)

        share = 1.0 if weight is None else lax.pmean(weight, axis_name)
        if not batches:
            return Collected((), (), share, state)
        matrices = [b.codec.matrices(x) for b, x in zip(batches, message, strict=True)]
        step = self._in_turns if self.alternate else self._together
        means, own, state = step(batches, matrices, state, mean)
        return Collected(_products(batches, means), _products(batches, own), share, state)

    def spread(
        self, key: Array, batches: Batches, part: Stacks, state: PyTree, axis_name: AxisName
    ) -> tuple[Stacks, PyTree]:
        return part, state

    def dense(
        self, leaves: Sequence[Array], axis_name: AxisName, weight: Array | None = None
    ) -> Sequence[Array]:
        return dense_.fused_mean(leaves, axis_name, weight)

    def payload_bytes(self, batches: Batches) -> tuple[float, ...]:
        """What each batch accounts for of what one worker puts into the collectives."""
        total = sum(
            accounting.payload_bytes(self._exchange, accounting.plan(self._exchange, vectors))
            for vectors in self._rounds(batches)
        )
        sizes = [left.size + right.size for left, right in _factors(batches)]
        return tuple(total * size / sum(sizes) for size in sizes)

    def efforts(self, batches: Batches, workers: int) -> tuple[tuple[Any, cost.Effort], ...]:
        """Each round's, with one device's arithmetic in all."""
        exchange: Any = self._exchange
        rounds = sum(
            effort.rounds
            for vectors in self._rounds(batches)
            for _, effort in exchange.efforts(accounting.plan(exchange, vectors).batches, workers)
        )
        return ((self, cost.Effort(rounds, encodes=1)),)

    def link_bytes(self, like: PyTree, workers: int) -> int:
        """One or two rounds of factors, and an all-reduce of the leaves that are left dense."""
        plan = trees.layout(self.uplink.policy, like)
        told = accounting.told_bytes(self, plan.batches, workers)
        return math.ceil(
            told + dense_.fused_link_bytes([plan.likes[i] for i in plan.dense], workers)
        ) + sum(
            self._exchange.link_bytes(vectors, workers) for vectors in self._rounds(plan.batches)
        )

    @functools.cached_property
    def _exchange(self) -> Reducer:
        """How the vectors of a round are averaged."""
        if self.factors is None or isinstance(self.factors, str):
            return Dense(self.factors)
        # What this codec loses is in `sent`, and so in the feedback of the power iteration.
        return Gather(Link(policy_.everywhere(self.factors), feedback_.default(self.factors)))

    def _rounds(self, batches: Batches) -> tuple[tuple[jax.ShapeDtypeStruct, ...], ...]:
        """The vectors of each round."""
        pairs = _factors(batches)
        if not self.alternate:
            return tuple(packing.rooms([half]) for half in zip(*pairs, strict=True))
        turns = [_sides(pairs, turn) for turn in _turns(pairs)]
        return (packing.rooms(turns),) if pairs else ()

    def _mean(
        self, key: Array, vectors: Stacks, state: PyTree, axis_name: AxisName, weight: Array | None
    ) -> tuple[Stacks, Stacks, PyTree]:
        """The mean of all workers' vectors, this worker's as they arrived, the round's state."""
        exchange, plan = self._exchange, accounting.plan(self._exchange, vectors)
        message, dense = trees.stacks(plan, vectors)
        got = exchange.collect(key, plan.batches, message, state, axis_name, weight)
        part, after = exchange.spread(key, plan.batches, got.part, got.state, axis_name)
        means = trees.assemble(plan, part, exchange.dense(dense, axis_name, weight))
        narrow = [x.astype(accounting.dense_dtype(exchange) or x.dtype) for x in dense]
        dense = [x.astype(like.dtype) for x, like in zip(narrow, dense, strict=True)]
        return means, trees.assemble(plan, got.sent, dense), after

    def _together(
        self, batches: Batches, matrices: list[Array], state: PowerState, mean: _Mean
    ) -> tuple[_Pairs, _Pairs, PowerState]:
        """Both factors in one step, by two rounds."""
        first, second = self._rounds(batches)
        lefts = list(map(low_rank.left_of, matrices, state.right))
        means, _, one = mean(0, packing.pack(first, lefts))
        basis = orthonormal.orthonormal(packing.unpack(means, lefts))
        rights = list(map(low_rank.right_of, matrices, basis))
        means, own, two = mean(1, packing.pack(second, rights))
        means, own = packing.unpack(means, rights), packing.unpack(own, rights)
        right = tuple(orthonormal.refreshed(means, state.right))
        after = state._replace(right=right, rounds=(one, two))
        return list(zip(basis, means, strict=True)), list(zip(basis, own, strict=True)), after

    def _in_turns(
        self, batches: Batches, matrices: list[Array], state: PowerState, mean: _Mean
    ) -> tuple[_Pairs, _Pairs, PowerState]:
        """One factor of each matrix in a step, by one round that has room for either."""
        pairs, (room,) = _factors(batches), self._rounds(batches)
        turns = _turns(pairs)
        kept = list(zip(state.left, state.right, strict=True))

        def project(turn: Sequence[int], matrices: list[Array], kept: _Pairs) -> tuple:
            basis = orthonormal.orthonormal(_sides(kept, _other(turn)))
            fresh = [
                low_rank.right_of(matrix, base) if side else low_rank.left_of(matrix, base)
                for matrix, base, side in zip(matrices, basis, turn, strict=True)
            ]
            return packing.pack(room, basis), packing.pack(room, fresh)

        def finish(turn: Sequence[int], basis: Stacks, means: Stacks, own: Stacks, kept: _Pairs):
            basis = packing.unpack(basis, _sides(pairs, _other(turn)))
            means, own = (packing.unpack(x, _sides(pairs, turn)) for x in (means, own))
            fresh = orthonormal.refreshed(means, _sides(kept, turn))
            found = (
                map(_pair, turn, means, basis),
                map(_pair, turn, own, basis),
                map(_pair, turn, fresh, _sides(kept, _other(turn))),
            )
            # In the other turn, it is the other one of a pair that differs between workers.
            return tuple([axes.alike(*pair) for pair in one_of] for one_of in found)

        now = state.turn == 0
        basis, fresh = lax.cond(
            now, *(functools.partial(project, turn) for turn in turns), matrices, kept
        )
        means, own, one = mean(0, fresh)
        means, own, kept = lax.cond(
            now, *(functools.partial(finish, turn) for turn in turns), basis, means, own, kept
        )
        left, right = zip(*kept, strict=True)
        return means, own, PowerState(left, right, 1 - state.turn, (one,))


def _factors(batches: Batches) -> _Pairs:
    """Shapes and dtypes of the left and the right factors of each batch."""
    return [batch.codec.factors(batch.like) for batch in batches]


def _products(batches: Batches, pairs: _Pairs) -> Stacks:
    return tuple(
        low_rank.product(left, right, batch.like)
        for batch, (left, right) in zip(batches, pairs, strict=True)
    )


def _turns(pairs: _Pairs) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which factor of each batch is renewed in each of two turns: 0 for the left, 1 for the right.

    The largest batches first, each begins with the factor that makes up for those before.
    """
    excess = [left.size - right.size for left, right in pairs]
    balance, first = 0, [0] * len(pairs)
    for number in sorted(range(len(pairs)), key=lambda i: -abs(excess[i])):
        first[number] = int((balance > 0) == (excess[number] > 0))
        balance += excess[number] * (1 - 2 * first[number])
    return tuple(first), _other(first)


def _other(turn: Sequence[int]) -> tuple[int, ...]:
    return tuple(1 - side for side in turn)


def _sides(pairs: _Pairs, turn: Sequence[int]) -> list[Any]:
    return [pair[side] for pair, side in zip(pairs, turn, strict=True)]


def _pair(side: int, factor: Any, other: Any) -> tuple[Any, Any]:
    """Left and right, where `factor` is the one on this side."""
    return (other, factor) if side else (factor, other)
