"""Published ways to train sharded models: exact without rounding, close and small with it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import algorithms

N = 8


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) / shape[-1] ** 0.5


def close(got, want, relative):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        error = np.linalg.norm(np.asarray(one) - np.asarray(other))
        assert 0 < error <= relative * np.linalg.norm(np.asarray(other))


@pytest.mark.full
@pytest.mark.parametrize(("make", "saved"), [(algorithms.zero_pp, 5.0), (algorithms.qsdp, 3.5)])
def test_fully_sharded_recipes(make, saved, mesh):
    params = {"a": draw(0, 256, 128), "b": draw(1, 128, 256)}
    x = draw(2, 64, 256)

    def loss(params, x):
        return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - x) ** 2)

    f = jaxcomp.fully_sharded(loss, mesh, "data", P("data"), **make())
    value, grads = f(params, x, key=0)
    want, dense = jax.value_and_grad(loss)(params, x)
    assert float(value) == pytest.approx(float(want), rel=2e-2)
    close(grads, dense, 0.25)
    sent, plain = (
        sum(one.link_bytes(params)["data"])
        for one in (f, jaxcomp.fully_sharded(loss, mesh, "data", P("data"), weights=None))
    )
    assert plain > saved * sent


@pytest.mark.full
@pytest.mark.parametrize("make", [algorithms.sdp4bit, algorithms.loco])
def test_sharded_optimizers_train_as_dense_ones(make):
    target, params = draw(0, 64, 96), {"w": jnp.zeros((64, 96)), "b": jnp.zeros(96)}

    def loss(params, x):
        return jnp.mean((x @ params["w"] + params["b"] - x @ target) ** 2)

    def train(tx):
        state = jax.vmap(tx.init, axis_name="data", in_axes=None, axis_size=4)(params)

        def step(carry, key):
            now, state = carry
            x = jax.random.normal(key, (4, 32, 64))
            grads = jax.vmap(jax.grad(loss), (None, 0))(now, x)
            own = jax.tree.map(lambda p: jnp.stack([p] * 4), now)
            updates, state = jax.vmap(tx.update, axis_name="data")(grads, state, own)
            now = optax.apply_updates(now, jax.tree.map(lambda u: u[0], updates))
            return (now, state), None

        keys = jax.random.split(jax.random.key(9), 150)
        (now, _), _ = jax.jit(lambda *c: jax.lax.scan(step, c, keys))(params, state)
        return float(loss(now, jax.random.normal(jax.random.key(5), (512, 64))))

    adam = optax.adam(2e-2)
    dense = train(optax.chain(jaxcomp.compressed_mean(jaxcomp.Dense(), "data"), adam))
    start = float(loss(params, jax.random.normal(jax.random.key(5), (512, 64))))
    assert dense < 0.1 * start
    assert train(jaxcomp.sharded_optimizer(adam, "data", **make())) < 0.15 * start


def typed(f, mesh, specs, out):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out))


@pytest.mark.full
def test_a_tensor_parallel_block(mesh):
    x, into, out = draw(0, 24, 64), draw(1, 64, N * 16), draw(2, N * 16, 64)
    specs = (P(), P(None, "data"), P("data"))

    def part(x, into, out):
        return jax.nn.relu(x @ into) @ out

    def grads(codec):
        block = algorithms.tensor_parallel(part, "data", codec)

        def loss(*given):
            return jnp.sum(block(*given, key=1, site="mlp") ** 2)

        return typed(jax.grad(loss, (0, 1, 2)), mesh, specs, specs)(x, into, out)

    want = jax.grad(lambda *given: jnp.sum(part(*given) ** 2), (0, 1, 2))(x, into, out)
    for one, other in zip(grads(None), want, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)
    close(grads(jaxcomp.qsgd_inf(bits=8)), want, 0.03)


def test_experts_compute_what_one_device_would_and_zeros_stay_zeros():
    tokens = draw(0, N, 4 * N, 64).at[:, 3::4].set(0)
    weights = draw(1, N, 64, 64)

    def want(tokens, weights):
        rows = tokens.reshape(N, N, 4, 64)
        return jnp.einsum("sect,etu->secu", rows, weights).reshape(tokens.shape)

    def run(moe, tokens, weights):
        return jax.vmap(lambda x, w: moe(x, w, key=0), axis_name="experts")(tokens, weights)

    def expert(tokens, weight):
        assert tokens.shape == (4 * N, 64)
        return tokens @ weight

    dense = algorithms.experts(expert, "experts", None)
    np.testing.assert_allclose(
        run(dense, tokens, weights), want(tokens, weights), rtol=2e-4, atol=1e-6
    )
    for combine in (None, jaxcomp.qsgd_inf(bits=8)):
        moe = algorithms.experts(expert, "experts", combine=combine)
        found = jax.jit(functools.partial(run, moe))(tokens, weights)
        close(found, want(tokens, weights), 0.06)
        assert not found[:, 3::4].any()


def test_a_pipeline_is_its_stages_one_after_another(mesh):
    batches, weights = draw(0, 5, 4, 64), draw(1, N, 64, 64)

    def stage(x, w):
        return x + jnp.tanh(x @ w)

    def sequential(weights):
        x = batches
        for w in weights:
            x = stage(x, w)
        return jnp.sum(x**2), x

    (_, out), want = jax.value_and_grad(sequential, has_aux=True)(weights)

    def both(codec):
        net = algorithms.pipeline(stage, "data", codec)

        def loss(weights, batches):
            found = net(batches, weights[0], key=0)
            return jnp.sum(found**2), found[None]

        f = typed(jax.grad(loss, has_aux=True), mesh, (P("data"), P()), (P("data"), P("data")))
        return f(weights, batches)

    grads, found = both(None)
    np.testing.assert_allclose(found[-1], out, rtol=1e-4, atol=1e-5)
    assert not found[:-1].any()
    np.testing.assert_allclose(grads, want, rtol=2e-3, atol=1e-4)
    grads, found = both(jaxcomp.qsgd_inf(bits=8))
    close(found[-1], out, 0.05)
    close(grads, want, 0.05)
