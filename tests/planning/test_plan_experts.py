"""Plans of layers with experts: the bytes of the collectives, and the rate where it pays."""

import jax
import jax.numpy as jnp
import pytest

import jaxcomp
from jaxcomp import collectives
from jaxcomp.planning import Network, plan_experts, timing

EIGHT, SLOW = jaxcomp.qsgd_inf(bits=8), Network(12.5e6, 1e-4)


def clock(way) -> timing.Measured:
    """1 ns an element to encode and 1 ns to decode."""
    return timing.Measured(10**9, whole=2.0, decode=1.0, add=1.0, error=0.1)


def bytes_of(planned):
    return {one.way.name: one.way.price.bytes for one in planned.forecasts}


def test_a_layer_sends_tokens_and_answers_forward_and_back():
    pair = {"8/8": (EIGHT, EIGHT), "8": (EIGHT, None)}
    one = bytes_of(plan_experts(96, 128, 8, SLOW, top=3, codecs=pair, link_only=True))
    like = jax.ShapeDtypeStruct((3 * 96, 128), jnp.bfloat16)
    settings = {"workers": 8, "split_axis": 0, "concat_axis": 0}
    sent = sum(collectives.wire_bytes(collectives.all_to_all, like, EIGHT, **settings))
    assert one["8/8"] == 2 * sent
    assert one["dense bfloat16"] == 4 * 2 * 3 * 96 * 128 * 7 / 8
    assert one["8"] == (one["8/8"] + one["dense bfloat16"]) / 2
    three = bytes_of(plan_experts(96, 128, 8, SLOW, top=3, layers=3, codecs=pair, link_only=True))
    assert three == {name: 3 * size for name, size in one.items()}


def test_experts_of_one_host_are_reached_over_its_fast_links():
    fast = Network(5e10, 5e-6)
    flat = bytes_of(plan_experts(64, 128, 8, SLOW, link_only=True))
    hosts = plan_experts(64, 128, (2, 4), SLOW, fast=fast, link_only=True)
    device = plan_experts(64, 128, (2, 4), SLOW, fast=fast, link_per="device", link_only=True)
    for name, size in flat.items():
        assert bytes_of(device)[name] == pytest.approx(size * 4 / 7)  # Four of seven others.
        assert bytes_of(hosts)[name] == pytest.approx(4 * size * 4 / 7)
    [dense] = [f.way for f in device.forecasts if f.way.name == "dense bfloat16"]
    assert dense.fast.bytes == pytest.approx(flat["dense bfloat16"] * 3 / 7)


def test_it_pays_below_the_rate_at_which_the_saved_bytes_take_as_long_as_the_work():
    found = plan_experts(4096, 512, 8, Network(1e9), top=1, clock=clock)
    [both] = [f for f in found.forecasts if f.way.name == "mxfp8 tokens and answers"]
    assert both.work == pytest.approx(4 * 2e-9 * 4096 * 512)  # Four messages.
    saved = bytes_of(found)["dense bfloat16"] - both.way.price.bytes
    assert both.break_even == pytest.approx(saved / both.work)
    below, above = (
        plan_experts(4096, 512, 8, Network(rate * both.break_even), top=1, clock=clock)
        for rate in (0.1, 2.0)
    )
    assert below.best.way.name == both.way.name
    assert not above.compress
    assert f"the answer is {both.way.name}" in " ".join(str(above).split())


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"workers": 1}, "`workers` must be at least 2 devices"),
        ({"workers": (2, 2)}, "beside `fast`"),
        ({"tokens": 0}, "`tokens` must be at least 1"),
        ({"codecs": {"x": EIGHT}}, "pairs of codecs or None"),
    ],
)
def test_wrong_arguments_of_plans_for_experts(given, says):
    with pytest.raises(ValueError, match=says):
        plan_experts(**{"tokens": 64, "width": 64, "workers": 8, "network": SLOW, **given})
