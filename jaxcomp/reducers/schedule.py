"""Schedules that change the reducer at given steps, within one compiled step."""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

from jaxcomp import checks
from jaxcomp.base import Reducer, ReducerFacts
from jaxcomp.exchange.phases import LAST_STEP
from jaxcomp.feedback import Link
from jaxcomp.layout.policy import Policy
from jaxcomp.reducers.gather import Gather


@dataclasses.dataclass(frozen=True)
class ReducerSchedule(Reducer, public=("reducers", "starts")):
    """Changes the reducer at given steps without recompiling, for example to warm up sparsity.

    Payloads have static shapes, so every phase is a separate program. All are compiled into one
    step, which runs the branch of its phase (under `vmap`, which only simulates, it may compute
    all branches and select one). The phases share one feedback and one state, so that no unsent
    part is lost between them.

    Args:
        phases: pairs of a phase's first step and its reducer; a link means `Gather(link)`. The
            first phase starts at 0, and the last one has no end.

    Raises:
        ValueError: if the first steps do not increase from 0, an entry is not a reducer with a
            link, or phases do not match: they need equal feedbacks, and policies that differ only
            in codec settings that do not change the buckets.

    Example:
        >>> import jaxcomp
        >>> feedback = jaxcomp.MomentumCorrection(momentum=0.9)
        >>> warmup = jaxcomp.dgc_warmup(fraction=0.001, steps_per_epoch=500)
        >>> reducer = ReducerSchedule(
        ...     tuple(
        ...         (start, jaxcomp.Link(jaxcomp.top_k(fraction=fraction), feedback))
        ...         for start, fraction in warmup
        ...     )
        ... )
        >>> reducer.starts
        (0, 500, 1000, 1500, 2000, 2500)

    Note:
        With `guard=True` in `compressed_mean`, a step whose mean is not finite is not counted, so a
        warm-up consists of steps that took effect. `describe` and `wire_bytes` show the bytes of
        the last phase, `Stats` those of the last step; `collective_bytes`, which reads the program,
        counts the phase that sends most. Dense leaves are always sent as in the last phase.
    """

    phases: tuple[tuple[int, "Reducer | Link"], ...]

    def __post_init__(self):
        if (
            not isinstance(self.phases, tuple)
            or not self.phases
            or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in self.phases)
        ):
            raise ValueError(
                "`phases` must be a tuple of pairs (start, reducer), as in ((0, early), (500, "
                f"late)), got {self.phases!r}"
            )
        pairs = tuple((start, _reducer(given)) for start, given in self.phases)
        object.__setattr__(self, "phases", pairs)
        for start in self.starts:
            checks.integer("start", start, 0, int(LAST_STEP))
        if self.starts[0] or any(
            a >= b for a, b in zip(self.starts, self.starts[1:], strict=False)
        ):
            raise ValueError(
                f"`phases` must have starts that increase from 0, as in (0, 500), got {self.starts}"
            )
        for reducer in self.reducers:
            _check_fit(reducer.uplink, self.uplink)

    @property
    def facts(self) -> ReducerFacts:
        """Each device holds a slice of the uplink's mirror in every phase, or in none."""
        every = [reducer.facts for reducer in self.reducers]
        return ReducerFacts(
            splits=all(facts.splits for facts in every),
            same_on_all=all(facts.same_on_all for facts in every),
            composes=False,
            phases=tuple(zip(self.starts, self.reducers, strict=True)),
        )

    @property
    def starts(self) -> tuple[int, ...]:
        """The step that each phase starts at."""
        return tuple(start for start, _ in self.phases)

    @property
    def reducers(self) -> tuple[Reducer, ...]:
        """The reducer of each phase."""
        return tuple(cast(Reducer, reducer) for _, reducer in self.phases)

    @property
    def uplink(self) -> Link:
        """The uplink of the last phase."""
        return self.reducers[-1].uplink


def piecewise_constant(values: Sequence[float], every: int) -> tuple[tuple[int, float], ...]:
    """Pairs of a step and the value from that step on: the next value after each `every` steps.

    Equal consecutive values become one pair, so that each is one phase of a `ReducerSchedule`.

    Args:
        values: the values in order; the last one has no end.
        every: the number of steps of each value.

    Raises:
        ValueError: if `every` is not positive.

    Example:
        >>> piecewise_constant([0.25, 0.1, 0.1, 0.01], every=100)
        ((0, 0.25), (100, 0.1), (300, 0.01))
    """
    checks.integer("every", every, 1)
    changes = [at for at, value in enumerate(values) if at == 0 or value != values[at - 1]]
    return tuple((at * every, values[at]) for at in changes)


def _reducer(given: Any) -> Any:
    if isinstance(given, Link):
        return Gather(given)
    if isinstance(given, Reducer) and given.uplink is not None:
        return given
    raise ValueError(
        "`phases` must hold links, such as jaxcomp.Link(jaxcomp.top_k(), jaxcomp.Residual()), or "
        f"reducers that have one, such as jaxcomp.Gather(link), got {given!r}"
    )


def _check_fit(link: Link, last: Link) -> None:
    shaped = [codec for codec in link.policy.codecs if codec.facts.shaped]
    if shaped:
        raise ValueError(
            "`phases` must have codecs that are the same for leaves of every shape, so that phases "
            f"share buckets, got {shaped[0]!r}"
        )
    if link.feedback != last.feedback:
        raise ValueError(
            "`phases` must have equal feedbacks, since each takes over the memory, got "
            f"{link.feedback!r} and {last.feedback!r}"
        )
    if _buckets(link.policy) != _buckets(last.policy):
        raise ValueError(
            "`phases` must have policies with the same rules, and codecs of equal bucket_size for "
            f"the same leaves, got {link.policy!r} and {last.policy!r}"
        )
    pairs = set(zip(last.policy.codecs, link.policy.codecs, strict=True))
    if len(pairs) > len(set(last.policy.codecs)):
        raise ValueError(
            "`phases` must give leaves that share a codec in the last phase one codec in every "
            f"phase, since they share buckets, got {link.policy!r} before {last.policy!r}"
        )


def _buckets(policy: Policy) -> tuple:
    """The settings of a policy that determine which leaves share buckets, and the bucket sizes."""

    def size(codec):
        return None if codec is None else (codec.bucket_size,)

    rules = [(r.path, r.min_size, r.min_ndim, size(r.codec)) for r in policy.rules]
    return policy.min_size, policy.min_ndim, size(policy.codec), tuple(rules)
