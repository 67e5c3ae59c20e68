"""`value_and_grad` in all ways of mapping, and keys among its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jaxcomp

MESH = jax.make_mesh((8,), ("data",))
AUTO = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
X = jax.random.normal(jax.random.key(0), (16, 4))
W = jnp.arange(1.0, 5.0)


def mapped(function, way):
    """The function of parameters and a batch, mapped over the workers; results of all of them."""
    if way == "vmap":
        return jax.vmap(function, in_axes=(None, 0), axis_name="data")
    if way == "pmap":
        return jax.pmap(function, in_axes=(None, 0), axis_name="data")

    def own(w, x):
        return jax.tree.map(lambda leaf: leaf[None], function(w, x[0]))

    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    return jax.jit(jax.shard_map(own, mesh=AUTO, **specs, check_vma=way == "shard_map"))


@pytest.mark.parametrize("way", ["shard_map", "shard_map without vma", "pmap", "vmap"])
def test_losses_are_averaged_and_gradients_are_not(way):
    """Metrics are averaged like the loss; other arrays, and gradients, remain each worker's own."""

    def loss_fn(params, x):
        y = x @ params["w"]
        return jnp.mean(y**2), {"logits": y, "metric": jnp.max(y), "count": jnp.sum(y > 0)}

    def step(w, x):
        params = {"w": w, "steps": jnp.int32(3)}
        (loss, aux), grads = jaxcomp.value_and_grad(loss_fn, "data", has_aux=True)(params, x)
        assert grads.pop("steps") is None
        return loss, aux, grads["w"]

    parts = X.reshape(8, 2, 4)
    loss, aux, grads = mapped(step, way)(W, parts)
    want = [jax.value_and_grad(lambda w, x=x: jnp.mean((x @ w) ** 2))(W) for x in parts]
    np.testing.assert_allclose(loss, np.full(8, np.mean([v for v, _ in want])), rtol=1e-5)
    np.testing.assert_allclose(grads, np.stack([g for _, g in want]), rtol=1e-5)
    np.testing.assert_allclose(aux["logits"], parts @ W, rtol=1e-5)
    np.testing.assert_allclose(aux["metric"], np.full(8, np.max(parts @ W, 1).mean()), rtol=1e-5)
    np.testing.assert_array_equal(aux["count"], np.sum(parts @ W > 0, 1))


@pytest.mark.core("shard_map")
@pytest.mark.parametrize("way", ["shard_map", "pmap"])
def test_keys_differ_between_workers(way):
    """Typed keys anywhere, and raw keys in arguments that are named; other words are data."""
    key, raw = jax.random.key(1), jax.random.PRNGKey(2)

    def drawn(w, keys, pair, labels, x, raw):
        draws = [keys["dropout"][0], keys["dropout"][1], raw, pair["a"][0], pair["a"][1]]
        return jnp.sum(w * x), (jnp.stack([jax.random.normal(k) for k in draws]), keys, labels + 0)

    def step(w, x):
        keys = {"dropout": jax.random.split(key), "table": raw}
        args, found = (w, keys, {"a": jax.random.split(raw)}, raw), []
        for named in ({"key_argnums": 2, "key_argnames": "raw"}, {}, {"fold_keys": False}):
            grad = jaxcomp.value_and_grad(drawn, "data", has_aux=True, **named)
            (_, (draws, keys, labels)), _ = grad(*args, x=x, raw=raw)
            found.append(draws)
        return found, keys["table"], labels

    (named, plain, kept), *data = mapped(step, way)(W, X.reshape(8, 2, 4))
    assert [len(np.unique(x)) for x in (named, plain, kept)] == [40, 16 + 3, 5]
    for words in data:
        np.testing.assert_array_equal(words, np.tile(raw, (8, 1)))
    own = [jax.random.fold_in(k, 5) for k in (raw, *jax.random.split(raw))]
    np.testing.assert_array_equal(named[5, 2:], [jax.random.normal(k) for k in own])


def test_arguments_named_as_keys_are_keys():
    def refused(match, *args, kwargs=None, **named):
        grad = jaxcomp.value_and_grad(lambda w, k, other=0: jnp.sum(w), "data", **named)
        step = mapped(lambda w, x: grad(w, *args, **(kwargs or {})), "vmap")
        with pytest.raises(ValueError, match=match):
            step(W, X[:8])

    key = jax.random.PRNGKey(0)
    refused("`key_argnums` must be numbers of the 2 positional.*got 0", key, key_argnums=0)
    refused("`key_argnums` must be numbers of the 2 positional.*got 2", key, key_argnums=2)
    refused(r"`key_argnames` must name.*got 'k'; name a positional", key, key_argnames="k")
    refused(r"must name PRNG keys.*got float32 of shape \(4,\) in argument 1", W, key_argnums=1)


