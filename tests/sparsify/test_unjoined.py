"""Long leaves that are read where they lie give the bytes of leaves that are joined first."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp
from jaxcomp.layout import trees
from jaxcomp.layout.batches import batch_keys
from jaxcomp.numerics import noise
from jaxcomp.sparsify import unjoined

LONG = unjoined.LONG
SHAPES = (
    *((7,), (LONG // 64, 64), (300, 5), (LONG + 992,), (1,), (129,), (2 * LONG - 32,), (LONG + 5,)),
    *((LONG - 1,), (4097,)),
)
CODECS = {
    "top_k": jaxcomp.top_k(),
    "quantised": jaxcomp.top_k(0.02, values=jaxcomp.qsgd_inf(bits=8, bucket_size=None)),
    "dgc": jaxcomp.dgc(),
    "every third": jaxcomp.dgc(0.02),
    "threshold": jaxcomp.threshold(2.2, fraction=0.02),
}


def gaussian(shape, rng):
    return rng.standard_normal(shape)


def ties(shape, rng):
    return np.round(rng.standard_normal(shape) * 2) / 2


def few(shape, rng):
    return np.where(rng.random(shape) < 3e-4, rng.standard_normal(shape), 0)


def rising(shape, rng):
    return np.sort(rng.standard_normal(math.prod(shape))).reshape(shape) ** 5


def spoilt(shape, rng):
    x = rng.standard_normal(shape)
    x.reshape(-1)[::50_021] = np.nan
    x.reshape(-1)[-1] = -np.inf
    return x


def constant(shape, rng):
    return np.full(shape, rng.integers(1, 3))


def zeros(shape, rng):
    return np.zeros(shape)


def no_number(shape, rng):
    return np.full(shape, np.nan)


def tiny(shape, rng):
    """Most are subnormal, others zero."""
    return rng.standard_normal(shape) * 1e-43


LAWS = [gaussian, ties, few, rising, spoilt, constant, zeros, no_number, tiny]


def tree_of(law, dtype=jnp.float32, shapes=SHAPES):
    rng = np.random.default_rng(3)
    return [jnp.asarray(law(shape, rng), dtype) for shape in shapes]


@functools.partial(jax.jit, static_argnums=0)
def joined(codec, tree):
    """The payload and the decoded leaves of the bucket of all leaves."""
    plan = trees.layout(codec, tree)
    (batch,) = plan.batches
    (key,) = batch_keys(noise.raw(5), plan.batches, 0)
    state = batch.codec.init(batch.like)
    payload, _ = batch.codec.encode(key, trees.stack(batch, tree), batch.counts(), state)
    return payload, trees.assemble(plan, [batch.codec.decode(key, payload, batch.like)], [])


def assert_same_bits(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        one, other = (np.asarray(x).reshape(-1).view(np.uint8) for x in (one, other))
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("name", CODECS)
def test_the_bytes_are_those_of_joined_leaves(name, law):
    codec, tree = CODECS[name], tree_of(law)
    wanted, decoded = joined(codec, tree)
    payload = jaxcomp.encode(codec, 5, tree)
    assert_same_bits(payload.batches, (wanted,))
    assert_same_bits(jaxcomp.decode(codec, 5, payload, tree), decoded)


def test_long_leaves_of_further_sizes_are_joined_and_sampled(monkeypatch):
    """The third of them would be read where it lies, but has one size too many."""
    monkeypatch.setattr(unjoined, "_MOST_SIZES", 1)
    shapes = ((LONG + 32,), (300, 5), (LONG,), (LONG + 32,))
    assert unjoined.long_leaves([math.prod(shape) for shape in shapes]) == (0, 3)
    codec = jaxcomp.dgc(0.021)  # No other test has traced it with more sizes.
    for law in (gaussian, few, spoilt):
        tree = tree_of(law, shapes=shapes)
        wanted, decoded = joined(codec, tree)
        payload = jaxcomp.encode(codec, 5, tree)
        assert_same_bits(payload.batches, (wanted,))
        assert_same_bits(jaxcomp.decode(codec, 5, payload, tree), decoded)


@pytest.mark.parametrize("name", ["top_k", "dgc"])
def test_the_bytes_of_bfloat16_are_those_of_joined_leaves(name):
    codec, tree = CODECS[name], tree_of(ties, jnp.bfloat16)
    wanted, decoded = joined(codec, tree)
    payload = jaxcomp.encode(codec, 5, tree)
    assert_same_bits(payload.batches, (wanted,))
    assert_same_bits(jaxcomp.decode(codec, 5, payload, tree), decoded)


def test_vmap_gives_the_bytes_of_each_tree():
    codec = CODECS["dgc"]
    several = [tree_of(law) for law in (gaussian, few)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *several)
    found = jax.vmap(lambda tree: jaxcomp.encode(codec, 5, tree))(stacked)
    for number, tree in enumerate(several):
        one = jax.tree.map(lambda leaf, number=number: leaf[number], found)
        assert_same_bits(one, jaxcomp.encode(codec, 5, tree))


@pytest.mark.parametrize("name", ["top_k", "dgc"])
def test_no_memory_holds_all_leaves(name):
    shapes = ((8 * LONG,),) * 4 + ((300, 5),)
    tree = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    codec, whole = CODECS[name], sum(4 * leaf.size for leaf in tree)
    payload = jax.eval_shape(lambda tree: jaxcomp.encode(codec, 5, tree), tree)
    encode = jax.jit(lambda tree: jaxcomp.encode(codec, 5, tree)).lower(tree)
    decode = jax.jit(lambda payload: jaxcomp.decode(codec, 5, payload, tree)).lower(payload)
    for lowered in (encode, decode):
        analysed: Any = lowered.compile().memory_analysis()
        assert analysed.temp_size_in_bytes < whole / 3


def test_other_platforms_join_all_leaves():
    tree = tree_of(gaussian)
    size = trees.layout(CODECS["top_k"], tree).batches[0].size
    traced = jax.jit(lambda tree: jaxcomp.encode(CODECS["top_k"], 5, tree)).trace(tree)
    for platform, whole in (("cpu", False), ("cuda", True), ("tpu", True)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert (f"tensor<{size}xf32>" in text) == whole


def test_few_sizes_are_read_where_they_lie():
    """Each is several kernels, which take long to compile."""
    sizes = [LONG + 32 * number for number in range(20)] + [LONG + 96, 10]
    found = unjoined.long_leaves(sizes)
    assert len(found) == 9
    assert {3, 20} < set(found)
    assert unjoined.long_leaves([LONG - 32, LONG + 1]) == ()
