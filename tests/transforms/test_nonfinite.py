"""Overflow is seen by every worker and enters no memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.suite import FEW, few_or_all, label

import jaxcomp
from jaxcomp.transforms.differences import compressed_differences

RNG = np.random.default_rng(0)
GRADS = {
    "kernel": jnp.asarray(RNG.standard_normal((8, 40, 64)), jnp.float32),
    "bias": jnp.asarray(RNG.standard_normal((8, 64)), jnp.float32),
}
LIKE = jax.tree.map(lambda g: g[0], GRADS)


def stepper(tx, mesh):
    return jaxcomp.data_parallel(
        lambda s, g: tx.update(jax.tree.map(lambda x: x[0], g), s), mesh, "data"
    )


@pytest.mark.core("RandomK(fraction=0.1,b=None)")
@pytest.mark.parametrize("codec", few_or_all(FEW[1::2], FEW), ids=label)
def test_one_bad_element_is_seen_by_all_and_never_remembered(codec, mesh):
    tx = jaxcomp.compressed_mean(codec, "data")
    step, state = stepper(tx, mesh), jaxcomp.init_state(tx, LIKE, mesh, "data")
    _, state = step(state, GRADS)
    memory = jax.tree.map(np.asarray, state.memory)
    for bad in (np.nan, np.inf):
        poisoned = {**GRADS, "kernel": GRADS["kernel"].at[3, 7, 11].set(bad)}
        mean, after = step(state, poisoned)
        assert not np.isfinite(np.asarray(mean["kernel"])[7, 11])
        for shard in mean["kernel"].addressable_shards:
            assert not np.isfinite(np.asarray(shard.data)[7, 11])
        for got, want in zip(jax.tree.leaves(after.memory), jax.tree.leaves(memory), strict=True):
            np.testing.assert_array_equal(got, want)
        assert int(after.step) == int(state.step) + 1
        clean, _ = step(after, GRADS)
        assert np.isfinite(np.asarray(clean["kernel"])).all()
    # A bad element in a dense leaf guards the memory of the compressed ones too.
    _, after = step(state, {**GRADS, "bias": GRADS["bias"].at[0, 0].set(np.nan)})
    for got, want in zip(jax.tree.leaves(after.memory), jax.tree.leaves(memory), strict=True):
        np.testing.assert_array_equal(got, want)


def test_without_the_guard_memory_is_poisoned(mesh):
    """The guard is what protects: switched off, the same step enters the residual."""
    tx = jaxcomp.compressed_mean(jaxcomp.sign(), "data", guard=False)
    step, state = stepper(tx, mesh), jaxcomp.init_state(tx, LIKE, mesh, "data")
    _, after = step(state, {**GRADS, "kernel": GRADS["kernel"].at[3, 7, 11].set(np.nan)})
    assert not np.isfinite(np.asarray(after.memory.feedback.tree.residual[0])).all()


@pytest.mark.core("False")
@pytest.mark.parametrize("check_vma", [True, False])
def test_skip_nonfinite_holds_the_optimizer(check_vma, mesh):
    tx = optax.chain(
        jaxcomp.compressed_mean(jaxcomp.sign(), "data"), jaxcomp.skip_nonfinite(optax.adam(0.1))
    )
    step = jaxcomp.data_parallel(
        lambda s, g: tx.update(jax.tree.map(lambda x: x[0], g), s, LIKE),
        mesh,
        "data",
        check_vma=check_vma,
    )
    _, state = step(jaxcomp.init_state(tx, LIKE, mesh, "data"), GRADS)
    updates, after = step(state, {**GRADS, "bias": GRADS["bias"].at[5, 5].set(np.inf)})
    assert not any(np.asarray(u).any() for u in jax.tree.leaves(updates))
    assert int(after[1].skipped) == 1
    np.testing.assert_array_equal(after[1].inner[0].mu["kernel"], state[1].inner[0].mu["kernel"])


@pytest.mark.core("RandomK(fraction=0.1,b=None)")
@pytest.mark.parametrize("codec", FEW[::3], ids=label)
def test_odd_trees(codec, mesh):
    """Empty leaves, scalars, length one and odd lengths, narrow dtypes: all in one tree."""
    like = {
        "empty": jnp.zeros((0, 3)),
        "scalar": jnp.ones(()),
        "one": jnp.ones((1, 1)),
        "odd": jnp.asarray(RNG.standard_normal((7, 11, 13)), jnp.float32),
        "half": jnp.asarray(RNG.standard_normal((3, 500)), jnp.float16),
        "brain": jnp.asarray(RNG.standard_normal((3, 501)), jnp.bfloat16),
        "nothing": None,
    }
    policy = jaxcomp.Policy(codec, min_size=0, min_ndim=0)
    tx = jaxcomp.compressed_mean(policy, "data")
    grads = jax.tree.map(lambda x: jnp.broadcast_to(x, (8, *x.shape)), like)
    step, state = stepper(tx, mesh), jaxcomp.init_state(tx, like, mesh, "data")
    mean, state = step(state, grads)
    for path, got in jax.tree_util.tree_leaves_with_path(mean):
        want = like[path[0].key]
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert np.isfinite(np.asarray(got, np.float32)).all()
    np.testing.assert_allclose(mean["one"], 1.0, rtol=1e-2)


def test_a_narrow_residual_does_not_overflow(mesh):
    """Finite gradients beyond float16's range must not leave Inf in a float16 residual."""
    link = jaxcomp.Link(jaxcomp.top_k(fraction=0.01), jaxcomp.Residual(dtype="float16"))
    tx = jaxcomp.compressed_mean(link, "data")
    step, state = stepper(tx, mesh), jaxcomp.init_state(tx, LIKE, mesh, "data")
    _, state = step(state, jax.tree.map(lambda g: 3e5 * g, GRADS))
    assert np.isfinite(np.asarray(state.memory.feedback.tree.residual[0], np.float32)).all()
    mean, _ = step(state, GRADS)
    assert np.isfinite(np.asarray(mean["kernel"])).all()


