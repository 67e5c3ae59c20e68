"""The README as the first page; links out of `docs/`, and of names to their entries."""

import functools
import logging
import os
import pathlib
import re
from typing import Any

from mkdocs.structure.files import File

_LOG = logging.getLogger("mkdocs.hooks.links")  # Under --strict, a warning fails the build.
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_LINKED = r"<(?P<tag>a|h\d|pre)\b.*?</(?P=tag)>"
_NAME = re.compile(rf"{_LINKED}|<code>(jaxcomp\.[\w.]*\w)(\([^<]*\))?</code>", re.DOTALL)


def on_files(files: Any, *, config: Any, **others: Any) -> Any:
    """Adds the README: one text is the first page of the repository and of the site."""
    del others
    text = (pathlib.Path(config.docs_dir).parent / "README.md").read_text(encoding="utf-8")

    def below(found: re.Match) -> str:
        picture, words, path, anchor = found.groups(default="")
        path = path.removeprefix("docs/") if path.startswith("docs/") else f"../{path}"
        return f"{picture}[{words}]({path}{anchor})"

    files.append(File.generated(config, "index.md", content=_outside_code(below, text)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **others: Any) -> str:
    """Makes links to files that the site does not have absolute, and refuses dead ones."""
    del others
    docs = pathlib.Path(config.docs_dir)
    here = docs / pathlib.Path(page.file.src_uri).parent

    def whole(found: re.Match) -> str:
        picture, words, path, anchor = found.groups(default="")
        target = (here / path).resolve()
        if target.is_relative_to(docs):
            return found[0]
        if not target.exists():
            _LOG.warning("%s has a link to %s, which is not there", page.file.src_uri, path)
        inside = target.relative_to(docs.parent).as_posix()
        kind = "raw" if picture else "tree" if target.is_dir() else "blob"
        return f"{picture}[{words}]({config.extra['source']}/{kind}/main/{inside}{anchor})"

    return _outside_code(whole, markdown)


def on_page_content(html: str, *, page: Any, config: Any, **others: Any) -> str:
    """Links each public name in the text to its entry in the API reference."""
    del others
    found = _entries(config.docs_dir)
    here = os.path.dirname(page.file.dest_uri)

    def linked(name: re.Match) -> str:
        entry = found.get(name[2])
        if entry is None:
            return name[0]
        return f'<a href="{os.path.relpath(entry, here or ".")}#{name[2]}">{name[0]}</a>'

    return _NAME.sub(linked, html)


@functools.cache
def _entries(docs: str) -> dict[str, str]:
    """The page of each name of the API reference."""
    found = {}
    for path in pathlib.Path(docs, "api").glob("*.md"):
        names = re.findall(r"^::: (\S+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        found |= dict.fromkeys(names, f"api/{path.stem}.html")
    return found


def _outside_code(change: Any, text: str) -> str:
    """The text with its links changed, but for blocks of code."""
    parts = _CODE.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(change, part) for part in parts)
