"""Declared properties of codecs hold for inputs that vary within a bucket, at every size."""

import dataclasses
import importlib
import inspect
import pkgutil

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.suite import label, law, nmse, slow

import jaxcomp
import jaxcomp.recipes
from jaxcomp import testing
from jaxcomp.base import Codec
from jaxcomp.codecs.parts import Part
from jaxcomp.codecs.rotated import Rotated
from jaxcomp.testing.bias import gaussian

SIZES = (512, 4096, 8192, 131_072, None)
BLOCKS = 3 * 4096
"""Elements of an input: several blocks of a rotation."""


def _sweep() -> list[Codec]:
    """Every recipe at its default, at each size of bucket, and below one bit."""
    found = []
    for module in pkgutil.iter_modules(jaxcomp.recipes.__path__, "jaxcomp.recipes."):
        loaded = importlib.import_module(module.name)
        for name, make in inspect.getmembers(loaded, inspect.isfunction):
            parameters = inspect.signature(make).parameters
            required = any(p.default is p.empty for p in parameters.values())
            if make.__module__ != module.name or name.startswith("_") or required:
                continue
            if not isinstance(make(), Codec):
                continue
            found.append(make())
            sizes = SIZES if "bucket_size" in parameters else ()
            rates = [{}]
            if name in ("eden", "ndsc", "dsc"):
                rates.append({"bits": 0.5})
            if name == "eden":
                rates += [{**rate, "rotations": 2} for rate in rates]
                rates += [{"bits": 0.5, "scale": "minimum_error"}]
                rates += [{"bits": 2.5, "rotations": 2}]
            if name == "ecsq":
                rates += [{"scale": "unbiased", "rotations": 2}, {"bits": 1}]
            for size in sizes:
                if name == "ecsq" and (size is None or size < 4096):
                    continue
                found += [make(bucket_size=size, **rate) for rate in rates]
    return list(dict.fromkeys(found))


FEW = [
    jaxcomp.eden(1, None, rotations=2),
    jaxcomp.eden(2.5, 8192, rotations=2),
    jaxcomp.eden(0.5, 8192, scale="minimum_error"),
    jaxcomp.ndsc(0.5, None),
    jaxcomp.ecsq(2, 8192, scale="unbiased", rotations=2),
    jaxcomp.qsgd_inf(4, None),
]


@pytest.mark.core("Q(Uniform(steps=7),MaxAbs,Stochastic,b=None)-4*")
@pytest.mark.parametrize(
    ("codec", "steps"),
    [(codec, 2**12) for codec in FEW] + [slow(codec, 2**16) for codec in _sweep()],
    ids=label,
)
def test_every_block_of_a_bucket_is_served(codec, steps):
    if codec.unbiased:
        testing.assert_every_part_arrives(codec, BLOCKS, parts=6)
    if codec.contractive:
        testing.assert_contractive(codec, gaussian(BLOCKS))
        # Signs of a bucket with a single element send one part in 12,288 a step.
        testing.assert_feedback_sends_all(codec, BLOCKS, parts=6, steps=steps)


@pytest.mark.full
def test_blocks_of_different_scale_have_the_error_of_their_own():
    """A block a tenth as large as its neighbour has the same relative error."""
    x = law("gaussian", 8192)
    x = jnp.where(jnp.arange(8192) < 4096, 10 * x, x)
    for codec, want in (
        (jaxcomp.eden(1, None, rotations=2), 0.571),
        (jaxcomp.ecsq(2, 8192, scale="unbiased", rotations=2), 0.104),
    ):
        np.testing.assert_allclose(nmse(codec, x), want, rtol=0.03)


def test_a_step_a_block_costs_a_hundredth_of_a_bit():
    x = law("gaussian", 2**17)
    whole = jaxcomp.wire_bytes(jaxcomp.eden(1, 4096), x)
    assert jaxcomp.wire_bytes(jaxcomp.eden(1, None), x) == whole
    assert 8 * whole / x.size == 1 + 32 / 4096
    assert 8 * jaxcomp.wire_bytes(jaxcomp.ecsq(1), x) / x.size == 1


def test_one_scale_for_more_than_is_rotated_together_is_refused():
    eden = jaxcomp.eden(1, 8192).codec
    wide = dataclasses.replace(eden, block=None)
    with pytest.raises(ValueError, match="block=4096"):
        Rotated(codec=wide)
    with pytest.raises(ValueError, match="rotated together"):
        Rotated(codec=Part(codec=jaxcomp.qsgd_inf(4, None), fraction=0.5))
    with pytest.raises(ValueError, match="rotated together"):
        Rotated(codec=jaxcomp.codecs.Clipped(codec=wide))
    assert Rotated(codec=wide, block=8192).bucket_size == 8192


def test_a_part_alone_promises_nothing():
    part = Part(codec=jaxcomp.sign(bucket_size=64), fraction=0.5, power=0, block=64)
    assert not part.unbiased
    assert not part.contractive
    assert Rotated(codec=part).contractive
    with pytest.raises(ValueError, match="`block`"):
        Part(codec=jaxcomp.sign(), fraction=0.5, block=0)


@dataclasses.dataclass(frozen=True)
class FirstHalf(jaxcomp.Codec, abstract=True):
    """Sends the first half of each bucket, and never the second."""

    bucket_size = 128
    unbiased = False

    def encode(self, key, x, count, state):
        return x[:, : self.bucket_size // 2], state

    def decode(self, key, payload, like, side=None):
        return jnp.pad(payload, ((0, 0), (0, self.bucket_size // 2)))


def test_a_part_that_is_never_sent_is_found():
    with pytest.raises(AssertionError, match="part 1 of 2"):
        testing.assert_feedback_sends_all(FirstHalf(), 128, parts=2, steps=16)
