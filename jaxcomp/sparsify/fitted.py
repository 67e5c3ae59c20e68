"""SIDCo: a threshold from a distribution fitted to the magnitudes, refined in stages."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float32, UInt32

from jaxcomp import checks
from jaxcomp.backend.xla import block_fma
from jaxcomp.numerics import exact
from jaxcomp.numerics.segments import Segments
from jaxcomp.sparsify import tails
from jaxcomp.sparsify.choices import Choice, Chosen, as_many_as_fit, share
from jaxcomp.sparsify.competitors import Leaves, Parts, PerPart, Row
from jaxcomp.sparsify.logarithm import log2
from jaxcomp.types import Array

_PART = 512
_LEAF_PART = 640
"""`_PART` where leaves share a bucket, whose wide rows are multiples of it."""

_SAMPLE = 2**21
"""Largest bucket that is fitted as a whole; of a longer one every second, third, … part."""

_PERIOD = 5
"""Steps over which the sent share is averaged before the number of stages may change."""

_TOLERANCE = math.log(1.2)
"""Accepted difference of the share from its target, as a logarithm."""

_GAIN = 0.7
"""Damping of the correction: the share may answer twice as much, and has noise."""

_BOUND = math.log(4)
"""Largest correction of the target share, as a logarithm."""


class Stages(NamedTuple):
    """The number of stages of each bucket, or leaf, and the errors of numbers tried before.

    The error of a number of stages is the natural logarithm of found over target, without any
    correction of the target.

    Attributes:
        number: the current number of stages.
        aim: the logarithm of the target over the corrected target.
        best: the number with the smallest error.
        needs: the error of `best`.
        last: the absolute error of the previous number.
        way: whether the number was last raised (1) or lowered (-1).
        tried: one bit for each number that was tried.
        ratio: the sum of found over target since the last change.
        steps: the number of steps in `ratio`.
    """

    number: PerPart
    aim: Float32[Array, "n parts"]
    best: PerPart
    needs: Float32[Array, "n parts"]
    last: Float32[Array, "n parts"]
    way: PerPart
    tried: PerPart
    ratio: Float32[Array, "n parts"]
    steps: PerPart


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted(Choice, public=("most", "threshold")):
    """All `|x|` above a threshold, computed from a fitted distribution for a given fraction.

    The distribution is fitted to all magnitudes for a fraction of `first`, then in each further
    stage to the excess over the threshold, for an equal fraction of the rest. Zeros are excluded.

    Args:
        fraction: the fraction of elements to send, in (0, 1].
        law: "exponential", "pareto" (generalised), "gamma" or "gamma_approximate"; after the first
            stage, the gammas continue with "pareto".
        stages: the number of stages; None adapts it for each bucket to the number of elements that
            exceeded the threshold in earlier steps, and corrects the target fraction if that is not
            enough.
        first: the fraction of the first of several stages.
        slack: the capacity of a bucket, as a multiple of the fraction.

    Raises:
        ValueError: for another `law`, or numbers out of range.
    """

    fraction: int | float
    law: str = "exponential"
    stages: int | None = None
    first: float = 0.25
    slack: float = 1.3
    fills = False
    homogeneous = True

    def __post_init__(self):
        checks.fraction(self.fraction)
        checks.choice("law", self.law, tuple(tails.LAWS))
        if self.stages is not None:
            checks.integer("stages", self.stages, 1, 30)
        checks.number("first", self.first, 0.01, 0.99)
        checks.number("slack", self.slack, 1.0)

    @property
    def most(self) -> int:
        """The largest number of stages: `⌈log₂(1/fraction)⌉`."""
        return max(1, math.ceil(math.log2(1 / self.fraction)))

    def room(self, size: int) -> int:
        return share(min(1.0, self.slack * self.fraction), size)

    def init(self, buckets: int, parts: int) -> Any:
        if self.stages is not None:
            return ()
        start = min(2, self.most)

        def full(value, dtype=jnp.int32):
            return jnp.full((buckets, parts), value, dtype)

        worst = full(jnp.finfo(jnp.float32).max, jnp.float32)
        zeros, none = full(0, jnp.float32), full(0)
        return Stages(full(start), zeros, full(start), worst, worst, full(1), none, zeros, none)

    def choose(self, x: Array, start: UInt32[Array, "n parts"], state: Any, parts: Parts) -> Chosen:
        targets = tuple(share(self.fraction, size) for size in parts.sizes)
        level = self.threshold(x, *(() if state == () else (state.number, state.aim)), parts=parts)
        low = jnp.maximum(lax.bitcast_convert_type(level, jnp.int32), 1)
        hits = parts.reach(x, low)
        found = parts.ones(hits)
        none = found == 0

        def largest(x: Array) -> Array:  # A fit to few elements may give a threshold above all.
            most = jnp.where(none, jnp.maximum(parts.largest(x), 1), low)
            return parts.reach(x, most)

        hits = lax.cond(jnp.any(none), largest, lambda _: hits, x)
        places, number = as_many_as_fit(x, hits, self._rooms(parts), start, parts)
        if state != ():
            each = jnp.asarray([[1 / target for target in targets]], jnp.float32)
            state = self._adapt(state, block_fma(found.astype(jnp.float32) * each))
        return Chosen(places, number, state)

    def threshold(
        self,
        x: Array,
        stages: PerPart | None = None,
        aim: Float32[Array, "n parts"] | None = None,
        parts: Parts | None = None,
    ) -> Float32[Array, "n parts"]:
        """The threshold of each bucket, or leaf, with this many stages (None for the fixed number),
        for `exp(−aim)` times the share.
        """
        parts = Row(x.shape[1]) if parts is None else parts
        a, pieces, seen = _sample(x, parts)
        initial, further = tails.LAWS[self.law]
        found = tails.moments(a, pieces, log=self.law.startswith("gamma"))
        # The share of all elements, as a share of the non-zero ones.
        wanted = [math.log(size / share(self.fraction, size)) for size in parts.sizes]
        logs = jnp.asarray([math.log2(size) for size in seen], jnp.float32)[None]
        zeros = (logs - log2(jnp.maximum(found.number, 1))) * jnp.float32(math.log(2))
        nats = jnp.maximum(jnp.asarray(wanted, jnp.float32)[None] - block_fma(zeros), 0)
        most = self.most if self.stages is None else self.stages
        number = jnp.full(nats.shape, most, jnp.int32) if stages is None else stages
        begin = -math.log(self.first)
        several = (number > 1) & (nats > begin)
        # The aim does not change whether there are several stages: the share would jump.
        nats = jnp.maximum(nats + (0 if aim is None else aim), jnp.where(several, begin, 0))
        level = initial(found, jnp.where(several, begin, nats)) * found.unit
        each = (nats - jnp.float32(begin)) * exact.reciprocal(
            jnp.maximum(number - 1, 1).astype(jnp.float32)
        )

        def stage(index: Any, level: Array) -> Array:
            y = lax.optimization_barrier((a, level))[0] - pieces.spread(level)[..., None]
            rest = tails.moments(y, pieces)
            raised = level + block_fma(further(rest, each) * rest.unit)
            return jnp.where(several & (index < number) & (rest.number > 0), raised, level)

        level = lax.fori_loop(1, jnp.max(number), stage, level) if most > 1 else level
        # A non-finite level keeps non-finite elements only.
        return jnp.where(jnp.isfinite(level), level, jnp.inf)

    def _adapt(self, state: Stages, ratio: Float32[Array, "n parts"]) -> Stages:
        """The next number of stages: a search in one direction until the error grows, then in the
        other, then back to the best number, whose target is corrected.
        """
        total, steps = state.ratio + ratio, state.steps + 1
        due = steps >= _PERIOD
        mean = jnp.maximum(total * jnp.float32(1 / _PERIOD), 2.0**-20)
        off = block_fma(log2(mean) * jnp.float32(math.log(2)))
        needs = state.aim + off
        away, error, smallest = jnp.abs(off), jnp.abs(needs), jnp.abs(state.needs)
        tried = state.tried | (1 << state.number)
        better = error < smallest
        # The best number is reset if its error has grown.
        fresh = (state.number == state.best) & (away > smallest + _TOLERANCE)
        best = jnp.where(better | fresh, state.number, state.best)
        least = jnp.where(better | fresh, needs, state.needs)
        tried = jnp.where(fresh, 1 << state.number, tried)
        way = jnp.where(error > state.last, -state.way, state.way)
        step = state.number + way
        inside = (step >= 1) & (step <= self.most)
        way = jnp.where(inside, way, -way)
        step = jnp.clip(state.number + way, 1, self.most)
        # After a number that was tried before, the other side of the best is next.
        step = jnp.where((tried >> step) & 1 == 1, jnp.clip(best + way, 1, self.most), step)
        step = jnp.where((tried >> step) & 1 == 1, best, step)
        number = jnp.where(away <= _TOLERANCE, state.number, step)
        aim = state.aim + block_fma(off * jnp.float32(_GAIN))
        aim = jnp.where(number == state.number, aim, jnp.where(number == best, least, 0))
        found = Stages(
            number=number,
            aim=jnp.clip(aim, -_BOUND, _BOUND),
            best=best,
            needs=least,
            last=error,
            way=way,
            tried=tried,
            ratio=jnp.zeros_like(total),
            steps=jnp.zeros_like(steps),
        )
        kept = state._replace(ratio=total, steps=steps)
        return jax.tree.map(lambda new, old: jnp.where(due, new, old), found, kept)


def _sample(
    x: Array, parts: Parts
) -> tuple[Float32[Array, "n m size"], tails.Pieces, tuple[int, ...]]:
    """Magnitudes in pieces, the pieces of each leaf, and how many of its elements are sampled.

    A long bucket is sampled in pieces at equal distances.
    """
    n, size = x.shape
    if isinstance(parts, Leaves):
        piece = min(parts.segments.width, _LEAF_PART)
        a = jnp.abs(x.astype(jnp.float32)).reshape(n, -1, piece)
        each = parts.segments.width // piece
        lengths = tuple(rows * each for rows in parts.segments.lengths)
        return a, tails.Pieces(Segments(lengths, 1)), parts.sizes
    part = min(size, _PART)
    whole = size // part
    stride = max(1, size // _SAMPLE)
    a = jnp.abs(x[:, : whole * part].astype(jnp.float32)).reshape(n, whole, part)[:, ::stride]
    if stride == 1 and whole * part < size:
        rest = jnp.abs(x[:, whole * part :].astype(jnp.float32))
        rest = jnp.pad(rest, ((0, 0), (0, part - rest.shape[1])))[:, None]
        a = jnp.concatenate([a, rest], axis=1)
    # Without the padding.
    return a, tails.Pieces(None), (min(size, a.shape[1] * a.shape[2]),)
