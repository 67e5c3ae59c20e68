"""Frozen parameters do not change, and nothing is sent for them, in every mapping mode."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.backend import axes
from jaxcomp.mesh import retyping

RNG = np.random.default_rng(0)
PARAMS = {
    "base": jnp.asarray(RNG.standard_normal((64, 64)) / 8, jnp.float32),
    "lora": jnp.asarray(RNG.standard_normal((64, 32)) / 8, jnp.float32),
}
BATCH = jnp.asarray(RNG.standard_normal((16, 64)), jnp.float32)
FROZEN, TRAINED = {"base": True, "lora": False}, {"base": False, "lora": True}
LABELS = {"base": "freeze", "lora": "train"}


def mean():
    return jaxcomp.compressed_mean(jaxcomp.sign(), "data")


def tuned():
    return optax.chain(mean(), optax.adam(1e-2))


def parts(tx):
    return optax.partition({"train": tx, "freeze": optax.set_to_zero()}, LABELS)


def zeros():
    return optax.masked(optax.set_to_zero(), FROZEN)


SENT_ALONE = {
    "freeze": lambda: jaxcomp.freeze(tuned(), FROZEN),
    "partition": lambda: parts(tuned()),
    "selective": lambda: optax.selective_transform(tuned(), freeze_mask=FROZEN),
    "masked mean": lambda: optax.chain(optax.masked(mean(), TRAINED), zeros(), optax.adam(1e-2)),
    "skip_nonfinite": lambda: jaxcomp.skip_nonfinite(parts(tuned())),
}
SENT_ALL = {
    "after the mean": lambda: optax.chain(mean(), parts(optax.adam(1e-2))),
    "before the mean": lambda: optax.chain(zeros(), tuned()),
}


def loss_of(params, x):
    return jnp.mean((x @ params["base"] @ params["lora"] - x[:, :32]) ** 2)


def step_of(tx, loss_of=loss_of):
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_of)(jaxcomp.local(params, "data"), batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, "data")

    return step


def run(tx, mesh, params=PARAMS, loss_of=loss_of, **settings):
    """Three steps: parameters, and what one of them sends."""
    state = jaxcomp.init_state(tx, params, mesh, "data")
    step = jaxcomp.data_parallel(step_of(tx, loss_of), mesh, "data", **settings)
    sent = jaxcomp.collective_bytes(step.lower(params, state, BATCH).compile())
    for _ in range(3):
        params, state, loss = step(params, state, BATCH)
    assert np.isfinite(float(loss))
    return params, sent


@pytest.fixture(scope="module")
def alone(mesh):
    """A model that has no other parameters."""

    def loss(params, x):
        return loss_of({"base": PARAMS["base"], **params}, x)

    return run(tuned(), mesh, {"lora": PARAMS["lora"]}, loss)


@pytest.mark.core("selective")
@pytest.mark.parametrize("name", SENT_ALONE)
def test_only_trained_leaves_are_sent(name, mesh, alone):
    params, sent = run(SENT_ALONE[name](), mesh)
    np.testing.assert_array_equal(params["base"], PARAMS["base"])
    # Adam's products and sums are fused in another way beside zeros.
    np.testing.assert_allclose(params["lora"], alone[0]["lora"], atol=1e-7)
    assert sent == alone[1]


@pytest.mark.core("after the mean")
@pytest.mark.parametrize("name", SENT_ALL)
def test_on_the_same_side_of_the_mean_all_are_sent(name, mesh, alone):
    params, sent = run(SENT_ALL[name](), mesh)
    np.testing.assert_array_equal(params["base"], PARAMS["base"])
    assert np.any(np.asarray(params["lora"] != PARAMS["lora"]))
    assert sent["all-to-all"] > 1.5 * alone[1]["all-to-all"]


def test_without_types(mesh, alone):
    params, sent = run(SENT_ALONE["partition"](), mesh, check_vma=False)
    np.testing.assert_array_equal(params["lora"], alone[0]["lora"])
    assert sent == alone[1]


@pytest.mark.full
@pytest.mark.parametrize("name", ["freeze", "partition"])
def test_in_a_mapped_function_of_ones_own(name, mesh, alone):
    """Under `pmap`; under `shard_map` with types, the zeros of optax are refused by `out_specs`."""
    tx = SENT_ALONE[name]()
    step, one = step_of(tx), tx.init(PARAMS)
    batch = BATCH.reshape(8, 2, 64)

    def stacked(tree):
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (8, *x.shape)), tree)

    params, state = map(stacked, (PARAMS, one))
    mapped = jax.pmap(step, "data")
    for _ in range(3):
        params, state, _ = mapped(params, state, batch)
    np.testing.assert_array_equal(params["base"][3], PARAMS["base"])
    np.testing.assert_array_equal(params["lora"][3], alone[0]["lora"])
    if name == "freeze":
        specs = jaxcomp.state_specs(one, "data")
        typed = jax.jit(
            jax.shard_map(
                step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P())
            )
        )
        params, state = PARAMS, jaxcomp.place(one, mesh, "data")
        for _ in range(3):
            params, state, _ = typed(params, state, BATCH)
        np.testing.assert_array_equal(params["lora"], alone[0]["lora"])


def test_no_memory_is_kept_for_frozen_leaves():
    by_function = jaxcomp.freeze(tuned(), lambda params: {name: name == "base" for name in params})
    with axes.planned(1):
        state = SENT_ALONE["freeze"]().init(PARAMS)
        other = by_function.init(PARAMS)
    assert {x.size for x in jax.tree.leaves(state) if x.size > 2} == {64 * 32}
    assert jax.tree.structure(other) == jax.tree.structure(state)


class Pair(eqx.Module):
    """A model, or a mask of one, that may be called."""

    base: Any
    lora: Any

    def __call__(self, x):
        return x @ self.base @ self.lora


def test_a_mask_may_be_a_callable_module():
    params, mask = Pair(**PARAMS), Pair(**FROZEN)
    with axes.planned(1):
        state = jaxcomp.freeze(tuned(), mask).init(params)
    assert {x.size for x in jax.tree.leaves(state) if x.size > 2} == {64 * 32}


@pytest.mark.core("float0")
@pytest.mark.parametrize("given", [None, "float0"])
def test_integers_may_be_frozen(given, mesh, alone):
    """Weights of a base model in eight bits have gradients None, or of a type without values."""
    scale = 1 / 127
    base = jnp.round(PARAMS["base"] / scale).astype(jnp.int8)
    tx = jaxcomp.freeze(tuned(), FROZEN)

    def step(params, state, batch):
        def loss(params, x):
            base = params["base"].astype(jnp.float32) * scale
            return loss_of({"base": base, "lora": params["lora"]}, x)

        own = jaxcomp.local(params, "data")
        if given is None:
            grads = jax.grad(lambda lora: loss({**own, "lora": lora}, batch))(own["lora"])
            grads = {"base": None, "lora": grads}
        else:
            grads = jax.grad(loss, allow_int=True)(own, batch)
            assert grads["base"].dtype == jax.dtypes.float0
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {"base": base, "lora": PARAMS["lora"]}
    state = jaxcomp.init_state(tx, params, mesh, "data")
    step = jaxcomp.data_parallel(step, mesh, "data")
    for _ in range(2):
        params, state = step(params, state, BATCH)
    assert params["base"].dtype == jnp.int8
    np.testing.assert_array_equal(params["base"], base)
    assert np.any(np.asarray(params["lora"] != PARAMS["lora"]))
    if given == "float0":
        grads = {"base": np.zeros((64, 64), jax.dtypes.float0), "lora": PARAMS["lora"]}
        tx = jaxcomp.freeze(optax.sgd(0.1), FROZEN)
        state = tx.init(params)
        with pytest.raises(ValueError, match=r"`params` must be given .* no gradient"):
            tx.update(grads, state)


def by_path(tree):
    """The labels of a model's parameters."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "train" if "lora" in jax.tree_util.keystr(path) else "freeze", tree
    )


