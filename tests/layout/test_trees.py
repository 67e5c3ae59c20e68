"""Leaves ↔ batches of buckets: every element once, at its position, for all sizes."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import jaxcomp
from jaxcomp.layout import batches, trees


def numbered(sizes):
    """Leaves whose elements are all different."""
    begins = np.cumsum([0, *sizes])
    return [
        jnp.arange(begin, begin + size, dtype=jnp.float32)
        for begin, size in zip(begins, sizes, strict=False)
    ]


@pytest.mark.full
@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 7, 511, 512, 513, 1024, 3000]), min_size=1, max_size=5),
    bucket=st.sampled_from([1, 33, 512, 5000, None]),
)
def test_assemble_inverts_stacks(sizes, bucket):
    tree = numbered(sizes)
    plan = trees.layout(jaxcomp.cast("float32", bucket_size=bucket), tree)
    xs, dense = trees.stacks(plan, tree)
    for batch, x in zip(plan.batches, xs, strict=True):
        assert x.shape == (batch.buckets, batch.size)
        count = np.asarray(batch.counts())
        real = np.arange(batch.size)[None] < count[:, None]
        assert not np.asarray(x)[~real].any()
        assert count.sum() == sum(piece.stop - piece.start for piece in batch.pieces)
    for got, want in zip(trees.assemble(plan, xs, dense), tree, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.core("0")
@pytest.mark.parametrize("extra", [0, 1, 64])
def test_a_dominating_leaf_is_not_copied(extra):
    """It is a batch of its own up to its last whole bucket; its tail joins the small leaves."""
    large = jnp.arange(2**18 + extra, dtype=jnp.float32).reshape(1, -1)
    tree = {"large": large, "small": jnp.ones((10, 100))}
    plan = trees.layout(jaxcomp.qsgd_inf(bits=8), tree)
    first, second = plan.batches
    assert first.pieces == (trees.Piece(0, 0, 2**18),)
    assert sum(p.stop - p.start for p in second.pieces) == 1000 + extra
    back = jax.jit(lambda t: jaxcomp.roundtrip(jaxcomp.cast("float32"), 0, t))(tree)
    np.testing.assert_array_equal(back["large"], large)
    payload = jaxcomp.encode(jaxcomp.qsgd_inf(bits=8), 0, tree)
    assert len(payload.batches) == 2
    close = jaxcomp.decode(jaxcomp.qsgd_inf(bits=8), 0, payload, tree)
    np.testing.assert_allclose(close["large"], large, atol=2**18 / 127)
    temp = jax.jit(lambda t: jaxcomp.encode(jaxcomp.qsgd_inf(bits=8), 0, t)).lower(tree).compile()
    assert temp.memory_analysis().temp_size_in_bytes < large.nbytes / 4


def test_one_batch_for_all_leaves_of_a_codec():
    tree = [jnp.ones((40, 64))] * 30 + [jnp.ones((40, 64), jnp.bfloat16)] * 3
    assert len(trees.layout(jaxcomp.sign(), tree).batches) == 2  # One a dtype.
    alike = trees.layout(jaxcomp.terngrad(), [jnp.ones((40, 64))] * 30)
    assert [batch.buckets for batch in alike.batches] == [30]  # One bucket a leaf.


def test_shorter_buckets_count_their_own_elements():
    """Rows that are cut again keep their elements, and padding does not count."""
    tree = [jnp.ones(13), jnp.ones(28)]
    (batch,) = trees.layout(jaxcomp.sign(bucket_size=10), tree).batches
    cut = [batches.Rows(batch, jaxcomp.sign(bucket_size=size)) for size in (4, 5, 7)]
    rows = np.zeros(batch.like.shape, np.int32)
    rows[:2].flat[:13], rows[2:].flat[:28] = 1, 1
    for counts, shorter in zip(jax.jit(lambda: [c.counts() for c in cut])(), cut, strict=True):
        missing = shorter.cuts * shorter.size - batch.size
        want = np.pad(rows, ((0, 0), (0, missing))).reshape(-1, shorter.size).sum(1)
        np.testing.assert_array_equal(counts, want)


def test_paths_are_written_as_a_user_would():
    tree = {"a": [{"kernel": jnp.ones(3)}], "b": (jnp.ones(2), None)}
    assert trees.layout(jaxcomp.sign(), tree).paths == ("a/0/kernel", "b/0")
    assert trees.layout(jaxcomp.sign(), jnp.ones(3)).paths == ("",)


@pytest.mark.full
def test_double_precision():
    """With 64-bit floats enabled: values travel as they should, and sums are taken in float64."""
    script = """
import jax
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp, numpy as np, jaxcomp
x = jnp.asarray(np.random.default_rng(0).standard_normal(2000))
assert x.dtype == jnp.float64
codecs = [jaxcomp.qsgd_inf(bits=8), jaxcomp.sign(), jaxcomp.cast("float16"), jaxcomp.terngrad()]
for codec in codecs:
    y = jaxcomp.roundtrip(codec, 0, x)
    assert y.dtype == jnp.float64 and jnp.isfinite(y).all(), codec
exact = jaxcomp.roundtrip(jaxcomp.top_k(fraction=1.0), 0, x)
np.testing.assert_array_equal(exact, x)
policy = jaxcomp.Policy(jaxcomp.top_k(fraction=0.1), min_size=0, min_ndim=0)
tx = jaxcomp.compressed_mean(policy, "data")
grads = jnp.stack([x, -x, 2 * x]) * 1e-9
state = jax.tree.map(lambda a: jnp.stack([a] * 3), tx.init(x))
mean, state = jax.jit(jax.vmap(tx.update, axis_name="data"))(grads, state)
residual = state.memory.feedback.tree.residual[0]
assert residual.dtype == jnp.float64
total = mean[0].sum() + residual.mean(0).sum()
np.testing.assert_allclose(total, grads.mean(0).sum(), rtol=1e-12)
# Long leaves are searched in loops, whose counts must not become 64 bits wide; neither must those
# in payloads.
long = jnp.asarray(np.random.default_rng(0).standard_normal(140_000))
for dtype in (jnp.float32, jnp.float64):
    sent = np.asarray(jaxcomp.roundtrip(jaxcomp.top_k(fraction=0.01), 0, long.astype(dtype)))
    least = np.abs(sent[sent != 0]).min()
    assert (sent != 0).sum() == 1400 and np.abs(long[sent == 0]).max() <= least
    payload = jaxcomp.encode(jaxcomp.threshold(3.0), 0, long.astype(dtype))
    assert payload.batches[0].number.dtype == jnp.int32
assert jnp.isfinite(jaxcomp.roundtrip(jaxcomp.demo(k=2, chunk=4), 0, x)).all()
clip = jax.vmap(lambda g: jaxcomp.clip_local(1.0, "data").update(g, ())[0], axis_name="data")
np.testing.assert_allclose(clip(jnp.array([[3e300, 4e300]])), [[0.6, 0.8]], rtol=1e-12)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200)
