"""A step calls the host, and checks its values, on meshes with axes of both types."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, io_callback
from jax.sharding import AxisType

import jaxcomp

X, W = np.arange(8, dtype=np.float32), np.ones(3, np.float32)
KINDS = pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])


def mesh_of(kind, shards=1):
    if shards == 1:
        return jax.make_mesh((8,), ("data",), axis_types=(kind,))
    return jax.make_mesh((8 // shards, shards), ("data", "fsdp"), axis_types=(kind,) * 2)


def calling(seen):
    """A step that notes its part of the batch, and has the host double it."""

    def step(w, x):
        io_callback(lambda part: seen.append(part.item()), None, x.sum())
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        twice = jax.pure_callback(lambda part: np.asarray(part) * 2, like, x)
        return w * jax.lax.pmean(twice.sum(), "data")

    return step


@KINDS
@pytest.mark.parametrize("check_vma", [True, False])
def test_the_host_is_called(kind, check_vma):
    seen, mesh = [], mesh_of(kind)
    run = jaxcomp.data_parallel(calling(seen), mesh, "data", check_vma=check_vma)
    found = run(W, X)
    jax.effects_barrier()
    np.testing.assert_array_equal(found, 7 * W)
    assert found.sharding.mesh == mesh
    assert sorted(seen) == X.tolist()


@KINDS
def test_within_a_jit_of_ones_own_too(kind):
    seen, mesh = [], mesh_of(kind)
    run = jaxcomp.data_parallel(calling(seen), mesh, "data")
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(jax.jit(lambda w, x: run(w, x) + 1)(W, X), 7 * W + 1)
    plain = jaxcomp.data_parallel(lambda w, x: w * jax.lax.pmean(x.sum(), "data"), mesh, "data")
    np.testing.assert_array_equal(jax.jit(plain)(W, X), 3.5 * W)  # Not placed on the mesh.


@KINDS
def test_a_worker_of_several_devices_calls_nobody(kind):
    run = jaxcomp.data_parallel(calling([]), mesh_of(kind, shards=2), "data")
    with pytest.raises(NotImplementedError, match="callbacks are only supported") as caught:
        run(W, X)
    said = "jaxcomp: each worker of 'data' consists of several devices"
    assert sum(said in note for note in caught.value.__notes__) == 1


def checked(w, x):
    checkify.check(jnp.all(x >= 0), "negative")
    return w * jax.lax.pmean(x.sum(), "data")


@KINDS
def test_a_step_is_checked_from_outside(kind):
    run = checkify.checkify(jaxcomp.data_parallel(checked, mesh_of(kind), "data"))
    error, found = run(W, X)
    assert error.get() is None
    np.testing.assert_array_equal(found, 3.5 * W)
    assert "at mapped index 4: negative" in run(W, X - 5)[0].get()


@KINDS
def test_a_step_is_checked_from_inside(kind):
    """On every mesh: each worker has an error of its own."""

    def step(w, x):
        error, found = checkify.checkify(checked)(w, x)
        return jaxcomp.PerWorker.wrap(error, "local", "data"), found

    run = jaxcomp.data_parallel(step, mesh_of(kind, shards=2), "data")
    jax.device_get(run(W, X)[0].tree).throw()
    with pytest.raises(checkify.JaxRuntimeError, match="negative"):
        jax.device_get(run(W, X - 4)[0].tree).throw()
