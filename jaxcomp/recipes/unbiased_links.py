"""Links of methods that are made for unbiased codecs."""

from jaxcomp.base import Codec
from jaxcomp.feedback import Link
from jaxcomp.layout import policy as policy_
from jaxcomp.layout.policy import Policy


def unbiased_link(name: str, given: Codec | Policy | Link) -> Link:
    """The link of an unbiased codec, without memory; a `Link` may have any codec and feedback.

    Raises:
        ValueError: for a biased codec; the error names the argument.
    """
    biased = []
    if isinstance(given, Codec | Policy):
        biased = [one for one in policy_.of(given).codecs if not one.unbiased]
    if biased:
        raise ValueError(
            f"`{name}` must be unbiased, such as jaxcomp.qsgd(bits=4), or a link with the feedback "
            f"of a biased codec, jaxcomp.Link(codec, jaxcomp.Residual()), got {biased[0]!r}"
        )
    return given if isinstance(given, Link) else Link(given)


def unbiased_links(
    codec: Codec | Policy | Link, down: Codec | Policy | Link | None
) -> tuple[Link, Link]:
    """The same of both directions; None for the uplink's downwards."""
    up = unbiased_link("codec", codec)
    return up, up if down is None else unbiased_link("down", down)
