"""The interface of a reducer, which computes the mean over all workers' links."""

import dataclasses
from fractions import Fraction
from typing import Any, NamedTuple

from jaxcomp.base import interface
from jaxcomp.base.interface import Interface
from jaxcomp.base.leg import Leg, Outcome
from jaxcomp.types import Array, PyTree, Stacks


class Costs(NamedTuple):
    """The cost of the compressed leaves of a plan to one device.

    Attributes:
        link_bytes: the bytes that the device sends over its link, those of agreements included.
        efforts: pairs of a link or reducer and its `theory.cost.Effort`, from which `plan`
            forecasts times; None if they are not known.
        payload_bytes: the payload bytes of each batch; None for those of the codecs.
    """

    link_bytes: Fraction | int
    efforts: tuple[tuple[Any, Any], ...] | None = None
    payload_bytes: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True)
class ReducerFacts:
    """Facts that a reducer declares, for transforms, plans and gates.

    Attributes:
        splits: whether a device has only a slice of the mean before the last leg, not all of it.
        same_on_all: whether every worker gets the same result. If not, the result and a receiver's
            mirror are this worker's own, and `compressed_mean`, which moves replicated parameters,
            refuses the reducer.
        excludes: whether non-finite messages are left out of the mean, so that a worker with one
            must keep its own memory as it was.
        over: "workers" for the mean over all workers, "senders" for the mean over the workers that
            sent an element.
        composes: whether it may be the slow level of another reducer.
        collectives: the maximum number of collectives that the payload is split into each way; None
            for a number that depends on the size.
        delay: seconds that a message takes one way; None for what is assumed.
        dtype: the dtype in which dense leaves are sent; None for their own.
        tiers: a dense reducer over the last axis and a reducer over the other axes, of which this
            one consists; None for a reducer of one level.
        phases: pairs of a first step and the reducer from that step on, if it changes with time.
        for_small_leaves: advice on compressing small leaves too, for messages.
    """

    splits: bool = False
    same_on_all: bool = True
    excludes: bool = False
    over: str = "workers"
    composes: bool = True
    collectives: int | None = 1
    delay: float | None = None
    dtype: str | None = None
    tiers: "tuple[Any, Any] | None" = None
    phases: "tuple[tuple[int, Any], ...]" = ()
    for_small_leaves: str = "jaxcomp.Policy(codec, min_size=0, min_ndim=0) compresses everything"

    @classmethod
    def of(cls, route: tuple[Leg, ...]) -> "ReducerFacts":
        """The facts of a route, which are those of its first leg."""
        if not route:
            return cls()
        move, combine = route[0].move, route[0].combine
        return cls(
            splits=move.splits,
            same_on_all=move.same_on_all,
            excludes=combine.excludes,
            over=combine.over,
            composes=move.same_on_all and not combine.excludes,
            collectives=move.collectives,
            delay=move.delay,
        )


class Reducer(Interface, abstract=True):
    """Computes the mean over all workers' links.

    A reducer is data: its `route` has the legs, which `exchange.legs` runs. Of a route of two legs,
    the first brings each device its part of the mean, and the second sends every part to every
    device. Legs see only the compressed leaves, as one `[buckets, size]` array for each batch of
    the `exchange.plan.Plan`.

    A reducer that is no sequence of legs has no route, and defines `uplink`, `init`, `collect` and
    `costs`.

    Attributes:
        route: the legs, in their order.
        uplink: the `Link` from the workers, or None if every leaf is sent dense.
        facts: what the reducer declares about itself.
    """

    route: tuple[Leg, ...] = ()

    def __init_subclass__(cls, *, abstract: bool = False, **rest: Any):
        super().__init_subclass__(abstract=abstract, **rest)
        own = [name for name in ("init", "collect", "costs") if name in vars(cls)]
        # Phases are facts, and have routes of their own.
        coded = "uplink" in vars(cls) and ({"collect", "costs"} <= {*own} or "facts" in vars(cls))
        if abstract or (cls.route == () and coded):
            return
        if cls.route == ():
            raise TypeError(
                f"{cls.__name__} must have a `route`, or define `uplink`, `collect` and `costs`"
            )
        if own:
            raise TypeError(
                f"{cls.__name__} must not define {own[0]} beside a `route`, whose legs run in its "
                "place: define a combination or a move, or `route = ()`"
            )

    @interface.derived
    def uplink(self) -> Any:
        """The link of the first leg."""
        return self.route[0].link if self.route else None

    @interface.derived
    def facts(self) -> ReducerFacts:
        """The facts of the legs."""
        return ReducerFacts.of(self.route)

    def init(self, plan: Any) -> PyTree:
        """The state before the first step of a reducer without a route; `()` for none."""
        del plan
        return ()

    def collect(
        self, plan: Any, key: Array, message: Stacks, state: PyTree, weight: Array | None = None
    ) -> Outcome:
        """Computes the mean of all messages, without a route."""
        raise NotImplementedError(f"{type(self).__name__} has a route: legs.collect runs it")

    def costs(self, plan: Any) -> Costs:
        """The bytes and efforts of the compressed leaves, without a route.

        What follows from them, as `plan.batch_bytes` and `plan.link_bytes` do, is not known here.
        """
        raise NotImplementedError(f"{type(self).__name__} has a route: `plan.costs` has its costs")


class WrappedReducer(Reducer, abstract=True):
    """A reducer around another one, `reducer`; it forwards every hook that it does not define."""

    reducer: Reducer


interface.forward(WrappedReducer, "reducer", interface.hooks(Reducer))
