"""Caveats that a plan must state: the owner of a link, the error of a codec, untimed work."""

import dataclasses
import json
import math
import statistics

import jax
import jax.numpy as jnp
import pytest

import jaxcomp
import jaxcomp_command
from jaxcomp.planning import compared, kept, models, planner, timing
from jaxcomp.reducers import choose
from jaxcomp.theory import cost

LIKE = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
FOUR_BIT = "qsgd_inf 4-bit, TwoShot"
SIGN, TOP = jaxcomp.sign(), jaxcomp.top_k(fraction=0.01)
PORT = cost.Network(25e9 / 8, 50e-6)
INSIDE = cost.Network(400e9 / 8, 5e-6)


def clock(way) -> timing.Measured:
    """All work takes no time; top-k loses nearly everything."""
    lossy = isinstance(way, jaxcomp.Link) and way.codec == TOP
    return timing.Measured(1, 0.0, 0.0, 0.0, error=0.95 if lossy else 0.4)


def on_hosts(network=PORT, **settings):
    return planner.plan(
        LIKE, (4, 8), network, codecs={"sign": SIGN}, fast=INSIDE, clock=clock, **settings
    )


def test_the_devices_of_a_host_share_its_link():
    """Eight devices behind one port have an eighth of it each."""
    shared = {line.way.name: line for line in on_hosts().forecasts}
    eighth = cost.Network(PORT.bandwidth / 8, PORT.latency)
    own = {line.way.name: line for line in on_hosts(eighth, link_per="device").forecasts}
    for name, line in shared.items():
        assert line.links == pytest.approx(own[name].links)
        assert line.way.price.bytes == pytest.approx(8 * own[name].way.price.bytes)
        assert line.break_even == pytest.approx(8 * own[name].break_even)
    # A ring between hosts moves the whole array over the port of each: 2·3/4 of its bytes.
    assert shared["dense bfloat16"].way.price.bytes == pytest.approx(1.5 * 2 * 2**20)
    for leaf, other in zip(
        on_hosts().leaves, on_hosts(eighth, link_per="device").leaves, strict=True
    ):
        assert leaf.saved == pytest.approx(other.saved)


def test_compressing_gains_more_where_devices_share_a_port():
    shared, own = (on_hosts(link_per=per).best.speedup for per in ("host", "device"))
    assert shared > 1.5 * own


def test_a_plan_says_whose_link_it_is():
    assert "25 Gbit/s for each host of 8 devices" in on_hosts().about
    assert "25 Gbit/s for each device" in on_hosts(link_per="device").about
    assert json.loads(on_hosts(link_per="device").to_json())["link_per"] == "device"


@pytest.mark.parametrize("delay", [None, 0.05])
@pytest.mark.parametrize("sizes", [(8,), (2, 8)])
def test_what_a_plan_says_to_write_is_the_way_that_it_compared(sizes, delay):
    named = planner.ways({**planner.CODECS, **planner.LOCAL}, sizes, delay)
    lines = compared.means(named, sizes, delay)
    assert set(compared.DENSE) < set(lines)
    assert set(lines) == set(named) - (set(compared.LOCAL) if len(sizes) > 1 else set())
    for name, line in lines.items():
        if name in compared.LOCAL:
            want = jaxcomp.chunk_top_k()
        elif len(sizes) > 1 or name in compared.DENSE or (delay and "PowerSGD" not in name):
            want = named[name]
        else:  # `compressed_mean` chooses the reducer.
            want = planner.CODECS[name.partition(", ")[0]]
        assert eval(line) == want


def test_behind_a_delay_messages_are_sent_at_once():
    """Two shots wait twice, and once more for dense leaves."""
    like = {"w": jnp.zeros((1000, 100)), "b": jnp.zeros(100)}
    for latency, rounds in ((1e-4, 2 * 7 + 2 * 7), (0.05, 3)):
        slow = cost.Network(bandwidth=1.25e7, latency=latency)
        planned = jaxcomp.plan(like, 8, slow, link_only=True)
        (two,) = (one.way for one in planned.forecasts if one.way.name == FOUR_BIT)
        assert two.price.rounds == rounds
        line = planned.conditions.means[FOUR_BIT]
        assert ("delay=0.05" in line) == (latency == 0.05)


