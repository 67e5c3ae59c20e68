"""Criteria are older than the results that they judge, by the history of the repository."""

import ast
import datetime
import io
import pathlib
import subprocess
import sys
import tarfile

import pytest
from helpers.paths import ROOT

CLAIMS = "benchmarks/claims"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


@pytest.fixture(scope="module")
def history():
    """Runs git; skips where there is no whole history."""

    def git(*words):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True)
        return done.stdout

    try:
        shallow = git("rev-parse", "--is-shallow-repository").decode().strip()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("there is no git or no repository: an archive has no history")
    if shallow != "false":
        pytest.skip("a shallow clone has no history")
    return git


def without_docstrings(tree):
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            text = body[0].value
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                node.body = body[1:] or [ast.Pass()]
    return tree


def definitions(tree):
    """The statements of a module, by each name that they define."""
    found = {}
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            found[statement.name] = statement
        targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
        names = [node for each in filter(None, targets) for node in ast.walk(each)]
        found |= {name.id: statement for name in names if isinstance(name, ast.Name)}
    return found


def rule(source, name):
    """A claim's criterion, judge and program, with all that they use of their module."""
    tree = without_docstrings(ast.parse(source))
    known = definitions(tree)
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    given = ({word.arg: word.value for word in call.keywords} for call in calls)
    [claim] = [
        words
        for words in given
        if isinstance(words.get("name"), ast.Constant) and words["name"].value == name
    ]
    parts = [claim[word] for word in ("criterion", "judge", "run") if word in claim]
    found, open_ = {"": [ast.dump(part) for part in parts]}, parts
    while open_:
        for node in ast.walk(open_.pop()):
            if isinstance(node, ast.Name) and node.id in known and node.id not in found:
                found[node.id] = ast.dump(known[node.id])
                open_.append(known[node.id])
    return found


def homes():
    """Each claim and the file of its module."""
    from claims import registry

    for _, module in registry.families():
        for claim in module.CLAIMS:
            yield claim, f"{CLAIMS}/{pathlib.Path(module.__file__).name}"


def committed(git, commit):
    return int(git("show", "--no-patch", "--format=%ct", commit))


def measured(git, name):
    """When a result was measured, by its stamp or else by the commit that last changed it."""
    import reporting

    stamp = reporting.read(reporting.RESULTS / name).get("measured")
    if stamp:
        when = datetime.datetime.fromisoformat(stamp)
        return when.replace(tzinfo=datetime.UTC).timestamp()
    return int(git("log", "-1", "--format=%ct", "--", f"benchmarks/results/{name}"))


def test_criteria_are_fixed_before_they_are_measured(history):
    from claims import registry

    later, fixed = registry.pending(), 0
    for claim, file in homes():
        if not claim.fixed or claim.name in later:
            continue
        fixed += 1
        for name in claim.files:
            assert committed(history, claim.fixed) <= measured(history, name), (claim.name, name)
        history("merge-base", "--is-ancestor", claim.fixed, "HEAD")
        then = rule(history("show", f"{claim.fixed}:{file}").decode(), claim.name)
        now = rule((ROOT / file).read_text(), claim.name)
        other = sorted(name for name in {**then, **now} if then.get(name) != now.get(name))
        fixed_at = committed(history, claim.fixed)
        since = [one for one in claim.changed if committed(history, one.commit) >= fixed_at]
        assert bool(other) == bool(since), (
            f"{claim.name}: {other} differ from commit {claim.fixed}: `changed` must say how"
        )
    assert fixed > 50


def test_a_changed_rule_is_seen():
    source = "A = 1\ndef judge(x):\n    '''Old.'''\n    return x < limit()\ndef limit(): return A\n"
    claim = "Claim(name='one', criterion='below A', judge=judge)\n"
    found = rule(source + claim, "one")
    assert set(found) == {"", "judge", "limit", "A"}
    assert rule(source.replace("Old", "New") + claim, "one") == found
    for changed in (source.replace("A = 1", "A = 2") + claim, source + claim.replace("A", "B")):
        assert rule(changed, "one") != found


FORMER = """
import pathlib, sys
from claims import page, registry
import reporting
for name in sys.argv[2:]:
    claim = registry.every()[name]
    own = all((reporting.RESULTS / file).is_file() for file in claim.files)
    print(name, page.judged(claim, reporting.RESULTS if own else pathlib.Path(sys.argv[1]))[1])
"""
"""The verdicts of a former commit, on the results that it has, or on the present ones."""


@pytest.mark.full
def test_former_verdicts_are_those_of_the_history(history, tmp_path):
    import reporting

    changes = {}
    for claim, _ in homes():
        for change in claim.changed:
            changes.setdefault(change.commit, {})[claim.name] = change.verdict
    for commit, told in changes.items():
        folder = tmp_path / commit
        packed = history("archive", commit, "benchmarks", "examples", "jaxcomp")
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        paths = f"import sys; sys.path[:0] = {[str(folder / x) for x in PLACES]}\n"
        command = [sys.executable, "-c", paths + FORMER, str(reporting.RESULTS), *told]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        found = dict(line.split(" ", 1) for line in done.stdout.splitlines())
        assert found == told, commit


PLACES = ("", "benchmarks", "examples")