def in_parts():
    """Zeros for the frozen leaves, which only the second trace of a step accepts."""
    return optax.partition({"train": tuned(), "freeze": optax.set_to_zero()}, by_path)


def test_equinox_models_train_in_parts(mesh, alone):
    """Static leaves, such as functions, are there in the second trace, too."""

    class Model(eqx.Module):
        base: Any
        lora: Any
        after: Any

    def loss(model, x):
        return model.after(loss_of({"base": model.base, "lora": model.lora}, x))

    tx = in_parts()

    def step(model, state, batch):
        loss_, grads = jaxcomp.value_and_grad(loss, "data")(model, batch)
        own = eqx.filter(model, eqx.is_inexact_array)
        updates, state = tx.update(grads, state, own)
        return eqx.apply_updates(model, updates), state, loss_

    model = Model(**PARAMS, after=jnp.real)
    state = jaxcomp.init_state(tx, eqx.filter(model, eqx.is_inexact_array), mesh, "data")
    step = jaxcomp.data_parallel(step, mesh, "data")
    for _ in range(3):
        model, state, _ = step(model, state, BATCH)
    np.testing.assert_array_equal(model.base, PARAMS["base"])
    np.testing.assert_allclose(model.lora, alone[0]["lora"], atol=1e-7)


def test_nnx_models_train_in_parts(mesh, alone):
    """Objects are updated in place by the second trace, and not by the first."""

    class Model(nnx.Module):
        def __init__(self):
            self.base, self.lora = nnx.Param(PARAMS["base"]), nnx.Param(PARAMS["lora"])

    def loss(model, x):
        return loss_of({"base": model.base[...], "lora": model.lora[...]}, x)

    def step(model, optimizer, batch):
        loss_, grads = jaxcomp.value_and_grad(loss, "data")(model, batch)
        optimizer.update(model, grads)
        return loss_

    model = Model()
    optimizer = nnx.Optimizer(model, jaxcomp.on_mesh(in_parts(), mesh, "data"), wrt=nnx.Param)
    step = jaxcomp.data_parallel(step, mesh, "data")
    for _ in range(3):
        step(model, optimizer, BATCH)
    assert int(optimizer.step[...]) == 3
    np.testing.assert_array_equal(model.base[...], PARAMS["base"])
    np.testing.assert_allclose(model.lora[...], alone[0]["lora"], atol=1e-7)


