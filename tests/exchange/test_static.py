"""A plan has everything that is static, once: workers, axes, batches, parts and bytes."""

import jax
import jax.numpy as jnp
import pytest

import jaxcomp
from jaxcomp.exchange.plan import Plan

LIKE = {"w": jnp.zeros((64, 60)), "v": jnp.zeros((40, 30)), "b": jnp.zeros(7)}
QSGD = jaxcomp.qsgd_inf(bits=4)
GATHER, TWO = jaxcomp.Gather(QSGD), jaxcomp.TwoShot(QSGD, QSGD)
LEVELS = jaxcomp.Hierarchical(jaxcomp.Dense("bfloat16"), jaxcomp.Gather(QSGD))


def test_a_plan_is_made_once_for_equal_arguments():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), LIKE)
    again = jaxcomp.Gather(jaxcomp.qsgd_inf(bits=4))
    assert Plan.of(GATHER, LIKE, sizes=(8,)) is Plan.of(again, shapes, sizes=(8,))
    assert Plan.of(GATHER, LIKE, sizes=(8,)) != Plan.of(GATHER, LIKE, sizes=(4,))


def test_workers_are_those_of_the_mapped_axes():
    seen = []

    def look(x):
        seen.append(Plan.of(GATHER, LIKE, ("slow", "fast")).sizes)
        return x

    run = jax.vmap(jax.vmap(look, axis_name="fast"), axis_name="slow")
    jax.eval_shape(run, jnp.zeros((2, 3)))
    assert set(seen) == {(2, 3)}
    assert Plan.of(GATHER, LIKE, "data").workers == 1  # Outside of a mapped function.


def test_a_fast_level_takes_the_last_axis():
    plan = Plan.of(LEVELS, LIKE, ("slow", "fast"), (4, 2))
    assert (plan.workers, plan.axis, plan.fast_axis) == (4, "slow", "fast")
    assert (plan.reducer, plan.fast) == (LEVELS.outer, LEVELS.inner)
    for whole, own in zip(plan.layout.batches, plan.batches, strict=True):
        assert own.buckets == -(-whole.buckets // 2)
    plain = Plan.of(GATHER, LIKE, ("slow", "fast"), (4, 2))
    assert (plain.workers, plain.axis, plain.fast) == (8, ("slow", "fast"), None)
    with pytest.raises(ValueError, match="`axis_name` must be a tuple of at least two axes"):
        _ = Plan.of(LEVELS, LIKE, "data", (8,)).axis


def test_parts_are_slices_of_two_shots_and_the_whole_of_one():
    one, two = (Plan.of(reducer, LIKE, sizes=(8,)) for reducer in (GATHER, TWO))
    assert one.part_like == one.likes == tuple(batch.like for batch in one.batches)
    for batch, part in zip(two.batches, two.part_like, strict=True):
        assert part.shape == (-(-batch.buckets // 8), batch.size)


def test_bytes_are_those_of_payloads_and_dense_leaves():
    plan = Plan.of(GATHER, LIKE, sizes=(8,))
    elements, dense = 64 * 60 + 40 * 30, 7 * 4
    assert plan.layout.dense == (0,)
    encoded = plan.payload_bytes - dense
    assert elements / 2 < encoded < 0.6 * elements  # Four bits, and the scales.
    assert plan.link_bytes == jaxcomp.wire_bytes(GATHER, LIKE, workers=8)
    assert plan.compressed_link_bytes == 7 * encoded
    assert Plan.of(GATHER, LIKE, sizes=(1,)).link_bytes == 0


def test_dense_leaves_are_sent_in_the_dtype_of_the_reducer():
    plan = Plan.of(jaxcomp.Dense("bfloat16"), LIKE, sizes=(8,))
    assert {x.dtype.name for x in plan.dense_likes} == {"bfloat16"}
    assert plan.payload_bytes == 2 * (64 * 60 + 40 * 30 + 7)
    assert plan.batches == ()
    assert not plan.tells


def test_only_a_memory_that_may_grow_is_told():
    """That of a shift, not a residual, whose codec bounds it."""
    kept, shifted = (
        Plan.of(jaxcomp.Gather(jaxcomp.Link(jaxcomp.sign(), feedback)), LIKE, sizes=(8,))
        for feedback in (jaxcomp.Residual(), jaxcomp.Shift())
    )
    assert (kept.tells, shifted.tells) == (False, True)
    assert shifted.link_bytes - kept.link_bytes == 7  # An all-reduce of four bytes.


def test_leaves_of_a_dtype_of_64_bits_have_a_plan_of_their_own(x64):
    like = {"w": jax.ShapeDtypeStruct((64, 60), jnp.float64)}
    assert Plan.of(GATHER, like, sizes=(8,)).likes[0].dtype == jnp.float64
