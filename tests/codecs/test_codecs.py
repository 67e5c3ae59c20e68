"""The codec contract, over every recipe: the public checks, golden bytes, one compilation."""

import dataclasses
import functools
import hashlib
import json
import os

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.lowering import lowered, mesh_of
from helpers.paths import TESTS
from helpers.suite import CODECS, COMMON, EVERY, FEW, VARIANTS, few_or_all, label, slow
from hypothesis import given, settings, strategies as st

import jaxcomp
from jaxcomp import testing
from jaxcomp.backend import axes
from jaxcomp.codecs.cast import Cast
from jaxcomp.codecs.cosine import Cosine
from jaxcomp.codecs.embedded import Embedded
from jaxcomp.codecs.quantizer import Quantizer
from jaxcomp.codecs.rotated import Rotated
from jaxcomp.codecs.sparsifier import Sparsifier
from jaxcomp.layout import batches as batches_, trees
from jaxcomp.numerics import noise
from jaxcomp.quantize import levels, rounding, scales
from jaxcomp.testing import programs
from jaxcomp.wire import buffer

GOLDEN = TESTS / "golden" / "payloads.json"


EAGER = [*FEW[:5], jaxcomp.random_k(fraction=0.1)]
"""What rotates, selects, adapts or has blocks is compared with eager arithmetic in `rotate/`,
`quantize/` and below."""


REPRESENTATIVES = (
    "Cast(dtype='bfloat16',b=512)-lean",
    "Q(Sign,MeanAbs,Nearest,b=512)-whole",
    "Q(Uniform(steps=7),MaxAbs,Stochastic,b=512)-whole",
    "Q(Uniform(steps=1),OptimalTernary*-lean",
    "Natural(b=512)-lean",
    "*PowerOfTwo,b=512,block=32)-lean",
    "Rotated(Q(MidRise(width=2,cells=True)*-lean",
    "RandomK(fraction=0.01,b=None)-lean",
    "Sparsifier(Largest(fraction=0.01),b=None)-lean",
)
"""A codec of each family."""


@pytest.mark.core(*REPRESENTATIVES)
@pytest.mark.parametrize(
    ("codec", "whole"),
    few_or_all(
        [(codec, codec in EAGER) for codec in COMMON + VARIANTS],
        [(codec, True) for codec in EVERY],
    ),
    ids=lambda value: ("lean", "whole")[value] if isinstance(value, bool) else label(value),
)
def test_contract(codec, whole):
    """The eager comparison compiles every operation separately, so most cases omit it."""
    dtypes = ("float16", "bfloat16") if whole else ("float16",)
    testing.check_codec(codec, eager=whole, dtypes=dtypes)


@pytest.mark.parametrize(
    "codecs",
    [
        pytest.param(COMMON + VARIANTS, id="common"),
        slow(EVERY, id="all"),
    ],
)
def test_golden_payload_bytes_are_unchanged(codecs):
    """The wire format is a promise: a changed byte is a changed version."""
    x = jnp.asarray(np.random.default_rng(7).standard_normal((37, 29)), jnp.float32)
    found = {}
    for codec in codecs:
        payload = jax.jit(lambda x, c=codec: buffer.fuse(jaxcomp.encode(c, 5, x, worker=3)))(x)
        found[label(codec)] = hashlib.sha256(np.asarray(payload).tobytes()).hexdigest()[:16]
    known = json.loads(GOLDEN.read_text())
    if os.environ.get("JAXCOMP_WRITE_GOLDEN"):
        known = found if codecs is EVERY else {**known, **found}
        GOLDEN.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    assert found == {name: known.get(name) for name in found}
    assert set(found) == set(known) or codecs is not EVERY


@pytest.mark.parametrize("codec", FEW, ids=label)
def test_equal_settings_compile_once(codec):
    chex.clear_trace_counter()

    @functools.partial(jax.jit, static_argnums=0)
    @chex.assert_max_traces(n=1)
    def traced(codec, key, x):
        return jaxcomp.roundtrip(codec, key, x)

    x = jnp.ones((4, 300))
    traced.trace(codec, noise.raw(1), x)
    traced.trace(dataclasses.replace(codec), noise.raw(2), 2 * x)


class TestEverywhere(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True, without_device=True)
    def test_variants_agree(self):
        x = jnp.asarray(np.random.default_rng(0).standard_normal(700), jnp.float32)
        for codec in (jaxcomp.qsgd_inf(bits=4), jaxcomp.top_k(fraction=0.01), jaxcomp.sign()):
            got = self.variant(lambda x, c=codec: jaxcomp.roundtrip(c, 3, x))(x)
            chex.assert_trees_all_equal(got, jaxcomp.roundtrip(codec, 3, x))


@pytest.mark.core("Cast(dtype='float16',b=512)")
@pytest.mark.parametrize("codec", few_or_all(FEW[::2], CODECS), ids=label)
def test_lowers_for_accelerators(codec):
    """Compiler hints for a CPU do not reach other platforms."""
    like = {"w": jax.ShapeDtypeStruct((40, 64), jnp.float32), "b": jnp.zeros(7)}
    tx = jaxcomp.compressed_mean(codec, "data")
    with axes.assume_workers(4):
        state = jax.eval_shape(tx.init, like)
    many = jax.tree.map(lambda x: jax.ShapeDtypeStruct((4, *x.shape), x.dtype), (like, state))
    step = jax.vmap(tx.update, axis_name="data")
    for platform in ("cuda", "tpu"):
        text = lowered(step, *many, mesh=mesh_of(platform))
        assert "func.func" in text
        assert "inlineable" not in text


