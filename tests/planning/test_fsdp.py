"""Plans of fully sharded models: the bytes of the program, and when not to compress."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.planning import Network, plan_fsdp

EIGHT, FOUR = jaxcomp.qsgd_inf(bits=8), jaxcomp.qsgd_inf(bits=4)
LIKE = {
    "a": jax.ShapeDtypeStruct((4096, 512), jnp.float32),
    "b": jax.ShapeDtypeStruct((512, 4096), jnp.float32),
    "bias": jax.ShapeDtypeStruct((4096,), jnp.float32),
}
SLOW, PAIR = Network(12.5e6, 1e-4), {"8/4": (EIGHT, FOUR)}


def bytes_of(planned):
    return {one.way.name: one.way.price.bytes for one in planned.forecasts}


def test_planned_bytes_are_those_of_the_program(mesh):
    specs = dict.fromkeys(LIKE, P("data"))
    f = jaxcomp.fully_sharded(
        lambda params, x: x.sum(), mesh, "data", specs, weights=EIGHT, gradients=FOUR
    )
    sent = f.link_bytes(LIKE)["data"]
    for gathers in (1, 2):
        planned = plan_fsdp(LIKE, 8, SLOW, codecs=PAIR, gathers=gathers, link_only=True)
        said = bytes_of(planned)["8/4"]
        assert said == pytest.approx(gathers * sent.forward + sent.backward, rel=1e-3)


def test_devices_share_the_slow_link_of_their_host():
    """A host sends (1 − 1/hosts) of everything over its link, whatever it has devices."""
    flat = bytes_of(plan_fsdp(LIKE, 2, SLOW, codecs=PAIR, link_only=True))
    settings = {"fast": Network(5e10, 5e-6), "codecs": PAIR, "link_only": True}
    host = bytes_of(plan_fsdp(LIKE, (2, 4), SLOW, **settings))
    device = bytes_of(plan_fsdp(LIKE, (2, 4), SLOW, link_per="device", **settings))
    for name, size in flat.items():
        assert host[name] == pytest.approx(size)
        assert device[name] == pytest.approx(size / 4)


def test_a_second_copy_crosses_the_slow_link_once():
    given = {"fast": Network(5e10, 5e-6), "codecs": PAIR, "link_only": True}
    once, twice = (plan_fsdp(LIKE, (2, 4), SLOW, gathers=times, **given) for times in (1, 2))
    copied = plan_fsdp(LIKE, (2, 4), SLOW, second_copy=True, **given)
    assert bytes_of(copied) == bytes_of(once)
    inside = [[one.way.fast for one in plan.forecasts] for plan in (copied, twice)]
    assert inside[0] == inside[1]


def test_the_verdict_depends_on_the_link():
    slow = plan_fsdp(LIKE, 8, SLOW, codecs=PAIR, compute=0.1, link_only=True)
    assert slow.compress
    assert slow.best.way.name == "8/4"
    # Dense bfloat16 sends 3 · 2 bytes a step and element, 8/4 sends 2 · 1 + 0.5 and scales.
    assert 2.2 < bytes_of(slow)["dense bfloat16"] / bytes_of(slow)["8/4"] < 2.4
    fast = plan_fsdp(LIKE, 8, Network(1e12, 1e-6), codecs=PAIR, compute=0.1, link_only=True)
    assert not fast.compress
    assert "Do not compress" in str(fast)


def test_the_plan_prints_the_line_that_it_counts(mesh):
    """Over one axis and over two, with codecs that can be evaluated; none for codecs of yours."""
    one = plan_fsdp(LIKE, 8, SLOW, compute=0.1, link_only=True)
    two = plan_fsdp(LIKE, (2, 4), SLOW, fast=Network(5e10, 5e-6), compute=0.1, link_only=True)
    assert one.best.way.name == two.best.way.name == "8-bit weights, 4-bit gradients"
    assert two.program == one.program.replace('"fsdp"', '("dcn", "fsdp")') != one.program
    known = {"jaxcomp": jaxcomp, "loss_fn": len, "mesh": mesh, "specs": P("data")}
    made = eval(one.program.replace('"fsdp"', '"data"'), known)
    assert made.links.weights[0][1].codec == EIGHT
    assert made.links.gradients[0][1].codec == FOUR
    assert plan_fsdp(LIKE, 8, SLOW, codecs=PAIR, compute=0.1, link_only=True).program == ""


@pytest.mark.wrong_types
def test_wrong_arguments_of_plans_for_fsdp():
    for arguments, says in (
        ({"workers": 1}, "`workers` must be at least 2 devices"),
        ({"workers": (2, 2)}, "beside `fast`"),
        ({"gathers": 0}, "`gathers` must be at least 1"),
        ({"second_copy": True}, "`second_copy` needs `fast`"),
        ({"codecs": {"x": (EIGHT, "int4")}}, "pairs of codecs, policies or None"),
    ):
        given = {"workers": 8, "link_only": True, **arguments}
        with pytest.raises(ValueError, match=says):
            plan_fsdp(LIKE, network=SLOW, **given)
