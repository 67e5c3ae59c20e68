"""A federated method: what a client does, how it sends, and what the server makes of it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax

from jaxcomp import checks
from jaxcomp.aggregates import Mean
from jaxcomp.base import Aggregate, Codec
from jaxcomp.federated.sampling import Everyone, Sampling
from jaxcomp.federated.uplink import Uplink, as_link
from jaxcomp.federated.work import LocalSteps, difference
from jaxcomp.feedback import Link, Residual
from jaxcomp.layout.policy import Policy
from jaxcomp.transforms.fragments import Fragments
from jaxcomp.types import PyTree


@dataclasses.dataclass(frozen=True)
class Method:
    """A federated method as data: the parts of a round.

    `Δᵢ = signal(φ, θᵢ)` after client i's local steps, sent over `up`;
    `φ ← φ + down(server(Σ wᵢ·Δᵢ / Σ wᵢ))`.

    Args:
        work: a client's local steps.
        up: what a client sends its update with: an `Uplink`; a codec, policy or `Link` becomes one.
        server: an optax transformation, which takes the clients' mean for a gradient. With
            `optax.sgd(1.0)` the parameters become the clients' mean.
        down: what the server sends its update with; None for the parameters as they are.
        sampling: which clients take part in a round.
        aggregate: how the messages are combined: `Mean()`, or one of `jaxcomp.aggregates` that
            bounds what a hostile client can do. A rule that needs all messages at once holds those
            of a round in memory.
        mean: over which weights the sum is divided: those of the "participants" whose messages were
            accepted, or the expected weight of "all", which is unbiased with independent sampling
            and required by a `Shift`, whose mirror is the weighted mean over all clients; or, for a
            sparsifier, element by element those of the "senders", whose messages are not zero
            there; or by the number of accepted "messages" times the mean weight of a client, so
            that messages that begin from old parameters shorten the step.
        signal: `signal(start, end)`, what a client sends of its parameters before and after.
        staleness: `p`: a client that began from parameters `a` rounds old has `(1 + a)^(-p)` times
            its weight.
        fragments: the number of parts of about equal bytes that take turns, one in each round; or a
            function from parameters, or their shapes and dtypes, to a tree of numbers, such as
            `jaxcomp.transforms.fragments.strided(4)`. Clients then go on from their own parameters,
            and so need `LocalSteps(keep=True, offsets=True)`.
        delay: how many of a round's steps a client takes after it has sent its update, at the
            parameters from which the round began: an exchange has their time.
        mix: `α`, the share of its own parameters with which a client goes on in the fragment that
            it has sent: `θ ← α θ + (1 − α) φ`; below 1.

    Raises:
        ValueError: for parts of another kind, or that do not go together.

    Example:
        >>> import jax.numpy as jnp, jaxcomp
        >>> work = LocalSteps(lambda w, x: jnp.mean((w - x) ** 2), optax.sgd(0.1))
        >>> method = Method(work, jaxcomp.qsgd_inf(bits=4))
    """

    work: LocalSteps
    up: "Uplink | Link | Codec | Policy"
    server: optax.GradientTransformation = optax.sgd(1.0)
    down: "Link | Codec | Policy | None" = None
    sampling: Sampling = Everyone()
    aggregate: Aggregate = Mean()
    mean: str = "participants"
    signal: Callable[[PyTree, PyTree], PyTree] = difference
    staleness: float = 0.5
    fragments: Fragments = 1
    delay: int = 0
    mix: float = 0.0

    def __post_init__(self):
        checks.part("work", self.work, LocalSteps)
        checks.part("sampling", self.sampling, Sampling)
        checks.part("aggregate", self.aggregate, Aggregate)
        checks.choice("mean", self.mean, ("participants", "all", "senders", "messages"))
        checks.number("staleness", self.staleness, 0.0)
        checks.integer("delay", self.delay, 0)
        checks.number("mix", self.mix, 0.0, 1.0)
        if not callable(self.fragments):
            checks.integer("fragments", self.fragments, 1)
        if not isinstance(self.up, Uplink):
            object.__setattr__(self, "up", Uplink(as_link("up", self.up)))
        if self.down is not None:
            object.__setattr__(self, "down", as_link("down", self.down))
            _check_down(self.down)
        if self.uplink.feedback.facts.mirrors and self.mean != "all":
            raise ValueError(
                "`mean` must be 'all' with a Shift, whose mirror on the server is the weighted "
                f"mean over all clients, got {self.mean!r}"
            )

        if self.work.offsets and self.signal is not difference:
            raise ValueError(
                "`signal` must be the difference with LocalSteps(offsets=True), which sends what "
                f"the client has moved, got {self.signal!r}; use offsets=False"
            )
        if self.mean == "senders":
            self._check_senders()
        if self.work.control:
            self._check_control()
        if self.streams:
            self._check_streams()
        if not self.aggregate.linear:
            self._check_robust()
        if not self.aggregate.streams and self.uplink.guessed:
            raise ValueError(
                "`aggregate` must add messages one by one where the server decodes with side "
                f"information, got {self.aggregate!r} with {self.uplink.side!r}; use "
                "jaxcomp.aggregates.ClippedMean(norm) or Mean()"
            )

    def _check_senders(self) -> None:
        dense = [c for c in self.uplink.policy.codecs if not c.facts.names_senders]
        if dense:
            raise ValueError(
                "`mean` must be 'participants' or 'all' for codecs that send every element, got "
                f"'senders' with {dense[0]!r}; 'senders' needs a sparsifier, such as "
                "jaxcomp.chunk_top_k()"
            )

    def _check_control(self) -> None:
        feedback = self.uplink.feedback
        wrong = {
            "`work` must have no control variates with fragments, a delay or a mix": self.streams,
            "`signal` must be the difference with control variates": self.signal is not difference,
            "`mean` must be 'participants', 'all' or 'messages' with control variates, whose mean "
            "the server keeps": self.mean == "senders",
            "`aggregate` must be jaxcomp.aggregates.Mean() with control variates, of which any "
            "other rule loses a part": self.aggregate != Mean(),
            "`up` must have no side information with control variates": self.uplink.guessed,
            "`up` must have jaxcomp.Residual() or jaxcomp.NoFeedback() with control variates": (
                feedback.facts.mirrors
                or feedback.facts.accelerates
                or feedback.facts.memory != feedback.facts.keeps_unsent
            ),
        }
        for says, found in wrong.items():
            if found:
                raise ValueError(f"{says}, got {self!r}")
        for codec in self.uplink.policy.codecs:
            try:
                Residual().check(codec, codec.bucket_size)
            except ValueError as error:
                raise ValueError(
                    f"`up` must have codecs whose error is below their input, got {codec!r}, with "
                    "which a control variate would grow from round to round; use "
                    "jaxcomp.codecs.Contractive(codec), more bits or shorter buckets"
                ) from error

    def _check_streams(self) -> None:
        if not (self.work.keep and self.work.offsets):
            raise ValueError(
                "`work` must be LocalSteps(keep=True, offsets=True) with fragments, a delay or a "
                f"mix, where clients go on from their own parameters, got {self.work!r}"
            )
        if self.uplink.guessed:
            raise ValueError(
                "`up` must have no side information with fragments, a delay or a mix, got "
                f"{self.uplink.side!r}"
            )
        if self.mix == 1:
            raise ValueError("`mix` must be below 1, where clients never meet, got 1")

    def _check_robust(self) -> None:
        if self.uplink.feedback.facts.memory:
            raise ValueError(
                "`up` must have jaxcomp.NoFeedback() with an aggregate that is not linear, got "
                f"{self.uplink.feedback!r} with {self.aggregate!r}: residuals and "
                "shifts assume that the steps add up to the sum of all messages. Use an unbiased "
                "codec, such as jaxcomp.qsgd(bits=4), or jaxcomp.aggregates.Mean()"
            )
        if self.mean != "participants" and not self.aggregate.streams:
            raise ValueError(
                f"`mean` must be 'participants' with {self.aggregate!r}, which is no sum that "
                f"could be divided by an expected weight, got {self.mean!r}"
            )

    @property
    def streams(self) -> bool:
        """Whether clients go on from their own parameters, and not from the server's."""
        return self.fragments != 1 or self.delay > 0 or self.mix > 0

    @property
    def mirrors(self) -> bool:
        """Whether the server keeps the mean of what clients keep, so that none may begin anew."""
        return self.uplink.feedback.facts.mirrors or self.work.control

    @property
    def uplink(self) -> Uplink:
        """`up` as an `Uplink`."""
        found: Any = self.up
        return found

    @property
    def downlink(self) -> Link | None:
        """`down` as a `Link`."""
        found: Any = self.down
        return found


def _check_down(link: Any) -> None:
    facts = link.feedback.facts
    if facts.mirrors or facts.accelerates or facts.needs_mean:
        raise ValueError(
            "`down` must have jaxcomp.Residual() or jaxcomp.NoFeedback() as its feedback, "
            f"got {link.feedback!r}"
        )
    for codec in link.policy.codecs:
        if codec.facts.agrees:
            raise ValueError(f"`down` must have a codec that needs no agreement, got {codec!r}")
