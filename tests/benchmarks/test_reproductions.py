"""The claims of published methods: their rows, their verdicts, and the page."""

import copy
import re

import pytest
from helpers.paths import ROOT

import jaxcomp

PAGE = ROOT / "docs" / "reproductions.md"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")  # What another test has added is gone again.
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


@pytest.fixture
def registry():
    from claims import registry

    return registry


def test_every_recipe_and_system_has_a_row(registry):
    assert len(registry.methods()) >= 44
    assert registry.uncovered() == []


def test_a_recipe_without_a_row_is_found(registry, monkeypatch):
    def novel():
        """A new recipe."""

    novel.__module__ = "jaxcomp.algorithms.novel"
    monkeypatch.setattr(jaxcomp.algorithms, "novel", novel, raising=False)
    monkeypatch.setitem(registry.SYSTEMS, "NOVEL", "novel_system")
    assert registry.uncovered() == ["novel", "NOVEL"]


def test_rows_name_what_exists(registry):
    """Names of the library, of its parts, or of the compared systems."""
    homes = (jaxcomp, jaxcomp.algorithms, jaxcomp.codecs, jaxcomp.optimizers, jaxcomp.gates)
    for claim in registry.every().values():
        for name in claim.methods:
            known = name in registry.SYSTEMS or any(hasattr(home, name) for home in homes)
            assert known, f"{claim.name} names {name}"


def test_every_verdict_has_a_result_with_its_environment(registry):
    import reporting
    from claims import claim as claim_, page

    later = registry.pending()
    for claim in registry.every().values():
        assert bool(claim.files) == claim.tried
        if claim.name in later:
            continue
        for name in claim.files:
            assert "jax" in reporting.read(reporting.RESULTS / name)["environment"]
        judged = page.judged(claim)
        assert (judged.verdict == claim_.CANNOT) == (not claim.tried)
        assert judged.words
        assert bool(claim.criterion) == claim.tried, claim.name
        if judged.margin is not None and not claim.criterion.startswith("never"):
            assert judged.margin > 0
            met = judged.margin >= 1 or judged.verdict != claim_.HOLDS
            assert met, f"{claim.name} holds with a margin of {judged.margin}"


def test_every_row_below_holds_says_why_in_one_word(registry):
    from claims import claim as claim_, page

    later = registry.pending()
    found = {c.name: page.judged(c) for c in registry.every().values() if c.name not in later}
    for name, one in found.items():
        below = one.verdict != claim_.HOLDS
        assert bool(registry.every()[name].why) == below, f"{name} {one.verdict}"
    told = dict(re.findall(r"\*(\w+)\* \([^;]+; (\d+) rows\)", PAGE.read_text().replace("\n", " ")))
    counts = page.reasons(found)
    assert {word: int(rows) for word, rows in told.items()} == dict(counts)
    assert set(told) == set(claim_.WHYS)
    assert counts.total() == sum(one.verdict != claim_.HOLDS for one in found.values())


def test_each_system_has_a_claim_that_holds_or_two_lines_why_not(registry):
    from claims import page

    later = registry.pending()
    found = {c.name: page.judged(c) for c in registry.every().values() if c.name not in later}
    missing = page.failing(found)
    assert set(missing) <= set(registry.TRIED)
    assert all(len(registry.TRIED[name]) <= 240 for name in registry.TRIED)


def test_a_claim_without_its_result_has_no_verdict_and_no_row(registry, tmp_path):
    from claims import page

    claim = registry.every()["qsgd-variance"]
    assert claim.name in registry.pending(tmp_path)
    assert "qsgd-variance" not in page.text(tmp_path).partition("## By paper")[2]
    with pytest.raises(page.MissingError, match="make reproduce CLAIM=qsgd-variance"):
        page.judged(claim, tmp_path)


def test_the_pages_are_what_claims_and_results_give():
    from claims import details

    texts = details.texts()
    for name, text in texts.items():
        assert (ROOT / "docs" / name).read_text() == text, "reproduce.py --page writes it"
    there = {
        path.relative_to(PAGE.parent).as_posix() for path in PAGE.parent.glob("reproductions/*")
    }
    assert there == set(texts) - {PAGE.name}


