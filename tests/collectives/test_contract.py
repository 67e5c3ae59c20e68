"""Every collective × codecs × mappings: bits, bytes, numbers that are not finite, JAX's own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

import jaxcomp
from jaxcomp import collectives

N = 8
RING = [(i, (i + 3) % N) for i in range(N)]
CALLS = {
    "gather": (collectives.all_gather, {}),
    "gather of rows": (collectives.all_gather, {"per_row": True, "axis": 1}),
    "scatter": (collectives.psum_scatter, {"scatter_dimension": 1}),
    "sum": (collectives.psum, {}),
    "shuffle": (collectives.all_to_all, {"split_axis": 0, "concat_axis": 1}),
    "pass on": (collectives.ppermute, {"perm": tuple(RING)}),
}
CODECS = [
    jaxcomp.codecs.Identity(),
    jaxcomp.qsgd_inf(bits=4),
    jaxcomp.mx(),
    *(jaxcomp.qsgd_inf(bits=8), jaxcomp.mx("mxfp8"), jaxcomp.eden(), jaxcomp.sign()),
    *(jaxcomp.top_k(fraction=0.1), jaxcomp.qsgd_inf(bits=4, bucket_size=None), jaxcomp.dsc()),
    *(jaxcomp.terngrad(), jaxcomp.natural(), jaxcomp.random_k(), jaxcomp.cast("bfloat16")),
]
X = 0.1 * jax.random.normal(jax.random.key(1), (N, len(CALLS), 48, 88))
"""A matrix for each collective: the compiler would join those that send the same."""
MODES = ("typed", "untyped", "pmap", "vmap")
ONE_OR_ALL = [
    CODECS[1],
    *(pytest.param(c, marks=pytest.mark.full) for c in CODECS if c != CODECS[1]),
]


def calls(codec, x, axis_name="data"):
    """The results of all collectives, each of a matrix and a site of its own."""
    return {
        name: call(x[i], axis_name, codec, key=7, site=name, **settings)
        for i, (name, (call, settings)) in enumerate(CALLS.items())
    }


def of_jax(x):
    """The same by JAX's own collectives."""
    return {
        "gather": lax.all_gather(x[0], "data", tiled=True),
        "gather of rows": lax.all_gather(x[1], "data", axis=1, tiled=True),
        "scatter": lax.psum_scatter(x[2], "data", scatter_dimension=1, tiled=True),
        "sum": lax.psum(x[3], "data"),
        "shuffle": lax.all_to_all(x[4], "data", 0, 1, tiled=True),
        "pass on": lax.ppermute(x[5], "data", RING),
    }


