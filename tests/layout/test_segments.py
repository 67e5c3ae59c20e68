"""Leaves that a codec takes whole share a bucket, and none of them can tell."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.suite import COMMON, few_or_all, label

import jaxcomp
from jaxcomp import codecs
from jaxcomp.exchange.plan import Plan
from jaxcomp.layout import trees
from jaxcomp.numerics import segments as segments_

WHOLE = [codec for codec in COMMON if codec.bucket_size is None]
SHAPES = [(64,), (100, 3), (7,), (333,), (128, 40), (64,), (50, 50)]
CERTAIN = [
    jaxcomp.top_k(fraction=0.05),
    jaxcomp.dgc(fraction=0.05),
    jaxcomp.threshold(1.5, fraction=0.9),
    jaxcomp.top_k(fraction=0.05, indices=codecs.Deltas()),
]
"""Codecs that draw nothing: what they decode to does not depend on where a leaf lies."""


def leaves(seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    tree = [rng.standard_normal(shape) for shape in SHAPES]
    tree[3] *= 0  # A leaf that is not trained, and one whose elements are alike.
    tree[6] = np.sign(tree[6])
    return [jnp.asarray(leaf, dtype) for leaf in tree]


def roundtrip(codec, tree):
    return jaxcomp.roundtrip(codec, 0, tree)


@pytest.mark.core("Q(Uniform(steps=8*")
@pytest.mark.parametrize("codec", WHOLE, ids=label)
def test_leaves_of_several_sizes_are_one_batch_of_as_many_bytes(codec):
    tree = leaves()
    (batch,) = trees.layout(codec, tree).batches
    assert batch.codec.segments.sizes == tuple(leaf.size for leaf in tree)
    apart = sum(jaxcomp.wire_bytes(codec, leaf) for leaf in tree)
    # Each leaf alone has words of its own, which it seldom fills.
    assert jaxcomp.wire_bytes(codec, tree) <= apart * 1.01


@pytest.mark.core("Sparsifier(Largest(fraction=0.05),b=None)")
@pytest.mark.parametrize("codec", CERTAIN, ids=label)
def test_a_leaf_is_encoded_as_it_would_be_alone(codec):
    tree = leaves()
    together = roundtrip(codec, tree)
    for number in (2, 3, 6):  # Fewer elements than a row, zeros, and elements that are alike.
        np.testing.assert_array_equal(together[number], roundtrip(codec, tree[number]))


@pytest.mark.full
@pytest.mark.parametrize("fraction", [0.002, 0.1, 0.4])
def test_wide_rows_hold_groups_of_every_fraction(fraction):
    """Groups of a row must divide it, however many elements are wanted of it."""
    rng = np.random.default_rng(2)
    tree = [jnp.asarray(rng.standard_normal(n), jnp.float32) for n in (130_000, 70_001, 640)]
    codec = jaxcomp.top_k(fraction)
    (batch,) = trees.layout(codec, tree).batches
    assert batch.codec.segments.width >= 160
    for leaf, found in zip(tree, roundtrip(codec, tree), strict=True):
        k = batch.codec.choice.room(leaf.size)
        kept = np.sort(np.argsort(-np.abs(leaf), stable=True)[:k])
        np.testing.assert_array_equal(np.flatnonzero(found), kept)
        np.testing.assert_array_equal(found[kept], leaf[kept])


@pytest.mark.core("Q(Uniform(steps=3*")
@pytest.mark.parametrize("codec", WHOLE, ids=label)
def test_a_leaf_does_not_depend_on_its_neighbours(codec):
    """Not on large ones, and not on ones that are not finite, which are seen."""
    tree, other = leaves(), leaves(1)
    other[0], other[4] = tree[0], tree[4]
    other[1] = other[1] * 1e30
    other[2] = other[2] * 1e-42
    other[5] = other[5].at[3].set(jnp.nan)
    other[6] = other[6].at[7, 3].set(-jnp.inf)
    before, after = roundtrip(codec, tree), roundtrip(codec, other)
    for number in (0, 4):
        np.testing.assert_array_equal(before[number], after[number])
    finite = [bool(jnp.isfinite(leaf).all()) for leaf in after]
    assert finite == [True, True, True, True, True, False, False]


EAGER = [jaxcomp.terngrad(), jaxcomp.random_k(0.01), jaxcomp.top_k(0.01)]


@pytest.mark.core("Q(Uniform(steps=1*")
@pytest.mark.parametrize("codec", few_or_all(EAGER, WHOLE), ids=label)
def test_compiled_as_eager(codec):
    tree = leaves(dtype=jnp.bfloat16)
    compiled = jax.jit(lambda tree: roundtrip(codec, tree))(tree)
    for one, other in zip(roundtrip(codec, tree), compiled, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_has_no_form_for_several_leaves_is_encoded_size_by_size():
    codec = codecs.Clipped(codec=jaxcomp.top_k(fraction=0.1))
    batches = trees.layout(codec, leaves()).batches
    assert [batch.size for batch in batches] == [64, 300, 7, 333, 5120, 2500]
    values = jaxcomp.top_k(fraction=0.1, values=jaxcomp.qsgd_inf(bits=4, bucket_size=32))
    assert values.segmented(segments_.of((64, 300))) is None  # A bucket of values has one scale.


def test_long_leaves_are_batches_of_their_size():
    """Where compiling a size is cheap; else only a leaf that is most of all is."""
    sizes = (2**19, 300, 2**18, 2**18 + 1, 2**19, 700)
    shapes = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes]
    batches = trees.layout(jaxcomp.terngrad(), shapes).batches
    joined = [batch for batch in batches if batch.codec.segments]
    assert [batch.codec.segments.sizes for batch in joined] == [(300, 2**18, 700)]
    others = [batch.size for batch in batches if batch not in joined]
    assert sorted(others) == [2**18 + 1, 2**19, 2**19]
    many = [jax.ShapeDtypeStruct((2**18 - i,), jnp.float32) for i in range(40)]
    many = trees.layout(jaxcomp.terngrad(), many).batches
    assert [batch.codec.segments.number for batch in many] == [13, 14, 13]

    (batch,) = trees.layout(jaxcomp.top_k(), shapes).batches
    assert batch.codec.segments.sizes == sizes
    most = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in (*sizes, 2**22)]
    joined, dominant = trees.layout(jaxcomp.top_k(), most).batches
    assert joined.codec.segments.sizes == sizes
    assert (dominant.codec.segments, dominant.size) == (None, 2**22)


@pytest.mark.core("Sparsifier(Largest(fraction=0.01),b=None)-1")
@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("codec", [jaxcomp.top_k(), jaxcomp.terngrad()], ids=label)
def test_what_is_put_into_buckets_comes_out_of_them(codec, slices):
    tree = leaves()
    plan = trees.layout(codec, tree, slices=slices)
    (batch,), (stack,) = plan.batches, trees.stacks(plan, tree)[0]
    assert stack.shape == (slices, batch.size) == batch.like.shape
    assert int(batch.counts().sum()) == sum(leaf.size for leaf in tree)
    for one, other in zip(trees.assemble(plan, (stack,), ()), tree, strict=True):
        np.testing.assert_array_equal(one, other)
    spent = dict(batch.bytes_of(100.0))
    assert sum(spent.values()) == pytest.approx(100.0)
    assert spent[4] == max(spent.values())


@pytest.mark.full
def test_a_downlink_of_shorter_buckets_leaves_the_padding_zero():
    reducer = jaxcomp.TwoShot(
        jaxcomp.Link(jaxcomp.top_k(fraction=0.5), jaxcomp.Residual()),
        jaxcomp.Link(jaxcomp.sign(bucket_size=16), jaxcomp.Residual()),
    )
    tx = jaxcomp.compressed_mean(reducer, "data")
    tree = leaves()
    grads = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), tree)

    @jax.jit
    def steps(grads):
        def step(state, _):
            return tx.update(grads, state)[::-1]

        return jax.lax.scan(step, tx.init(grads), None, length=3)

    state, mean = jax.vmap(steps, axis_name="data")(grads)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in mean)
    held = state.memory.reducer[1].memory.tree.residual[0]
    plan = Plan.of(reducer, tree, sizes=(2,)).layout
    real = plan.batches[0].codec.segments.real(plan.batches[0].counts())
    assert real.shape[0] == 2
    np.testing.assert_array_equal(np.where(real, 0, held.reshape(real.shape)), 0)


def test_a_downlink_that_needs_each_leaf_alone_is_refused():
    whole = codecs.Clipped(codec=jaxcomp.top_k())
    up, down = (jaxcomp.Link(codec, jaxcomp.Residual()) for codec in (jaxcomp.top_k(), whole))
    with pytest.raises(ValueError, match="`down` must have a bucket_size after"):
        jaxcomp.TwoShot(up, down)


def test_rows_are_as_wide_as_their_padding_allows():
    assert segments_.of([64, 100]).width == 32
    wide = segments_.of([2**20 + 1, 5000])
    assert wide.width == 2560
    assert wide.size - sum(wide.sizes) <= sum(wide.sizes) / 256
    large = segments_.of([2**31, 7])
    assert max(large.lengths) <= 2**15


def test_moved_keeps_every_element():
    one, other = segments_.Segments((5, 1, 40), 8), segments_.Segments((5, 1, 40), 3)
    x = np.zeros((2, one.size), np.int32)
    real = np.asarray(one.real(jnp.broadcast_to(jnp.asarray(one.sizes), (2, 3))))
    x[real] = np.arange(1, 93)
    there = segments_.change_width(jnp.asarray(x), one, other)
    assert sorted(np.asarray(there)[there > 0]) == list(range(1, 93))
    np.testing.assert_array_equal(segments_.change_width(there, other, one), x)


@pytest.mark.core("Q(Uniform(steps=8*")
@pytest.mark.parametrize("codec", WHOLE, ids=label)
def test_a_model_of_many_shapes_is_a_short_program(codec):
    """A hundred shapes are little more than ten: the leaves alone are put in and taken out."""

    def lines(shapes):
        tree = {f"leaf{i}": jax.ShapeDtypeStruct((64 + i, 37), jnp.float32) for i in range(shapes)}
        lowered = jax.jit(lambda tree: roundtrip(codec, tree)).lower(tree)
        return lowered.as_text().count("\n")

    few, many = lines(10), lines(100)
    assert many <= few + 90 * 20
    assert many <= 8000