def test_every_claim_has_a_row_by_its_paper_and_its_details_once(registry):
    from claims import details, papers

    texts, known = details.texts(), registry.every()
    whole = texts.pop(PAGE.name)
    assert len(whole.split()) < 5000
    homes = [name for _, names in registry.PAGES.values() for name in names.split()]
    modules = [module.__name__.partition(".")[2] for _, module in registry.families()]
    assert sorted(homes) == sorted(modules)
    for name, page in registry.page_of().items():
        text = texts[f"reproductions/{page}.md"]
        assert f"### {name}\n" in text
        assert whole.count(f'<a id="{name}"></a>') == 1
        assert papers.papers(known[name]), f"papers.py knows no paper of {name}"
    for paper in papers.PAPERS:
        assert any(each.startswith(paper) for c in known.values() for each in papers.papers(c))


DOCTORED = {
    "qsgd-variance": lambda found: found["numbers"]["rows"][0].update(error=1e3),
    "local-sgd-rate": lambda found: found["adaptive"]["rounds of 16"].update(loss=[1.0]),
    "adpsgd-variance": lambda found: found["adaptive"]["ADPSGD"].update(variance=[1.0]),
    "muloco-two-bits": lambda found: found["bits"]["MuLoCo, 2-bit"].update(score=[4.0]),
    "dgc-accuracy": lambda found: found["numbers"]["digits"]["methods"]["dgc"].update(
        score=[90.0] * 5
    ),
    "choco-consensus": lambda found: [row.update(variance=1.0) for row in found["choco"]],
    "gradient-tracking-linear": lambda found: found["links"]["gradient tracking, sign"].update(
        error=[0.1]
    ),
    "dpsvrg-rate": lambda found: found["reduction"]["table"][0].update(dpsvrg_slope=-0.5),
    "qsvrg-linear": lambda found: found["numbers"].update(QSVRG=found["numbers"]["QSGD"]),
    "predictive-coding-bytes": lambda found: [
        row.update(megabytes=[100.0] * 5)
        for name, row in found["numbers"].items()
        if name.startswith("predictive")
    ],
    "fedvote-hostile": lambda found: found["numbers"].update(
        dict.fromkeys(("honest majority, 5", "honest majority, 10"), [5.0] * 5)
    ),
    "genqsgd-energy": lambda found: found["numbers"]["GenQSGD, 14 bits"].update(energy=2e4),
    "ceo-sum-rate": lambda found: found["codecs"]["drive"].update(bits=1.0),
    "drive-error": lambda found: found["codecs"]["drive"]["error"].update(late=0.7),
    "sidco-thresholds": lambda found: found["ratios"][0].__setitem__(4, 5.0),
    "lag-messages": lambda found: found["curves"]["breast cancer, 8 workers"]["lag"].update(
        bits=[1e9] * 69
    ),
    "artemis-participation": lambda found: found["curves"]["least squares, 8 workers"][
        "artemis, half of the workers"
    ].update(errors=[1e-3]),
}
"""Numbers that are clearly worse, by claim."""


@pytest.mark.parametrize("name", DOCTORED)
def test_a_worse_number_changes_the_verdict(registry, name):
    import reporting
    from claims.claim import VERDICTS

    claim = registry.every()[name]
    found = {file: reporting.read(reporting.RESULTS / file) for file in claim.files}
    before = claim.verdict(found).verdict
    worse = copy.deepcopy(found)
    DOCTORED[name](next(iter(worse.values())))
    after = claim.verdict(worse).verdict
    assert VERDICTS.index(after) > VERDICTS.index(before)


