"""Sums and means over workers: their order, their rounding, their weights and derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxcomp.exchange import over_workers

DRAWS = np.random.default_rng(0).standard_normal((8, 300)).astype(np.float32)


def on_devices(f, mesh, out_specs=P()):
    """`f` of the row of each device."""
    mapped = jax.shard_map(
        lambda rows: f(rows[0]), mesh=mesh, in_specs=P("data"), out_specs=out_specs
    )
    return jax.jit(mapped)


def test_a_total_is_added_in_the_order_of_the_workers():
    """Also over two axes, of which the outer one is mapped last."""
    want = functools.reduce(np.add, DRAWS)
    assert (want != DRAWS.sum(0, dtype=np.float64).astype(np.float32)).any()

    def total(x, axis_name):
        return over_workers.total([x], axis_name)[0]

    one = jax.vmap(functools.partial(total, axis_name="data"), axis_name="data")
    np.testing.assert_array_equal(jax.jit(one)(DRAWS)[0], want)
    both = jax.vmap(functools.partial(total, axis_name=("slow", "fast")), axis_name="fast")
    both = jax.vmap(both, axis_name="slow")
    np.testing.assert_array_equal(jax.jit(both)(DRAWS.reshape(2, 4, -1))[0, 0], want)


def test_a_worker_of_weight_zero_adds_nothing_to_a_mean():
    weights = np.array([2, 0, 1, 1, 0.5, 0.5, 0, 3], np.float32)
    spoilt = np.where(weights[:, None] == 0, np.nan, DRAWS)
    means = jax.vmap(
        lambda x, w: over_workers.mean([x, x.astype(jnp.bfloat16)], "data", w), axis_name="data"
    )
    wide, narrow = jax.jit(means)(spoilt, weights)
    want = (DRAWS * weights[:, None]).sum(0) / 8  # Of all workers, whatever they weigh.
    np.testing.assert_allclose(wide[0], want, atol=1e-6)
    np.testing.assert_allclose(np.asarray(narrow[0], np.float32), want, atol=2e-2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.int32], ids=str)
def test_means_and_totals_have_the_dtype_of_their_terms(dtype):
    x = jnp.asarray(8 * np.arange(24).reshape(8, 3), dtype)
    run = jax.vmap(lambda x: over_workers.total([x], "data")[0], axis_name="data")
    total = jax.jit(run)(x)
    assert total.dtype == dtype
    np.testing.assert_array_equal(total[0], np.asarray(x).sum(0))
    assert over_workers.is_narrow(dtype) == (dtype == jnp.float16)


def test_rows_are_averaged_by_the_worker_of_their_number(mesh):
    rows = np.random.default_rng(1).standard_normal((8, 8, 5)).astype(np.float32)
    run = on_devices(lambda rows: over_workers.mean_of_rows(rows, "data")[None], mesh, P("data"))
    vmapped = jax.vmap(lambda rows: over_workers.mean_of_rows(rows, "data"), axis_name="data")
    np.testing.assert_allclose(run(rows), rows.mean(0), atol=1e-6)
    np.testing.assert_array_equal(run(rows), jax.jit(vmapped)(rows))


def test_halves_are_gathered_bit_for_bit(mesh):
    """As integers: a NaN keeps its bits, and no compiler sends a wider dtype."""
    words = np.random.default_rng(2).integers(0, 2**16, (8, 33), np.uint16)
    halves = jax.lax.bitcast_convert_type(jnp.asarray(words), jnp.bfloat16)
    run = on_devices(lambda x: over_workers.gather(x, "data"), mesh)
    found = jax.lax.bitcast_convert_type(run(halves), jnp.uint16)
    np.testing.assert_array_equal(found, words)
    text = run.lower(halves).compile().as_text()
    assert "u16[" in next(line for line in text.splitlines() if " all-gather(" in line)


def test_halves_are_rounded_once():
    """The mean of eight workers is the float32 mean, rounded to nearest."""
    x = np.random.default_rng(0).standard_normal((8, 300)).astype(np.float32)
    for dtype in ("bfloat16", "float16"):
        halves = jnp.asarray(x, dtype)
        whole = functools.reduce(np.add, np.asarray(halves, np.float32)) * np.float32(1 / 8)
        run = jax.vmap(lambda x: over_workers.mean([x], "data")[0], axis_name="data")
        np.testing.assert_array_equal(run(halves)[0], jnp.asarray(whole, dtype))


@pytest.mark.full
def test_means_have_derivatives_and_may_be_mapped_again():
    """As `lax.pmean` has; and an axis that is none of the workers' changes nothing."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 8, 5)), jnp.float32)

    def mean(x, weight):
        return over_workers.mean([x, x.astype(jnp.bfloat16)], "data", weight)

    def loss(x):
        wide, narrow = jax.vmap(lambda x: mean(x, None), axis_name="data")(x)
        return jnp.sum(wide**2) + jnp.sum(narrow.astype(jnp.float32))

    grad = jax.grad(loss)(x[0])
    np.testing.assert_allclose(grad, 2 * x[0].mean(0)[None].repeat(8, 0) + 1, rtol=1e-5)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    weights = jnp.arange(24.0).reshape(3, 8) / 8

    def body(x, weight):  # The same for three trees at once.
        return jax.vmap(mean)(x[:, 0], weight[:, 0])

    specs = (P(None, "data"), P(None, "data"))
    got = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P()))(x, weights)
    rows = jax.vmap(jax.vmap(mean, axis_name="data"))(x, weights)
    for one, other in zip(got, rows, strict=True):
        np.testing.assert_array_equal(one, other[:, 0])