def test_a_plan_says_what_to_write():
    slow = cost.Network(bandwidth=1.25e6)
    planned = jaxcomp.plan(1_000_000, 8, slow, compute=10.0, link_only=True)
    assert planned.program == "jaxcomp.compressed_mean(jaxcomp.PowerIteration(rank=4), axis_name)"
    assert f"    {planned.program}\n" in str(planned)
    assert json.loads(planned.to_json())["program"] == planned.program
    fast = planned.on(cost.Network(bandwidth=1e15))
    assert not fast.compress
    assert not fast.program
    own = jaxcomp.plan(1_000_000, 8, slow, codecs={"sign": jaxcomp.sign()}, link_only=True)
    assert not own.program


def test_a_way_that_loses_nearly_everything_is_named_and_not_taken():
    codecs = {"sign": SIGN, "top": TOP}

    def lossy(way):  # Of a random matrix, low rank is nearly nothing too.
        found = clock(way)
        power = isinstance(way, jaxcomp.PowerIteration)
        return dataclasses.replace(found, error=0.98) if power else found

    found = planner.plan(LIKE, 4, cost.Network(1e6), codecs=codecs, clock=clock)
    taken = found.best.way
    assert taken.name == "sign, TwoShot"
    assert found.forecasts[0].way.name == "top, Gather"
    assert found.forecasts[0].way.risky
    assert not taken.risky
    said = " ".join(str(found).split())
    assert "top, Gather would take" in said
    assert "but its error is 0.95: training may need many more steps, or fail." in said
    assert "How many steps training needs is not counted" in said
    (line,) = (line for line in str(found).splitlines() if "top, Gather  " in line)
    assert line.endswith("0.95  !")
    told = json.loads(found.to_json())
    assert (told["best"], told["fastest"]) == (taken.name, "top, Gather")
    assert (told["caution"], told["notes"]) == (found.caution, list(found.notes))
    assert {way["name"]: way["risky"] for way in told["ways"]}["top, Gather"]
    bold = planner.plan(LIKE, 4, cost.Network(1e6), codecs=codecs, clock=clock, max_error=1)
    assert bold.best.way.name == "top, Gather"
    assert "But its error is 0.95" in " ".join(str(bold).split())
    safe = planner.plan(LIKE, 4, cost.Network(1e6), codecs=codecs, clock=clock, max_error=0.9)
    assert safe.caution == ""
    assert "!" not in str(safe).partition("*")[0]
    power = {"power": jaxcomp.PowerIteration(rank=4)}
    low = planner.plan(LIKE, 4, cost.Network(1e6), codecs=codecs | power, clock=lossy)
    assert (low.best.way.name, low.best.way.mark) == ("power", "~")