def test_what_differs_is_refused_with_advice_that_works(mesh, alone):
    """Moments of gradients that no mean has seen, and zeros after them."""
    late = optax.chain(optax.masked(mean(), TRAINED), optax.adam(1e-2), zeros())
    with pytest.raises(ValueError, match=r"mu\['base'\] differs .* jaxcomp\.freeze\(tx, frozen\)"):
        run(late, mesh)
    with pytest.raises(ValueError, match=r"\[0\]\['base'\] differs .* around the whole chain"):
        run(optax.chain(optax.masked(mean(), TRAINED), optax.sgd(1e-2)), mesh)
    params, sent = run(jaxcomp.freeze(tuned(), FROZEN), mesh)
    np.testing.assert_array_equal(params["lora"], alone[0]["lora"])
    assert sent == alone[1]


def test_values_are_typed_by_what_they_are_computed_from(mesh):
    """Calls, branches, loops and collectives, of what is the same and of what differs."""

    def f(x, own):
        zero = jnp.zeros_like(own)
        local = axes.vary(x, "data")

        def loop(carry, _):
            return carry + jnp.sum(zero), None

        same = {
            "sum": local + zero,
            "call": jax.jit(lambda a, b: a * 2 + b)(zero, local),
            "branch": jax.lax.cond(x[0] > 0, lambda a: a + 1, lambda a: -a, local),
            "platform": jax.lax.platform_dependent(local, cpu=jnp.sin, default=jnp.cos),
            "mean": jax.lax.pmean(own, "data") + local,
        }
        differs = {
            "own": own + zero,
            "loop": jax.lax.scan(loop, axes.vary(jnp.zeros(()), "data"), None, length=2)[0],
            "branch": jax.lax.cond(x[0] > 0, lambda a, b: a, lambda a, b: b, local, own),
            "index": jax.lax.axis_index("data") * x,
        }
        return same, differs

    seen = {}

    def body(x, own):
        same, differs = retyping.narrowed(f)(x, own)
        seen["same"] = {name: axes.varies(y, "data") for name, y in same.items()}
        seen["differs"] = {name: axes.varies(y, "data") for name, y in differs.items()}
        return same

    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")))
    x, own = jnp.arange(1.0, 3.0), jnp.arange(16.0)
    got = jax.jit(mapped(body, out_specs=P()))(x, own)
    assert not any(seen["same"].values()), seen
    assert all(seen["differs"].values()), seen
    want = jax.jit(mapped(lambda *a: axes.vary(f(*a)[0], "data"), out_specs=P("data")))(x, own)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[:2]), got, want)
