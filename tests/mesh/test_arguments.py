"""Names, splitting and passing of the arguments of a step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxcomp

X, Y = jnp.arange(16.0), jnp.arange(16.0) + 1


def step(params, x, scale=1.0, *, y=None):
    y = x if y is None else y
    return params * scale, jax.lax.pmean(jnp.sum(x * y), "data")


def test_arguments_by_name(mesh):
    """Each way to give the same arguments gives the same result, compiled once a way."""
    run = jaxcomp.data_parallel(step, mesh, "data", batch_argnames=("x", "y"))
    params, wanted = jnp.ones(3), np.sum(X * Y) / 8
    for args, kwargs in [
        ((params, X), {"y": Y}),
        ((params,), {"y": Y, "x": X}),
        ((), {"y": Y, "x": X, "scale": 2.0, "params": params}),
        ((params, X, 2.0), {"y": Y}),
    ]:
        found, value = run(*args, **kwargs)
        np.testing.assert_array_equal(value, wanted)
        np.testing.assert_array_equal(found, params * (2.0 if len(args + tuple(kwargs)) > 3 else 1))
    text = run.lower(params, X, y=Y).as_text()
    assert "tensor<16xf32>" in text
    assert run.trace(params, X, y=Y).jaxpr.out_avals[0].shape == (3,)
    np.testing.assert_array_equal(run(params, X)[1], np.sum(X * X) / 8)


def test_donated_by_name(mesh):
    run = jaxcomp.data_parallel(
        step, mesh, "data", batch_argnames="y", donate_argnames="params", donate_argnums=1
    )
    params, x, y = (jax.device_put(a, NamedSharding(mesh, P())) for a in (jnp.ones(3), X, Y[:8]))
    run(y=y, x=jnp.ones(1), params=params)
    assert params.is_deleted()
    assert not y.is_deleted()
    assert not x.is_deleted()


def test_errors_name_arguments(mesh):
    parallel = functools.partial(jaxcomp.data_parallel, step, mesh, "data")
    with pytest.raises(ValueError, match=r"`batch_argnames` must name arguments.*got 'z'"):
        parallel(batch_argnames="z")
    with pytest.raises(ValueError, match=r"`donate_argnames` must name arguments.*got 'z'"):
        parallel(donate_argnames=("params", "z"))
    with pytest.raises(ValueError, match=r"`batch_argnums` must be numbers of the 2 arguments"):
        parallel(batch_argnums=(1, 2)).lower(jnp.ones(3), X)
    with pytest.raises(ValueError, match=r"argument 1 \('x'\) is a batch.*got shape \(7,\)"):
        parallel().lower(jnp.ones(3), jnp.ones(7))
    with pytest.raises(ValueError, match=r"argument 2 \('y'\) is a batch.*got shape \(7,\)"):
        parallel(batch_argnames=("x", "y")).lower(jnp.ones(3), X, y=jnp.ones(7))
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        parallel().lower(jnp.ones(3), X, z=3)


def test_the_batch_is_the_last_argument_whatever_shapes_the_others_have(mesh):
    """Parameters whose leading dimension happens to be that of the batch stay whole."""
    like = {"w": jnp.ones((16, 2)), "b": jnp.ones(16)}

    def evaluate(params, x):
        assert params["w"].shape == (16, 2)
        assert x.shape == (2,)
        return jax.lax.pmean(x.sum() * params["b"].sum(), "data")

    run = jaxcomp.data_parallel(evaluate, mesh, "data")
    np.testing.assert_array_equal(run(like, X), 16 * X.sum() / 8)
    with pytest.raises(ValueError, match=r"argument 1 \('x'\) is a batch.*got shape \(12,\)"):
        run(like, X[:12])


def test_a_step_does_not_run_for_a_batch_that_does_not_divide(mesh):
    def refuse(x, y):
        raise AssertionError("the step ran")

    run = jaxcomp.data_parallel(refuse, mesh, "data", batch_argnums=(0, 1))
    with pytest.raises(ValueError, match=r"argument 0 \('x'\).*multiple of the 8 workers"):
        run(X[:9], Y)


def test_forgotten_batches_in_a_training_step(mesh):
    """A step that fails says which arguments were taken as batches; its error keeps its type."""
    tx = jaxcomp.compressed_mean(jaxcomp.Dense(), "data")
    params, x, y = {"w": jnp.ones((4, 1))}, jnp.ones((64, 4)), jnp.ones((64, 1))

    def step(params, state, x, y):
        grads = jax.grad(lambda p: jnp.sum((x @ p["w"] - y) ** 2))(jaxcomp.local(params, "data"))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    args = params, tx.init(params), x, y
    with pytest.raises(TypeError, match="incompatible shapes") as error:
        jaxcomp.data_parallel(step, mesh, "data").lower(*args)
    (note,) = [note for note in error.value.__notes__ if "jaxcomp" in note]
    assert "only the last argument, argument 3 ('y'), is split over the workers" in note
    assert "Name the batches among ('params', 'state', 'x', 'y') by `batch_argnums`" in note
    jaxcomp.data_parallel(step, mesh, "data", batch_argnums=(2, 3)).lower(*args)
    for settings in ({"batch_argnums": 3}, {"batch_argnames": "y"}):  # The user's own choice.
        with pytest.raises(TypeError, match="incompatible shapes") as error:
            jaxcomp.data_parallel(step, mesh, "data", **settings).lower(*args)
        assert not [note for note in error.value.__notes__ if "jaxcomp" in note]


def test_a_step_without_a_signature(mesh):
    """Such as some callables that are compiled."""

    def larger(x, y):
        return jnp.maximum(x, y)

    larger.__signature__ = "none"
    run = jaxcomp.data_parallel(larger, mesh, "data", batch_argnums=())
    np.testing.assert_array_equal(run(jnp.float32(1), y=jnp.float32(2)), 2)
    with pytest.raises(ValueError, match=r"argument 1 is a batch.*got shape \(7,\)"):
        jaxcomp.data_parallel(larger, mesh, "data")(X, jnp.ones(7))


def test_results_that_differ_raise_a_plain_error(mesh):
    run = jaxcomp.data_parallel(lambda x: x.sum(), mesh, "data")
    with pytest.raises(ValueError, match="result differs between the workers of 'data'") as error:
        run.lower(X)
    assert type(error.value) is ValueError
    assert error.value.__context__ is None


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_batch_that_lies_along_another_dimension(kind):
    """Microbatches in front: the workers would take whole ones, and a part of the gradient."""
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(kind,) * 2)
    total = jaxcomp.data_parallel(lambda x: jax.lax.psum(x.sum(), "data"), mesh, "data")
    x = jnp.arange(256.0).reshape(4, 8, 8)
    wrong = jax.device_put(x, NamedSharding(mesh, P(None, "data")))
    with pytest.raises(
        ValueError, match=r"argument 0 \('x'\) is a batch.*\(4, 8, 8\).*`batch_spec`"
    ):
        total(wrong)
    with pytest.raises(ValueError, match=r"sharded over it along another one"):
        jax.jit(total)(wrong) if kind == AxisType.Explicit else total.lower(wrong)
    assert total(jax.device_put(x, NamedSharding(mesh, P("data", None, "fsdp")))) == x.sum()
