"""States keep their dtypes and shapes for gradients of any dtype, and parts of trees train."""

import warnings
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import methods

import jaxcomp
from jaxcomp.layout import masked, trees

WORKERS = 2
F, B, H = "float32", "bfloat16", "float16"
PAIRS = {  # Parameters and gradients of two leaves.
    "wide gradients": ((B, B), (F, F)),
    "half": ((H, H), (H, H)),
    "mixed parameters": ((B, F), (F, F)),
    "mixed gradients": ((F, F), (B, F)),
}
LABELS = {"a": "trained", "b": "frozen"}


def likes(dtypes):
    return {name: jax.ShapeDtypeStruct((3, 50), d) for name, d in zip("ab", dtypes, strict=True)}


def around(tx, params, grads):
    """The states before and after a step, as shapes."""

    def own(worker, params, grads):
        given = jax.tree.map(lambda g: g + worker.astype(g.dtype), grads)
        state = tx.init(params)
        jaxcomp.view(params, state)

        def gradient(p):
            return masked.visible_part(p, given)

        found = {"grad_fn": gradient, "full_grad_fn": gradient}
        return state, tx.update(given, state, params, **found)[1]

    run = jax.vmap(own, in_axes=(0, None, None), axis_name=methods.AXIS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return jax.eval_shape(run, jnp.arange(WORKERS), params, grads)


def described(tree):
    return [(jax.tree_util.keystr(k), x.shape, x.dtype) for k, x in leaves(tree)]


def leaves(tree):
    return jax.tree_util.tree_leaves_with_path(tree)


@pytest.mark.core("ef21", "artemis", "local_sgd", "choco_sgd", "one_bit_adam", "mcm")
@pytest.mark.parametrize("name", methods.METHODS | methods.GOSSIP)
def test_a_step_changes_no_dtype_or_shape_of_a_state(name):
    for kind, (params, grads) in PAIRS.items():
        before, after = around(methods.build(name), likes(params), likes(grads))
        assert described(before) == described(after), kind


@pytest.mark.core("ef21", "local_sgd")
@pytest.mark.parametrize("name", methods.METHODS | methods.GOSSIP)
def test_a_method_takes_parts_of_a_tree(name):
    """Beside frozen leaves, in two groups, and with a leaf without elements."""
    like = {**likes((F, F)), "empty": jax.ShapeDtypeStruct((0, 4), F)}
    labels = {**LABELS, "empty": "trained"}
    made = methods.build(name)
    mask = {key: label == "trained" for key, label in labels.items()}
    frozen = jax.tree.map(lambda trained: not trained, mask)
    for tx in (
        jaxcomp.freeze(made, frozen),
        optax.partition({"trained": made, "frozen": methods.build(name)}, labels),
        optax.chain(optax.masked(made, mask), optax.masked(optax.set_to_zero(), frozen)),
    ):
        before, after = around(tx, like, like)
        assert described(before) == described(after)


class Module(eqx.Module):
    """With a field that is no array, one of integers and one without elements."""

    a: jax.ShapeDtypeStruct
    b: jax.ShapeDtypeStruct
    count: jax.ShapeDtypeStruct
    empty: jax.ShapeDtypeStruct
    function: Callable = eqx.field(static=True, default=jax.nn.relu)
    name: str | None = "a layer"


FIELDS = {
    **likes((F, F)),
    "count": jax.ShapeDtypeStruct((3,), "int32"),
    "empty": jax.ShapeDtypeStruct((0, 4), F),
}
TREES = {
    "plain": FIELDS,
    "equinox": eqx.filter(Module(**FIELDS), lambda leaf: not isinstance(leaf, str)),
    "nnx": nnx.State({"layer": nnx.State({k: nnx.Param(x) for k, x in FIELDS.items()})}),
}


@pytest.mark.core("ef21", "local_sgd")
@pytest.mark.parametrize("name", methods.METHODS | methods.GOSSIP)
def test_a_method_takes_trees_of_frameworks_with_frozen_integers(name):
    for kind, like in TREES.items():
        frozen = jax.tree.map(lambda leaf: leaf.dtype == "int32", like)
        labels = jax.tree.map(lambda on: "frozen" if on else "trained", frozen)
        made = methods.build(name)
        for tx in (
            jaxcomp.freeze(made, frozen),
            optax.partition({"trained": made, "frozen": optax.set_to_zero()}, labels),
        ):
            before, after = around(tx, like, like)
            assert described(before) == described(after), kind


def test_accumulate_sums_in_float32():
    for dtype in (B, H):
        tx = jaxcomp.accumulate(optax.sgd(1.0), "w", every=512)
        params = {"x": jnp.zeros(3, dtype)}
        grads = {"x": jnp.ones(3, dtype)}

        def own(_, tx=tx, params=params, grads=grads):
            def step(state, _):
                updates, state = tx.update(grads, state, params)
                return state, updates

            return jax.lax.scan(step, tx.init(params), length=512)[1]

        updates = jax.vmap(own, axis_name="w")(jnp.arange(1))["x"]
        assert updates.dtype == dtype
        np.testing.assert_array_equal(updates[0, -1].astype(F), -1.0)


@pytest.mark.full
def test_a_mean_moves_narrow_parameters_as_float32_and_resumes_bit_for_bit():
    """With wide gradients of narrow parameters, whose residual is float32 throughout."""
    rng = np.random.default_rng(0)
    grads = jnp.asarray(rng.standard_normal((12, WORKERS, 3, 50)), F)
    link = jaxcomp.Link(methods.TOP, jaxcomp.Residual())
    tx = jaxcomp.compressed_mean(jaxcomp.Gather(link), "w")

    def run(dtype, given, states=None):
        params = {"a": jnp.zeros((3, 50), dtype)}

        def own(g, state):
            state = tx.init(params) if state is None else state

            def step(state, g):
                updates, state = tx.update({"a": g}, state, params)
                return state, updates["a"]

            return jax.lax.scan(step, state, g)

        axes = (1, None if states is None else 0)
        return jax.jit(jax.vmap(own, in_axes=axes, axis_name="w"))(given, states)

    whole, means = run(B, grads)
    np.testing.assert_array_equal(means, run(F, grads)[1])
    half, _ = run(B, grads[:5])
    resumed, rest = run(B, grads[5:], half)
    np.testing.assert_array_equal(rest, means[:, 5:])
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)


