"""The reducer that is taken where none is named: what moves fewest bytes for these workers."""

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
from jaxcomp.layout import trees
from jaxcomp.layout.policy import Policy
from jaxcomp.reducers import dense as dense_
from jaxcomp.reducers.gather import Gather
from jaxcomp.reducers.psum import Psum
from jaxcomp.reducers.two_shot import TwoShot, TwoShotState
from jaxcomp.theory import cost
from jaxcomp.types import Array, AxisName, Batches, PyTree, Stacks
from jaxcomp.wire import cost as wire_cost

_NOTICED = 2**16
"""Bytes of compressed leaves below which it is nobody's concern how they travel."""


class Offer(NamedTuple):
    """One way to reduce, and what a device would send for the compressed leaves."""

    reducer: Any
    bytes: Fraction | int


@dataclasses.dataclass(frozen=True)
class Auto(Reducer, public=("picked", "priced", "reducers", "two_shot")):
    """`Gather`, or for many workers `TwoShot` with the same codec down: what moves fewer bytes.

    `Gather` sends `n − 1` payloads, `TwoShot` two shares of `(n − 1)/n`: with equal codecs, the
    second pays from three workers on. It rounds twice, and asks two things of the codec: buckets,
    since a leaf that is encoded whole would change its meaning with the number of workers, and no
    memory but what a downlink can have. A linear codec is summed on the way instead (`Psum`), where
    nothing is rounded twice; so is one of integers on a shared grid, if that moves fewer bytes. Of
    equals, the one that rounds once is taken.

    The downlink has the feedback that its codec's error class asks for: none for unbiased ones, a
    residual for contractive ones, or the other half of EF21 where the uplink is EF21.

    Args:
        link: the link from each worker; a bare codec or policy is `Link(codec)` with the feedback
            of its error class.

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
                object.__setattr__(self, "link", Link(given))  # Which says what is wrong.

    @property
    def uplink(self) -> Link:
        link: Any = self.link
        return link

    def picked(self, like: PyTree, workers: int) -> Reducer:
        """What is taken for a tree like this and so many workers."""
        return self._pick(trees.layout(self.uplink.policy, like).batches, workers)

    def priced(self, batches: Batches, workers: int) -> tuple[Offer, ...]:
        """What may be taken, and what a device would send for these batches."""
        return tuple(
            Offer(reducer, reducer.batches_link_bytes(batches, workers))
            for reducer in self.reducers
        )

    @property
    def reducers(self) -> tuple[Any, ...]:
        """What may be taken."""
        ways: list[Any] = [Gather(self.uplink)]
        codecs, two_shot = self.uplink.policy.codecs, self.two_shot()
        if codecs and all(codec.may_sum for codec in codecs):
            with contextlib.suppress(ValueError):  # Not by these settings.
                ways.append(Psum(self.uplink))
        if two_shot is not None and not all(codec.linear for codec in codecs):
            ways = [two_shot] if self.splits else [*ways, two_shot]
        return tuple(ways)

    @property
    def splits(self) -> bool:
        """Whether devices share the uplink's mirror: with one, it is always TwoShot."""
        return self.uplink.feedback.mirrors and self.two_shot() is not None

    @property
    def downlink(self) -> Link | None:
        """The downlink of `TwoShot` where it is always taken; otherwise the workers decide."""
        two_shot = self.two_shot() if self.splits else None
        return None if two_shot is None else two_shot.downlink

    def resolve(self, batches: Batches, workers: tuple[int, ...]) -> Reducer:
        """The reducer that moves fewest bytes; warns if a dense mean would move fewer."""
        offer = self._offer(batches, math.prod(workers))
        self._warn(batches, math.prod(workers), math.ceil(offer.bytes))
        return offer.reducer

    def init(self, batches: Batches, axis_name: AxisName) -> "AutoState":
        last = self.reducers[-1]
        state = last.init(batches, axis_name)
        whole = AutoState(*state) if isinstance(state, TwoShotState) else AutoState(state, (), ())
        # Outside of the mapped function no one knows the workers: the first step will.
        return self._trimmed(batches, whole, axis_name) if axes.known(axis_name) else whole

    def fitted(self, batches: Batches, state: "AutoState", axis_name: AxisName) -> "AutoState":
        """The state with the memory that the resolved reducer needs.

        Raises:
            ValueError: for the memory of a downlink that other workers had.
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
        raise TypeError("jaxcomp.Auto does not reduce: its `resolve` returns the reducer that does")

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
        """What of it the batches account for."""
        return self._offer(batches, workers).bytes

    def _pick(self, batches: Batches, workers: int) -> Any:
        return self._offer(batches, workers).reducer

    def _offer(self, batches: Batches, workers: int) -> Offer:
        """The offer of fewest bytes; of equals, the first one."""
        return min(self.priced(batches, workers), key=lambda offer: offer.bytes)

    def _warn(self, batches: Batches, workers: int, sent: int) -> None:
        """Warns of a codec whose gathered payloads exceed a dense mean."""
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
        """`TwoShot` with this link, or None where the codec or feedback does not allow it.

        Args:
            whole: allow it for codecs that take a leaf whole too.
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
        """Raises a `ValueError` for a downlink's memory that a step has seen."""
        two_shot = self.two_shot()
        if two_shot is None:
            return
        rows = tuple(batch.like for batch in batches)
        unused = jax.tree.leaves(jax.eval_shape(lambda: two_shot.feedback.init(rows, rows)))
        for x, like in zip(jax.tree.leaves(state.memory), unused, strict=True):
            if x.shape[1] not in (0, like.shape[0]):
                raise ValueError(
                    f"`state` must be one for these {axes.size(axis_name)} workers, who have no "
                    "downlink: it remembers shares of what a downlink has not sent yet. Move it "
                    "here with jaxcomp.resize_workers"
                )

    def _trimmed(self, batches: Batches, state: "AutoState", axis_name: AxisName) -> "AutoState":
        """The state without a downlink's memory, where there is no downlink."""
        if isinstance(self._here(batches, axis_name), TwoShot):
            return state
        return state._replace(memory=jax.tree.map(lambda x: x[:, :0], state.memory))


class AutoState(NamedTuple):
    """The state of whichever reducer is resolved, in the fields of `TwoShotState`.

    Where there is no downlink, `memory` has no rows.

    Attributes:
        up: state of the uplink's codecs.
        down: state of the downlink's; `()` if there never is one.
        memory: of the downlink's feedback.
    """

    up: PyTree
    down: PyTree
    memory: PyTree
