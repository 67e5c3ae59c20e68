"""A link: the codec and the feedback of one direction."""

import dataclasses
import warnings

from jaxcomp.base import Codec, Feedback
from jaxcomp.feedback.residual import NoFeedback, Residual
from jaxcomp.layout import policy as policy_
from jaxcomp.layout.policy import Policy


@dataclasses.dataclass(frozen=True)
class Link:
    """The codec and the feedback of one direction, uplink or downlink.

    Args:
        codec: a codec, applied to the leaves that the default policy selects, or a `Policy`.
        feedback: the sender's memory.

    Raises:
        ValueError: if `codec` or `feedback` is of another kind, or they cannot be combined.

    Example:
        >>> import jaxcomp
        >>> jaxcomp.Link(jaxcomp.top_k(fraction=0.01), jaxcomp.Residual()).feedback
        Residual(decay=1.0, dtype=None)
    """

    codec: "Codec | Policy"
    feedback: Feedback = NoFeedback()

    def __post_init__(self):
        if not isinstance(self.codec, Codec | Policy):
            raise ValueError(
                "`codec` must be a codec such as jaxcomp.qsgd_inf(bits=4), or a Policy, "
                f"got {self.codec!r}"
            )
        if not isinstance(self.feedback, Feedback):
            raise ValueError(
                "`feedback` must be a feedback such as jaxcomp.Residual() or jaxcomp.NoFeedback(), "
                f"got {self.feedback!r}"
            )
        lossy = [codec for codec in self.policy.codecs if codec.contractive]
        if lossy and not self.feedback.facts.memory:
            warnings.warn(
                f"{lossy[0]!r} is biased, and without feedback what it drops is lost for good; "
                "use Link(codec, Residual()).",
                stacklevel=3,
            )
        loose = [
            codec
            for codec in self.policy.codecs
            if not codec.contractive and codec.variance_bound(codec.bucket_size or 1) is None
        ]
        if loose and self.feedback.facts.keeps_unsent:
            warnings.warn(
                f"{loose[0]!r} is not known to be contractive: where its error exceeds its input, "
                "a residual on top of it grows from step to step. Use NoFeedback(), or a "
                "contractive codec.",
                stacklevel=3,
            )

        for codec in self.policy.codecs:
            self.feedback.check(codec, codec.bucket_size)

    @property
    def policy(self) -> Policy:
        """The policy that chooses a codec for each leaf."""
        return policy_.of(self.codec)


def default(codec: "Codec | Policy") -> Feedback:
    """The default feedback of a codec: `Residual()` if it is contractive, else none.

    Raises:
        ValueError: if a policy mixes both kinds, since the whole tree has one feedback.
    """
    classes = {member.contractive for member in policy_.of(codec).codecs}
    if len(classes) > 1:
        raise ValueError(
            "`codec` must not mix contractive codecs, which need feedback, with others, got "
            f"{codec!r}; choose a feedback with jaxcomp.Link(policy, feedback)"
        )
    return Residual() if classes == {True} else NoFeedback()
