"""Derivatives of collectives: exact without rounding, right on average with it, equal bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import collectives as c

N = 8
IDENTITY = jaxcomp.codecs.Identity()
EIGHT = jaxcomp.qsgd_inf(bits=8)
RING = [(i, (i + 1) % N) for i in range(N - 1)]


def arrays(*shapes):
    return [
        jax.random.normal(jax.random.key(i), shape) / shape[0] ** 0.5
        for i, shape in enumerate(shapes)
    ]


class OfJax:
    """JAX's collectives under the names and arguments of ours."""

    @staticmethod
    def all_gather(x, axis_name, codec, *, key, site=0):
        return lax.all_gather(x, axis_name, tiled=True)

    @staticmethod
    def psum_scatter(x, axis_name, codec, *, key, site=0):
        return lax.psum_scatter(x, axis_name, tiled=True)

    @staticmethod
    def all_to_all(x, axis_name, codec, *, key, split_axis, concat_axis, site=0):
        return lax.all_to_all(x, axis_name, split_axis, concat_axis, tiled=True)

    @staticmethod
    def ppermute(x, axis_name, codec, *, key, perm, site=0):
        return lax.ppermute(x, axis_name, perm)

    @staticmethod
    def psum(x, axis_name, codec, *, key, site=0):
        return lax.psum(x, axis_name)


def loss(ops, codec, weights, x):
    """A network in which every collective is used once, and differentiated."""
    shard, up, down = weights
    x = jnp.tanh(x @ ops.all_gather(shard, "data", codec, key=1))
    x = ops.all_to_all(x, "data", codec, split_axis=0, concat_axis=1, key=1, site="to")
    x = ops.all_to_all(jnp.tanh(x), "data", codec, split_axis=1, concat_axis=0, key=1, site="back")
    x = x + ops.ppermute(x, "data", codec, perm=RING, key=1)
    part = ops.psum_scatter(x, "data", codec, key=1)
    return jnp.sum(ops.psum(jnp.tanh(part @ up) @ down, "data", codec, key=1, site=2) ** 2)


