"""The project's page on a package index: the README, whose links work outside of the repository.

Hatchling calls `Page` when it builds. Relative links become links into the repository of
`project.urls.Source` in `pyproject.toml`, which is the one place that names it.
"""

import pathlib
import re

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")


def absolute(text: str, source: str) -> str:
    """The text with its relative links and pictures as addresses below `source`."""

    def whole(found: re.Match) -> str:
        picture, words, target = found.groups()
        kind = "raw" if picture else "blob"
        return f"{picture}[{words}]({source.rstrip('/')}/{kind}/main/{target})"

    return _LINK.sub(whole, text)


class Page(MetadataHookInterface):
    """Gives the project its readme."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict) -> None:
        text = pathlib.Path(self.root, "README.md").read_text(encoding="utf-8")
        page = absolute(text, metadata["urls"]["Source"])
        metadata["readme"] = {"content-type": "text/markdown", "text": page}