def test_a_bad_gradient_spoils_only_its_round_of_accumulation():
    tx = jaxcomp.accumulate(optax.identity(), "data", every=2)
    grads = jnp.array([[1.0, np.nan, 3.0, 5.0, np.inf, 1.0, 2.0, 4.0]])

    def own(grads):
        return jax.lax.scan(lambda s, g: tx.update(g, s)[::-1], tx.init(grads[0]), grads)[1]

    made = jax.jit(jax.vmap(own, axis_name="data"))(grads)
    np.testing.assert_array_equal(made[0], [0, np.nan, 0, 4, 0, np.nan, 0, 3])


def test_differences_keep_their_state_in_a_bad_step():
    """Both in a step of full gradients, as the first one is, and in one of differences."""
    exact = jaxcomp.Policy(jaxcomp.codecs.Identity(), min_size=0, min_ndim=0)
    tx = compressed_differences(exact, "data", restart=jaxcomp.gates.Every(9))
    params = jnp.ones((2, 3))
    first = jax.tree.map(lambda x: np.stack([x, x]), tx.init(params))
    second = first._replace(step=first.step + np.uint32(1))

    def own(grads, state):
        return tx.update(grads, state, params + 1, grad_fn=jnp.zeros_like)

    step = jax.jit(jax.vmap(own, axis_name="data"))
    grads = np.zeros((2, 2, 3), np.float32)
    for bad, state in ((np.nan, first), (np.inf, second)):
        grads[1, 0, 0] = bad
        made, after = step(grads, state)
        assert not np.isfinite(np.asarray(made)[:, 0, 0]).any()
        jax.tree.map(np.testing.assert_array_equal, after, state)


@pytest.mark.core("1e+30")
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_stats_hold_at_any_scale(scale, mesh):
    tx = jaxcomp.compressed_mean(jaxcomp.sign(), "data", stats=True)
    step, state = stepper(tx, mesh), jaxcomp.init_state(tx, LIKE, mesh, "data")
    _, state = step(state, jax.tree.map(lambda g: scale * g, GRADS))
    assert 0.3 < float(state.stats.relative_error) < 0.4
    assert 0.5 < float(state.stats.residual_ratio) < 0.7
