"""Arrays without elements, which crash XLA of JAX 0.11.2 as arguments of a `shard_map`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, PartitionSpec as P

import jaxcomp
from jaxcomp.backend import axes, mapping

SMALL = {"w": jnp.ones((8, 128)), "none": jnp.zeros((0, 3))}
EMPTY = {"ours": jnp.zeros((16, 0)), "all": jnp.zeros((3, 0), jnp.int8)}
SPECS = {"ours": P("data"), "all": P()}


def taken(jaxpr):
    """The arguments of each `shard_map`, also of nested ones."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "shard_map":
            yield [variable.aval for variable in equation.invars]
        for inner in jaxprs_in_params(equation.params):
            yield from taken(inner)


@pytest.mark.parametrize("check_vma", [True, False])
def test_arrays_without_elements_are_the_same_inside(check_vma, mesh):
    """Their local shapes, dtypes and types of replication; without `jit`, nothing crashes."""
    seen = {}

    def body(x, empty):
        seen[run] = jax.tree.map(lambda e: (e.shape, e.dtype, axes.varying_axes(e)), empty)
        return x + empty["ours"].sum(), empty["ours"] * 2, empty["all"]

    settings = {"mesh": mesh, "out_specs": (P("data"), P("data"), P()), "check_vma": check_vma}
    found = {}
    for run in (jax.shard_map, mapping.shard_map):
        mapped = run(body, in_specs=(P("data"), SPECS), **settings)
        found[run] = mapped(jnp.arange(8.0), EMPTY)
    assert seen[jax.shard_map] == seen[mapping.shard_map]
    for one, other in zip(*found.values(), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    np.testing.assert_array_equal(found[mapping.shard_map][0], jnp.arange(8.0))


@pytest.mark.parametrize("check_vma", [True, False])
def test_all_arguments_may_be_without_elements(check_vma, mesh):
    def body(empty):
        return empty["ours"], empty["all"]

    run = mapping.shard_map(
        body, mesh=mesh, in_specs=(SPECS,), out_specs=(P("data"), P()), check_vma=check_vma
    )
    assert [x.shape for x in jax.jit(run)(EMPTY)] == [(16, 0), (3, 0)]


@pytest.mark.parametrize("check_vma", [True, False])
def test_arrays_without_elements_within_another_map(check_vma):
    """They differ between the workers of the outer map, too, and between those of both axes."""
    devices = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def inner(x, empty):
        seen.append((empty.shape, axes.varying_axes(empty)))
        return x + empty.sum(), empty

    def body(x, empty):
        settings = {"out_specs": P("model"), "axis_names": {"model"}, "check_vma": check_vma}
        return mapping.shard_map(inner, in_specs=P("model"), **settings)(x, empty)

    seen = []
    run = mapping.shard_map(
        body, mesh=devices, in_specs=P("data"), out_specs=P("data"), axis_names={"data"},
        check_vma=check_vma,
    )  # fmt: skip
    x, empty = jax.jit(run)(jnp.arange(8.0), jnp.zeros((8, 0)))
    np.testing.assert_array_equal(x, jnp.arange(8.0))
    assert empty.shape == (8, 0)
    assert set(seen) == {((1, 0), frozenset({"data", "model"}) if check_vma else frozenset())}


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_step_maps_no_arrays_without_elements(check_vma, mesh):
    """Neither a parameter without elements nor its moments and sums."""
    mean = jaxcomp.compressed_mean(jaxcomp.sign(), "data")
    tx = jaxcomp.accumulate(optax.chain(mean, optax.adam(0.1)), "data", every=2)
    state = jaxcomp.init_state(tx, SMALL, mesh, "data")

    def train(params, state, x):
        loss, grads = jaxcomp.value_and_grad(lambda p, x: jnp.mean(x @ p["w"]), "data")(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    step = jaxcomp.data_parallel(train, mesh, "data", check_vma=check_vma)
    given = (SMALL, state, jnp.ones((8, 8)))
    assert sum(leaf.size == 0 for leaf in jax.tree.leaves(state)) == 3
    mapped = list(taken(step.trace(*given).jaxpr.jaxpr))
    assert mapped
    assert all(aval.size for avals in mapped for aval in avals)
    for before, after in zip(
        jax.tree.leaves(given[:2]), jax.tree.leaves(step(*given)[:2]), strict=True
    ):
        assert (before.shape, before.dtype) == (after.shape, after.dtype)
