"""What keeps a non-finite step out of memory: each test of values, and who is told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp.base import Mirrored
from jaxcomp.exchange import guarding

SMALL, LARGE = jnp.ones((3, 5)), jnp.ones(2**16)
"""`all_finite` joins small leaves, and reduces large ones one by one."""


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_element_of_any_leaf_is_seen(value):
    spoilt = [
        {"small": SMALL.at[2, 4].set(value), "large": LARGE},
        {"small": SMALL, "large": LARGE.at[-1].set(value)},
    ]
    assert [bool(guarding.all_finite(tree)) for tree in spoilt] == [False, False]


def test_trees_without_elements_are_finite():
    assert guarding.all_finite(())
    assert guarding.all_finite({"none": jnp.zeros((0, 3)), "count": jnp.int32(3)})
    assert guarding.all_finite({"small": SMALL, "large": LARGE, "most": jnp.float32(3e38)})


def test_a_step_that_is_not_sound_is_undone_whole():
    now, before = {"x": jnp.ones(3), "n": jnp.int32(2)}, {"x": jnp.zeros(3), "n": jnp.int32(1)}
    assert guarding.where_finite(jnp.array(False), now, before)["n"] == 1
    found = guarding.where_finite(jnp.array(True), now, before)
    jax.tree.map(np.testing.assert_array_equal, found, now)


def test_a_state_keeps_its_dtypes_and_finite_values():
    before = {"half": jnp.zeros(3, jnp.float16), "count": jnp.zeros((), jnp.uint32)}
    now = {"half": jnp.array([1e6, -1e6, jnp.inf]), "count": jnp.int32(5)}
    found = guarding.cast_like(now, before)
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, before)
    np.testing.assert_array_equal(found["half"], np.array([65504, -65504, np.inf]))
    assert found["count"] == 5


def test_only_elements_that_a_step_spoils_are_lost():
    """A best loss starts at infinity, and counts are no floats."""
    before = {"best": jnp.array([jnp.inf, 1.0]), "count": jnp.int32(3)}
    assert guarding.none_lost({"best": jnp.array([jnp.inf, 0.5]), "count": jnp.int32(4)}, before)
    assert guarding.none_lost({"best": jnp.array([0.5, 0.5]), "count": jnp.int32(4)}, before)
    lost = {"best": jnp.array([jnp.inf, jnp.nan]), "count": jnp.int32(4)}
    assert not guarding.none_lost(lost, before)


def test_one_worker_with_a_memory_that_is_not_finite_tells_all():
    """The mirror is the same on all of them, so only their own memory counts."""
    rows = jnp.zeros((4, 3)).at[2, 1].set(jnp.inf)
    told = jax.jit(
        jax.vmap(lambda x: guarding.flag_any_unsound((x, jnp.int32(1)), "data"), axis_name="data")
    )
    assert jnp.isnan(told(rows)).all()
    assert (told(rows.at[2].set(0)) == 0).all()
    assert jnp.isnan(guarding.flag_unsound(rows[2]))
    nan = jnp.full(3, jnp.nan)
    assert guarding.flag_unsound(Mirrored(own=rows[0], mirror=nan)) == 0
    assert jnp.isnan(guarding.flag_unsound(Mirrored(own=nan, mirror=rows[0])))


def test_the_smallest_leaf_that_has_elements_carries_the_flag():
    tree = {"none": jnp.zeros(0), "large": jnp.ones((4, 4)), "small": jnp.ones(2)}
    found = guarding.poison(tree, jnp.float32(jnp.nan))
    assert jnp.isnan(found["small"]).all()
    np.testing.assert_array_equal(found["large"], tree["large"])
    jax.tree.map(np.testing.assert_array_equal, guarding.poison(tree, jnp.float32(0)), tree)