@functools.cache
def gradient(ops, codec, typed, remat=False):
    """The gradient of all weights, over a mesh of eight devices."""
    f = functools.partial(loss, ops, codec)
    f = jax.checkpoint(f) if remat else f
    mesh = jax.make_mesh((N,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (P("data"), P("data"), P(None, "data"))
    whole = jax.shard_map(
        jax.grad(f), mesh=mesh, in_specs=(specs, P("data")), out_specs=specs, check_vma=typed
    )
    return jax.jit(whole)


WEIGHTS = tuple(arrays((64, 48), (N * 48, 32), (32, N * 48)))
INPUTS = jax.random.normal(jax.random.key(9), (N * 16, 64))


@pytest.mark.parametrize("typed", [True, pytest.param(False, marks=pytest.mark.full)])
def test_without_rounding_they_are_jaxs_own(typed):
    want = gradient(OfJax, IDENTITY, typed)(WEIGHTS, INPUTS)
    got = gradient(c, IDENTITY, typed)(WEIGHTS, INPUTS)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_forward_mode_is_jaxs_own_without_types_and_rounding():
    """As Jacobians and products with a Hessian need it; with a codec JAX refuses it."""
    xs = jax.random.normal(jax.random.key(0), (N, N, 4))  # Matrices, on each worker.

    def derivative(ops, codec):
        def every(x):
            y = ops.all_gather(x, "data", codec, key=1) @ x.T
            y = ops.all_to_all(y, "data", codec, split_axis=0, concat_axis=1, key=1, site="to")
            y = ops.psum_scatter(y, "data", codec, key=1)
            y = ops.ppermute(jnp.sin(y), "data", codec, perm=[*RING, (N - 1, 0)], key=1)
            return ops.psum(y**2, "data", codec, key=1, site=2)

        return jax.vmap(lambda x: jax.jvp(every, (x,), (jnp.cos(x),)), axis_name="data")(xs)

    for got, want in zip(derivative(c, IDENTITY), derivative(OfJax, None), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    with pytest.raises(TypeError, match="forward-mode"):
        derivative(c, EIGHT)


@pytest.mark.full
def test_with_rounding_they_are_close_and_remat_changes_no_bit():
    want = gradient(OfJax, IDENTITY, True)(WEIGHTS, INPUTS)
    got = gradient(c, EIGHT, True)(WEIGHTS, INPUTS)
    again = gradient(c, EIGHT, True, remat=True)(WEIGHTS, INPUTS)
    jax.tree.map(np.testing.assert_array_equal, again, got)
    for one, other in zip(got, want, strict=True):
        error = jnp.linalg.norm(one - other) / jnp.linalg.norm(other)
        assert 1e-4 < error < 0.05


def test_a_scan_over_layers_is_the_unrolled_network():
    layers = jax.random.normal(jax.random.key(0), (N, 3, 6, 48)) / 7
    x = jax.random.normal(jax.random.key(1), (N, 4, 48))

    def net(layers, x, scanned):
        def layer(x, numbered):
            number, shard = numbered
            weight = c.all_gather(shard, "data", EIGHT, key=3, site=("layer", number))
            return jnp.tanh(x @ weight), None

        if scanned:
            x, _ = lax.scan(jax.checkpoint(layer), x, (jnp.arange(3), layers))
        else:
            for number in range(3):
                x, _ = layer(x, (number, layers[number]))
        return jnp.sum(x**2)

    found = [
        jax.jit(jax.vmap(jax.grad(functools.partial(net, scanned=s)), axis_name="data"))(layers, x)
        for s in (True, False)
    ]
    np.testing.assert_array_equal(*found)


def test_gradients_of_a_linear_layer_are_unbiased():
    """Of weights and inputs, over 4,096 keys, within six standard errors in each element."""
    shards = jax.random.normal(jax.random.key(0), (4, 8, 24))
    x = jax.random.normal(jax.random.key(1), (4, 6, 32))
    out = jax.random.normal(jax.random.key(2), (4, 6, 24))
    codec = jaxcomp.qsgd_inf(bits=2, bucket_size=32)

    def linear(key, how, shard, x, out):
        weight = c.all_gather(shard, "data", how, key=key)
        # The layer's result is scattered over the workers' sum, and shuffled back.
        return jnp.vdot(x @ weight, out)

    def grads(key, how):
        one = functools.partial(linear, key, how)
        return jax.vmap(jax.grad(one, (0, 1)), axis_name="data")(shards, x, out)

    exact = grads(0, IDENTITY)
    draws = jax.jit(lambda keys: lax.map(lambda k: grads(k, codec), keys, batch_size=64))
    found = draws(jnp.arange(4096))
    for one, want in zip(found, exact, strict=True):
        mean, spread = one.mean(0), one.std(0) / 64
        assert float(spread.min()) >= 0
        assert float(spread.max()) > 1e-3
        np.testing.assert_array_less(jnp.abs(mean - want), 6 * spread + 1e-5)


@pytest.mark.full
def test_second_derivatives_are_those_of_the_rounded_network():
    """Reverse over reverse; the collective is linear, so that only other functions bend."""
    shards, x = jax.random.normal(jax.random.key(0), (4, 8, 24)), jnp.ones((4, 2, 32)) / 9

    def slope(codec, shard, x):
        def f(shard):
            return jnp.sum(jnp.tanh(x @ c.all_gather(shard, "data", codec, key=0)) ** 2)

        return jax.grad(lambda s: jnp.sum(jax.grad(f)(s) ** 2))(shard)

    run = [jax.vmap(functools.partial(slope, k), axis_name="data") for k in (IDENTITY, EIGHT)]
    exact, rounded = (f(shards, x) for f in run)
    assert float(jnp.linalg.norm(exact)) > 0
    np.testing.assert_allclose(rounded, exact, atol=0.06 * float(jnp.abs(exact).max()))


@pytest.mark.full
def test_a_tensor_parallel_block_is_exact_without_rounding():
    """`pvary` at the entry sums what the workers' parts make of the input's gradient."""
    into, out = arrays((64, N * 16), (N * 16, 64))
    x = jax.random.normal(jax.random.key(3), (24, 64))
    mesh = jax.make_mesh((N,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def block(codec, into, out, x):
        x = c.pvary(x, "data", codec, key=0) if codec else x
        hidden = jax.nn.relu(x @ into)
        total = (
            c.psum(hidden @ out, "data", codec, key=0) if codec else lax.psum(hidden @ out, "data")
        )
        return jnp.sum(total**2)

    specs = (P(None, "data"), P("data"), P())

    def grads(codec):
        f = jax.grad(functools.partial(block, codec), argnums=(0, 1, 2))
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs))

    exact = grads(None)(into, out, x)
    jax.tree.map(np.testing.assert_array_equal, grads(IDENTITY)(into, out, x), exact)
    rounded = grads(EIGHT)
    for one, other in zip(rounded(into, out, x), exact, strict=True):
        assert 1e-4 < jnp.linalg.norm(one - other) / jnp.linalg.norm(other) < 0.03
    # Forward and back: two shots of the sum, two of the input's gradient, nothing else.
    moved = jaxcomp.collective_bytes(rounded.lower(into, out, x).compile())
    there = c.wire_bytes(c.psum, x, EIGHT, N)
    assert there.backward == 0
    entry = c.wire_bytes(c.pvary, x, EIGHT, N)
    assert entry.forward == 0
    assert sum(moved.values()) == there.forward + entry.backward


def assert_close(got, want, tolerance):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jnp.linalg.norm(one - other) < tolerance * jnp.linalg.norm(other)


HALVES = [x / 2 for x in arrays((32, N, 4), (N, 4, 32), (32, N, 4), (N, 4, 32))]
BLOCKS = (
    jnp.stack(HALVES[::2]),
    jnp.stack(HALVES[1::2]),
    jax.random.normal(jax.random.key(3), (8, 32)),
)
"""The weights of two blocks, of which worker `i` has `[:, :, i]` and `[:, i]`, and their input."""

SPECS = P(None, None, "data"), P(None, "data"), P()


def perceptrons(split, into, out, x):
    """The loss of two blocks one after another, whole or split over workers."""

    def block(x, into, out):
        return jax.nn.relu(x @ into.reshape(32, -1)) @ out.reshape(-1, 32)

    one = jaxcomp.algorithms.tensor_parallel(block, "data", IDENTITY)
    for layer in range(2):
        own = x, into[layer], out[layer]
        x = x + (one(*own, key=0, site=layer) if split else block(*own))
    return jnp.mean(x**2)


def over_devices(f, out_specs, typed):
    mesh = jax.make_mesh((N,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=SPECS, out_specs=out_specs, check_vma=typed)


@pytest.mark.parametrize(
    "mode", ["typed", "untyped", "vmap", pytest.param("pmap", marks=pytest.mark.full)]
)
def test_blocks_one_after_another_have_the_gradients_of_the_whole_network(mode):
    """Of inputs and weights, in the mappings that do not know what is the same on all, too."""
    want = jax.value_and_grad(functools.partial(perceptrons, False), (0, 1, 2))(*BLOCKS)
    f = jax.value_and_grad(functools.partial(perceptrons, True), (0, 1, 2))
    if mode in ("vmap", "pmap"):
        over = jax.vmap if mode == "vmap" else jax.pmap
        each = over(f, in_axes=(2, 1, None), out_axes=(0, (2, 1, 0)), axis_name="data")
        value, (of_into, of_out, of_x) = jax.jit(each)(*BLOCKS)
        got = value[3], (of_into, of_out, of_x[3])
    else:
        got = jax.jit(over_devices(f, (P(), SPECS), mode == "typed"))(*BLOCKS)
    assert_close(got, want, 1e-5)


def test_gradients_from_outside_of_the_mapping_need_types():
    loss = functools.partial(perceptrons, True)
    typed, untyped = (
        jax.grad(over_devices(loss, P(), checked), (0, 1, 2)) for checked in (True, False)
    )
    want = jax.grad(functools.partial(perceptrons, False), (0, 1, 2))(*BLOCKS)
    assert_close(jax.jit(typed)(*BLOCKS), want, 1e-5)
    with pytest.raises(ValueError, match="take the gradient inside, as in"):
        jax.eval_shape(untyped, *BLOCKS)


def test_a_mapping_inside_over_other_axes_is_no_outside():
    """Its backward pass belongs to a gradient that is taken inside of the workers' mapping."""
    mesh = jax.make_mesh((4, 2), ("data", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def loss(x):
        def inner(x):
            return lax.psum(jnp.sum(c.pvary(x, "data", EIGHT, key=0) ** 2), "tp")

        return jax.shard_map(
            inner, in_specs=P("tp"), out_specs=P(), axis_names={"tp"}, check_vma=False
        )(x)

    whole = jax.shard_map(
        jax.grad(loss), mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}, check_vma=False
    )
    assert jax.eval_shape(jax.jit(whole), jnp.ones((16, 64))).shape == (16, 64)


@pytest.mark.full
@pytest.mark.parametrize(("codec", "down"), [(EIGHT, IDENTITY), (IDENTITY, EIGHT)])
def test_a_sum_with_one_dense_way_is_the_same_on_all_workers(codec, down):
    """By its type, too: two blocks one after another have the right gradients."""
    into, out = arrays((64, N * 16), (N * 16, 64))
    x = jax.random.normal(jax.random.key(3), (24, 64)) / 8
    mesh = jax.make_mesh((N,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (P(None, "data"), P("data"), P())

    def grads(codec, down):
        def loss(into, out, x):
            for site in range(2):
                own = c.pvary(x, "data", codec, key=0, site=site)
                part = jax.nn.relu(own @ into) @ out
                x = x + c.psum(part, "data", codec, down=down, key=0, site=("out", site))
            return jnp.sum(x**2)

        f = jax.shard_map(jax.grad(loss, (0, 1, 2)), mesh=mesh, in_specs=specs, out_specs=specs)
        return jax.jit(f)(into, out, x)

    for one, other in zip(grads(codec, down), grads(IDENTITY, IDENTITY), strict=True):
        assert jnp.linalg.norm(one - other) < 0.05 * jnp.linalg.norm(other)


def test_vmap_shuffles_what_is_the_same_on_all_workers():
    """As the gradient of a gathered loss is, if the codec is not random."""
    codec = jaxcomp.mx("mxfp8")
    x = jax.random.normal(jax.random.key(4), (N, 3, 40))

    def one(x):
        whole, pull = jax.vjp(lambda x: c.all_gather(x, "data", codec, key=0), x)
        return pull(whole)[0]

    mesh = jax.make_mesh((N,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    over_devices = jax.shard_map(
        lambda x: one(x[0])[None],
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,
    )
    got = jax.jit(jax.vmap(one, axis_name="data"))(x)
    np.testing.assert_array_equal(got, jax.jit(over_devices)(x))
    np.testing.assert_allclose(got, N * x, rtol=0.2, atol=0.05)
