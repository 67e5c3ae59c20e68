"""The parameters of the contract suites: all contents of `jaxcomp.recipes`, and more."""

import contextlib
import functools
import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp
import jaxcomp.recipes
from jaxcomp.base import Codec
from jaxcomp.numerics import noise
from jaxcomp.sparsify.indices import Bitmap, Packed


def _defaults() -> list[Codec]:
    codecs = []
    for module in pkgutil.iter_modules(jaxcomp.recipes.__path__, "jaxcomp.recipes."):
        loaded = importlib.import_module(module.name)
        for name, make in inspect.getmembers(loaded, inspect.isfunction):
            if make.__module__ == module.name and not name.startswith("_"):
                required = [
                    p for p in inspect.signature(make).parameters.values() if p.default is p.empty
                ]
                made = None if required else make()
                if isinstance(made, Codec):
                    codecs.append(made)
    return codecs


def slow(*values, **settings):
    """A case of `parametrize` that runs only if slow tests are selected."""
    return pytest.param(*values, marks=pytest.mark.slow, **settings)


def few_or_all(few, every):
    """The cases of both lists; those that are not in `few` are slow."""
    few = list(few)
    others = [one for one in every if one not in few]
    return [*few, *(slow(*one) if isinstance(one, tuple) else slow(one) for one in others)]


CODECS = _defaults()
"""Every recipe with its default settings: adding a recipe adds no test code."""

_ALIKE = [jaxcomp.elias_qsgd(), jaxcomp.huffman_nuqsgd(), jaxcomp.amq(), jaxcomp.dsc()]
COMMON = [codec for codec in CODECS if codec not in _ALIKE]
"""Without recipes that compile for long and resemble others: `ecsq`, `alq` and `ndsc`."""

VARIANTS = [
    jaxcomp.cast("float16"),
    jaxcomp.qsgd_inf(bits=3),
    jaxcomp.qsgd_inf(bits=8, bucket_size=None),
    jaxcomp.terngrad(clip=None, bucket_size=100),
    jaxcomp.terngrad(shared=True),
    jaxcomp.top_k(fraction=0.05, bucket_size=64),
    jaxcomp.top_k(fraction=0.1, values=jaxcomp.qsgd_inf(bits=8, bucket_size=32), indices=Packed()),
    jaxcomp.top_k(fraction=0.1, values=jaxcomp.ndsc(bits=3.5, bucket_size=64)),
    jaxcomp.threshold(
        1.0, fraction=0.2, bucket_size=64, values=jaxcomp.natural(), indices=Bitmap()
    ),
    jaxcomp.qsgd_inf(bits=4, levels="midrise", subtractive=True),
    jaxcomp.mx("nvfp4"),
    jaxcomp.ndsc(bits=2, bucket_size=64, dithered=False),
    jaxcomp.codecs.Contractive(codec=jaxcomp.qsgd(bits=2)),
    jaxcomp.codecs.Chained(codecs=(jaxcomp.sign(), jaxcomp.qsgd_inf(bits=2))),
]
"""Settings that take other paths: planes, whole leaves, odd buckets, agreement."""

MORE_VARIANTS = [
    jaxcomp.cast("float8_e4m3fn"),
    jaxcomp.qsgd(bits=6, bucket_size=64),
    jaxcomp.sign(bucket_size=None),
    jaxcomp.natural_dithering(bits=3, natural_norm=True),
    jaxcomp.natural(bits=8),
    jaxcomp.mx("mxfp8", rule="ceil", rounding="stochastic"),
    jaxcomp.eden(bits=2.5, bucket_size=512, scale="minimum_error"),
    jaxcomp.codecs.Clipped(codec=jaxcomp.blockwise(bits=4)),
    jaxcomp.msc(jaxcomp.natural(), 2),
    jaxcomp.eden(bits=0.5, bucket_size=256, rotations=2),
    jaxcomp.drive(scale="minimum_error"),
    jaxcomp.drive(bucket_size=8, rotations=2),
    jaxcomp.eden(bits=0.5, bucket_size=512, scale="norm"),
    jaxcomp.terngrad(scaler="clip"),
    jaxcomp.mx("mxfp6", rule="even"),
    jaxcomp.ndsc(bits=0.5, bucket_size=512),
    jaxcomp.dsc(bits=0.5, bucket_size=512),
    jaxcomp.wyner_ziv(levels=3, bucket_size=100, rotated=False, private=True),
    jaxcomp.codecs.BestOf(bucket_size=512),
]
"""Further settings, for slow tests."""

EVERY = CODECS + VARIANTS + MORE_VARIANTS


FEW = [
    jaxcomp.cast("float16"),
    jaxcomp.sign(),
    jaxcomp.qsgd(bits=4),
    jaxcomp.qsgd_inf(bits=4),
    jaxcomp.terngrad(shared=True),
    jaxcomp.mx("nvfp4"),
    jaxcomp.natural(bits=8),
    jaxcomp.eden(bits=4),
    jaxcomp.alq(bits=3),
    jaxcomp.random_k(fraction=0.1),
    jaxcomp.top_k(fraction=0.01),
    jaxcomp.sidco(fraction=0.01),
]
"""One of each way through a training step, for what has nothing to do with levels."""


def label(value: object) -> str:
    """A short test id."""
    from jaxcomp.planning.columns import short

    text = short(value) if isinstance(value, Codec) else repr(value)
    return text.replace("Quantizer", "Q").replace("bucket_size", "b").replace(" ", "")


KEY = noise.raw(5)


@functools.partial(jax.jit, static_argnums=0)
def compiled(function, *args):
    """The result as one program; called by itself, each of its operations is one."""
    return function(*args)


@contextlib.contextmanager
def compilations():
    """The programs that are compiled in here."""
    found = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@functools.partial(jax.jit, static_argnums=0)
def roundtrip(codec, x, key=KEY):
    return jaxcomp.roundtrip(codec, key, x)


def nmse(codec, x):
    x = jnp.asarray(x, jnp.float32)
    return float(jnp.sum((roundtrip(codec, x) - x) ** 2) / jnp.sum(x * x))


def law(name, n, seed=0):
    rng = np.random.default_rng(seed)
    draws = {
        "gaussian": rng.standard_normal,
        "laplace": lambda n: rng.laplace(size=n),
        "heavy": lambda n: rng.standard_normal(n) ** 3,
    }
    return jnp.asarray(draws[name](n), jnp.float32)
