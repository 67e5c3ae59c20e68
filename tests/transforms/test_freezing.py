"""Frozen parameters do not change, and nothing is sent for them, in every mapping mode."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import sharding
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxcomp
from jaxcomp.backend import axes

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


def parts(tx, labels=LABELS):
    return optax.partition({"train": tx, "freeze": optax.set_to_zero()}, labels)


def zeros():
    return optax.masked(optax.set_to_zero(), FROZEN)


SENT_ALONE = {
    "freeze": lambda: jaxcomp.freeze(tuned(), FROZEN),
    "skip_nonfinite": lambda: jaxcomp.skip_nonfinite(jaxcomp.freeze(tuned(), FROZEN)),
}
OF_OPTAX = {
    "partition": lambda: parts(tuned()),
    "selective": lambda: optax.selective_transform(tuned(), freeze_mask=FROZEN),
    "masked mean": lambda: optax.chain(optax.masked(mean(), TRAINED), zeros(), optax.adam(1e-2)),
}
"""Zeros that optax makes like this worker's gradients, and with their type."""
SENT_ALL = {
    "after the mean": lambda: optax.chain(mean(), parts(optax.adam(1e-2))),
    "before the mean": lambda: optax.chain(zeros(), tuned()),
}


def loss_of(params, x):
    return jnp.mean((x @ params["base"] @ params["lora"] - x[:, :32]) ** 2)


def step_of(tx, loss_of=loss_of):
    def step(params, state, batch):
        own = jaxcomp.local(jaxcomp.view(params, state), "data")
        loss, grads = jax.value_and_grad(loss_of)(own, batch)
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


@pytest.mark.core("skip_nonfinite")
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


@pytest.mark.core("partition", "selective")
@pytest.mark.parametrize("name", OF_OPTAX)
def test_zeros_of_optax_are_the_same_on_all_workers(name, mesh, alone):
    """JAX types them as different, like the gradients; no value that differs is behind them."""
    tx = OF_OPTAX[name]()
    for given, settings in ((tx, {}), (tx, {"check_vma": False}), (frozen(tx), {})):
        params, sent = run(given, mesh, **settings)
        np.testing.assert_array_equal(params["base"], PARAMS["base"])
        np.testing.assert_allclose(params["lora"], alone[0]["lora"], atol=1e-7)
        assert sent == alone[1]


def frozen(tx):
    return jaxcomp.freeze(tx, FROZEN)


def test_updates_may_be_added_to_local_parameters(mesh):
    """They have another type than the parameters, and the same values."""
    tx = optax.chain(mean(), optax.sgd(0.1))

    def step(params, state, batch):
        own = jaxcomp.local(params, "data")
        updates, state = tx.update(jax.grad(loss_of)(own, batch), state)
        return optax.apply_updates(params, updates), optax.apply_updates(own, updates)

    state = jaxcomp.init_state(tx, PARAMS, mesh, "data")
    found, own = jaxcomp.data_parallel(step, mesh, "data")(PARAMS, state, BATCH)
    jax.tree.map(np.testing.assert_array_equal, found, own)


DIFFERENT = {
    "times zero": lambda own, grads: grads["base"] * 0,
    "in a loop": lambda own, grads: jax.lax.fori_loop(
        0, 2, lambda _, x: x + jnp.sum(grads["lora"]), own["lora"]
    ),
    "by its index": lambda own, grads: own["lora"] * jax.lax.axis_index("data"),
    "by a condition": lambda own, grads: jax.lax.cond(
        grads["base"][0, 0] > 0, lambda x: x, lambda x: 2 * x, own["lora"]
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_a_gradient_or_an_index_is_behind_stays_different(name, mesh):
    def step(params, batch):
        own = jaxcomp.local(params, "data")
        return DIFFERENT[name](own, jax.grad(loss_of)(own, batch))

    with pytest.raises(ValueError, match="result differs between the workers of 'data'"):
        jaxcomp.data_parallel(step, mesh, "data").lower(PARAMS, BATCH)


@pytest.mark.full
@pytest.mark.parametrize("name", ["freeze", "partition"])
def test_in_a_mapped_function_of_ones_own(name, mesh, alone):
    """Under `pmap`; under `shard_map` with types, the zeros of optax are refused by `out_specs`."""
    tx = (SENT_ALONE | OF_OPTAX)[name]()
    step = step_of(tx)
    batch = BATCH.reshape(8, 2, 64)

    def stacked(tree):
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (8, *x.shape)), tree)

    params = stacked(PARAMS)
    state, mapped = jax.pmap(tx.init, "data")(params), jax.pmap(step, "data")
    for _ in range(3):
        params, state, _ = mapped(params, state, batch)
    np.testing.assert_array_equal(params["base"][3], PARAMS["base"])
    np.testing.assert_array_equal(params["lora"][3], alone[0]["lora"])
    if name == "freeze":
        state = jaxcomp.init_state(tx, PARAMS, mesh, "data")
        specs = jaxcomp.state_specs(state, "data")
        typed = jax.jit(
            jax.shard_map(
                step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P())
            )
        )
        params = PARAMS
        for _ in range(3):
            params, state, _ = typed(params, state, BATCH)
        np.testing.assert_array_equal(params["lora"], alone[0]["lora"])


