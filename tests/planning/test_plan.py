"""The cost of a mean on a link, and plans made of it."""

import dataclasses
import json
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest

import jaxcomp
from jaxcomp.planning import planner, timing
from jaxcomp.reducers import choose
from jaxcomp.theory import comparison, cost
from jaxcomp.theory.candidates import Way

TEN_GBIT = cost.Network(1.25e9)
RESNET = 25_600_000


EF = jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual())


def still(way) -> timing.Measured:
    """A device of 1 ns an element for each pass, without looking at what passes."""
    if isinstance(way, jaxcomp.Dense):
        return timing.Measured(10**9, 0.0, 0.0, 0.0, 0.0)
    return timing.Measured(10**9, whole=2.0, decode=1.0, add=0.5, error=0.1)


def test_a_model_of_resnet_takes_what_arithmetic_says():
    n = 16

    def ms(price):
        return round(1e3 * price.seconds(TEN_GBIT), 1)

    assert ms(cost.ring(4 * RESNET, n)) == 153.6
    assert ms(cost.ring(2 * RESNET, n)) == 76.8
    for bits, expected in ((8, 38.4), (4, 19.2), (1, 4.8)):
        size = bits * RESNET / 8
        assert ms(cost.reduce_scatter(size, n) + cost.all_gather(size / n, n)) == expected
    assert ms(cost.all_gather(RESNET / 8, n)) == 38.4
    assert ms(cost.all_gather(0.01 * RESNET * 8, n)) == 24.6


def test_messages_cost_their_latency():
    network = cost.Network(1e9, latency=1e-3)
    assert cost.ring(0, 8).seconds(network) == pytest.approx(14e-3)
    assert cost.all_gather(0, 8).seconds(network) == pytest.approx(7e-3)
    assert cost.ring(123, 1) == cost.all_gather(123, 1) == cost.Price()


numbers = st.floats(1e-3, 1e3)


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(numbers, numbers, numbers, numbers, st.integers(0, 9), st.integers(0, 9), numbers)
def test_break_even_is_where_both_take_as_long(b1, b2, w1, w2, r1, r2, hidden):
    dense, packed = cost.Price(1e9 * b1, r1, w1), cost.Price(1e9 * b2, r2, w2)
    edge = cost.break_even(dense, packed, latency=0.1, hidden=hidden)

    def gain(bandwidth):
        network = cost.Network(bandwidth, 0.1)
        both = (max(price.seconds(network) - hidden, 0.0) for price in (dense, packed))
        return next(both) - next(both)

    if edge == 0:  # It sends no less: on slow links that is what counts.
        assert b2 >= b1
        assert gain(1e3) <= 0
    elif edge == math.inf:
        assert gain(1e15) >= -1e-6
    else:
        assert gain(edge * 0.99) > 0
        assert gain(edge * 1.01) <= 1e-9


def test_a_step_hides_what_runs_beside_the_backward_pass():
    assert cost.step(1.0, 0.5, backward=0.6, overlap=0.5) == pytest.approx(1.2)
    assert cost.step(1.0, 0.2, backward=0.6, overlap=0.5) == 1.0
    assert cost.step(1.0, 0.5, every=10) == pytest.approx(1.05)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: cost.Network(0.0), "`bandwidth`"),
        (lambda: cost.Network(1.0, -1.0), "`latency`"),
        (lambda: cost.step(1.0, 1.0, overlap=2.0), "`overlap`"),
        (lambda: cost.ring(1.0, 0), "`workers`"),
        (lambda: comparison.compare([Way("x", cost.Price())], TEN_GBIT), "dense"),
        (lambda: planner.plan(100, 1, TEN_GBIT), "`workers`"),
        (lambda: planner.plan(100, (2, 4), TEN_GBIT), "`fast`"),
        (lambda: planner.plan(100, 4, TEN_GBIT, fast=TEN_GBIT), "`fast`"),
        (lambda: planner.plan(100, 4, TEN_GBIT, link_per="rack"), "`link_per`"),
    ],
)
def test_wrong_use_says_what_is_allowed(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize(
    ("work", "said"),
    [(0.0, "pays on links of any speed."), (1.0, "pays on links below 0.032 kbit/s.")],
)
def test_the_verdict_says_on_which_links(work, said):
    """Four bytes are saved for a second, or for nothing."""
    ways = [
        Way("dense", cost.Price(bytes=8.0), dense=True),
        Way("x", cost.Price(bytes=4.0, work=work)),
    ]
    assert comparison.compare(ways, cost.Network(1.0)).verdict.endswith(said)


LIKE = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32), "b": jax.ShapeDtypeStruct((9,), "f4")}


