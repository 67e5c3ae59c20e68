"""A checkpoint of any number of workers is restored on any number of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import resizing
from helpers.resizing import AXIS, PARAMS
from helpers.suite import slow
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
from test_resizing import COMPOSITIONS, EVERY

import jaxcomp

SHAPES = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
CORE = ("both ways, residual", "both ways, ef21", "choco_sgd", "local steps", "accumulated")


def described(tree):
    flat, treedef = jax.tree.flatten(tree)
    return treedef, [(x.shape, jnp.dtype(x.dtype)) for x in flat]


@pytest.mark.core(*CORE)
@pytest.mark.parametrize("name", EVERY)
def test_a_target_needs_no_devices(name):
    """The shapes of a state of eight workers, from shapes, on a mesh of four without devices."""
    tx = EVERY[name]()
    found = jaxcomp.restore_target(tx, SHAPES, AbstractMesh((4,), (AXIS,)), AXIS, workers=8)
    wanted = resizing.shapes(tx, (8,))
    assert described(found) == described(wanted)
    again = jaxcomp.restore_target(tx, SHAPES, AbstractMesh((4,), (AXIS,)), AXIS, workers=found)
    assert jax.tree.leaves(again) == jax.tree.leaves(found)


def mesh_of(workers, shards=1):
    return jax.make_mesh(
        (workers, shards),
        (AXIS, "fsdp"),
        devices=jax.devices()[: workers * shards],
        axis_types=(AxisType.Auto,) * 2,
    )


def through_a_folder(folder, tx, params, mesh, state):
    """The state, saved and restored on another mesh by what its checkpoint says."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, state)
        checkpointer.wait_until_finished()
        saved = checkpointer.metadata(folder).item_metadata
        target = jaxcomp.restore_target(tx, params, mesh, AXIS, workers=saved)
        found = checkpointer.restore(folder, target)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(state))
    assert all(x.sharding.mesh == mesh for x in jax.tree.leaves(found))
    return found


FAMILIES = [
    "both ways, residual", "mirrored, ef21", "gather, momentum", "chosen, int8", "sidco", "levels",
    "phases, residual", "credible", "low rank", "gated shifts", "before", "accumulated",
    "displaced", "local steps", "own models", "choco_sgd", "gradient_tracking", "noloco",
]  # fmt: skip
"""One of each kind of memory."""


@pytest.mark.core("both ways, residual")
@pytest.mark.parametrize(
    "name", [*FAMILIES, *(slow(name) for name in EVERY if name not in FAMILIES)]
)
def test_eight_workers_go_on_as_four_and_as_eight(name, tmp_path):
    tx, eight, four = EVERY[name](), mesh_of(8), mesh_of(4)
    one = resizing.all_rows(tx) if name in COMPOSITIONS else None
    state = resizing.filled(resizing.shapes(tx, (8,)), one)
    half = jaxcomp.resize_workers(tx, state, PARAMS, 4)
    state = jaxcomp.place(state, eight, AXIS)
    found = through_a_folder(tmp_path / "eight", tx, PARAMS, four, state)
    found = jaxcomp.place(jaxcomp.resize_workers(tx, found, PARAMS, 4), four, AXIS)
    check_near(found, half)
    found = through_a_folder(tmp_path / "four", tx, PARAMS, eight, found)
    found = jaxcomp.place(jaxcomp.resize_workers(tx, found, PARAMS, 8), eight, AXIS)
    assert described(found) == described(state)


def check_near(found, wanted):
    """Means over split rows are added in another order."""

    def one(got, want):
        bits = jnp.finfo(got.dtype).nmant if jnp.issubdtype(got.dtype, jnp.floating) else 23
        wide = [np.asarray(x, np.float64) for x in (got, want)]
        np.testing.assert_allclose(*wide, rtol=2.0 ** (1 - bits), atol=1e-6)

    jax.tree.map(one, jax.device_get(found), jax.device_get(wanted))


def test_shards_keep_their_place_on_fewer_workers(tmp_path):
    """Four workers of two devices each go on as two; moments stay sharded like the parameters."""
    specs, big, small = {"w": P("fsdp"), "b": P()}, mesh_of(4, 2), mesh_of(2, 2)
    mean = jaxcomp.compressed_mean(jaxcomp.sign(), AXIS, param_specs=specs)
    tx = optax.chain(mean, optax.adam(1e-3))

    def put(mesh):
        like = {"w": np.ones((64, 64), np.float32), "b": np.ones(8, np.float32)}
        return jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), like, specs)

    state, params = jaxcomp.init_state(tx, put(big), big, AXIS), put(small)
    named = jaxcomp.restore_target(tx, put(big), small, AXIS, workers=4)
    placed = jaxcomp.restore_target(tx, params, small, AXIS, workers=4)
    assert jax.tree.leaves(named) == jax.tree.leaves(placed)
    found = through_a_folder(tmp_path / "state", tx, params, small, state)
    assert found[1][0].mu["w"].sharding.spec == P("fsdp")
    found = jaxcomp.place(jaxcomp.resize_workers(tx, found, params, 2), small, AXIS, params=params)
    wanted = jaxcomp.init_state(tx, params, small, AXIS)
    assert described(found) == described(wanted)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert got.sharding == want.sharding


def test_memory_of_workers_that_do_not_divide_is_on_every_device():
    tx = jaxcomp.compressed_mean(jaxcomp.sign(), AXIS)
    like = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    target = jaxcomp.restore_target(tx, like, mesh_of(3), AXIS, workers=8)
    (residual,) = jax.tree.leaves(target.memory.feedback)
    assert residual.shape[0] == 8
    assert residual.sharding.spec == P(None)
    same = jaxcomp.restore_target(tx, like, mesh_of(4), AXIS)
    made = jax.eval_shape(lambda p: jaxcomp.init_state(tx, p, mesh_of(4), AXIS), like)
    assert described(same) == described(made)


def test_what_has_no_target_says_so():
    tx = jaxcomp.compressed_mean(jaxcomp.sign(), AXIS)
    abstract, like = AbstractMesh((4,), (AXIS,)), {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    with pytest.raises(ValueError, match=r"`mesh` must have devices.*jaxcomp\.restore_target"):
        jaxcomp.init_state(tx, like, abstract, AXIS)
    with pytest.raises(ValueError, match="`workers` must be at least 1, got 0"):
        jaxcomp.restore_target(tx, like, abstract, AXIS, workers=0)
    outer = jaxcomp.Gather(jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual()))
    levels = jaxcomp.compressed_mean(jaxcomp.Hierarchical(jaxcomp.Dense(), outer), ("slow", "fast"))
    both = AbstractMesh((2, 2), ("slow", "fast"))
    with pytest.raises(ValueError, match=r"`state` must not be that of jaxcomp\.Hierarchical"):
        jaxcomp.restore_target(levels, like, both, ("slow", "fast"), workers=8)