def test_no_memory_is_kept_for_frozen_leaves():
    by_function = jaxcomp.freeze(tuned(), lambda params: {name: name == "base" for name in params})
    with axes.assume_workers(1):
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
    with axes.assume_workers(1):
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
    """A mask of a model's parameters."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "lora" not in jax.tree_util.keystr(path), tree
    )


def in_parts(way):
    """Half of the model is trained, by one of the two ways."""
    if way == "freeze":
        return jaxcomp.freeze(tuned(), by_path)
    return parts(tuned(), lambda tree: jax.tree.map(label, by_path(tree)))


def label(stays):
    return "freeze" if stays else "train"


@pytest.mark.core("partition")
@pytest.mark.parametrize("way", ["freeze", "partition"])
def test_equinox_models_train_in_parts(way, mesh, alone):

    class Model(eqx.Module):
        base: Any
        lora: Any
        after: Any

    def loss(model, x):
        return model.after(loss_of({"base": model.base, "lora": model.lora}, x))

    tx = in_parts(way)

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


@pytest.mark.core("partition")
@pytest.mark.parametrize("way", ["freeze", "partition"])
def test_nnx_models_train_in_parts(way, mesh, alone):
    class Model(nnx.Module):
        def __init__(self):
            self.base, self.lora = nnx.Param(PARAMS["base"]), nnx.Param(PARAMS["lora"])

    def loss(model, x):
        return loss_of({"base": model.base[...], "lora": model.lora[...]}, x)

    def step(model, optimizer, batch):
        loss_, grads = jaxcomp.value_and_grad(loss, "data")(model, batch)
        optimizer.update(model, grads)
        return loss_

    step, model = jaxcomp.data_parallel(step, mesh, "data"), Model()
    optimizer = nnx.Optimizer(model, jaxcomp.on_mesh(in_parts(way), mesh, "data"), wrt=nnx.Param)
    for _ in range(3):
        step(model, optimizer, BATCH)
    assert int(optimizer.step[...]) == 3
    np.testing.assert_array_equal(model.base[...], PARAMS["base"])
    np.testing.assert_allclose(model.lora[...], alone[0]["lora"], atol=1e-7)


def test_what_differs_is_refused_with_advice_that_works(mesh, alone):
    """Moments of gradients that no mean has seen, and zeros after them."""
    late = optax.chain(optax.masked(mean(), TRAINED), optax.adam(1e-2), zeros())
    with pytest.raises(ValueError, match=r"\['base'\] differs .* jaxcomp\.freeze\(tx, frozen\)"):
        run(late, mesh)
    with pytest.raises(ValueError, match=r"\[0\]\['base'\] differs .* around the whole chain"):
        run(optax.chain(optax.masked(mean(), TRAINED), optax.sgd(1e-2)), mesh)
    params, sent = run(jaxcomp.freeze(tuned(), FROZEN), mesh)
    np.testing.assert_array_equal(params["lora"], alone[0]["lora"])
    assert sent == alone[1]


NESTED = {
    "base": {"a": PARAMS["base"], "deep": {"b": PARAMS["base"]}},
    "lora": {"u": PARAMS["lora"], "v": PARAMS["lora"]},
}
SPECS = {"base": {"a": P("fsdp"), "deep": {"b": P(None, "fsdp")}}, "lora": P(None, "fsdp")}
CODEC = jaxcomp.Policy(jaxcomp.qsgd_inf(bits=4), min_size=0)


def nested_loss(params, x):
    base = params["base"]["a"] + params["base"]["deep"]["b"]
    return loss_of({"base": base, "lora": params["lora"]["u"] - params["lora"]["v"]}, x)


def with_specs():
    return optax.chain(jaxcomp.compressed_mean(CODEC, "data", param_specs=SPECS), optax.adam(1e-2))


KINDS = {
    "mean": with_specs,
    "sharded_optimizer": lambda: jaxcomp.sharded_optimizer(
        optax.adam(1e-2), "data", CODEC, param_specs=SPECS
    ),
    "diloco": lambda: jaxcomp.algorithms.diloco(
        CODEC, "data", inner=optax.adam(1e-2), every=1, param_specs=SPECS
    ),
    "fragments": lambda: jaxcomp.local_updates(
        optax.adam(1e-2), None, "data", every=2, fragments=2, reducer=CODEC, param_specs=SPECS
    ),
    "gossip": lambda: jaxcomp.gossip(optax.sgd(0.1), CODEC, "data", param_specs=SPECS),
}
"""What takes specs of all parameters, in the tree that they have without wrappers."""
WAYS = {
    "freeze": lambda tx: jaxcomp.freeze(tx, FROZEN),
    "freeze leaves": lambda tx: jaxcomp.freeze(
        tx, {"base": {"a": True, "deep": {"b": True}}, "lora": False}
    ),
    "freeze a branch": lambda tx: jaxcomp.freeze(
        tx, {"base": {"a": False, "deep": True}, "lora": False}
    ),
    "freeze twice": lambda tx: jaxcomp.freeze(
        jaxcomp.freeze(tx, {"base": {"a": False, "deep": False}, "lora": False}), FROZEN
    ),
    "partition": parts,
    "masked": lambda tx: optax.chain(optax.masked(tx, TRAINED), zeros()),
}


@pytest.mark.core(
    "freeze-mean", "freeze-fragments", "freeze a branch-mean", "freeze twice-mean", "partition-mean"
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_specs_of_all_parameters_fit_the_trained_ones(way, kind):
    """Specs, masks and labels of the whole tree, of which a transformation sees a part."""
    mesh, tx = sharding.make_mesh({"data": 2, "fsdp": 4}), WAYS[way](KINDS[kind]())

    def lie(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    params = jax.tree.map(lie, NESTED, SPECS | {"lora": dict.fromkeys("uv", SPECS["lora"])})
    state = jax.eval_shape(lambda: jaxcomp.init_state(tx, params, mesh, "data"))
    step = jaxcomp.data_parallel(step_of(tx, nested_loss), mesh, "data")
    assert jax.tree.structure(step.trace(params, state, BATCH).out_info[:2]) == jax.tree.structure(
        (params, state)
    )
