"""The Pallas kernels have the reference's bits in an interpreter, and lower for accelerators."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.lowering import lowered, mesh_of
from helpers.suite import few_or_all
from jax.sharding import AxisType, PartitionSpec as P

import jaxcomp
from jaxcomp import bits
from jaxcomp.codecs.payload import QuantizedPayload
from jaxcomp.numerics import exact, noise
from jaxcomp.quantize import rounding
from jaxcomp.reducers import choose
from jaxcomp.rotate import hadamard
from jaxcomp.types import Key

KEY = noise.raw(3)
FIRST = jnp.uint32(2**32 - 3)  # Bucket numbers wrap around.
INTERPRETED = ("gpu_interpret", "tpu_interpret")
CODECS = {
    "four bits": jaxcomp.qsgd_inf(bits=4),
    "two planes, L2": jaxcomp.qsgd(bits=3),
    "one bit, mean": jaxcomp.sign(),
    "trits, clipped": jaxcomp.terngrad(bucket_size=640),
    "powers of two, L2": jaxcomp.nuqsgd(bits=4),
    "no zero": jaxcomp.qsgd_inf(bits=3, levels="midrise"),
    "powers of two, p = 3/2": jaxcomp.natural_dithering(bits=3, p=1.5),
    "lattice": jaxcomp.averaged_ternary(8, bucket_size=512),
    "three planes, no whole words": jaxcomp.qsgd_inf(bits=7, bucket_size=300),
}
"""One of every scale, levels and packing that kernels are given."""


def extremes(n, size, dtype=jnp.float32):
    """Buckets of every sort: zeros, NaN, huge, denormal, half empty, one outlier, Gaussian."""
    x = np.random.default_rng(n).standard_normal((n, size)).astype(np.float32)
    x[0], x[1, 3], x[4, size // 2 :], x[5, 7], x[5, 9] = 0, np.nan, 0, 1e4, -1e-40
    with np.errstate(under="ignore"):
        x[2], x[3] = x[2] * 1e30, x[3] * 1e-40
    return jnp.asarray(x).astype(dtype), jnp.full(n, size).at[4].set(size // 2)


def assert_same_bits(got, want):
    """As integers, so that −0 differs from 0; all NaN are equal."""
    got, want = (
        np.where(np.isnan(x), np.float32(np.nan), x)
        for x in (np.asarray(got, np.float32), np.asarray(want, np.float32))
    )
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.full
def test_reciprocals_and_roots_of_kernels_are_correctly_rounded():
    """Every mantissa, in an even and an odd exponent; some of them in the extreme exponents."""
    tiny = np.finfo(np.float32).tiny
    reciprocal, sqrt = map(jax.jit, (exact.reciprocal_by_digits, exact.sqrt_by_digits))
    for exponent in (1, 126, 127, 253, 254):
        stride = 1 if exponent in (126, 127) else 1001
        mantissas = np.arange(0, 2**23, stride, dtype=np.int32)
        x = ((exponent << 23) + mantissas).view(np.float32)
        want = 1 / np.asarray(x)
        np.testing.assert_array_equal(reciprocal(x), np.where(want < tiny, 0, want))
        np.testing.assert_array_equal(sqrt(x), np.sqrt(np.asarray(x)))
    assert float(sqrt(jnp.float32(0))) == 0


def test_a_gpu_takes_the_instructions_that_round_to_nearest():
    """They flush results below the normal numbers, as `exact.reciprocal` says."""
    codec = jaxcomp.qsgd(bits=4)
    x, count = extremes(6, 512)
    text = lowered(
        functools.partial(bits.encode, codec), x, count, KEY, FIRST, mesh=mesh_of("cuda")
    )
    assert "rcp.rn.ftz.f32" in text
    assert "sqrt.rn.ftz.f32" in text


@pytest.mark.core("8-gpu_interpret")
@pytest.mark.parametrize("implementation", INTERPRETED)
@pytest.mark.parametrize("width", few_or_all([3, 8, 1.6], range(1, 9)))
def test_kernels_pack_the_same_words(width, implementation):
    n, size = 5, 640 if width == 1.6 else 512
    codes = np.random.default_rng(0).integers(0, 3 if width == 1.6 else 2**width, (n, size))
    codes = jnp.asarray(codes, jnp.uint32)
    words = bits.pack(codes, bits=width)
    got = bits.pack(codes, bits=width, implementation=implementation)
    np.testing.assert_array_equal(got, words)
    back = bits.unpack(words, bits=width, size=size, implementation=implementation)
    np.testing.assert_array_equal(back, codes)


@pytest.mark.core("four bits-gpu")
@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *few_or_all(
            # Half a minute each when interpreted for a TPU, so one case that uses nearly
            # everything.
            [
                *((name, "gpu_interpret") for name in list(CODECS)[:6]),
                ("two planes, L2", "tpu_interpret"),
            ],
            itertools.product(CODECS, INTERPRETED),
        ),
        *(pytest.param(name, "gpu", marks=pytest.mark.gpu) for name in CODECS),
        *(pytest.param(name, "tpu", marks=pytest.mark.tpu) for name in CODECS),
    ],
)
def test_kernels_quantise_the_same(name, implementation):
    codec = CODECS[name]
    x, count = extremes(9, codec.bucket_size, jnp.bfloat16 if name == "four bits" else jnp.float32)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    # A compiler may treat a bf16 array in any way; the bits must not depend on it.
    run = functools.partial(jax.jit, static_argnames="implementation")
    encode = run(functools.partial(bits.encode, codec))
    words, steps = encode(x, count, KEY, FIRST)
    got = encode(x, count, KEY, FIRST, implementation=implementation)
    np.testing.assert_array_equal(got[0], words)
    np.testing.assert_array_equal(got[1], steps)
    payloads = jnp.stack([words, words ^ 0x1111, words]), jnp.stack([steps, 2 * steps, steps])
    if codec.bits == 1.6:
        payloads = payloads[0].at[1].set(words), payloads[1]

    @run
    def add(*payloads, implementation=None):
        return bits.decode_sum(codec, *payloads, like, implementation=implementation)

    want, got = add(*payloads), add(*payloads, implementation=implementation)
    assert_same_bits(got, want)


@pytest.mark.core("gpu_interpret")
@pytest.mark.parametrize("implementation", INTERPRETED)
def test_a_slice_of_a_batch_has_the_noise_of_the_batch(implementation):
    """Buckets are numbered from the first one of the batch, wherever a slice begins."""
    codec = jaxcomp.qsgd_inf(bits=8, bucket_size=128)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 128)), jnp.float32)

    @jax.jit
    def encode(x, first):
        count = jnp.full(len(x), 128)
        return bits.encode(codec, x, count, KEY, first, implementation=implementation)[0]

    one, other = encode(x[:4], FIRST), encode(x[1:], FIRST + 1)
    np.testing.assert_array_equal(one[1:], other[:3])


@pytest.mark.core("gpu_interpret")
@pytest.mark.parametrize("implementation", INTERPRETED)
def test_kernels_sum_levels_that_are_a_table(implementation):
    """The payload of EDEN."""
    codec = jaxcomp.eden(bits=4, bucket_size=512).codec
    x, count = extremes(6, 512)
    encode = jax.vmap(lambda x: codec.encode(Key(KEY, KEY, FIRST), x, count, ())[0])
    sent = jax.jit(encode)(np.stack([x, -2 * x]))
    words, steps = sent.words, sent.steps[0]
    like = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    add = jax.jit(
        lambda implementation: bits.decode_sum(
            codec, words, steps, like, implementation=implementation
        ),
        static_argnums=0,
    )
    assert_same_bits(add(implementation), add(None))


@pytest.mark.core("4-unbiased")
@pytest.mark.parametrize("scale", ["unbiased", "minimum_error", "norm"])
@pytest.mark.parametrize("width", [1, 4])
def test_a_kernel_fits_the_same_steps(width, scale):
    """A GPU chooses the codes of EDEN and fits their step in one pass."""
    codec = jaxcomp.eden(bits=width, bucket_size=1024, scale=scale).codec
    x, count = extremes(7, 1024)
    want, _ = jax.jit(codec.encode)(Key(KEY, KEY, FIRST), x, count, ())
    encode = jax.jit(functools.partial(bits.gpu.encode, codec, interpret=True))
    words, steps = encode(x, count, KEY, FIRST)
    np.testing.assert_array_equal(words, want.words)
    assert_same_bits(steps, want.steps[0])


@pytest.mark.full
def test_a_kernel_takes_a_scale_that_was_agreed_and_buckets_of_any_size():
    codec = jaxcomp.qsgd_inf(bits=4, bucket_size=100)
    x, count = extremes(6, 100)
    x = x.at[1:3].set(1.0)
    scale = jnp.full(6, 2e4)
    want = bits.encode(codec, x, count, KEY, FIRST, scale)
    got = bits.encode(codec, x, count, KEY, FIRST, scale, implementation="gpu_interpret")
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.full
@pytest.mark.parametrize("implementation", INTERPRETED)
def test_kernels_under_vmap_and_shard_map(implementation):
    """Four workers with different keys; more than sixteen payloads are added in a loop."""
    codec, workers = CODECS["four bits"], 4
    x = jnp.stack([extremes(6, 512)[0] + worker for worker in range(workers)])
    keys = jnp.stack([noise.fold(KEY, worker) for worker in range(workers)])
    count = jnp.full(6, 512)

    @functools.partial(jax.jit, static_argnums=2)
    def encode(x, key, implementation=implementation):
        return bits.encode(codec, x, count, key, FIRST, implementation=implementation)

    want = [encode(x[i], keys[i], "reference") for i in range(workers)]
    words, steps = jax.vmap(encode)(x, keys)
    mesh = jax.make_mesh(
        (workers,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:workers]
    )
    mapped = jax.shard_map(
        lambda x, key: jax.tree.map(lambda y: y[None], encode(x[0], key[0])),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=implementation == "tpu_interpret",  # JAX's own interpreter does not type it.
    )
    for found in ((words, steps), jax.jit(mapped)(x, keys)):
        for i in range(workers):
            np.testing.assert_array_equal(found[0][i], want[i][0])
            np.testing.assert_array_equal(found[1][i], want[i][1])
    many = jnp.tile(words, (5, 1, 1)), jnp.tile(steps, (5, 1))
    like = jax.ShapeDtypeStruct((6, 512), jnp.float32)
    np.testing.assert_array_equal(
        bits.decode_sum(codec, *many, like, implementation=implementation),
        bits.decode_sum(codec, *many, like, implementation="reference"),
    )


@pytest.mark.core("2-gpu_interpret")
@pytest.mark.parametrize(
    ("block", "implementation"),
    [
        *((block, "gpu_interpret") for block in (2, 64, 4096, 8192)),
        *((block, "tpu_interpret") for block in (128, 1024)),
        *(pytest.param(block, "gpu", marks=pytest.mark.gpu) for block in (2, 64, 4096, 8192)),
        *(pytest.param(block, "tpu", marks=pytest.mark.tpu) for block in (128, 1024, 8192)),
    ],
)
def test_kernels_rotate_the_same(block, implementation):
    """Several blocks a bucket, where they are short; the last program, or group, has too few."""
    x, _ = extremes(9, block * max(1, 256 // block))
    seeds = noise.seeds(KEY, FIRST, len(x))
    for turn in (hadamard.rotate, hadamard.unrotate):
        rotated = functools.partial(turn, x, *seeds, block, down=1 / block, up=8.0)
        assert_same_bits(rotated(implementation=implementation), rotated())


CALLS = {"cuda": "__gpu$xla.gpu.triton", "tpu": "tpu_custom_call"}


def lowered_step(codec, mesh):
    """A training step over the first axis of the mesh."""
    reducer = jaxcomp.Gather(choose.link_or_reducer(codec))
    tx = jaxcomp.compressed_mean(reducer, "data")
    params = {"w": jnp.ones((64, 640)), "v": jnp.ones(5000)}
    given = params, jax.eval_shape(tx.init, params)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), given)

    def step(grads, state):
        mean, state = tx.update(*jax.tree.map(lambda x: x[0], (grads, state)))
        return mean, jax.tree.map(lambda x: x[None], state)

    specs = {"in_specs": P("data"), "out_specs": (P(), P("data")), "axis_names": {"data"}}
    return lowered(jax.shard_map(step, mesh=mesh, **specs), *like, mesh=mesh)


@pytest.mark.core("four bits-cuda")
@pytest.mark.parametrize("platform", CALLS)
@pytest.mark.parametrize("name", CODECS)
def test_each_platform_takes_its_own_kernel(name, platform):
    """One kernel encodes, one decodes and sums; with a residual, one decodes what was sent."""
    codec = CODECS[name]
    text = lowered_step(codec, mesh_of(platform, (8,), ("data",)))
    rows_fit = platform != "tpu" or codec.bucket_size % 128 == 0  # Lanes of a TPU.
    assert text.count(f"@{CALLS[platform]}") == (3 if codec.contractive else 2) * rows_fit
    if name == "four bits":
        assert CALLS[platform] not in lowered_step(codec, mesh_of("cpu", (8,), ("data",)))


@pytest.mark.parametrize("platform", CALLS)
def test_under_an_axis_that_is_not_manual_xla_does_the_work(platform):
    """XLA cannot split a kernel over devices, so no kernel is used where it might have to."""
    mesh = mesh_of(platform, (8, 4), ("data", "model"))
    with pytest.warns(UserWarning, match="param_specs"):  # Nothing lies on the other axis here.
        text = lowered_step(CODECS["four bits"], mesh)
    assert CALLS[platform] not in text


@pytest.mark.core("2")
@pytest.mark.parametrize("workers", [2, 3, 20])
def test_a_weighted_sum_is_the_same_bits_however_it_is_compiled(workers):
    """Weights go into the steps: XLA may or may not round a product."""
    rng = np.random.default_rng(workers)
    codec, n = CODECS["four bits"], 16
    words = jnp.asarray(rng.integers(0, 2**32, (workers, n, 64)), jnp.uint32)
    steps = rounding.exact_step(
        jnp.asarray(rng.uniform(0.1, 1, (workers, n)), jnp.float32), 7, jnp.float32
    )[0]
    weights = jnp.asarray(rng.uniform(0.1, 1, workers), jnp.float32).at[0].set(0)
    payloads = QuantizedPayload(words, (steps.at[0].set(jnp.nan),))
    like = jax.ShapeDtypeStruct((n, 512), jnp.float32)

    def add(codec, payloads, weights):
        return codec.decode_sum(Key(KEY, KEY, FIRST), payloads, like, weights)

    want = add(codec, payloads, weights)
    kernel = dataclasses.replace(codec, implementation="gpu_interpret")
    for got in (
        jax.jit(add, static_argnums=0)(codec, payloads, weights),
        add(kernel, payloads, weights),
    ):
        assert_same_bits(got, want)
    each = codec.values(bits.unpack(words.reshape(-1, 64), bits=4, size=512)).reshape(
        workers, n, -1
    )
    exact = np.einsum(
        "wnk,wn->nk",
        np.asarray(each[1:], np.float64),
        np.asarray(steps[1:] * weights[1:, None], np.float64),
    )
    np.testing.assert_allclose(want, exact, atol=1e-5 * workers)


def test_the_choice_of_a_platform_is_transparent_to_transformations():
    """Nested `vmap`, `scan` and derivatives see through it; no kernel is traced before lowering."""
    codec = CODECS["four bits"]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 700)), jnp.float32)

    def roundtrip(x):
        return jaxcomp.roundtrip(codec, 0, x)

    want = [[roundtrip(x[i, j]) for j in range(3)] for i in range(2)]
    np.testing.assert_array_equal(jax.vmap(jax.vmap(roundtrip))(x), jnp.array(want))
    _, scanned = jax.lax.scan(lambda carry, row: (carry, jax.vmap(roundtrip)(row)), 0, x)
    np.testing.assert_array_equal(scanned, jnp.array(want))
    slope = jax.jit(jax.grad(lambda x: jnp.sum(roundtrip(x))))(x[0, 0])
    assert slope.shape == (700,)
    assert np.isfinite(np.asarray(slope)).all()
    text = str(jax.make_jaxpr(roundtrip)(x[0, 0]))
    assert "pallas_call" not in text


def test_a_bucket_that_a_kernel_cannot_hold_takes_the_reference():
    codec = jaxcomp.qsgd_inf(bits=4, bucket_size=None)
    x = jnp.ones(100_000)
    for platform, call in CALLS.items():
        encode = lowered(lambda x: jaxcomp.encode(codec, 0, x), x, mesh=mesh_of(platform))
        assert call not in encode


@pytest.mark.core("cuda")
@pytest.mark.parametrize("platform", CALLS)
def test_a_rotation_is_one_kernel(platform):
    """One rotation each way; XLA compiles blocks that no program can hold."""
    whole = jaxcomp.qsgd_inf(bits=4, bucket_size=2**14)  # No kernel can hold this bucket.
    for block, calls in ((4096, 2), (2**14, 0)):
        codec = jaxcomp.codecs.Rotated(codec=whole, block=block, times=2)
        run = jax.vmap(lambda x, codec=codec: jaxcomp.roundtrip(codec, 0, x))
        text = lowered(run, jnp.ones((2, 2**14)), mesh=mesh_of(platform))
        assert text.count(f"@{CALLS[platform]}") == calls


def test_forcing_fails_loudly():
    codes = jnp.zeros((1, 100), jnp.uint32)
    with pytest.raises(ValueError, match="`implementation` must be one of 'reference', 'gpu'"):
        bits.pack(codes, bits=4, implementation="cuda")
    with pytest.raises(ValueError, match="`implementation` 'tpu' cannot do this: a bucket must be"):
        bits.pack(codes, bits=4, implementation="tpu")
    with pytest.raises(ValueError, match="a bucket must have 1 to 8192 elements"):
        bits.pack(jnp.zeros((1, 10_000), jnp.uint32), bits=4, implementation="gpu")
    x, seeds = jnp.zeros((1, 2**14)), noise.seeds(KEY, FIRST, 1)
    for name, block in (("gpu", 2**14), ("tpu", 64)):
        with pytest.raises(ValueError, match=f"`implementation` '{name}' cannot do this: a block"):
            hadamard.rotate(x, *seeds, block, implementation=name)
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError, match="interpret mode"):
            bits.pack(codes, bits=4, implementation="gpu")


def test_the_cpu_reads_x_for_the_scale_and_for_the_words_and_writes_no_more():
    """Two passes over x, none over anything else as large; only words and steps come out."""
    codec, n = jaxcomp.qsgd_inf(bits=4), 4096
    x = jax.ShapeDtypeStruct((n, 512), jnp.float32)

    def run(x, key):
        return bits.encode(codec, x, jnp.full(n, 512), key, jnp.uint32(0))

    compiled = jax.jit(run).lower(x, jax.ShapeDtypeStruct((2,), jnp.uint32)).compile()
    entry = compiled.as_text().split("ENTRY")[1]
    (name,) = [
        line.split()[0]
        for line in entry.splitlines()
        if "] parameter(0)" in line or "} parameter(0)" in line
    ]
    readers = [line for line in entry.splitlines() if f"{name}," in line or f"{name})" in line]
    assert len(readers) == 2, readers
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes == 4 * n * (64 + 1) + 16  # And the tuple of the two.
    assert memory.temp_size_in_bytes < 4 * n * 64
