"""Power iteration: the workers jointly compute a low-rank approximation of their mean."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp import checks, feedback as feedback_
from jaxcomp.backend import axes
from jaxcomp.base import Codec, Costs, Feedback, Outcome, Reducer, ReducerFacts
from jaxcomp.codecs import low_rank
from jaxcomp.codecs.low_rank import LowRank
from jaxcomp.exchange import legs, packing
from jaxcomp.exchange.plan import Plan
from jaxcomp.feedback import Link, Residual
from jaxcomp.layout import policy as policy_, trees
from jaxcomp.layout.policy import Policy, Rule
from jaxcomp.numerics import noise, orthonormal
from jaxcomp.reducers.dense import Dense
from jaxcomp.reducers.gather import Gather
from jaxcomp.theory import cost
from jaxcomp.types import Array, Batches, PyTree, Stacks

_Pairs: TypeAlias = list[tuple[Any, Any]]
"""The left and the right factors of each batch."""

_Mean: TypeAlias = Callable[[int, Stacks], tuple[Stacks, Stacks, PyTree]]
"""A round's number and vectors ↦ their mean, this worker's as they arrived, the round's state."""


class PowerState(NamedTuple):
    """The factors for the next step; the same on all workers except for the codecs' memory.

    Attributes:
        left: `[n, rank, rows]` for each batch, or `()` if they are not kept from step to step.
        right: `[n, rank, cols]` for each batch.
        turn: 0 or 1, which selects the factors that the next step updates; `()` for always both.
        rounds: the state of each exchange.
    """

    left: tuple[Array, ...]
    right: tuple[Array, ...]
    turn: Any
    rounds: tuple[PyTree, ...]


