"""Times of codecs that a plan takes from the package's table, or from earlier measurements."""

import dataclasses
import json
import math

import pytest
from helpers.paths import ROOT

import jaxcomp
from jaxcomp.planning import Network, kept, planner, timing
from jaxcomp.reducers import choose

NETWORK = Network(bandwidth=1.25e8, latency=50e-6)
OWN = choose.link_or_reducer(jaxcomp.qsgd_inf(bits=3))
"""A codec that is not in the table."""

TOOK = timing.Measured(kept.ELEMENTS, 3e-3, 1e-3, 5e-4, 0.01)


@pytest.fixture
def asked(monkeypatch):
    """All that default plans time, by name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import plan_times

    return plan_times.asked()


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The ways that were measured; the user's cache is an empty folder."""
    found = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(timing, "measure", lambda way, *_, **__: found.append(way) or TOOK)
    monkeypatch.setattr(timing, "copy", lambda: 2 * json.loads(kept.TABLE.read_text())["copy"])
    kept._copy.cache_clear()
    yield found
    kept._copy.cache_clear()


def test_the_table_has_all_that_default_plans_time(measured, asked):
    table = json.loads(kept.TABLE.read_text())
    assert set(asked) <= set(table["times"])
    for times in table["times"].values():
        took = timing.Measured(**times)
        assert took.elements == kept.ELEMENTS
        assert 0 < took.whole < 1
        assert 0 <= took.decode <= took.whole
        assert math.isfinite(took.error)
    assert measured == []


def test_default_plans_measure_nothing_and_say_whose_times_they_have(measured):
    found = planner.plan(10**6, 16, NETWORK)
    assert measured == []
    machine = json.loads(kept.TABLE.read_text())["machine"]
    assert f"Work: by times of {machine}, scaled" in str(found).replace("\n  ", " ")
    alone = planner.plan(10**6, 16, NETWORK, link_only=True)
    assert all(forecast.way.price.work == 0 for forecast in alone.forecasts)
    assert "Work: by times" not in str(alone)


def test_a_slower_copy_makes_codecs_slower(measured, asked):
    """Both take twice the time here."""
    name, way = next((name, way) for name, way in asked.items() if name.startswith("Link"))
    own = timing.Measured(**json.loads(kept.TABLE.read_text())["times"][name])
    assert kept.measure(way).whole == pytest.approx(2 * own.whole)
    assert kept.measure(way).error == own.error
    assert measured == []


def test_a_codec_is_measured_once_on_a_machine(measured):
    assert kept.measure(OWN) == kept.measure(OWN) == TOOK
    assert measured == [OWN]
    assert kept.measure(OWN).machine == ""


def test_an_exact_timing_replaces_a_kept_one(measured, monkeypatch):
    kept.measure(OWN)
    other = dataclasses.replace(TOOK, whole=9e-3)
    monkeypatch.setattr(timing, "measure", lambda *_, **__: other)
    assert kept.exact(OWN) == kept.measure(OWN) == other
    small = dataclasses.replace(TOOK, elements=1024)
    monkeypatch.setattr(timing, "measure", lambda *_, **__: small)
    assert kept.exact(OWN, 1024) == small  # Which is not what others ask for.
    assert kept.measure(OWN) == other


def test_times_of_another_machine_are_not_taken(measured, monkeypatch):
    kept.measure(OWN)
    monkeypatch.setattr(kept, "_here", lambda: "another machine")
    kept.measure(OWN)
    assert measured == [OWN, OWN]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}'])
def test_a_damaged_file_is_measured_again(measured, text):
    kept.path().parent.mkdir()
    kept.path().write_text(text)
    assert kept.measure(OWN) == TOOK
    assert kept.measure(OWN) == TOOK
    assert measured == [OWN]


def test_a_cache_that_cannot_be_written_costs_a_measurement(measured, tmp_path):
    (tmp_path / "jaxcomp").write_text("a file where the folder should be")
    assert kept.measure(OWN) == kept.measure(OWN) == TOOK
    assert measured == [OWN, OWN]


def test_the_delay_of_a_link_is_not_part_of_its_work():
    assert kept.name_of(jaxcomp.Dense(delay=0.05)) == kept.name_of(jaxcomp.Dense())
    assert kept.name_of(jaxcomp.sign()) == repr(jaxcomp.sign())
