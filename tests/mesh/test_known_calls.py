"""A step checks and lays out the arguments of a kind of call once, and refuses others as before."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcomp
from jaxcomp.mesh import calls
from jaxcomp.mesh.mapped_step import MappedStep

PARAMS = {"w": np.linspace(-1, 1, 64, dtype=np.float32), "b": np.float32(1)}


def mean(params, batch, scale=1.0):
    return jax.tree.map(lambda p: p + jax.lax.pmean(batch.mean(), "data") * scale, params)


@pytest.fixture
def checks(monkeypatch):
    """The number of checks so far, of calls and of programs."""
    made, check = [], MappedStep.check
    monkeypatch.setattr(
        MappedStep, "check", lambda self, *args: (made.append(1), check(self, *args))[1]
    )
    return made


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("data",))


def test_a_kind_of_call_is_checked_once(mesh, checks):
    run = jaxcomp.data_parallel(mean, mesh, "data", donate_argnums=0)
    params = run(PARAMS, np.ones(8, np.float32))
    params = run(params, np.ones(8, np.float32))
    before = len(checks)
    for number in range(4):  # Values of the batch differ, and it is put on the mesh each time.
        params = run(params, np.full(8, number, np.float32))
    assert len(checks) == before
    np.testing.assert_allclose(params["w"], PARAMS["w"] + (1 + 1 + 0 + 1 + 2 + 3), rtol=1e-6)
    run(params, np.ones(16, np.float32))
    assert len(checks) > before


def test_other_kinds_are_refused_after_a_known_call():
    """On automatic axes the type of an array does not say how it is split."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    run = jaxcomp.data_parallel(mean, mesh, "data")
    params = jaxcomp.place(PARAMS, mesh, "data")
    for _ in range(3):
        run(params, np.ones(8, np.float32))
    with pytest.raises(ValueError, match="multiple of the 8 workers, got shape \\(7,\\)"):
        run(params, np.ones(7, np.float32))
    split = jax.device_put(PARAMS["w"], NamedSharding(mesh, PartitionSpec("data")))
    for batch in (np.ones(8, np.float32), jnp.ones(8)):
        run(params, batch)
        with pytest.raises(ValueError, match="must not be sharded over 'data'"):
            run(params | {"w": split}, batch)
    with pytest.raises(ValueError, match="PRNG key"):
        run(params, jax.random.key(0))


def test_keywords_and_numbers_belong_to_the_kind(mesh):
    run = jaxcomp.data_parallel(mean, mesh, "data", batch_argnames="batch")
    for scale in (1, 2, 3.0, np.float32(4), 2):
        for _ in range(2):
            params = run(PARAMS, scale=scale, batch=np.ones(8, np.float32))
            assert float(params["b"]) == 1 + scale


def test_a_caller_that_traces_is_not_kept(mesh):
    run = jaxcomp.data_parallel(mean, mesh, "data")
    batch = np.ones(8, np.float32)
    shapes = jax.eval_shape(run, PARAMS, batch)
    inside = jax.jit(run)(PARAMS, batch)
    outside = run(PARAMS, batch)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, inside)
    jax.tree.map(np.testing.assert_array_equal, inside, outside)


def test_memory_of_one_worker_is_copied_in_each_call(mesh):
    source = jaxcomp.Gather(jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual()))
    tx = optax.chain(jaxcomp.compressed_mean(source, "data"), optax.sgd(0.1))
    grads = {"w": jnp.linspace(-1, 1, 4096).reshape(64, 64)}

    def step(params, state, x):
        return tx.update(jax.tree.map(lambda p: p * x.mean(), params), state, params)

    run, state = jaxcomp.data_parallel(step, mesh, "data"), tx.init(grads)
    first, second = (run(grads, state, np.ones(8, np.float32)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert jax.tree.leaves(second[1][0].memory)[0].shape[0] == 8


def test_few_kinds_are_kept():
    known = calls.Calls()
    leaves = [np.ones(3, np.float32), 1, 2.0, jnp.ones(2)]
    kinds = [calls.kind(leaves, number, ()) for number in range(6)]
    for number, kind in enumerate(kinds):
        known.add(kind, leaves, calls.Call({}, lambda *_, number=number: number))
    found = [known.find(calls.kind(leaves, number, ())) for number in range(6)]
    assert [call and call.run((), leaves, None) for call in found] == [None, None, 2, 3, 4, 5]
    known.add(calls.kind([object()], 9, ()), [object()], calls.Call({}, len))
    assert known.find(calls.kind([object()], 9, ())) is None
    assert known.find(calls.kind([leaves[0][:2], *leaves[1:]], 5, ())) is None
    assert known.find(calls.kind([leaves[0], True, *leaves[2:]], 5, ())) is None
