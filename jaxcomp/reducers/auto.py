"""The default reducer, which picks the reducer that moves the fewest bytes."""

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax

from jaxcomp import feedback as feedback_
from jaxcomp.backend import axes
from jaxcomp.base import Codec, Collected, Reducer
from jaxcomp.feedback import Link, Shift
from jaxcomp.layout.policy import Policy
from jaxcomp.reducers import accounting, dense as dense_
from jaxcomp.reducers.gather import Gather
from jaxcomp.reducers.psum import Psum
from jaxcomp.reducers.two_shot import TwoShot, TwoShotState
from jaxcomp.theory import cost
from jaxcomp.types import Array, AxisName, Batches, PyTree, Stacks
from jaxcomp.wire import cost as wire_cost

_NOTICED = 2**16
"""Bytes of compressed leaves below which it is nobody's concern how they travel."""


class Offer(NamedTuple):
    """A candidate reducer, and the bytes that a device would send for the compressed leaves."""

    reducer: Any
    bytes: Fraction | int


@dataclasses.dataclass(frozen=True)
class Auto(Reducer, public=("picked", "priced", "reducers", "two_shot")):
    """Picks `Gather`, `TwoShot` or `Psum`, whichever moves the fewest bytes for these workers.

    `Gather` sends `n − 1` payloads, `TwoShot` twice `(n − 1)/n` of a payload: with the same codec
    on the downlink, `TwoShot` moves fewer bytes from three workers on. `TwoShot` rounds twice, and
    requires a codec with buckets, since the encoding of a whole leaf would depend on the number of
    workers, and a feedback that a downlink can have. A linear codec uses `Psum` instead, which
    rounds once; a codec with integers on a shared grid uses `Psum` if it moves fewer bytes. Among
    reducers of equal bytes, it picks one that rounds once.

    The downlink has the default feedback of its codec: none if it is unbiased, a residual if it is
    contractive, or the downlink half of EF21 if the uplink is EF21.

    Args:
        link: the link from each worker; a bare codec or policy means `Link(codec)` with its default
            feedback.

    Raises:
        ValueError: if `link` is none of these.

    Example:
        >>> import jax.numpy as jnp, jaxcomp
        >>> like = {"w": jnp.zeros((1024, 1024))}
        >>> reducer = Auto(jaxcomp.qsgd_inf(bits=4))
        >>> [type(reducer.picked(like, workers=n)).__name__ for n in (2, 3, 8)]
        ['Gather', 'TwoShot', 'TwoShot']
    """

    link: "Link | Codec | Policy"

    def __post_init__(self):
        if not isinstance(self.link, Link):
            given: Any = self.link
            if isinstance(given, Codec | Policy) and not isinstance(given, type):
                object.__setattr__(self, "link", Link(given, feedback_.default(given)))
            else:
                object.__setattr__(self, "link", Link(given))  # Raises with a helpful message.

    @property
    def uplink(self) -> Link:
        link: Any = self.link
        return link

    def picked(self, like: PyTree, workers: int) -> Reducer:
        """The reducer picked for a tree like this and this number of workers."""
        return self._pick(accounting.plan(self, like).batches, workers)

    def priced(self, batches: Batches, workers: int) -> tuple[Offer, ...]:
        """The candidates, with the bytes that a device would send for these batches."""
        return tuple(
            Offer(reducer, reducer.batches_link_bytes(batches, workers))
            for reducer in self.reducers
        )

    @property
    def reducers(self) -> tuple[Any, ...]:
        """The candidates."""
        ways: list[Any] = [Gather(self.uplink)]
        codecs, two_shot = self.uplink.policy.codecs, self.two_shot()
        if codecs and all(codec.may_sum for codec in codecs):
            with contextlib.suppress(ValueError):  # The settings do not allow it.
                ways.append(Psum(self.uplink))
        if two_shot is not None and not all(codec.linear for codec in codecs):
            ways = [two_shot] if self.splits else [*ways, two_shot]
        return tuple(ways)

    @property
    def splits(self) -> bool:
        """Whether each device holds a slice of the uplink's mirror; with a mirror, the reducer is
        always `TwoShot`.
        """
        return self.uplink.feedback.mirrors and self.two_shot() is not None

    @property
    def downlink(self) -> Link | None:
        """The downlink of `TwoShot` if it is always picked; else it depends on the workers."""
        two_shot = self.two_shot() if self.splits else None
        return None if two_shot is None else two_shot.downlink

    def resolve(self, batches: Batches, workers: tuple[int, ...]) -> Reducer:
        """The reducer that moves the fewest bytes; warns if a dense mean would move fewer."""
        offer = self._offer(batches, math.prod(workers))
        self._warn(batches, math.prod(workers), math.ceil(offer.bytes))
        return offer.reducer

    def init(self, batches: Batches, axis_name: AxisName) -> "AutoState":
        last = self.reducers[-1]
        state = last.init(batches, axis_name)
        whole = AutoState(*state) if isinstance(state, TwoShotState) else AutoState(state, (), ())
        # Outside of the mapped function the number of workers is unknown; the first step knows it.
        return self._trimmed(batches, whole, axis_name) if axes.known(axis_name) else whole

    def fitted(self, batches: Batches, state: "AutoState", axis_name: AxisName) -> "AutoState":
        """The state with the memory that the resolved reducer needs.

        Raises:
            ValueError: for a downlink's memory that was made for other workers.
        """
        resolved = self._here(batches, axis_name)
        if isinstance(resolved, TwoShot):
            return AutoState(*resolved.fitted(batches, TwoShotState(*state), axis_name))
        self._check_unused(batches, state, axis_name)
        return self._trimmed(batches, state, axis_name)

    def resolved_state(self, resolved: Reducer, state: "AutoState") -> PyTree:
        return TwoShotState(*state) if isinstance(resolved, TwoShot) else state.up

    def unresolved_state(self, resolved: Reducer, after: PyTree, state: "AutoState") -> "AutoState":
        if isinstance(resolved, TwoShot):
            return AutoState(*after)
        return state._replace(up=after)

    def part_like(self, batches: Batches, axis_name: AxisName) -> PyTree:
        return self._here(batches, axis_name).part_like(batches, axis_name)

    def collect(
        self,
        key: Array,
        batches: Batches,
        message: Stacks,
        state: PyTree,
        axis_name: AxisName,
        weight: Array | None = None,
    ) -> Collected:
        raise TypeError("jaxcomp.Auto cannot reduce: use the reducer that its `resolve` returns")

    def dense(
        self, leaves: Sequence[Array], axis_name: AxisName, weight: Array | None = None
    ) -> Sequence[Array]:
        return dense_.fused_mean(leaves, axis_name, weight)

    def efforts(self, batches: Batches, workers: int) -> tuple[tuple[Link, cost.Effort], ...]:
        """The efforts of the resolved reducer."""
        return self._pick(batches, workers).efforts(batches, workers)

    def link_bytes(self, like: PyTree, workers: int) -> int:
        """The link bytes of the resolved reducer."""
        return self.picked(like, workers).link_bytes(like, workers)

    def batches_link_bytes(self, batches: Batches, workers: int) -> Fraction | int:
        """The part of `link_bytes` for the compressed leaves."""
        return self._offer(batches, workers).bytes

    def _pick(self, batches: Batches, workers: int) -> Any:
        return self._offer(batches, workers).reducer

    def _offer(self, batches: Batches, workers: int) -> Offer:
        """The candidate of the fewest bytes; among equals, the first one."""
        return min(self.priced(batches, workers), key=lambda offer: offer.bytes)

    def _warn(self, batches: Batches, workers: int, sent: int) -> None:
        """Warns if the gathered payloads exceed the bytes of a dense mean."""
        dense = sum(math.prod(b.like.shape) * b.dtype.itemsize for b in batches)
        ring = wire_cost.ring_bytes(dense, workers)
        if dense >= _NOTICED and sent > ring:
            warnings.warn(
                f"over {workers} workers {self.uplink.codec!r} sends {sent:,} bytes a device, more "
                f"than a dense all-reduce ({ring:,}). Take fewer bits, "
                "or jaxcomp.TwoShot(link, link), whose bytes do not grow with the workers; see "
                "jaxcomp.describe(codec, params, workers).",
                stacklevel=2,
            )

    def _here(self, batches: Batches, axis_name: AxisName) -> Any:
        return self._pick(batches, axes.size(axis_name))

    def two_shot(self, *, whole: bool = False) -> TwoShot | None:
        """`TwoShot` with this link, or None if the codec or feedback does not allow it.

        Args:
            whole: allow codecs without a bucket size too.
        """
        link, codecs = self.uplink, self.uplink.policy.codecs
        if not whole and not all(codec.bucket_size for codec in codecs):
            return None
        shaped = any(codec.shaped for codec in codecs)
        if shaped or len({codec.contractive for codec in codecs}) != 1:
            return None
        feedback = link.feedback
        if feedback != Shift() or not codecs[0].contractive:
            feedback = feedback_.default(link.codec)
        return TwoShot(link, Link(link.codec, feedback))

    def _check_unused(self, batches: Batches, state: "AutoState", axis_name: AxisName) -> None:
        """Raises a `ValueError` for a downlink's memory that has been in use."""
        two_shot = self.two_shot()
        if two_shot is None:
            return
        rows = tuple(batch.like for batch in batches)
        unused = jax.tree.leaves(jax.eval_shape(lambda: two_shot.feedback.init(rows, rows)))
        for x, like in zip(jax.tree.leaves(state.memory), unused, strict=True):
            if x.shape[1] not in (0, like.shape[0]):
                raise ValueError(
                    f"`state` must be one for these {axes.size(axis_name)} workers, which have no "
                    "downlink, got a state with a downlink's residual: convert it with "
                    "jaxcomp.resize_workers"
                )

    def _trimmed(self, batches: Batches, state: "AutoState", axis_name: AxisName) -> "AutoState":
        """The state without a downlink's memory if there is no downlink."""
        if isinstance(self._here(batches, axis_name), TwoShot):
            return state
        return state._replace(memory=jax.tree.map(lambda x: x[:, :0], state.memory))


class AutoState(NamedTuple):
    """The state of the resolved reducer, in the fields of `TwoShotState`.

    Without a downlink, `memory` has no rows.

    Attributes:
        up: the state of the uplink's codecs.
        down: the state of the downlink's codecs; `()` if there never is a downlink.
        memory: the memory of the downlink's feedback.
    """

    up: PyTree
    down: PyTree
    memory: PyTree