@pytest.mark.core("False")
@pytest.mark.parametrize("check_vma", [True, False])
def test_words_are_data(check_vma):
    """Two labels for each worker, and weights of hardware; a batch of pairs of words."""

    def loss_fn(w, labels, weights, x):
        logits = x @ jnp.outer(w, jnp.arange(3.0))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses) * weights[0] + weights[1]

    def step(w, weights, x, labels):
        return jaxcomp.value_and_grad(loss_fn, "data")(w, labels, weights, x)[0]

    labels, weights = jnp.arange(16, dtype=jnp.uint32) % 3, jnp.array([3, 5], jnp.uint32)
    settings = {"batch_argnums": (2, 3), "check_vma": check_vma}
    found = jaxcomp.data_parallel(step, MESH, "data", **settings)(W / 9, weights, X, labels)
    np.testing.assert_allclose(found, loss_fn(W / 9, labels, weights, X), rtol=1e-5)
    pairs = jnp.arange(128, dtype=jnp.uint32).reshape(64, 2)
    total = jaxcomp.data_parallel(lambda p: jax.lax.psum(p.sum(), "data"), MESH, "data")(pairs)
    assert int(total) == 127 * 64


def test_keys_that_differ_already_stay():
    def loss_fn(w, key):
        return jnp.sum(w * jax.random.normal(key))

    def step(w, seeds):
        loss, _ = jaxcomp.value_and_grad(loss_fn, "data")(w, jax.random.key(seeds[0]))
        return loss

    loss = jaxcomp.data_parallel(step, MESH, "data")(jnp.ones(()), jnp.arange(8))
    want = np.mean([jax.random.normal(jax.random.key(i)) for i in range(8)])
    np.testing.assert_allclose(loss, want, rtol=1e-5)


def test_a_loss_that_is_averaged_already_is_refused():
    def loss_fn(w, x):
        return jax.lax.pmean(jnp.mean((x @ w) ** 2), "data")

    step = jaxcomp.data_parallel(jaxcomp.value_and_grad(loss_fn, "data"), MESH, "data")
    with pytest.raises(ValueError, match=r"without jax\.lax\.pmean or psum"):
        step(W, X)
    with pytest.raises(ValueError, match="is not bound here"):
        jaxcomp.value_and_grad(loss_fn, "data")(W, X)
    with pytest.raises(ValueError, match=r"`argnums` must be numbers of the 2 .*, got 2"):
        mapped(jaxcomp.value_and_grad(loss_fn, "data", argnums=2), "shard_map")(W, X[:, None])


def test_several_arguments_are_differentiated():
    def step(w, b, x):
        grad = jaxcomp.value_and_grad(lambda x, w, b: jnp.sum(x @ w + b), "data", argnums=(1, -1))
        _, grads = grad(x, w, b)
        return jax.lax.pmean(grads, "data")

    w, b = jaxcomp.data_parallel(step, MESH, "data")(W, jnp.zeros(()), X)
    np.testing.assert_allclose(w, X.sum(0) / 8, rtol=1e-5)
    assert b == 2


def test_pmean_is_the_mean_of_compressed_mean():
    codec = jaxcomp.qsgd_inf(bits=4)
    tx = jaxcomp.compressed_mean(codec, axis_name="data")

    def step(_, x):
        grads, number = x, jnp.int32(3)
        state = tx.init(grads)._replace(step=jnp.uint32(number))
        want, _ = tx.update(grads, state)
        keys = [number, number + 1, jax.random.key(3)]
        return want, [jaxcomp.pmean(grads, codec, "data", key) for key in keys]

    grads = jax.random.normal(jax.random.key(2), (8, 32, 32))
    want, (same, *others) = mapped(step, "shard_map")(W, grads)
    np.testing.assert_array_equal(same, want)
    assert len({x.tobytes() for x in map(np.asarray, (same, *others))}) == 3

    def refused(codec, key, match):
        step = mapped(lambda _, x: jaxcomp.pmean(x, codec, "data", key(x)), "shard_map")
        with pytest.raises(ValueError, match=match):
            step(W, grads)

    refused(jaxcomp.sign(), lambda x: 0, "`codec` must need no memory, got .*compressed_mean")
    refused(codec, lambda x: x[0, 0].astype(int), "`key` must be the same on all workers")
