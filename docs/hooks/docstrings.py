"""Docstrings as the site shows them: links of reStructuredText become links of Markdown."""

import re
from typing import Any

import griffe

_LINK = re.compile(r"`([^`<]+?)\s+<(https?://[^>\s]+)>`_")


def markdown(text: str) -> str:
    """The text with links in Markdown, and its example as a section with highlighted code."""
    text = _LINK.sub(lambda found: f"[{' '.join(found[1].split())}]({found[2]})", text)
    return re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites each docstring once, when its object is read."""

    def on_object(self, *, obj: griffe.Object, **settings: Any) -> None:
        del settings
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
