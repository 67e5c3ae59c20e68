"""Two tiers of links: a dense mean over fast links, a compressed mean over slow ones."""

import dataclasses
from typing import Any, cast

from jaxcomp.base import Codec, Reducer, ReducerFacts, WrappedReducer
from jaxcomp.feedback import Link
from jaxcomp.layout.policy import Policy
from jaxcomp.reducers.dense import Dense
from jaxcomp.reducers.gather import Gather


@dataclasses.dataclass(frozen=True)
class Hierarchical(WrappedReducer):
    """A dense reduce-scatter over the fast axis, a compressed mean over the slow axes, a gather.

    Each of the `n` devices on the fast axis averages `1/n` of the vector, reduces this slice over
    the slow axes with the outer reducer, and sends the result to the others on the fast axis. A
    device sends `1/n` of the outer reducer's bytes over its slow link, and stores `1/n` of its
    links' memory.

    Args:
        inner: `Dense()`, or `Dense("bfloat16")` to send bfloat16 over the fast links.
        outer: the reducer over the slow axes; a codec, policy or link means `Gather` of it.

    `axis_name` of `compressed_mean` is a tuple that ends with the fast axis, as in
    `("dcn", "ici")`, and `workers` has one number for each axis.

    Raises:
        ValueError: for another inner reducer, or an outer reducer without links; on use, for fewer
            than two axes.

    Example:
        >>> import jax.numpy as jnp, jaxcomp
        >>> codec = jaxcomp.qsgd_inf(bits=4)
        >>> reducer = Hierarchical(jaxcomp.Dense(), jaxcomp.TwoShot(codec, codec))
        >>> like = {"w": jnp.zeros((1024, 1024))}
        >>> jaxcomp.wire_bytes(reducer, like, workers=(2, 4))  # Of which slow: 133,120.
        6424576

    Note:
        Leaves that the policy leaves dense are averaged by one all-reduce over all axes.
    """

    inner: Dense = Dense()
    outer: "Reducer | Link | Codec | Policy | None" = None

    def __post_init__(self):
        if not isinstance(self.inner, Dense):
            raise ValueError(
                "`inner` must be jaxcomp.Dense(), or jaxcomp.Dense('bfloat16'), for the fast axis, "
                f"got {self.inner!r}; the compressed reducer is `outer`"
            )
        if isinstance(self.outer, Link | Policy | Codec):
            object.__setattr__(self, "outer", Gather(self.outer))
        outer: Any = self.outer
        if not isinstance(outer, Reducer) or outer.uplink is None:
            raise ValueError(
                "`outer` must be a reducer with links, such as jaxcomp.TwoShot(codec, codec), or a "
                f"codec, got {outer!r}"
            )
        facts = outer.facts
        if facts.phases or facts.tiers is not None or not facts.composes:
            raise ValueError(
                "`outer` must be a reducer of payloads, such as jaxcomp.Gather, jaxcomp.TwoShot or "
                f"jaxcomp.Psum, got {outer!r}"
            )

        for link in (outer.uplink, *(leg.link for leg in outer.route)):
            if link.feedback.facts.mirrors:
                raise ValueError(
                    "`outer` must not use a feedback with a mirror, because devices on the fast "
                    f"axis would hold different mirrors, got {link.feedback!r}. Use "
                    "jaxcomp.Residual(), or for shifts compressed_mean(reducer, 'slow', "
                    "param_specs=PartitionSpec())"
                )

    @property
    def facts(self) -> ReducerFacts:
        outer: Any = self.outer
        advice = outer.facts.for_small_leaves
        return ReducerFacts(
            splits=True, composes=False, tiers=(self.inner, outer), for_small_leaves=advice
        )

    @property
    def reducer(self) -> Reducer:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The outer reducer, whose links are those of this one."""
        return cast(Reducer, self.outer)
