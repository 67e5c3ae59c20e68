"""One direction of travel: a codec with its feedback."""

import dataclasses
import warnings

from jaxcomp.base import Codec, Feedback
from jaxcomp.feedback.momentum import MomentumCorrection
from jaxcomp.feedback.residual import NoFeedback, Residual
from jaxcomp.layout import policy as policy_
from jaxcomp.layout.policy import Policy


@dataclasses.dataclass(frozen=True)
class Link:
    """One direction of travel: a codec with its feedback.

    Args:
        codec: a codec, which takes the leaves that the default policy gives it, or a `Policy`.
        feedback: the sender's memory.

    Raises:
        ValueError: if `codec` or `feedback` is not one, or they do not go together.

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
        if lossy and isinstance(self.feedback, NoFeedback):
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
        if loose and isinstance(self.feedback, Residual | MomentumCorrection):
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
        """Which codec for which leaf."""
        return policy_.of(self.codec)


def default(codec: "Codec | Policy") -> Feedback:
    """The feedback that a codec's error class asks for: residual for contractive, else none.

    Raises:
        ValueError: if a policy mixes both classes, since one feedback serves the whole tree.
    """
    classes = {member.contractive for member in policy_.of(codec).codecs}
    if len(classes) > 1:
        raise ValueError(
            "`codec` is a policy that mixes contractive codecs, which need feedback, with others, "
            "which do not; say which feedback you want with jaxcomp.Link(policy, feedback), got "
            f"{codec!r}"
        )
    return Residual() if classes == {True} else NoFeedback()
