"""Exchanges in fragments, with a delay and mixing."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.rounds import (
    AXIS,
    EVERYTHING,
    FOUR,
    PARAMS,
    WORKERS,
    trained,
)

import jaxcomp
from jaxcomp.transforms import fragments

STREAMED: Any = {"every": 4, "fragments": 2}


@pytest.mark.full
def test_one_fragment_without_delay_or_mixing_is_diloco():
    outer = optax.sgd(0.7, 0.9, nesterov=True)
    whole: Any = lambda params: {"w": 0}  # noqa: E731
    for key in ({"fragments": 1, "delay": 0, "mix": 0.0}, {"fragments": whole}):
        plain, streamed = (
            trained(
                jaxcomp.local_updates(
                    optax.adam(0.05), outer, AXIS, every=4, reducer=EVERYTHING, **more
                ),
                8,
            )
            for more in ({}, key)
        )
        np.testing.assert_array_equal(plain[0]["w"], streamed[0]["w"])
        np.testing.assert_array_equal(plain[1]["w"], streamed[1]["w"])


@pytest.mark.full
def test_fragments_take_turns_once_in_a_round():
    tx = jaxcomp.local_updates(optax.sgd(0.1), None, AXIS, **STREAMED)
    params = trained(tx, 8, FOUR)[0]
    moved = {
        name: [s for s in range(1, 8) if np.any(x[s] != x[s - 1])] for name, x in params.items()
    }
    assert sorted(map(tuple, moved.values())) == [(1, 5), (1, 5), (3, 7), (3, 7)]


@pytest.mark.full
def test_a_worker_that_keeps_its_own_model_is_never_moved():
    tx = jaxcomp.local_updates(optax.sgd(0.1), None, AXIS, mix=1.0, **STREAMED)
    alone = jaxcomp.local_updates(optax.sgd(0.1), None, AXIS, every=1000)
    (params, own, *_), (_, want, *_) = trained(tx, 9, FOUR), trained(alone, 9, FOUR)
    for name in FOUR:
        np.testing.assert_array_equal(own[name], want[name])
        assert np.any(params[name][-1] != FOUR[name])


@pytest.mark.full
def test_mixing_is_between_the_own_model_and_the_centre():
    settings: Any = {"every": 2, "delay": 1}
    whole, half = (
        trained(jaxcomp.local_updates(optax.sgd(0.1), None, AXIS, mix=mix, **settings), 2)
        for mix in (1.0, 0.25)
    )
    want = 0.25 * whole[1]["w"][1] + 0.75 * whole[0]["w"][1]
    np.testing.assert_allclose(half[1]["w"][1], want, rtol=1e-6, atol=1e-7)


@pytest.mark.full
def test_with_a_delay_the_steps_after_the_pseudo_gradient_are_lost_without_mixing():
    """The centre after a round with a delay is that of a round which ended earlier."""
    late = jaxcomp.local_updates(optax.sgd(0.1), None, AXIS, every=6, delay=2)
    early = jaxcomp.local_updates(optax.sgd(0.1), None, AXIS, every=4)
    (params, own, *_), (want, *_) = trained(late, 6), trained(early, 4)
    np.testing.assert_array_equal(params["w"][5], want["w"][3])
    np.testing.assert_array_equal(params["w"][4], np.stack([PARAMS["w"]] * WORKERS))
    np.testing.assert_array_equal(own["w"][5], params["w"][5])


def test_fragments_are_bins_of_bytes_or_layers_in_turn():
    x = jnp.ones
    assert fragments.balanced(2)({"a": x(8), "b": x(5), "c": x(3)}) == {"a": 0, "b": 1, "c": 1}
    layers = {f"layer{n}": {"w": x(2)} for n in range(5)}
    found = fragments.strided(3)({**layers, "head": x(2), "embed": x(2)})
    assert [found[f"layer{n}"]["w"] for n in range(5)] == [0, 1, 0, 1, 0]
    assert found["head"] == found["embed"] == 2
