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
    """The majority of the workers' signs, with one bit per element in both directions.

    `sign(Σ wᵢ · sign(gᵢ))`: each worker counts the votes on its slice of the elements and sends the
    result. The result is `±1`, so the learning rate alone determines the step size. A minority of
    workers with a wrong sign does not change an element. A tie is decided at random, alike on all
    workers.

    With weights from a gate it is the weighted majority. Apply momentum before the vote:
    `optax.chain(jaxcomp.per_worker(optax.trace(0.9)), jaxcomp.compressed_mean(Vote(), "data"),
    optax.sgd(1e-3))` is signum. Dense leaves are averaged, not voted on;
    `Vote(jaxcomp.Policy(jaxcomp.codecs.Ballot(), min_size=0, min_ndim=0))` votes on all leaves.

    Args:
        up: a `Policy` of ballots, which chooses the leaves that are voted on.
        down: the codec of the result; None for that of the votes.

    Raises:
        ValueError: for codecs that are not ballots, or for a feedback, because votes have no
            magnitude from which to compute an error.

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
        Each worker is the server for a slice of the elements. The sign of a zero gradient, and the
        result of a tie, are random; in the paper the sign of zero depends on the implementation. A
        non-finite element makes its bucket non-finite on all workers, so that a guard sees it.
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
                    f"vote counts signs, got {link.codec!r}; use TwoShot for a mean with any codec"
                )
            if link.feedback.facts.memory:
                raise ValueError(
                    "`up` and `down` must have no feedback, since votes have no magnitude, got "
                    f"{link.feedback!r}; for error feedback use "
                    "jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual())"
                )

    @property
    def reducer(self) -> TwoShot:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A two-shot mean of ballots, whose downlink sends the sign of the mean."""
        down: Any = self.down
        return TwoShot(self.up, down)
