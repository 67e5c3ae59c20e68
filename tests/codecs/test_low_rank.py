"""Low rank: the matrices among the leaves, their bases, and the codec of one sender."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings, strategies as st

import jaxcomp
from jaxcomp import testing
from jaxcomp.codecs.low_rank import merged_layers
from jaxcomp.exchange.plan import Plan
from jaxcomp.layout import trees
from jaxcomp.numerics import orthonormal as orthonormal_


def gaussian(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@jax.jit
def orthonormal(*sets):
    return orthonormal_.orthonormal(sets)


def gram(basis):
    basis = np.asarray(basis, np.float64)
    return basis @ np.swapaxes(basis, -1, -2)


def test_a_matrix_of_rank_one_is_exact():
    """Golden vector: `u vᵀ` at rank one comes back, and `Pᵀ P = 1`."""
    x = jnp.outer(gaussian(40), gaussian(64, seed=1))
    codec = jaxcomp.codecs.LowRank(rank=1)
    payload = jaxcomp.encode(codec, 0, x)
    left = payload.batches[0].left
    assert (left.shape, payload.batches[0].right.shape) == ((1, 1, 1, 40), (1, 1, 1, 64))
    np.testing.assert_allclose(gram(left), 1, atol=1e-6)
    np.testing.assert_allclose(jaxcomp.decode(codec, 0, payload, x), x, rtol=1e-5, atol=1e-6)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), exponent=st.sampled_from([-30, -10, 0, 10, 30]))
@example(seed=112, exponent=-30)
def test_a_basis_is_orthonormal(seed, exponent):
    """For all scales of the vectors, and for nearly parallel ones."""
    rng = np.random.default_rng(seed)
    sets = []
    for shape in [(3, 5, 50), (1, 2, 9000), (2, 5, 256)]:  # One is longer than one sum takes.
        vectors = rng.standard_normal(shape)
        vectors[-1, 1:] = vectors[-1, :1] * (1 + 1e-4 * vectors[-1, 1:])  # Nearly parallel.
        sets.append(vectors * 10.0 ** rng.integers(-4, 4, (*shape[:2], 1)))
    flushed = np.finfo(np.float32).tiny / 10.0**exponent  # Denormals are taken for zeros.
    found = orthonormal(*(jnp.asarray(x * 10.0**exponent, jnp.float32) for x in sets))
    for basis, vectors in zip(found, sets, strict=True):
        assert basis.shape == vectors.shape
        eyes = np.broadcast_to(np.eye(basis.shape[1]), (*basis.shape[:2], basis.shape[1]))
        np.testing.assert_allclose(gram(basis), eyes, atol=1e-5)
        for number in range(basis.shape[1]):  # In their order, they span what the vectors did.
            some, whole = np.asarray(basis)[:, : number + 1], vectors[:, number : number + 1]
            inside = whole @ np.swapaxes(some, 1, 2) @ some
            most = 1e-5 * np.abs(whole).max(2, keepdims=True) + flushed
            assert (np.abs(inside - whole) <= most).all()


def test_a_basis_of_dependent_vectors():
    x, y = gaussian(2, 50)
    vectors = jnp.stack([x, 2 * x, 0 * x, y, x - y])
    spoiled = [vectors.at[3, 3].set(bad) for bad in (np.nan, np.inf)]
    whole = jnp.stack([vectors, *spoiled, 0 * vectors, jnp.full_like(vectors, 1e-40)])
    basis = np.asarray(orthonormal(whole)[0])
    np.testing.assert_allclose(gram(basis[0]), np.diag([1.0, 0, 0, 1, 0]), atol=1e-6)
    assert not np.isfinite(basis[1:3, 3:]).any()
    assert not basis[3].any()
    assert np.isfinite(basis[4]).all()


@pytest.mark.wrong_types
def test_the_codec_of_one_sender():
    """`LowRank` alone is a contractive codec with a warm start."""
    codec = jaxcomp.codecs.LowRank(rank=2)
    testing.assert_is_setting(codec)
    like = jax.ShapeDtypeStruct((3, 3, 16, 32), jnp.float32)
    assert jaxcomp.wire_bytes(codec, like) == 4 * 2 * (144 + 32)
    roundtrip = jax.jit(functools.partial(jaxcomp.roundtrip, codec, 0))
    for x in (gaussian(30, 40), gaussian(30, 40) ** 3, jnp.zeros((30, 40)).at[7, 9].set(1.0)):
        assert float(jnp.sum((roundtrip(x) - x) ** 2) / jnp.sum(x**2)) < 0.98
    # A codec that is called again goes on from the last factors, and comes closer.
    x = gaussian(30, 40)
    (batch,) = trees.layout(codec, x).batches
    encode = jax.jit(batch.codec.encode)
    state, errors = batch.codec.init(batch.like), []
    for _ in range(8):
        payload, state = encode(None, x.reshape(1, -1), None, state)
        back = batch.codec.decode(None, payload, batch.like)
        errors.append(float(jnp.sum((back - x.reshape(1, -1)) ** 2)))
    best = float((np.linalg.svd(x, compute_uv=False)[2:] ** 2).sum())
    assert errors[0] > 1.05 * best
    assert errors[-1] < 1.02 * best


def test_which_leaf_is_which_matrix():
    like = {
        "conv": jnp.zeros((3, 3, 64, 128)),
        "dense": jnp.zeros((576, 128)),
        "heads": jnp.zeros((512, 8, 64)),
        "scan": jnp.zeros((12, 64, 80)),
        "norms": jnp.zeros((12, 256)),
        "thin": jnp.zeros((300, 8)),
        "half": jnp.zeros((64, 20), jnp.bfloat16),
        "bias": jnp.zeros(4096),
        "head": jnp.zeros((64, 64)),
        "none": jnp.zeros((0, 64, 64)),
    }
    stacked = jaxcomp.codecs.LowRank(rank=2, stacked_axes=1)
    rules = (
        jaxcomp.Rule("scan", stacked),
        jaxcomp.Rule("n*", stacked),
        jaxcomp.Rule("head", None),
    )
    reducer = jaxcomp.PowerIteration(rank=4, rules=rules)
    plan = layout_of(reducer, like)
    found = {
        path: (codec and (codec.rank, *codec.matrix), why)
        for path, codec, why in zip(plan.paths, plan.codecs, plan.reasons, strict=True)
    }
    assert found["conv"] == found["dense"] == ((4, 1, 576, 128), "default")
    assert found["heads"] == ((4, 1, 512, 512), "default")
    assert found["scan"] == ((2, 12, 64, 80), "rule 'scan'")
    assert found["norms"] == (None, "rule 'n*', 1-D beside 1 stacked axes, no matrix")
    assert found["thin"] == (None, "default, factors 1.9x smaller, below min_ratio=2")
    assert found["half"] == ((4, 1, 64, 20), "default")  # As in float32, in which memory is.
    assert found["bias"] == (None, "1-D, below min_ndim=2")
    assert found["head"] == (None, "rule 'head'")
    assert sorted(batch.buckets for batch in plan.batches) == [
        1,
        1,
        1,
        2,
    ]  # Of one shape, together.
    less = jaxcomp.PowerIteration(rank=4, min_ratio=1.5)
    assert layout_of(less, like).codecs[plan.paths.index("thin")] is not None


def layout_of(reducer, like):
    return Plan.of(reducer, like, sizes=(1,)).layout


STACKS = {
    "a block": {"up": (12, 64, 256), "down": (12, 256, 64), "bias": (12, 256), "norm": (12, 64)},
    "without biases": {"q": (12, 64, 64), "up": (12, 64, 256), "norm": (12, 64)},
    "modules": {
        "in": {"kernel": (4, 64, 256), "bias": (4, 256)},
        "out": {"kernel": (4, 256, 64), "bias": (4, 64)},
    },
    "heads and experts": {"q": (6, 64, 8, 8), "e": (6, 4, 64, 96), "n": (6, 64), "gain": (6,)},
}
OTHERS = {
    "convolutions": {"a": {"kernel": (3, 3, 64, 64), "bias": (64,)}, "b": (3, 3, 64, 128)},
    "convolutions alone": {"a": (3, 3, 64, 64), "b": (3, 3, 64, 128), "dense": (3, 512)},
    "attention": {
        "query": {"kernel": (96, 12, 64), "bias": (12, 64)},
        "out": {"kernel": (12, 64, 96), "bias": (96,)},
    },
    "heads first": {"q": (12, 96, 64), "k": (12, 96, 64), "o": (12, 64, 96), "bias": (12, 64)},
    "embeddings": {"tokens": (50, 640), "more": (50, 96)},
    "state space": {"conv": (4, 1, 512), "a": (512, 16), "in": (256, 1024)},
    "one patch": {"tokens": (1, 196, 64), "class": (1, 1, 64), "bias": (1, 640)},
    "no matrices": {"a": (12, 640), "b": (12, 320)},
}


def shapes_of(tree):
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), tree, is_leaf=is_shape)


@pytest.mark.parametrize("name", [*STACKS, *OTHERS])
def test_stacked_layers_are_named(name):
    """Where shapes tell that a first axis is an index of layers, and nowhere else."""
    tree = {"embed": (500, 64), "inner": (STACKS | OTHERS)[name], "scale": (64,)}
    plain = jaxcomp.PowerIteration(rank=2)
    hints = merged_layers(layout_of(plain, shapes_of(tree)))
    assert len(hints) == (name in STACKS)
    alone = merged_layers(layout_of(plain, shapes_of(tree["inner"])))
    assert len(alone) == (name in STACKS)
    if name in STACKS:
        assert "'inner/*' looks like" in hints[0]
        advice = hints[0].rpartition("rules=")[2]
        better = jaxcomp.PowerIteration(rank=2, rules=eval(advice, {"jaxcomp": jaxcomp}))
        assert not merged_layers(layout_of(better, shapes_of(tree)))


@pytest.mark.parametrize("mean", ["power iteration", "codec", "local"])
def test_training_warns_of_merged_layers(mean):
    like = shapes_of({"blocks": STACKS["a block"], "head": (64, 64)})
    reducer = jaxcomp.PowerIteration(rank=2)
    reducer = jaxcomp.codecs.LowRank(rank=2) if mean == "codec" else reducer
    assert "'blocks/*' looks like 12 stacked" in str(jaxcomp.describe(reducer, like))
    tx = jaxcomp.compressed_mean(reducer, "data")
    if mean == "local":
        tx = jaxcomp.local_updates(optax.sgd(0.1), None, "data", every=2, reducer=reducer)
    init = functools.partial(jax.eval_shape, jax.vmap(tx.init, axis_name="data"))
    with pytest.warns(UserWarning, match="'blocks/up'.* stacked_axes=1"):
        init(jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), like))


def test_wrong_arguments_of_low_rank_say_so():
    with pytest.raises(ValueError, match="`stacked_axes` must be at least 0, got -1"):
        jaxcomp.codecs.LowRank(rank=1, stacked_axes=-1)
    with pytest.raises(ValueError, match="`rank` must be at least 1, got 0"):
        jaxcomp.codecs.LowRank(rank=0)
    rotated = jaxcomp.codecs.Rotated(codec=jaxcomp.codecs.LowRank(rank=1))
    with pytest.raises(ValueError, match=r"`matrix` must be set.* inside another codec"):
        jaxcomp.encode(rotated, 0, jnp.ones((8, 8)))
