"""The package as it is published: its page, its versions, and what is in the sdist."""

import re
import subprocess
import sys
import tomllib
import types

import pytest
from helpers.paths import ROOT
from packaging.version import Version

import jaxcomp

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
LINKS = re.findall(r"\]\((?!https?://)([^)\s]+)\)", README)


@pytest.fixture
def build(monkeypatch):
    """`hatch_build.py`, without hatchling, which is only installed where the package is built."""
    interface = types.SimpleNamespace(MetadataHookInterface=object)
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.delitem(sys.modules, "hatch_build", raising=False)
    import hatch_build

    return hatch_build


def test_links_of_the_page_work_outside_of_the_repository(build):
    hook = build.Page()
    hook.root = str(ROOT)
    metadata = {"urls": {"Source": "https://example.org/jaxcomp/"}}
    hook.update(metadata)
    page = metadata["readme"]["text"]
    assert metadata["readme"]["content-type"] == "text/markdown"
    assert re.findall(r"\]\((?!https?://)[^)]*\)", page) == []
    assert "](https://example.org/jaxcomp/blob/main/docs/local.md)" in page
    assert "](https://example.org/jaxcomp/raw/main/docs/digits.png)" in page
    assert page.count("](") == README.count("](")


@pytest.mark.parametrize("link", sorted(set(LINKS)))
def test_every_link_of_the_readme_leads_somewhere(link):
    path, _, anchor = link.partition("#")
    target = ROOT / (path or "README.md")
    assert target.exists()
    if anchor:
        headings = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE)
        anchors = [
            re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
        ]
        assert anchor in anchors


def test_the_sdist_has_what_is_in_the_repository():
    """All that git holds at the top, but for other hidden files; an unpacked sdist has no git."""
    patterns = SETTINGS["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    found = [{path.name for path in ROOT.glob(pattern.removeprefix("/"))} for pattern in patterns]
    assert all(found)
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        held = {line.partition("/")[0] for line in listed.stdout.splitlines()}
        wanted = {name for name in held if name[0] != "."} - {"pyproject.toml"}  # It always is.
        assert wanted | {".github"} == set().union(*found)


def test_the_wheel_is_typed_and_has_the_command():
    packages = SETTINGS["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert all((ROOT / package / "py.typed").exists() for package in packages)
    module, _, function = SETTINGS["project"]["scripts"]["jaxcomp"].partition(":")
    assert module in packages
    assert callable(getattr(__import__(module), function))


def test_the_wheel_has_the_files_of_the_watch_page():
    """Hatchling takes whatever is in a package and git does not ignore."""
    from jaxcomp.cli import page

    names = {ROOT / "jaxcomp" / "cli" / "watch_page" / name for name, _ in page._FILES.values()}
    assert set((ROOT / "jaxcomp" / "cli" / "watch_page").iterdir()) == names
    if (ROOT / ".git").exists():
        command = ["git", "check-ignore", *map(str, names)]
        said = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        assert said.stdout == ""


def test_the_changelog_begins_with_this_version():
    headings = re.findall(r"^## (\S+) \((.*)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    version = Version(jaxcomp.__version__)
    (first, when), *others = headings
    assert first == version.base_version
    assert (when == "unreleased") == version.is_devrelease
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for _, date in others)
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    last = others[0][0] if version.is_devrelease else first
    assert cited is not None
    assert cited.group(1) == last