@pytest.mark.parametrize(
    ("reducer", "n", "rounds", "work"),
    [
        # 1 ns to encode, 1 for the first payload of a sum, ½ for each further one.
        (jaxcomp.Gather(jaxcomp.qsgd_inf(4)), 4, 3 + 6, 1 + 1 + 1.5),
        (jaxcomp.TwoShot(EF, EF), 4, 6 + 6, 1 + 0.25 + 0.375 + 0.25 + 1),
        (jaxcomp.Psum(jaxcomp.random_k(0.01)), 4, 6 + 6, 2),
        (jaxcomp.PowerIteration(rank=2), 4, 12 + 6, 1),
        (jaxcomp.PowerIteration(rank=2, alternate=True), 4, 6 + 6, 1),
        (jaxcomp.Dense(), 8, 14, 0),
    ],
)
def test_the_price_of_a_reducer_is_its_bytes_messages_and_passes(reducer, n, rounds, work):
    spent, fast = planner.price(reducer, LIKE, (n,), still)
    assert fast == cost.Price()
    assert spent.bytes == jaxcomp.wire_bytes(reducer, LIKE, n)
    assert spent.rounds == rounds
    assert spent.work == pytest.approx(work * 512 * 512 * 1e-9)


Q4 = jaxcomp.qsgd_inf(bits=4)
EVEN = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 8
UNEVEN = [jax.ShapeDtypeStruct((64, 1024, 1024), jnp.float32), *EVEN]
ONE = jax.ShapeDtypeStruct((8192, 1024), jnp.float32)


@pytest.mark.parametrize(
    ("reducer", "like", "rounds"),
    [
        (jaxcomp.Gather(Q4), EVEN, 4 * 3),
        (jaxcomp.Gather(Q4, collectives=2), EVEN, 2 * 3),
        (jaxcomp.TwoShot(EF, EF), EVEN, 4 * 6),
        (jaxcomp.TwoShot(EF, EF, collectives=1), EVEN, 6),
        # Whole arrays travel: one is most of this tree, and the others go together.
        (jaxcomp.Gather(Q4), UNEVEN, 2 * 3),
        (jaxcomp.Gather(Q4), ONE, 3),
        # What has no collectives to choose, and small factors of large leaves.
        (jaxcomp.Psum(jaxcomp.random_k(0.01)), EVEN, 6),
        (jaxcomp.PowerIteration(rank=2, factors=Q4), EVEN, 2 * 3),
    ],
)
def test_each_collective_of_a_large_tree_waits_for_its_own_messages(reducer, like, rounds):
    spent, _ = planner.price(reducer, like, (4,), still)
    assert spent.rounds == rounds


def test_collectives_of_a_large_tree_are_in_what_a_plan_says_of_latency():
    slow = cost.Network(1e30, latency=1.0)
    found = planner.plan(EVEN, 4, slow, codecs={"q": jaxcomp.TwoShot(Q4, Q4)}, clock=still)
    (line,) = (line for line in found.forecasts if not line.way.dense)
    assert line.links == pytest.approx(24)


def test_two_axes_share_out_what_crosses_the_slow_links():
    outer = jaxcomp.TwoShot(EF, EF)
    reducer = jaxcomp.Hierarchical(jaxcomp.Dense(), outer)
    like = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    slow, fast = planner.price(reducer, like, (4, 8), still)
    assert slow.bytes == pytest.approx(jaxcomp.wire_bytes(outer, like, 4) / 8, rel=0.01)
    assert fast.bytes == pytest.approx(2 * 7 / 8 * 4 * 2**20)
    dense, near = planner.price(jaxcomp.Dense("bfloat16"), like, (4, 8), still)
    assert dense.bytes == pytest.approx(2 * 3 / 4 * 2 * 2**20 / 8)
    assert near.bytes == pytest.approx(2 * 7 / 8 * 2 * 2**20)


LARGE = jax.ShapeDtypeStruct((5000, 5000), jnp.float32)


def plan(link: float, **settings):
    return planner.plan(LARGE, 4, cost.Network(link), clock=still, **settings)


def test_slow_links_are_worth_compressing_for_and_fast_ones_are_not():
    slow, quick = plan(12.5e6), plan(12.5e9)
    assert slow.compress
    assert slow.best.speedup > 10
    assert not quick.compress
    assert "Do not compress" in str(quick)
    edge = slow.best.break_even
    name = slow.best.way.name
    for times, faster in ((0.9, True), (1.1, False)):
        lines = {line.way.name: line.step for line in plan(edge * times).forecasts}
        assert (lines[name] < lines["dense bfloat16"]) is faster


