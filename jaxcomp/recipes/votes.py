"""Majority votes on the sign of each element."""

import dataclasses
from typing import Any

from jaxcomp.base import Codec, WrappedReducer
from jaxcomp.codecs.sign_bits import Ballot
from jaxcomp.feedback import Link
from jaxcomp.layout.policy import Policy
from jaxcomp.reducers.two_shot import TwoShot


@dataclasses.dataclass(frozen=True)
class Vote(WrappedReducer):
    """The sign that most workers have, by one bit an element in both directions.

    `sign(Σ wᵢ · sign(gᵢ))`: every worker counts the votes on its share of the elements and tells
    the outcome. What arrives is `±1`, so the step is all in the learning rate, and at most half of
    the workers can be wrong about an element without changing it. A draw is decided at random,
    alike on all workers.

    With weights (from a gate) it is the weighted majority. Momentum belongs before the vote:
    `optax.chain(jaxcomp.per_worker(optax.trace(0.9)), jaxcomp.compressed_mean(Vote(), "data"),
    optax.sgd(1e-3))` is signum. Leaves that the policy leaves dense are averaged, not voted on:
    `Vote(jaxcomp.Policy(jaxcomp.codecs.Ballot(), min_size=0, min_ndim=0))` votes on all.

    Args:
        up: which leaves are voted on: a `Policy` of ballots.
        down: how the outcome travels: as the votes do, if it is None.

    Raises:
        ValueError: for codecs that are not ballots, or a feedback, which has nothing to go by where
            sizes do not count.

    Example:
        >>> import jax, jax.numpy as jnp, jaxcomp
        >>> policy = jaxcomp.Policy(jaxcomp.codecs.Ballot(), min_size=0)
        >>> tx = jaxcomp.compressed_mean(Vote(policy), "data")
        >>> grads = jnp.array([[[3.0, -1.0]], [[-1.0, -1.0]], [[0.1, 5.0]]])
        >>> vote = lambda g: tx.update(g, tx.init(g))[0]
        >>> jax.vmap(vote, axis_name="data")(grads)[0]
        Array([[ 1., -1.]], dtype=float32)

    References:
        Bernstein et al., `signSGD with majority vote is communication efficient and fault tolerant
        <https://arxiv.org/abs/1810.05291>`_, 2019.

    Note:
        The paper's server is every worker here, for a share of the elements. An element of which a
        worker's gradient is zero, or of which the votes are even, is drawn by chance, where the
        paper's sign of zero depends on the implementation. What is not finite spoils its bucket on
        all workers, so that a guard sees it.
    """

    up: "Link | Codec | Policy" = Ballot()
    down: "Link | Codec | Policy | None" = None

    def __post_init__(self):
        if self.down is None:
            given = self.up.codec if isinstance(self.up, Link) else self.up
            object.__setattr__(self, "down", Link(given))
        for link in (self.reducer.uplink, self.reducer.downlink):
            if not all(isinstance(codec, Ballot) for codec in link.policy.codecs):
                raise ValueError(
                    "`up` and `down` must be jaxcomp.codecs.Ballot(), or a Policy of it, since a "
                    f"vote is about signs, got {link.codec!r}; TwoShot takes the mean by any codec"
                )
            if link.feedback.kind != "none":
                raise ValueError(
                    "`up` and `down` must have no feedback, since a ballot has no size, got "
                    f"{link.feedback!r}; jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual()) has one"
                )

    @property
    def reducer(self) -> TwoShot:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A two-shot mean of ballots, whose downlink sends the sign of the mean."""
        down: Any = self.down
        return TwoShot(self.up, down)