@pytest.mark.core("AdaptiveQ(b=512)-float16", "Cast(dtype='bfloat16',b=512)-bfloat16", "Natural*")
@pytest.mark.parametrize(
    ("codec", "dtype"),
    few_or_all(
        [(codec, "bfloat16") for codec in COMMON[::4]]
        + [(codec, "float16") for codec in COMMON[1::8]],
        [(codec, "bfloat16") for codec in CODECS] + [(codec, "float16") for codec in CODECS[1::8]],
    ),
    ids=lambda value: value if isinstance(value, str) else label(value),
)
def test_narrow_dtypes_decode_exactly(codec, dtype):
    """In the gradient's own dtype, encoding does not change decoded values."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal(600) * 1e-3, dtype)
    narrow = jaxcomp.roundtrip(codec, 0, x)
    plan = trees.layout(codec, x)
    payload = jaxcomp.encode(codec, 0, x)
    for number, (batch, part) in enumerate(zip(plan.batches, payload.batches, strict=True)):
        wide = jax.ShapeDtypeStruct(batch.like.shape, jnp.float32)
        key = batches_.batch_key(noise.raw(0), number, 0)
        decode = jax.jit(batch.codec.decode, static_argnums=2)
        value = decode(key, part, wide).reshape(-1)[:600]
        if not isinstance(codec, Quantizer | Cast | Sparsifier):  # Longer values are rounded once.
            value = value.astype(dtype).astype(jnp.float32)
        np.testing.assert_array_equal(np.asarray(value), np.asarray(narrow, np.float32))
    assert np.isfinite(np.asarray(narrow, np.float32)).all()
    # The error in the narrow dtype is close to that in float32.
    error = np.asarray(x, np.float64) - np.asarray(narrow, np.float64)
    exact = np.asarray(jaxcomp.roundtrip(codec, 0, x.astype(jnp.float32)))
    reference = np.asarray(x, np.float64) - exact
    assert (error**2).sum() <= 1.6 * (reference**2).sum() + 1e-5 * (exact**2).sum()


def test_half_precision_keeps_its_smallest_numbers():
    """Multiples of 2^-24 are all that float16 has down there; steps are multiples of it too."""
    x = jnp.asarray(np.arange(-300, 300) * 2.0**-24, jnp.float16)
    y = jaxcomp.roundtrip(jaxcomp.qsgd_inf(bits=8), 0, x)
    assert np.abs(np.asarray(x - y, np.float32)).max() <= 4 * 2.0**-24


@pytest.mark.core("Cast(dtype='bfloat16',b=512)", "Natural*", "Q(Uniform(steps=7),L2*", "Random*")
@pytest.mark.parametrize("codec", few_or_all(COMMON, CODECS), ids=label)
def test_the_largest_floats_survive(codec):
    x = jnp.asarray(np.random.default_rng(2).uniform(-3e38, 3e38, 700), jnp.float32)
    y = np.asarray(programs.compiled(codec, noise.raw(0), x)[1])
    assert np.isfinite(y).all()
    large = np.abs(y) > 0
    assert large.any()
    if isinstance(codec, Rotated | Embedded | Cosine):  # One element's error is all elements'.
        wide = np.asarray(x, np.float64)
        assert ((y - wide) ** 2).sum() < (wide**2).sum()
        return
    # Values just below the largest float are still those of the input, signs included.
    assert (np.sign(y[large]) == np.sign(np.asarray(x)[large])).all()


def test_a_part_of_a_batch_draws_the_noise_of_the_whole():
    """`Key.first` numbers the buckets, so splitting a batch over workers changes nothing."""
    codec = jaxcomp.qsgd_inf(bits=4)
    x = jnp.asarray(np.random.default_rng(3).standard_normal((6, 512)), jnp.float32)
    key, count = batches_.batch_key(noise.raw(0), 0, 1), jnp.full(6, 512)
    whole, _ = codec.encode(key, x, count, ())
    part, _ = codec.encode(key._replace(first=jnp.uint32(4)), x[4:], count[4:], ())
    np.testing.assert_array_equal(whole.words[4:], part.words)


@pytest.mark.wrong_types
def test_error_classes_are_declared_honestly():
    """Legal compositions whose properties differ from those of their parts."""
    deaf = Quantizer(levels=levels.Sign(), scale=scales.MaxAbs(), rounding=rounding.Stochastic())
    assert not deaf.unbiased  # Signs take no dither.
    assert not deaf.contractive
    blind = Quantizer(levels=levels.Uniform(1), scale=scales.L2(), rounding=rounding.Nearest())
    assert not blind.contractive  # Everything may round to zero.
    nearest = Quantizer(
        levels=levels.Uniform(7), scale=scales.MaxAbs(), rounding=rounding.Nearest()
    )
    assert nearest.contractive
    testing.check_codec(nearest)
    with pytest.raises(ValueError, match="`scale` must be an instance of a scale"):
        Quantizer(levels=levels.Sign(), scale=scales.MaxAbs, rounding=rounding.Nearest())


@pytest.mark.core("Q(Sign,MeanAbs,Nearest,b=512)")
@pytest.mark.parametrize("codec", few_or_all(FEW[1::2], FEW), ids=label)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), power=st.sampled_from([1, 3]))
def test_any_seed(codec, seed, power):
    """The output is finite, and no larger than the scale allows."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal(700) ** power * 2.0 ** rng.integers(-60, 60), jnp.float32)
    x = x.at[: rng.integers(0, 700)].set(0)
    y = np.asarray(programs.compiled(codec, noise.raw(seed), x)[1])
    assert np.isfinite(y).all()
    assert np.abs(y).max() <= np.sqrt(700) * float(jnp.max(jnp.abs(x))) * 1.01