@dataclasses.dataclass(frozen=True)
class PowerIteration(Reducer):
    """PowerSGD: a low-rank approximation of the mean of the workers' matrices.

    `P = orth(Σ Mᵢ Q / n)`, `Q = Σ Mᵢᵀ P / n`, and the mean is `P Qᵀ`. The next step starts from
    this `Q`, so that over the steps the iteration converges to the leading singular vectors. Each
    sum is one all-reduce for the whole model, whose bytes do not grow with the number of workers.
    Each worker's residual keeps the error of the projection, `Mᵢ − P Pᵀ Mᵢ`.

    Leaves of one shape are one batch of matrices. `LowRank` chooses the matrix shape of a leaf, and
    leaves it dense if its factors would save too little.

    Args:
        rank: the columns of a factor.
        min_ratio: the smallest compression ratio, in elements, at which a leaf is compressed; other
            leaves stay dense. Factors are 32-bit floats, whatever the dtype of the leaf.
        alternate: True updates only one of the two factors in each step, in turns, with a single
            all-reduce: `P = Σ Mᵢ Q / n` with the orthonormalised `Q` of the previous step, and the
            reverse in the next step. Some batches start with `P`, others with `Q`, to balance the
            bytes of the steps; the all-reduce has the size of the larger one.
        factors: the wire format of the factors: None for 32-bit floats; "bfloat16" to halve them;
            or a codec with buckets, whose payloads are gathered, for few workers.
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
        A worker's residual is the error of its own projection, as in the paper's Algorithm 2 and in
        the authors' `HalfRankKReducer`. Their package and `RankKReducer` use the difference from
        the received mean instead, which has the same mean over the workers. Linearly dependent
        vectors become zero in `P`; the authors add an epsilon or complete the basis. A zero in `Q`
        does not replace the previous value, so a step of zeros does no harm. Between steps `Q` is
        stored with columns of length one, which affects only rounding. Compression starts with the
        first step; the authors' code can send the first steps dense. All workers compute `P` from
        the same sum: on devices that round differently, replicas would differ in the last bits. A
        mean of bfloat16 is rounded to bfloat16, and no residual includes that error. XLA chooses
        the order of sums in matrix products by their shapes, so under `vmap` the last bits may
        differ from other mappings. Products with factors, and their sums over the workers, are
        float32 and must be finite.
    """

    rank: int = 4
    min_ratio: int | float = 2.0
    alternate: bool = False
    factors: "str | Codec | None" = None
    rules: tuple[Rule, ...] = ()
    feedback: Feedback = Residual()
    facts = ReducerFacts(
        composes=False,
        for_small_leaves=(
            'jaxcomp.PowerIteration(rules=(jaxcomp.Rule("*", jaxcomp.codecs.LowRank(rank=1, '
            "min_ratio=1)),)) compresses every matrix whose factors are smaller"
        ),
    )

    def __post_init__(self):
        if not isinstance(self.alternate, bool):
            raise ValueError(f"`alternate` must be True or False, got {self.alternate!r}")
        if not isinstance(self.factors, Codec) or isinstance(self.factors, type):
            checks.choice("factors", self.factors, (None, "bfloat16"))
        elif self.factors.bucket_size is None:
            raise ValueError(
                "`factors` must be a codec with buckets, since it encodes the factors of all "
                f"leaves together, got {self.factors!r}; give it a bucket_size"
            )
        for codec in self.uplink.policy.codecs:
            if not isinstance(codec, LowRank):
                raise ValueError(
                    "`rules` must give leaves a jaxcomp.codecs.LowRank, or None for dense, got "
                    f"{codec!r}; other codecs need another reducer, such as jaxcomp.Gather"
                )

    @functools.cached_property
    def uplink(self) -> Link:
        """The link with the policy of matrix shapes and the workers' memory."""
        codec = LowRank(rank=self.rank, min_ratio=self.min_ratio)
        return Link(Policy(codec, rules=self.rules), self.feedback)

    def init(self, plan: Plan) -> PowerState:
        pairs = _factors(plan.batches)
        return PowerState(
            left=tuple(low_rank.start(left) for left, _ in pairs) if self.alternate else (),
            right=tuple(low_rank.start(right) for _, right in pairs),
            turn=jnp.zeros((), jnp.int32) if self.alternate else (),
            rounds=tuple(legs.init(inner) for inner in self._plans(plan)),
        )

    def collect(
        self,
        plan: Plan,
        key: Array,
        message: Stacks,
        state: PowerState,
        weight: Array | None = None,
    ) -> Outcome:
        plans, batches = self._plans(plan), plan.batches

        def mean(number: int, vectors: Stacks) -> tuple[Stacks, Stacks, PyTree]:
            round_key = noise.fold(key, number)
            return _mean(plans[number], round_key, vectors, state.rounds[number], weight)

        share = 1.0 if weight is None else lax.pmean(weight, plan.axis)
        if not batches:
            return Outcome((), (), share, state)
        matrices = [b.codec.matrices(x) for b, x in zip(batches, message, strict=True)]
        step = self._in_turns if self.alternate else self._together
        means, own, state = step(batches, matrices, state, mean)
        return Outcome(_products(batches, means), _products(batches, own), share, state)

    def costs(self, plan: Plan) -> Costs:
        """One or two exchanges of factors; each batch's bytes of the factors that it sends."""
        plans = self._plans(plan)
        sizes = [left.size + right.size for left, right in _factors(plan.batches)]
        total = sum(inner.payload_bytes for inner in plans)
        rounds = sum(e.rounds for inner in plans for _, e in inner.costs.efforts or ())
        return Costs(
            link_bytes=sum(inner.link_bytes for inner in plans),
            efforts=((self, cost.Effort(rounds, encodes=1)),),
            payload_bytes=tuple(total * size / sum(sizes) for size in sizes),
        )

    def _plans(self, plan: Plan) -> tuple[Plan, ...]:
        """The plan of each exchange of factors."""
        return tuple(
            Plan.of(self._exchange, vectors, plan.axis_name, plan.sizes)
            for vectors in self._rounds(plan.batches)
        )

    @functools.cached_property
    def _exchange(self) -> Reducer:
        """The reducer that averages the vectors of an exchange."""
        if self.factors is None or isinstance(self.factors, str):
            return Dense(self.factors)
        # This codec's error is part of `sent`, so the feedback of the power iteration includes it.
        return Gather(Link(policy_.everywhere(self.factors), feedback_.default(self.factors)))

    def _rounds(self, batches: Batches) -> tuple[tuple[jax.ShapeDtypeStruct, ...], ...]:
        """The vectors of each exchange."""
        pairs = _factors(batches)
        if not self.alternate:
            return tuple(packing.rooms([half]) for half in zip(*pairs, strict=True))
        turns = [_sides(pairs, turn) for turn in _turns(pairs)]
        return (packing.rooms(turns),) if pairs else ()

    def _together(
        self, batches: Batches, matrices: list[Array], state: PowerState, mean: _Mean
    ) -> tuple[_Pairs, _Pairs, PowerState]:
        """Updates both factors in one step, with two exchanges."""
        first, second = self._rounds(batches)
        lefts = list(map(low_rank.left_of, matrices, state.right))
        means, _, one = mean(0, packing.pack(first, lefts))
        basis = orthonormal.orthonormal(packing.unpack(means, lefts))
        rights = list(map(low_rank.right_of, matrices, basis))
        means, own, two = mean(1, packing.pack(second, rights))
        means, own = packing.unpack(means, rights), packing.unpack(own, rights)
        right = tuple(orthonormal.refresh(means, state.right))
        after = state._replace(right=right, rounds=(one, two))
        return list(zip(basis, means, strict=True)), list(zip(basis, own, strict=True)), after

    def _in_turns(
        self, batches: Batches, matrices: list[Array], state: PowerState, mean: _Mean
    ) -> tuple[_Pairs, _Pairs, PowerState]:
        """Updates one factor of each matrix in a step, with one exchange of fixed size."""
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
            fresh = orthonormal.refresh(means, _sides(kept, turn))
            found = (
                map(_pair, turn, means, basis),
                map(_pair, turn, own, basis),
                map(_pair, turn, fresh, _sides(kept, _other(turn))),
            )
            # In the other turn, the other factor of a pair varies over the workers.
            return tuple([axes.match_vma(*pair) for pair in one_of] for one_of in found)

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


def _mean(
    plan: Plan, key: Array, vectors: Stacks, state: PyTree, weight: Array | None
) -> tuple[Stacks, Stacks, PyTree]:
    """The mean of all workers' vectors, this worker's decoded vectors, and the next state."""
    message, dense = trees.stacks(plan.layout, vectors)
    got = legs.collect(plan, key, message, state, weight)
    part, after = legs.spread(plan, key, got.value, got.state)
    means = trees.assemble(plan.layout, part, plan.dense_mean(dense, weight))
    narrow = [x.astype(plan.dense_dtype or x.dtype) for x in dense]
    dense = [x.astype(like.dtype) for x, like in zip(narrow, dense, strict=True)]
    return means, trees.assemble(plan.layout, got.sent, dense), after


def _factors(batches: Batches) -> _Pairs:
    """Shapes and dtypes of the left and the right factors of each batch."""
    return [batch.codec.factors(batch.like) for batch in batches]


def _products(batches: Batches, pairs: _Pairs) -> Stacks:
    return tuple(
        low_rank.product(left, right, batch.like)
        for batch, (left, right) in zip(batches, pairs, strict=True)
    )


def _turns(pairs: _Pairs) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The factor of each batch to update in each of two turns: 0 for the left, 1 for the right.

    Starting from the largest batch, each takes the factor that best balances the two turns.
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
    """The pair (left, right) in which `factor` is on this side."""
    return (other, factor) if side else (factor, other)
