"""The least local steps of a round that hide an exchange, against all rounds tried one by one."""

import json

import pytest

import jaxcomp
from jaxcomp.planning import Network, rounds
from jaxcomp.theory.local_rounds import seconds

STEP, STALL = 0.1, 0.05


@pytest.fixture(scope="module")
def planned():
    link = Network(bandwidth=1.25e6, latency=1e-4)
    return jaxcomp.plan(2_000_000, 4, link, compute=STEP, link_only=True, rounds=True)


@pytest.mark.full
@pytest.mark.parametrize("delayed", [0, 0.5, 2 / 3, 1])
def test_no_shorter_round_stalls_less(planned, delayed):
    found = rounds(planned, stall=STALL, delayed=delayed)
    assert len(found.rounds) == len(planned.forecasts)
    for one in found.rounds:
        most = delayed * (one.name != "SparseLoCo")

        def stalls(every, delay, exchange=one.exchange):
            return seconds(every, STEP, exchange, delay) > (1 + STALL) * every * STEP + 1e-9

        assert one.alone == next(h for h in range(1, 10_000) if not stalls(h, 0))
        longest = {h: min(h - 1, int(most * h + 1e-9)) for h in range(1, 10_000)}
        assert one.every == next(h for h in range(1, 10_000) if not stalls(h, longest[h]))
        assert not stalls(one.every, one.delay)
        assert one.delay <= most * one.every + 1e-9
        assert one.delay == 0 or one.delay * STEP >= min(one.exchange, longest[one.every] * STEP)
        assert one.step == pytest.approx((1 + one.stall) * STEP)
        assert one.stall <= STALL + 1e-9


def test_the_most_exact_way_that_fits_is_taken(planned):
    for longest in (1000, 30, 10, 1):
        found = rounds(planned, longest=longest)
        safe = [one for one in found.rounds if not one.risky]
        fits = [one for one in safe if one.every <= longest]
        if fits:
            assert found.best.error == min(one.error for one in fits)
            assert found.best.every <= longest
        else:
            assert found.best.every == min(one.every for one in safe)
            assert "Nothing fits rounds of 1 steps" in str(found)
        assert f"every={found.best.every}" in str(found)
    assert rounds(planned, longest=1000).best.name.startswith("dense")


@pytest.mark.parametrize("workers", [4, (2, 4)])
def test_a_line_to_write_makes_the_round(planned, workers):
    axis_name, link = "workers", planned.network
    if workers != 4:
        axis_name = ("hosts", "devices")
        planned = jaxcomp.plan(
            2_000_000, workers, link, fast=link, compute=STEP, link_only=True, rounds=True
        )
    for delayed in (0.0, 0.5):
        found = rounds(planned, delayed=delayed)
        assert found.best.program in " ".join(str(found).split())
        for one in found.rounds:
            if one.program:
                tx = eval(one.program, {"jaxcomp": jaxcomp, "axis_name": axis_name})
                assert f"every={one.every}" in one.program
                assert ("streaming" in one.program) == (one.delay > 0)
                assert callable(tx.update)
        silent = [one.name for one in found.rounds if not one.program]
        assert silent == ([] if workers == 4 else ["SparseLoCo"])  # It has one level.


def test_what_pages_advise_against_is_not_taken_unasked(planned):
    found = rounds(planned, longest=12)
    named = {one.name: one for one in found.rounds}
    assert named["sign, TwoShot"].risky
    assert named["top_k 1 %, Gather"].risky
    assert not found.best.risky
    assert "not taken unasked" in str(found)
    assert "sign, TwoShot" in found.notes[0]
    assert not named["SparseLoCo"].risky
    assert named["SparseLoCo"].delay == 0
    assert not planned.best.way.local
    link = planned.network
    asked = jaxcomp.plan(
        2_000_000, 4, link, compute=STEP, link_only=True, codecs={"sign": jaxcomp.sign()}
    )
    assert not rounds(asked).notes


def test_a_fast_link_needs_no_rounds():
    link = Network(bandwidth=1.25e12)
    planned = jaxcomp.plan(1000, 2, link, compute=1.0, link_only=True)
    best = rounds(planned).best
    assert (best.every, best.alone, best.delay) == (1, 1, 0)


def test_as_json(planned):
    found = json.loads(rounds(planned).to_json())
    assert found["best"] in [one["name"] for one in found["rounds"]]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stall": 0}, "`stall` must be"),
        ({"longest": 0}, "`longest` must be"),
        ({"delayed": 1.1}, "`delayed` must be"),
    ],
)
def test_wrong_use_of_plans_of_rounds(planned, settings, said):
    with pytest.raises(ValueError, match=said):
        rounds(planned, **settings)


def test_the_time_of_a_step_must_be_known(planned):
    planned = jaxcomp.plan(1000, 2, planned.network, link_only=True)
    with pytest.raises(ValueError, match="`compute` must be"):
        rounds(planned)
    with pytest.raises(ValueError, match="`delay` must be"):
        seconds(4, 0.1, 1.0, delay=4)