def test_gossip_is_judged_beside_the_fastest_dense_all_reduce(registry):
    def verdict(**seconds):
        names = {"whole": "all-reduce, dense", "ours": "D-PSGD on a ring, dense"}
        names["merged"] = "all-reduce, dense, one message"
        cases = {names[key]: {"seconds": [s], "curve": [[5]]} for key, s in seconds.items()}
        file = "network/gossip-train.json"
        found = {file: {"cells": [{"methods": cases}]}}
        return registry.every()["dpsgd-slow-links"].verdict(found).verdict

    assert verdict(whole=30.0, ours=10.0) == "holds"
    assert verdict(whole=30.0, merged=15.0, ours=10.0) == "holds in part"
    assert verdict(whole=30.0, merged=9.0, ours=10.0) == "does not hold here"


def test_claims_are_checked_when_they_are_made():
    from claims.claim import Claim

    given = {"name": "a-claim", "methods": ("qsgd",), "source": "", "claim": "", "setting": ""}
    for wrong, said in (
        ({"name": "A claim"}, "`name` must be in kebab-case"),
        ({"methods": ()}, "`methods` of a-claim must name a method"),
        ({"run": dict, "results": "a.json", "command": "make"}, "got both"),
        ({"results": "a.json"}, "`command` of a-claim must be that of `results`"),
        ({}, "`note` of a-claim must say why it cannot be tried"),
        ({"criterion": "x" * 121}, "`criterion` of a-claim must have at most 120"),
        ({"fixed": "yesterday"}, "commits of a-claim must have 8 hexadecimal digits"),
        ({"why": "luck"}, "`why` of a-claim must be one of premise, size"),
    ):
        with pytest.raises(ValueError, match=said):
            Claim(**{**given, "judge": lambda _: ("1", "holds"), **wrong})
    odd = Claim(**given, judge=lambda _: ("1", "maybe"), run=dict)
    with pytest.raises(ValueError, match="must give one of"):
        odd.verdict({"a.json": {"numbers": {}}})


def test_a_claim_is_measured_and_written(registry, tmp_path, capsys):
    import reporting
    import reproduce

    claim = registry.every()["genqsgd-energy"]
    verdict = reproduce.measure(claim, tmp_path).verdict
    found = reporting.read(tmp_path / claim.files[0])
    assert verdict == "holds"
    assert set(found) == {"environment", "measured", "minutes", "numbers"}
    said = capsys.readouterr().out
    assert "the committed result has the same number and verdict" in said
    assert '"numbers"' not in said
    reproduce.show(claim, "a number", verdict)
    assert "verdict: holds" in capsys.readouterr().out
    assert "genqsgd-energy" in str(reproduce.listing().rows())


def test_results_of_a_larger_benchmark_are_read_from_the_given_folder(registry, tmp_path, capsys):
    import reporting
    import reproduce

    claim = registry.every()["error-feedback-fixes-signs"]
    reproduce.measure(claim, tmp_path)
    assert str(reporting.RESULTS / claim.files[0]) in capsys.readouterr().out
    found = reporting.read(reporting.RESULTS / claim.files[0])
    found["errors"]["sign, residuals"][-1][1] = 9.0
    reporting.keep(tmp_path / claim.files[0], found)
    verdict = reproduce.measure(claim, tmp_path).verdict
    said = capsys.readouterr().out
    assert verdict == "does not hold here"
    assert str(tmp_path / claim.files[0]) in said
    assert "the committed result has the verdict 'holds in part'" in said


def test_a_mistyped_claim_gets_a_suggestion(monkeypatch, capsys):
    import reproduce

    monkeypatch.setattr("sys.argv", ["reproduce.py", "--claim", "qsgd-varianc"])
    with pytest.raises(SystemExit):
        reproduce.parse()
    assert "did you mean qsgd-variance or" in capsys.readouterr().err


def test_the_pages_have_short_cells_and_the_paired_differences():
    from claims import details

    whole = "\n".join(details.texts().values())
    tables = [line for line in whole.splitlines() if line.startswith("| [")]
    cells = [cell.strip() for line in tables for cell in line.replace("\\|", "").split("|")]
    assert max(map(len, cells)) <= 2 * 120  # The first cell has a link.
    assert "at its edge" in whole
    assert "| better than dense by |" in whole