def test_a_codec_may_be_kept_from_losing_too_much():
    def clock(way):
        found = still(way)
        few = isinstance(way, jaxcomp.Link) and way.codec == jaxcomp.sign()
        return dataclasses.replace(found, error=0.4) if few else found

    codecs = {"sign": jaxcomp.sign(), "qsgd_inf": jaxcomp.qsgd_inf(bits=4)}
    link = cost.Network(12.5e6)
    free = planner.plan(LARGE, 4, link, codecs=codecs, clock=clock)
    assert free.best.way.name.startswith("sign")
    held = planner.plan(LARGE, 4, link, codecs=codecs, clock=clock, max_error=0.2)
    assert held.best.way.name == "qsgd_inf, TwoShot"
    assert len(held.forecasts) == 4


def test_nothing_is_won_where_the_mean_hides_behind_the_backward_pass():
    assert plan(1.25e8).compress
    hidden = plan(1.25e8, compute=30.0, backward=20.0, overlap=1.0)
    assert not hidden.compress
    assert hidden.best.speedup == 1.0


def test_leaves_that_are_too_short_for_a_codec_stay_dense():
    like = {"w": jnp.zeros((512, 512)), "b": jnp.zeros(512)}
    found = planner.plan(like, 4, cost.Network(1e6), codecs={"sign": jaxcomp.sign()}, clock=still)
    leaves = {leaf.path: leaf for leaf in found.leaves}
    assert leaves["b"].codec is None
    assert leaves["w"].codec == jaxcomp.sign()
    assert 0 < leaves["w"].saved < found.on(cost.Network(1e6)).forecasts[-1].mean
    assert "w " in str(found)


def test_a_plan_is_json_too():
    found = json.loads(plan(12.5e6).to_json())
    assert found["compress"]
    assert {"name", "step", "break_even", "bytes"} <= set(found["ways"][0])
    assert found["best"] == found["ways"][0]["name"]
    assert (found["elements"], found["workers"]) == (25_000_000, [4])


def test_a_plan_tells_programs_what_to_do_with_each_leaf():
    like, codec = {"w": jnp.zeros((512, 512)), "b": jnp.zeros(512)}, jaxcomp.sign()
    found = planner.plan(like, 4, cost.Network(1e6), codecs={"sign": codec}, clock=still)
    told = json.loads(found.to_json())
    saved = [leaf.saved for leaf in found.leaves]
    assert told["leaves"] == [
        {"path": "b", "shape": [512], "codec": None, "saved": saved[0]},
        {"path": "w", "shape": [512, 512], "codec": repr(codec), "saved": saved[1]},
    ]
    elsewhere = found.on(cost.Network(2e6))
    assert elsewhere.about == "262,656 elements over 4 workers, 16 Mbit/s, 0 s a message"


@pytest.mark.parametrize(
    ("parameters", "compute", "slow", "fast"),
    [
        (61_000_000, 0.1, (7.26, 3.73), (1.18, 0.90)),  # AlexNet
        (138_000_000, 1.0, (6.12, 3.38), (1.07, 0.98)),  # VGG-16
        (7_000_000, 0.35, (1.94, 1.41), (1.01, 0.99)),  # GoogLeNet
    ],
)
def test_ternary_gradients_win_most_where_parameters_are_many_for_the_arithmetic(
    parameters, compute, slow, fast
):
    """The table in docs/network.md: 16 hosts of eight that share a link, against two dtypes."""
    like = jax.ShapeDtypeStruct((parameters // 1000, 1000), jnp.float32)
    for between, wanted in (
        (cost.Network(1.25e8, 1e-4), slow),
        (cost.Network(1.25e10, 5e-6), fast),
    ):
        found = planner.plan(
            like,
            (16, 8),
            between,
            codecs={"terngrad": jaxcomp.TwoShot(jaxcomp.terngrad(), jaxcomp.terngrad())},
            fast=cost.Network(8e9, 1e-5),
            compute=compute,
            clock=lambda way: timing.Measured(1, 0.0, 0.0, 0.0, 0.0),
        )
        steps = {line.way.name: line.step for line in found.forecasts}
        for base, times in zip(("dense float32", "dense bfloat16"), wanted, strict=True):
            assert steps[base] / steps["terngrad"] == pytest.approx(times, abs=0.006)


@pytest.mark.full
def test_a_link_is_measured_on_this_device():
    found = timing.measure(choose.link_or_reducer(jaxcomp.sign()), 2**14, repeats=1)
    assert found.error == pytest.approx(1 - 2 / math.pi, abs=0.01)
    assert found.whole > 0
    assert found.decode > 0
    assert found.work.encode == pytest.approx(max(0, found.whole - found.decode) / found.elements)
    assert timing.measure(choose.link_or_reducer(jaxcomp.sign()), 2**14, repeats=1) is found
    whole = timing.measure(jaxcomp.PowerIteration(rank=2), 2**14, repeats=1)
    assert whole.decode == whole.add == 0
    assert whole.work.encode > 0
