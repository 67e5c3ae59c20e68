"""Forecasts of rounds between sites."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxcomp
from jaxcomp.planning import Network, plan_sites

LINK = Network(bandwidth=1.25e6, latency=0.025)


def test_a_round_is_steps_bytes_and_waits():
    like = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32), "b": jnp.zeros(512)}
    codec = jaxcomp.qsgd_inf(bits=4)
    found = plan_sites(like, LINK, up=codec, steps=10, step=0.3, idle=2.0, trips=4, handling=1e-6)
    up = jaxcomp.wire_bytes(codec, {"w": like["w"]}) + 4 * 512
    assert (found.up, found.down) == (up, 4 * 512 * 513)
    handled = 1e-6 * 4 * 512 * 513
    want = 3.0 + (found.up + found.down) / 1.25e6 + handled + 2.0 + 4 * 0.05
    assert found.seconds == pytest.approx(want)
    assert found.share == pytest.approx(3.0 / want)
    more = dataclasses.replace(found, steps=found.steps_for(0.9))
    assert more.share == pytest.approx(0.9, abs=0.01)
    assert "A site trains for" in str(found)
    assert '"share"' in found.to_json()


def test_each_direction_has_its_rate_and_its_delay():
    modem = Network(bandwidth=0.25e6, latency=0.04)
    same = plan_sites(10_000_000, LINK, up=jaxcomp.sign(), down=jaxcomp.qsgd_inf(bits=8))
    other = plan_sites(
        10_000_000, LINK, up=jaxcomp.sign(), down=jaxcomp.qsgd_inf(bits=8), upload=modem
    )
    assert (same.up, same.down) == (other.up, other.down)
    assert other.sending == pytest.approx(same.up / 0.25e6 + same.down / 1.25e6)
    assert other.waiting - same.waiting == pytest.approx(same.trips * 0.015)
    assert plan_sites(10_000_000, LINK, up=jaxcomp.sign(), upload=LINK).sending == pytest.approx(
        plan_sites(10_000_000, LINK, up=jaxcomp.sign()).sending
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"up": 3}, "`up`"),
        ({"down": 3}, "`down`"),
        ({"steps": 0}, "`steps`"),
        ({"step": -1.0}, "`step`"),
        ({"trips": -1.0}, "`trips`"),
        ({"handling": -1.0}, "`handling`"),
        ({"network": 3}, "`network`"),
        ({"upload": 3}, "`upload`"),
    ],
)
def test_wrong_arguments_of_plans_between_sites(given, says):
    given = {"params": 10_000_000, "network": LINK, "up": jaxcomp.sign(), **given}
    with pytest.raises(ValueError, match=says):
        plan_sites(given.pop("params"), given.pop("network"), **given)


def test_a_share_of_all_is_refused():
    found = plan_sites(10_000_000, LINK, up=jaxcomp.sign(), step=1.0)
    for share in (0.0, 1.0, 2.0):
        with pytest.raises(ValueError, match="`share`"):
            found.steps_for(share)
