"""The drivers of the benchmarks, and the bounds that their committed results meet."""

import itertools

import pytest
from helpers.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")  # As `reporting`, perhaps imported before.
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.mark.full
def test_committed_results_hold():
    import check

    assert check.failures() == []


def test_a_slower_result_is_found(monkeypatch):
    import check

    cells = check.cells("mean")
    seconds = cells["100mbit", 4]["methods"]["two shots, 4-bit"]["seconds"]
    seconds[:] = [2 * each for each in seconds]
    held = {"mean": cells, "train": check.cells("train")}
    monkeypatch.setattr(check, "cells", held.get)
    wrong = [claim for claim, holds in check.slow_wire() if not holds]
    assert "two shots, 4-bit is 6.5 times faster than dense" in wrong


def test_a_command_without_a_setting_of_its_result_is_found(monkeypatch):
    import check

    read = check.reporting.read

    def deeper(path):
        found = read(path)
        return (
            {**found, "settings": {**found["settings"], "layers": 9}} if path == changed else found
        )

    changed = check.RESULTS / "convergence" / "byte_lm.json"
    monkeypatch.setattr(check.reporting, "read", deeper)
    wrong = [claim for claim, holds in check.settings() if not holds]
    assert wrong == ["the command of convergence/byte_lm.json has its settings ['layers']"]


def test_tables_leave_cells_without_a_value_empty():
    from reporting import Table

    table = Table("codecs", "codec {name} | bits {found[bits]:.1f}", [
        {"name": "sign", "found": {"bits": 1.06}}, {"name": "dense", "found": {}}
    ])  # fmt: skip
    lines = ["| codec | bits |", "|---|---:|", "| sign | 1.1 |", "| dense |  |"]
    assert table.markdown().splitlines() == lines


def test_runs_are_timed_in_turns(monkeypatch):
    """After two turns to warm up; slow work is timed three times."""
    import timing

    ticks, order = itertools.count(), []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(ticks)))
    runs = {"a": lambda: order.append("a"), "b": lambda: (next(ticks), order.append("b"))}
    found = timing.in_turns(runs, 4)
    assert "".join(order) == "ab" * 6
    assert found == {"a": (1.0, 1.0, 1.0), "b": (2.0, 2.0, 2.0)}
    order.clear()
    timing.in_turns(runs, 100, within=2.0)
    assert order.count("b") == 2 + 2 + 3  # Estimate, warm-up, measurement.


def test_names_of_lines_do_not_overlap():
    """They keep the order of the ends, and stay inside the panel's height."""
    import reporting  # noqa: F401  It makes the examples importable.

    # isort: split
    import pictures

    _, ((axes,),) = pictures.page("Lines", "Five of them.")
    ends = [1e-3, 1.1e-3, 1.2e-3, 5e-1, 1.0]
    lines = [axes.loglog([1, 2], [1, end], label=f"{end:g}")[0] for end in ends]
    axes.set_ylim(1e-4, 1)
    pictures.name_ends(axes, lines, gap=0.1)
    places = [text.get_position()[1] for text in axes.texts]
    assert [text.get_text() for text in axes.texts] == [f"{end:g}" for end in ends]
    assert min(b - a for a, b in itertools.pairwise(places)) > 0.1 - 1e-9
    assert 0 <= places[0] < places[-1] <= 1
    assert places[-1] == pytest.approx(1)


def test_numbers_of_titles_have_two_digits_and_a_power_of_ten():
    import reporting  # noqa: F401  It makes the examples importable.

    # isort: split
    import pictures

    numbers = (1.24, 121.4, 0.054, 1e-3, 2.46e-26, 1.5e-4)
    said = ["1.2", "121", "0.054", "10⁻³", "2.5·10⁻²⁶", "1.5·10⁻⁴"]
    assert list(map(pictures.power, numbers)) == said


@pytest.mark.full
def test_pictures_are_drawn_again_from_committed_results(tmp_path):
    """Each is one of the documentation; a few are drawn here."""
    import redraw

    for name in redraw.PICTURES:
        assert (ROOT / "docs" / f"{name}.png").is_file(), name
    for name in ("algorithms", "fit", "local"):
        redraw.PICTURES[name](tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 50_000