def test_links_alone_are_not_timed(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a codec was timed")

    monkeypatch.setattr(timing, "measure", refuse)
    monkeypatch.setattr(timing, "times", refuse)
    codecs = {"sign": SIGN}
    found = planner.plan(LIKE, 4, cost.Network(1e6), codecs=codecs, link_only=True)
    assert all(line.work == 0 for line in found.forecasts)
    assert found.best.way.error == pytest.approx(1 - 2 / math.pi, abs=0.01)
    text = str(found)
    assert "Links alone: no codec was timed" in text
    assert "counting the links alone" in " ".join(text.split())
    assert not {"of it work", "pays below", "spread"} & set(text.splitlines()[2].split("  "))
    assert json.loads(found.to_json())["timed"] is False

    def slow(way):
        return timing.Measured(1, 1.0, 1.0, 1.0, error=0.4, spread=2.0)

    other = planner.plan(LIKE, 4, cost.Network(1e6), codecs=codecs, link_only=True, clock=slow)
    assert [line.step for line in other.forecasts] == [line.step for line in found.forecasts]


def test_where_links_alone_have_another_answer_both_are_told():
    """PowerSGD sends the fewest bytes, and its products take longer than four bits on CPUs."""

    gigabit, settings = cost.Network(1.25e8, 5e-5), {"compute": 0.25}
    alone = planner.plan(models.resnet50(), 8, gigabit, link_only=True, **settings)
    timed = planner.plan(models.resnet50(), 8, gigabit, clock=kept.of_table, **settings)
    power, four = "PowerSGD rank 4", "qsgd_inf 4-bit, TwoShot"
    assert (alone.best.way.name, timed.best.way.name) == (power, four)
    assert alone.other.best.step == timed.best.step
    assert timed.other.best.step == alone.best.step
    assert f"the answer is {four}" in " ".join(str(alone).split())
    assert f"Counting the links alone, the answer is {power}" in " ".join(str(timed).split())
    assert json.loads(timed.to_json())["contrast"] == timed.contrast
    agreed = planner.plan(models.resnet50(), 8, cost.Network(1.25e10), link_only=True, compute=9.0)
    assert agreed.contrast == ""


def test_the_fastest_of_the_repeats_counts_and_their_spread_is_told(monkeypatch):
    """Uses a simulated clock: eleven milliseconds, and more when something else runs."""
    given = [0.011, 0.022, 0.033]
    monkeypatch.setattr(timing, "times", lambda run, repeats, meet: given)
    measure = timing.measure.__wrapped__  # Nothing of this may be remembered.
    way = choose.link_or_reducer(SIGN)
    found = measure(way, 2**12)
    assert (found.whole, found.decode, found.add) == (0.011, 0.011, 0.0)
    assert found.spread == pytest.approx(1.0)
    assert measure(way, 2**12, choose=statistics.median).whole == 0.022
    assert found.free == dataclasses.replace(
        found, whole=0.0, decode=0.0, add=0.0, spread=0.0
    )  # The error stays.

    def busy(way):
        return dataclasses.replace(found, spread=0.5)

    network = cost.Network(1e6)
    said = str(planner.plan(LIKE, 4, network, codecs={"sign": SIGN}, clock=busy))
    assert "50 %" in said
    assert "This machine was busy" in " ".join(said.split())
    idle = str(planner.plan(LIKE, 4, network, codecs={"sign": SIGN}, clock=clock))
    assert "busy" not in idle


def number_of(tree) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("parameters", [1, 29, 99, 12_345, 100_000, 25_000_000, 7_000_000_000])
def test_a_transformer_has_as_many_parameters_as_asked_for(parameters):
    shapes = models.transformer(parameters)
    assert number_of(shapes) == parameters
    if parameters >= 100_000:
        width = shapes["embedding"].shape[1]
        blocks = sum(name.startswith("block") for name in shapes)
        assert width == 64 * blocks
        assert number_of({k: v for k, v in shapes.items() if "block" in k}) < parameters


def test_known_models_have_the_parameters_that_are_known():
    assert number_of(models.gpt2()) == 124_439_808
    assert number_of(models.resnet50()) == 25_557_032
    assert set(models.MODELS) == {"gpt2", "resnet50"}
    with pytest.raises(ValueError, match="`parameters`"):
        models.transformer(0)


def test_a_number_of_parameters_is_planned_as_many_leaves():
    """PowerSGD sends factors of each matrix, many more bytes than those of one large matrix."""
    codecs = {"PowerSGD": jaxcomp.PowerIteration(rank=4)}
    found = planner.plan(1_000_000, 4, cost.Network(1e6), codecs=codecs, clock=clock)
    assert found.conditions.elements == 1_000_000
    one = planner.plan(LIKE, 4, cost.Network(1e6), codecs=codecs, clock=clock)
    sent, sent_by_one = (
        next(line.way.price.bytes for line in each.forecasts if not line.way.dense)
        for each in (found, one)
    )
    assert sent > 3 * sent_by_one
    rows = [line.split() for line in str(found.leaves).splitlines()]
    assert ["block*/up", "2", "128x512"] in [row[:3] for row in rows]
    assert ["embedding", "1"] in [row[:2] for row in rows]
    assert len(found.leaves) == 28


def test_the_command_line_offers_all_of_it(capsys):
    common = ["plan", "--model", "resnet50", "--codec", "sign()", "--link-only"]
    hosts = ["--workers", "4x8", "--link", "25Gbit", "--fast-link", "400Gbit"]
    jaxcomp_command.main([*common, *hosts, "--json"])
    shared = json.loads(capsys.readouterr().out)
    assert (shared["link_per"], shared["timed"]) == ("host", False)
    jaxcomp_command.main([*common, *hosts, "--link-per", "device", "--json"])
    own = json.loads(capsys.readouterr().out)
    bytes_ = [{way["name"]: way["bytes"] for way in each["ways"]} for each in (shared, own)]
    assert bytes_[0] == pytest.approx({name: 8 * size for name, size in bytes_[1].items()})