@functools.lru_cache(maxsize=4)
def mapped(f, mode):
    """The function over eight workers, compiled; the leading axis is theirs."""
    if mode == "pmap":
        return jax.pmap(f, axis_name="data")
    if mode == "vmap":
        return jax.jit(jax.vmap(f, axis_name="data"))
    mesh = jax.make_mesh((N,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def one(x):
        return jax.tree.map(lambda y: y[None], f(x[0]))

    whole = jax.shard_map(
        one, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=mode == "typed"
    )
    return jax.jit(whole)


@pytest.mark.parametrize("codec", ONE_OR_ALL, ids=repr)
def test_all_mappings_agree_and_send_what_was_said(codec):
    f = functools.partial(calls, codec)
    want = mapped(f, "vmap")(X)
    for mode in MODES[:3]:
        got = mapped(f, mode)(X)
        for name in CALLS:
            if isinstance(codec, jaxcomp.codecs.Identity) and name in ("scatter", "sum"):
                continue  # JAX adds in another order under `vmap`.
            np.testing.assert_array_equal(got[name], want[name], err_msg=f"{name}, {mode}")
    moved = jaxcomp.collective_bytes(mapped(f, "typed").lower(X).compile())
    like = jax.ShapeDtypeStruct(X.shape[2:], X.dtype)
    said = [
        collectives.wire_bytes(call, like, codec, N, **settings)
        for call, settings in CALLS.values()
    ]
    assert sum(moved.values()) == sum(one.forward for one in said)
    if codec.bucket_size:  # Not the cast to 16 bits, and not a bitmap of random coordinates.
        dense = [
            collectives.wire_bytes(call, like, None, N, **settings)
            for call, settings in CALLS.values()
        ]
        assert sum(one.forward for one in said) < 0.7 * sum(one.forward for one in dense)


@pytest.mark.parametrize(
    "mode", ["typed", *(pytest.param(m, marks=pytest.mark.full) for m in MODES[1:])]
)
def test_identity_is_jaxs_own_collective(mode):
    want = mapped(of_jax, mode)(X)
    got = mapped(functools.partial(calls, jaxcomp.codecs.Identity()), mode)(X)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(
    "codec",
    [
        jaxcomp.mx(),
        pytest.param(jaxcomp.top_k(fraction=0.1), marks=pytest.mark.full),
        pytest.param(jaxcomp.sign(), marks=pytest.mark.full),
    ],
    ids=repr,
)
def test_messages_are_what_codecs_make_of_rows_and_shards(codec):
    """Codecs without noise, each message by itself; sums are those of the decoded messages."""
    once = jax.jit(lambda x: jaxcomp.roundtrip(codec, 0, x))
    each_row = jax.jit(jax.vmap(jax.vmap(jax.vmap(lambda row: jaxcomp.roundtrip(codec, 0, row)))))
    shards = jnp.stack([once(x) for x in X[:, 0]])
    _, rows, _, summands, tokens, passed = jnp.moveaxis(each_row(X), 1, 0)
    pieces = jnp.stack([jnp.stack([once(x) for x in jnp.split(y, N, axis=1)]) for y in X[:, 2]])
    got = mapped(functools.partial(calls, codec), "vmap")(X)
    np.testing.assert_array_equal(got["gather"][0], shards.reshape(-1, 88))
    np.testing.assert_array_equal(got["gather of rows"][3], jnp.concatenate(list(rows), axis=1))
    np.testing.assert_array_equal(got["pass on"][3], passed[0])
    for i in range(N):
        arrived = tokens.reshape(N, N, 6, 88)[:, i]
        np.testing.assert_array_equal(got["shuffle"][i], jnp.concatenate(list(arrived), axis=1))
        total = pieces[0, i]
        for j in range(1, N):
            total = total + pieces[j, i]
        np.testing.assert_allclose(got["scatter"][i], total, rtol=2e-6, atol=1e-7)
    total = summands[0]
    for j in range(1, N):
        total = total + summands[j]
    second = each_row(total[None, None])[0, 0]
    np.testing.assert_allclose(got["sum"][5], second, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("codec", ONE_OR_ALL, ids=repr)
def test_extremes(codec):
    """Zeros, tiny and huge numbers; what is not finite stays so in its element."""
    f = mapped(functools.partial(calls, codec), "vmap")
    zeros = f(jnp.zeros_like(X))
    for name, found in zeros.items():
        assert bool(jnp.isfinite(found).all()), name
        assert not found.any(), name
    for scale in (1e-40, 1e30):
        for name, found in f(X * scale).items():
            assert bool(jnp.isfinite(found).all()), (name, scale)
    for bad in (np.nan, np.inf):
        found = f(X.at[2, :, 13, 17].set(bad))
        assert not jnp.isfinite(found["gather"][1, 2 * 48 + 13, 17])
        assert not jnp.isfinite(found["gather of rows"][1, 13, 2 * 88 + 17])
        assert not jnp.isfinite(found["scatter"][1, 13, 6])
        assert not jnp.isfinite(found["sum"][4, 13, 17])
        assert not jnp.isfinite(found["shuffle"][2, 1, 2 * 88 + 17])
        assert not jnp.isfinite(found["pass on"][5, 13, 17])
        others = jnp.delete(found["pass on"][5], 13, axis=0)
        assert bool(jnp.isfinite(others).all()), "a token spoils no other one"


def test_trees_of_many_dtypes_and_shapes():
    """Policies, empty and odd leaves, narrow dtypes, a scalar: the dtype of a leaf stays."""
    tree = {
        "half": jax.random.normal(jax.random.key(2), (N, 33, 65), jnp.bfloat16),
        "small": jax.random.normal(jax.random.key(3), (N, 7), jnp.float16),
        "empty": jnp.zeros((N, 0, 5)),
        "one": jnp.arange(N, dtype=jnp.float32),
        "head": jax.random.normal(jax.random.key(4), (N, 40, 50)),
    }
    policy = jaxcomp.Policy(jaxcomp.qsgd_inf(bits=8), rules=(jaxcomp.Rule("head", None),))

    def f(tree, codec):
        whole = collectives.all_gather(tree, "data", codec, key=1, tiled=False)
        mean = collectives.pmean(tree, "data", codec, key=1, site="mean")
        to_next = collectives.ppermute(tree, "data", codec, perm=RING[:-1], key=1)
        return whole, mean, to_next

    for codec, error in ((policy, 0.0), (jaxcomp.qsgd_inf(bits=8), 0.05)):
        run = jax.jit(jax.vmap(functools.partial(f, codec=codec), axis_name="data"))
        whole, mean, to_next = run(tree)
        for name, x in tree.items():
            assert whole[name].dtype == mean[name].dtype == to_next[name].dtype == x.dtype
            spread = 0.05 if name in ("half", "small") else error
            close = functools.partial(np.testing.assert_allclose, atol=spread, rtol=2e-2)
            close(np.float32(whole[name][1]), np.float32(x))
            close(np.float32(mean[name][1]), np.float32(x).mean(0))
            close(np.float32(to_next[name][3]), np.float32(x[0]))
            assert not to_next[name][RING[-1][1]].any()


def test_a_policy_decides_by_the_leaf_whatever_its_neighbours_are():
    """Not by the rows into which two shots reshape it, nor by rows that are padded."""
    shapes = {"bias": (2048,), "matrix": (64, 64), "rows": (2, 601)}
    keys = jax.random.split(jax.random.key(2), len(shapes))
    tree = {
        name: jax.random.normal(k, (N, *s))
        for k, (name, s) in zip(keys, shapes.items(), strict=True)
    }
    # 1,202 elements, and 1,204 in rows that are two equal buckets.
    dense = jaxcomp.Rule("*", None, min_size=1203)
    whole = jaxcomp.Policy(jaxcomp.qsgd_inf(bits=4), rules=(dense,))
    policy = dataclasses.replace(whole, rules=(dataclasses.replace(dense, path="rows"),))

    def both(tree):
        def back(zeros):
            shared = collectives.pvary(zeros, "data", policy, key=1)
            return sum(jnp.vdot(x, tree[name]) for name, x in shared.items())

        total = collectives.psum(tree, "data", policy, key=1)
        arrived = collectives.ppermute(tree["rows"], "data", whole, perm=RING, key=1)
        return total, jax.grad(back)(jax.tree.map(jnp.zeros_like, tree)), arrived

    *sums, arrived = jax.jit(jax.vmap(both, axis_name="data"))(tree)
    assert (arrived[3] != tree["rows"][0]).mean() > 0.9
    for found in sums:
        for name, x in tree.items():
            want = np.sum(x, axis=0)
            error = np.linalg.norm(found[name][0] - want) / np.linalg.norm(want)
            assert error < 1e-6 if name == "bias" else 0.02 < error < 0.5


@pytest.mark.parametrize("codec", ONE_OR_ALL, ids=repr)
def test_tokens_of_zeros_arrive_as_zeros(codec):
    """With every codec, since no bucket has elements of two rows."""
    tokens = X[:, 4].at[:, ::3].set(0)

    def shuffle(x):
        return collectives.all_to_all(x, "data", codec, split_axis=0, concat_axis=0, key=1)

    arrived = mapped(shuffle, "vmap")(tokens)
    sent = tokens.reshape(N, N, 6, 88).swapaxes(0, 1).reshape(N, 48, 88)
    np.testing.assert_array_equal(arrived.any(axis=-1), sent.any(axis=-1))


@pytest.mark.full
def test_several_axes_are_one_and_one_worker_is_enough():
    codec = jaxcomp.qsgd_inf(bits=4)
    want = mapped(functools.partial(calls, codec), "vmap")(X)
    devices = np.array(jax.devices()).reshape(2, 4)
    mesh = Mesh(devices, ("slow", "fast"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def one(x):
        return jax.tree.map(lambda y: y[None], calls(codec, x[0], ("slow", "fast")))

    spec = P(("slow", "fast"))
    got = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec))(X)
    jax.tree.map(np.testing.assert_array_equal, got, want)

    def alone(x):
        gathered = collectives.all_gather(x, "data", codec, key=0)
        return gathered, collectives.psum(x, "data", codec, key=0)

    for found in jax.vmap(alone, axis_name="data")(X[:1, 0]):
        np.testing.assert_allclose(found, X[:1, 0], atol=0.06)


@pytest.mark.full
def test_noise_differs_between_workers_steps_sites_and_passes():
    codec = jaxcomp.qsgd_inf(bits=2)
    x = jnp.broadcast_to(X[0, 0], (N, *X.shape[2:]))

    def f(x, key, site):
        whole = collectives.all_gather(x, "data", codec, key=key, site=site, tiled=False)
        back = jax.grad(
            lambda y: jnp.vdot(
                collectives.ppermute(y, "data", codec, perm=RING, key=key, site=site), x
            )
        )(x)
        return whole, back

    run = jax.jit(jax.vmap(f, (0, None, None), axis_name="data"))
    found = [run(x, key, site) for key, site in ((0, 0), (1, 0), (0, 1))]
    (whole, back), *others = found
    for i in range(1, N):
        assert (whole[0, 0] != whole[0, i]).any()
    for other, _ in others:
        assert (whole != other).any()
    assert (back[0] != whole[0, 0]).any()
    named = [
        jax.vmap(
            lambda x, s=site: collectives.all_gather(x, "data", codec, key=0, site=s),
            axis_name="data",
        )(x)
        for site in ("a", "b", ("a", 1))
    ]
    assert (named[0] != named[1]).any()
    assert (named[0] != named[2]).any()