@pytest.mark.full
def test_a_sign_after_the_mean_does_not_hide_that_a_step_is_not_finite():
    """The mean keeps its memory then, so that the step must not be taken."""
    tx = jaxcomp.skip_nonfinite(jaxcomp.algorithms.demo_sgd("w"))
    params = {"w": jnp.zeros((64, 64), H), "b": jnp.zeros(64, H)}
    bad = jax.tree.map(jnp.ones_like, params)
    bad["b"] = bad["b"].at[3].set(jnp.inf)
    run = jax.vmap(lambda _: tx.update(bad, tx.init(params), params), axis_name="w")
    updates, state = jax.jit(run)(jnp.arange(1))
    assert state.skipped[0] == 1
    assert not any(np.asarray(u).any() for u in jax.tree.leaves(updates))


def test_tracking_follows_the_mean_gradient_and_counts_the_steps_that_it_leaves_out():
    """Mixing does not change the mean of the estimates, which is that of the last gradients."""
    tx = methods.build("gradient_tracking", methods.IDENTITY)
    params = {"x": jnp.zeros((1, 50))}
    grads = np.random.default_rng(0).standard_normal((4, WORKERS, 1, 50)).astype(np.float32)
    grads[2] = np.nan

    def step(state, g):
        state = jax.vmap(lambda g, s: tx.update({"x": g}, s, params)[1], axis_name=methods.AXIS)(
            g, state
        )
        return state, state.tracked.tree.estimate["x"]

    state = jax.tree.map(lambda x: np.stack([x] * WORKERS), tx.init(params))
    state, estimates = jax.jit(lambda s: jax.lax.scan(step, s, grads))(state)
    assert (np.asarray(state.skipped.tree) == 1).all()
    want = grads[[0, 1, 1, 3]].mean(1)
    np.testing.assert_allclose(np.asarray(estimates).mean((1, 2)), want, atol=1e-5)


@pytest.mark.parametrize(
    "codec", [jaxcomp.top_k(0.01), jaxcomp.sidco(0.01), jaxcomp.dgc(0.01)], ids=repr
)
def test_a_leaf_may_have_more_than_two_to_the_31_elements(codec):
    plan = trees.layout(codec, jax.ShapeDtypeStruct((2**30 + 1, 2), F))
    assert [batch.buckets for batch in plan.batches] == [2]
    assert jaxcomp.wire_bytes(codec, jax.ShapeDtypeStruct((2**30 + 1, 2), F)) > 2**24
