"""Commands of the pages start programs that exist, with options that these have."""

import re
import shlex

import pytest
from helpers.paths import ROOT

from jaxcomp_command import arguments

RECIPES = {
    "A model that fills a host": "python examples/hosts.py",
    "TPU slices over the data-centre network": "(multislice.md)",
    "Ten thousand phones": "federated.Simulation(",
    "QSGD against NUQSGD, in one command": "python examples/byte_lm.py --codec dense qsgd nuqsgd",
}
"""What each recipe of the cookbook starts."""


def pages():
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(start, inline=False):
    """Of every page, in blocks, or in the text, where they may be short."""
    for page in pages():
        text = page.read_text()
        blocks = re.findall(r"^```bash\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
        lines = "\n".join(blocks).replace("\\\n", "").splitlines()
        if inline:
            plain = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
            lines = re.findall(r"`([^`]+)`", plain)
        for line in lines:
            found = re.search(rf"(?:^|\s){start}( .*|$)", line, flags=re.DOTALL)
            if found:
                yield page.name, shlex.split(f"{start}{found[1]}", comments=True)


def sources(path):
    """The text of a program, and of the modules of the project that it imports."""
    text = path.read_text()
    names = re.findall(r"^(?:from|import) (\w+)", text, flags=re.MULTILINE)
    found = [folder / f"{name}.py" for name in names for folder in (path.parent, path.parents[1])]
    return text, "".join(each.read_text() for each in found if each.is_file())


def has(path, option):
    """Whether a program has an option, by a parser or as the keyword of a helper that adds it."""
    own, others = sources(path)
    by_name = rf"\b{option[2:].replace('-', '_')}="
    return f'"{option}"' in own + others or re.search(by_name, own)


def test_programs_have_the_options_that_pages_give_them(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import options

    seen = 0
    for page, (_, program, *given) in (*commands("python"), *commands("python", inline=True)):
        if "/" not in program or not program.endswith(".py"):
            continue
        path = ROOT / program
        assert path.is_file(), (page, program)
        asked = {word.partition("=")[0] for word in given if word.startswith("--")}
        asked = {option for option in asked if not has(path, option)}
        assert not asked, (page, program)
        if program in ("examples/byte_lm.py", "examples/train_digits.py") and "--codec" in given:
            after = given[given.index("--codec") + 1 :]
            end = next((i for i, word in enumerate(after) if word.startswith("-")), len(after))
            unknown = {word for word in after[:end] if word[0] != "$"} - set(options.METHODS)
            assert not unknown, (page, program)
        seen += 1
    assert seen > 50


def test_the_command_line_takes_what_pages_give_it():
    seen = 0
    for page, (_, *given) in commands("jaxcomp"):
        try:
            arguments.read(given)
        except SystemExit as end:
            pytest.fail(f"{page}: jaxcomp {shlex.join(given)} ends with {end.code}")
        seen += 1
    assert seen > 5


def test_the_command_line_has_the_options_that_pages_name():
    text = "".join(path.read_text() for path in (ROOT / "jaxcomp_command").glob("*.py"))
    seen = 0
    for page, (_, *given) in commands("jaxcomp", inline=True):
        asked = {word.partition("=")[0] for word in given if word.startswith("--")}
        unknown = {option for option in asked - {"--help"} if f'"{option}"' not in text}
        assert not unknown, (page, given)
        seen += len(asked)
    assert seen > 10


def test_the_cookbook_has_its_recipes():
    """Each has what it starts, so that none is cut without notice."""
    text = (ROOT / "docs" / "cookbook.md").read_text()
    titles, parts = zip(*re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.M | re.S), strict=True)
    assert list(titles) == list(RECIPES)
    for title, part in zip(titles, parts, strict=True):
        assert RECIPES[title] in part, title
