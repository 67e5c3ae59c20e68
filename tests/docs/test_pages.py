"""The site has every page, an entry for every public name, and no link that leads nowhere."""

import functools
import importlib
import inspect
import re
from collections import Counter

import pytest
from helpers.paths import ROOT, TESTS
from test_blocks import PAGES

DOCS = ROOT / "docs"
SITE = ROOT / "mkdocs.yml"
PUBLIC = (
    "aggregates algorithms base codecs collectives federated adapters.flower adapters.keras gates "
    "graphs optimizers planning reducers telemetry testing theory weights"
)
"""The modules, beside `jaxcomp` itself, whose names a user types."""
ELSEWHERE = {
    "adoption.md": "end_to_end/test_adoption_page.py",
    "budget.md": "planning/test_budget.py",
    "federated.md": "end_to_end/test_frameworks.py",
    "flower.md": "adapters/test_flower.py",
    "frameworks.md": "end_to_end/test_frameworks.py",
    "local.md": "end_to_end/test_frameworks.py",
    "plain_jit.md": "end_to_end/test_frameworks.py",
    "sharded.md": "transforms/test_sharded.py",
    "sites.md": "adapters/test_flower_site.py",
    "telemetry.md": "telemetry/test_telemetry.py",
}
"""Pages whose blocks run in a test that also checks what they compute."""


def pages():
    return {path.relative_to(DOCS).as_posix(): path.read_text() for path in DOCS.rglob("*.md")}


def without_code(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def test_every_page_is_in_the_navigation_once():
    nav = SITE.read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"^ +- (?:[^#\n]*: )?([\w/]+\.md)$", nav, flags=re.MULTILINE)
    assert sorted(listed) == sorted([*pages(), "index.md"])  # The README is the first page.


@functools.cache
def entries():
    """The names in the API reference, with how often each is there."""
    texts = (path.read_text() for path in (DOCS / "api").glob("*.md"))
    return Counter(re.findall(r"^::: (\S+)$", "\n".join(texts), flags=re.MULTILINE))


def public_names(module):
    found = importlib.import_module(module)
    names = getattr(found, "__all__", [name for name in vars(found) if name[0] != "_"])
    return {name for name in names if not inspect.ismodule(getattr(found, name))}


def test_every_public_name_has_one_entry():
    everyday = public_names("jaxcomp")
    wanted = {f"jaxcomp.{name}" for name in everyday}
    for module in PUBLIC.split():
        inside = public_names(f"jaxcomp.{module}")
        if module == "base":  # Its interfaces are everyday names, or those of legs.
            inside -= everyday | public_names("jaxcomp.reducers")
        wanted |= {f"jaxcomp.{module}.{name}" for name in inside}
    wanted |= {f"jaxcomp_weights.{name}" for name in public_names("jaxcomp_weights")}
    assert len(wanted) > 250
    assert wanted - set(entries()) == set()
    assert [name for name, count in entries().items() if count > 1] == []


def test_every_entry_has_a_docstring():
    for name in entries():
        module, _, attribute = name.rpartition(".")
        value = getattr(importlib.import_module(module), attribute)
        assert inspect.getdoc(value) or not callable(value), name


def anchors(text):
    """The anchors of a page that GitHub and the site agree on."""
    headings = re.findall(r"^#+ (.*)$", without_code(text), flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    ours = {re.sub(r"[ -]+", "-", heading.encode("ascii", "ignore").decode()) for heading in plain}
    named = set(re.findall(r'<a id="([\w-]+)"></a>', text))
    return ours & {heading.replace(" ", "-") for heading in plain} | named


@pytest.mark.parametrize("page", [*sorted(pages()), "../CONTRIBUTING.md", "../CHANGELOG.md"])
def test_every_link_leads_somewhere(page):
    here = DOCS / page
    for path, anchor in re.findall(
        r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]*))?\)", without_code(here.read_text())
    ):
        target = (here.parent / path).resolve() if path else here
        assert target.exists(), (page, path)
        if anchor:
            assert anchor in anchors(target.read_text()), (page, path, anchor)


def test_every_python_block_is_run():
    """In `test_blocks.py`, or in a test of its own; a block that cannot be found is refused."""
    found = {page for page, text in pages().items() if "```python" in text}
    assert found == set(PAGES) | set(ELSEWHERE)
    assert set(PAGES).isdisjoint(ELSEWHERE)
    for page, test in ELSEWHERE.items():
        assert page in (TESTS / test).read_text()
    for page, text in pages().items():
        languages = re.findall(r"^ *(?:```|~~~)(\S.*)$", text, flags=re.MULTILINE)
        assert set(languages) <= {"python", "bash", "diff", "text"}, page
        assert not re.search(r"^ +```", text, flags=re.MULTILINE), page


def test_code_fits_beside_the_navigation():
    """The site has room for a hundred columns at 1,366 pixels."""
    for name, text in {"README.md": (ROOT / "README.md").read_text(), **pages()}.items():
        blocks = re.findall(r"^```.*?^```$", text, flags=re.DOTALL | re.MULTILINE)
        wide = [line for block in blocks for line in block.splitlines() if len(line) > 100]
        assert not wide, name


def test_contributing_names_files_that_exist():
    """From the root, or from a folder whose files it speaks of."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:[\w.-]+/)+|(?:[\w.-]+/)*[\w-]+\.(?:py|md|toml|json|csv))`", text)
    homes = [ROOT, *(ROOT / name for name in ("jaxcomp", "tests", "benchmarks", "docs"))]
    homes += [ROOT / "jaxcomp" / "bits", ROOT / "tests" / "docs", ROOT / "tests" / "helpers"]
    assert len(named) > 50
    gone = [name for name in named if not any((home / name).exists() for home in homes)]
    assert gone == []
