"""Codecs around codecs: their results, forwarded hooks, and refused combinations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.suite import law, nmse, roundtrip

import jaxcomp
from jaxcomp import testing
from jaxcomp.base import Codec, WrappedCodec, changed
from jaxcomp.codecs.cosine import Cosine
from jaxcomp.codecs.embedded import Embedded
from jaxcomp.codecs.parts import Part, Split
from jaxcomp.codecs.rotated import Rotated
from jaxcomp.codecs.staged import Staged
from jaxcomp.layout import batches as batches_
from jaxcomp.numerics import noise


def test_contractions_of_unbiased_codecs():
    x = law("heavy", 4096)
    for codec in (jaxcomp.qsgd(bits=2), jaxcomp.random_k(fraction=0.1), jaxcomp.natural()):
        wrapped = jaxcomp.codecs.Contractive(codec=codec)
        omega = codec.variance_bound(codec.bucket_size or 4096)
        small, large = roundtrip(wrapped, x), roundtrip(codec, x)
        np.testing.assert_allclose(small, large / (1 + omega), rtol=1e-4)
        assert nmse(wrapped, x) < 1
        assert wrapped.contractive
    with pytest.raises(ValueError, match="`codec` must be unbiased"):
        jaxcomp.codecs.Contractive(codec=jaxcomp.sign())
    with pytest.raises(ValueError, match="`omega` must be the largest relative variance"):
        jaxcomp.codecs.Contractive(codec=jaxcomp.mx(rule="ceil", rounding="stochastic"))


def test_stages_multiply_what_is_left():
    """R times a contraction leaves (1 − δ)^R; the last one decides about bias."""
    x = law("gaussian", 2**16)
    left = [nmse(jaxcomp.codecs.Chained(codecs=(jaxcomp.sign(),) * r), x) for r in (1, 2, 3)]
    np.testing.assert_allclose(left[0], 1 - 2 / np.pi, rtol=0.01)
    assert left[1] < 0.5 * left[0]
    assert left[2] < 0.5 * left[1]
    mended = jaxcomp.codecs.Chained(codecs=(jaxcomp.sign(), jaxcomp.qsgd_inf(bits=2)))
    assert mended.unbiased
    assert not mended.contractive
    with pytest.raises(ValueError, match="all with the same bucket size"):
        jaxcomp.codecs.Chained(codecs=(jaxcomp.sign(), jaxcomp.sign(bucket_size=64)))


def test_stages_of_a_bucket_that_is_not_full():
    """Padding that a stage decodes to something is nothing to the next one."""
    codec = jaxcomp.msc(jaxcomp.sign(bucket_size=8), 3)
    x = jnp.asarray(np.random.default_rng(3).standard_normal(13), jnp.float32)
    both = jaxcomp.roundtrip(codec, 0, x)
    np.testing.assert_array_equal(both[8:], jaxcomp.roundtrip(codec, 0, x[8:]))


def test_stages_of_an_unbiased_codec_stay_unbiased():
    """Their variance is `q^R / (1 − q^R)`, which random-k attains."""
    once = jaxcomp.random_k(fraction=0.25, bucket_size=64)
    codec = jaxcomp.msc(once, 2)
    bound = codec.variance_bound(64)
    assert bound == pytest.approx(0.75**2 / (1 - 0.75**2))
    x = jnp.asarray(np.random.default_rng(3).standard_normal((1, 64)), jnp.float32)
    many = jax.vmap(lambda seed: jaxcomp.roundtrip(codec, seed, x))(
        jnp.stack([jnp.zeros(4000, jnp.uint32), jnp.arange(4000, dtype=jnp.uint32)], axis=1)
    )
    bias = jnp.linalg.norm(many.mean(axis=0) - x) / jnp.linalg.norm(x)
    variance = jnp.mean(jnp.sum((many - x) ** 2, axis=(1, 2))) / jnp.sum(x**2)
    assert bias < 3 * (bound / 4000) ** 0.5
    assert variance == pytest.approx(bound, rel=0.02)


def test_stages_of_the_largest_are_more_of_them():
    x = jnp.asarray(np.random.default_rng(3).standard_normal(40), jnp.float32)
    np.testing.assert_array_equal(
        jaxcomp.roundtrip(jaxcomp.msc(jaxcomp.top_k(fraction=0.1), 3), 0, x),
        jaxcomp.roundtrip(jaxcomp.top_k(fraction=0.3), 0, x),
    )


def test_clipping_is_undone_by_nothing():
    x = jnp.concatenate([jnp.full(511, 0.1), jnp.array([50.0])])
    y = roundtrip(jaxcomp.codecs.Clipped(codec=jaxcomp.qsgd_inf(bits=8), sigmas=1.0), x)
    assert float(jnp.max(y)) < 3
    np.testing.assert_allclose(y[:511], 0.1, atol=0.02)


SHARED = jaxcomp.terngrad(clip=None, shared=True, bucket_size=64)
"""All workers speak of the same levels: two messages differ by whole steps."""


@pytest.mark.core("Rotated", "Split", "Contractive")
@pytest.mark.parametrize(
    "codec",
    [
        Rotated(codec=SHARED, shared=True),
        Part(codec=SHARED, fraction=0.5),
        Split(first=SHARED, second=SHARED, fraction=0.5),
        Embedded(codec=SHARED, block=64),
        jaxcomp.codecs.Contractive(codec=SHARED),
        jaxcomp.codecs.Clipped(codec=SHARED),
        jaxcomp.codecs.Chained(codecs=(SHARED, jaxcomp.terngrad(clip=None, bucket_size=64))),
    ],
    ids=lambda codec: type(codec).__name__,
)
def test_what_workers_agree_on_is_passed_on(codec):
    """A scale that is shared is the same on both workers, however deep it lies."""
    x = jnp.stack([law("gaussian", 32), 3 * law("gaussian", 32, seed=1)])[:, None]
    count, key = jnp.full(1, 32), batches_.batch_key(noise.raw(0), 0, 0)

    def run(x):
        state = codec.agree(key, x, count, codec.init(x), "data")
        return codec.encode(key, x, count, state)[0]

    assert codec.facts.agrees
    payload = jax.vmap(run, axis_name="data")(x)
    steps = next(leaf for leaf in jax.tree.leaves(payload) if leaf.dtype == jnp.float32)
    assert (steps > 0).all()
    np.testing.assert_array_equal(steps[0], steps[1])


@pytest.mark.wrong_types
def test_codecs_whose_decoders_need_more_are_refused():
    """The wrapped encoder would use adaptive levels that the decoder does not know."""
    alq = jaxcomp.alq(3)
    for make in (
        lambda: Rotated(codec=alq),
        lambda: Part(codec=alq, fraction=0.5),
        lambda: Split(first=jaxcomp.qsgd(3), second=alq, fraction=0.5),
        lambda: Embedded(codec=alq),
        lambda: jaxcomp.codecs.Contractive(codec=alq, omega=1.0),
        lambda: jaxcomp.codecs.Clipped(codec=alq),
        lambda: jaxcomp.codecs.Chained(codecs=(alq, jaxcomp.qsgd(3))),
    ):
        with pytest.raises(
            ValueError, match=r"decodes from its payload alone, got .* needs levels"
        ):
            make()
    with pytest.raises(ValueError, match="`codecs` must not need agreement between workers"):
        jaxcomp.codecs.Chained(codecs=(jaxcomp.sign(64), SHARED))
    with pytest.raises(ValueError, match="`codec` must be a codec such as"):
        Rotated(codec=jaxcomp.qsgd)


def wrapped(codec):
    """The codec inside of everything that takes one."""
    return [
        jaxcomp.codecs.Contractive(codec=codec, omega=1.0),
        jaxcomp.codecs.Clipped(codec=codec),
        jaxcomp.codecs.Chained(codecs=(codec, codec)),
        jaxcomp.codecs.Rotated(codec=codec),
        Part(codec=codec, fraction=0.5, block=64),
        Split(first=codec, second=codec, fraction=0.5),
        Embedded(codec=codec),
        Staged(codec=codec, stages=2, omega=1.0),
    ]


def test_what_is_wrapped_is_asked_whether_it_scales_with_its_input():
    @dataclasses.dataclass(frozen=True)
    class Fixed(WrappedCodec):
        codec: Codec = jaxcomp.natural(bucket_size=64)
        unbiased = True
        facts = changed(homogeneous=False)

        def variance_bound(self, size, peak=None):
            return self.codec.variance_bound(size)

    for outer in wrapped(Fixed()):
        assert not outer.facts.homogeneous, outer
    for outer in wrapped(jaxcomp.natural()):
        assert outer.facts.homogeneous, outer
    with pytest.raises(ValueError, match="scale with its input"):
        Cosine(codec=jaxcomp.codecs.Clipped(codec=jaxcomp.threshold(1.0)))


def test_a_sum_in_a_domain_of_its_own_stays_one_when_it_is_wrapped():
    inner = jaxcomp.random_k(0.1, bucket_size=64)
    for codec in (jaxcomp.codecs.Contractive(codec=inner), jaxcomp.codecs.Clipped(codec=inner)):
        testing.assert_sums(codec, jnp.linspace(-1, 1, 300))
