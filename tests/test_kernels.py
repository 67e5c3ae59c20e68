"""The Pallas kernels: the reference's bits, in an interpreter; and what they are lowered to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jaxcomp
from jaxcomp import bits, noise
from jaxcomp.quantize import exact

KEY = noise.raw(3)
FIRST = jnp.uint32(2**32 - 3)  # Bucket numbers wrap around.
INTERPRETED = ("gpu_interpret", "tpu_interpret")
CODECS = {
    "four bits": jaxcomp.qsgd_inf(bits=4),
    "two planes, L2": jaxcomp.qsgd(bits=3),
    "one bit, mean": jaxcomp.sign(),
    "trits, clipped": jaxcomp.terngrad(bucket_size=640),
}


def extremes(n, size, dtype=jnp.float32):
    """Buckets of every sort: zeros, NaN, huge, denormal, half empty, one outlier, Gaussian."""
    x = np.random.default_rng(n).standard_normal((n, size)).astype(np.float32)
    x[0], x[1, 3], x[4, size // 2 :], x[5, 7] = 0, np.nan, 0, 1e4
    with np.errstate(under="ignore"):
        x[2], x[3] = x[2] * 1e30, x[3] * 1e-40
    return jnp.asarray(x).astype(dtype), jnp.full(n, size).at[4].set(size // 2)


def test_reciprocals_and_roots_by_digits_are_correctly_rounded():
    """Every mantissa, in exponents where nothing, or everything, could go wrong."""
    mantissas = jnp.arange(2**23, dtype=jnp.int32)
    tiny = np.finfo(np.float32).tiny
    for exponent in (1, 126, 127, 253):
        x = jax.lax.bitcast_convert_type((exponent << 23) + mantissas, jnp.float32)
        want = 1 / np.asarray(x)
        got = np.asarray(jax.jit(exact.reciprocal_by_digits)(x))
        np.testing.assert_array_equal(got, np.where(want < tiny, 0, want))
        got = np.asarray(jax.jit(exact.sqrt_by_digits)(x))
        np.testing.assert_array_equal(got, np.sqrt(np.asarray(x)))
    assert float(exact.sqrt_by_digits(jnp.float32(0))) == 0


@pytest.mark.parametrize("implementation", INTERPRETED)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6, 7, 8, 1.6])
def test_kernels_pack_the_same_words(width, implementation):
    n, size = 5, 640 if width == 1.6 else 512
    codes = np.random.default_rng(0).integers(0, 3 if width == 1.6 else 2**width, (n, size))
    codes = jnp.asarray(codes, jnp.uint32)
    words = bits.pack(codes, bits=width)
    got = bits.pack(codes, bits=width, implementation=implementation)
    np.testing.assert_array_equal(got, words)
    back = bits.unpack(words, bits=width, size=size, implementation=implementation)
    np.testing.assert_array_equal(back, codes)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *((name, "gpu_interpret") for name in CODECS),
        # A minute each, interpreted: the two that between them use everything, and the rest.
        ("two planes, L2", "tpu_interpret"),
        ("trits, clipped", "tpu_interpret"),
        pytest.param("four bits", "tpu_interpret", marks=pytest.mark.slow),
        pytest.param("one bit, mean", "tpu_interpret", marks=pytest.mark.slow),
    ],
)
def test_kernels_quantise_the_same(name, implementation):
    codec = CODECS[name]
    x, count = extremes(9, codec.bucket_size, jnp.bfloat16 if name == "four bits" else jnp.float32)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    # A compiler may do with a bf16 array what it likes; the bits must not depend on it.
    run = functools.partial(jax.jit, static_argnames="implementation")
    encode = run(functools.partial(bits.encode, codec))
    words, steps = encode(x, count, KEY, FIRST)
    got = encode(x, count, KEY, FIRST, implementation=implementation)
    np.testing.assert_array_equal(got[0], words)
    np.testing.assert_array_equal(got[1], steps)
    payloads = jnp.stack([words, words ^ 0x1111, words]), jnp.stack([steps, 2 * steps, steps])
    if codec.bits == 1.6:
        payloads = payloads[0].at[1].set(words), payloads[1]
    add = run(
        lambda *args, implementation=None: bits.decode_sum(
            codec, *args, like, implementation=implementation
        )
    )
    for weights in (None, jnp.array([1.0, 0.0, 0.3])):
        want = np.asarray(add(*payloads, weights), np.float32)
        got = np.asarray(add(*payloads, weights, implementation=implementation), np.float32)
        np.testing.assert_array_equal(got, want)


def test_a_kernel_takes_a_scale_that_was_agreed_and_buckets_of_any_size():
    codec = jaxcomp.qsgd_inf(bits=4, bucket_size=100)
    x, count = extremes(6, 100)
    x = x.at[1:3].set(1.0)
    scale = jnp.full(6, 2e4)
    want = bits.encode(codec, x, count, KEY, FIRST, scale)
    got = bits.encode(codec, x, count, KEY, FIRST, scale, implementation="gpu_interpret")
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_kernels_under_vmap_and_shard_map(implementation):
    """Four workers, each with a key of its own; more than sixteen payloads are added in a loop."""
    codec, workers = CODECS["four bits"], 4
    x = jnp.stack([extremes(6, 512)[0] + worker for worker in range(workers)])
    keys = jnp.stack([noise.fold(KEY, worker) for worker in range(workers)])
    count = jnp.full(6, 512)

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
        bits.decode_sum(codec, *many, None, like, implementation=implementation),
        bits.decode_sum(codec, *many, None, like, implementation="reference"),
    )


CALLS = {"cuda": "__gpu$xla.gpu.triton", "tpu": "tpu_custom_call"}


@pytest.mark.parametrize("platform", CALLS)
@pytest.mark.parametrize("name", CODECS)
def test_each_platform_takes_its_own_kernel(name, platform):
    """Inside a training step over eight devices: one kernel encodes, one decodes and sums."""
    codec = CODECS[name]
    tx = jaxcomp.compressed_mean(codec, "data")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    grads = {"w": jnp.ones((8, 64, 640)), "v": jnp.ones((8, 5000))}
    state = jaxcomp.init_state(tx, jax.tree.map(lambda g: g[0], grads), mesh, "data")
    step = jaxcomp.data_parallel(
        lambda state, grads: tx.update(jax.tree.map(lambda g: g[0], grads), state), mesh, "data"
    )
    text = step.trace(state, grads).lower(lowering_platforms=(platform,)).as_text()
    assert text.count(CALLS[platform]) >= 2
    assert CALLS[platform] not in step.lower(state, grads).as_text()


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
    encode = jax.jit(lambda x: jaxcomp.encode(codec, 0, x))
    for platform, call in CALLS.items():
        lowered = encode.trace(jnp.ones(100_000)).lower(lowering_platforms=(platform,))
        assert call not in lowered.as_text()


def test_forcing_fails_loudly():
    codes = jnp.zeros((1, 100), jnp.uint32)
    with pytest.raises(ValueError, match="`implementation` must be one of 'reference', 'gpu'"):
        bits.pack(codes, bits=4, implementation="cuda")
    with pytest.raises(ValueError, match="`implementation` 'tpu' cannot do this: a bucket must be"):
        bits.pack(codes, bits=4, implementation="tpu")
    with pytest.raises(ValueError, match="a bucket must have 1 to 8192 elements"):
        bits.pack(jnp.zeros((1, 10_000), jnp.uint32), bits=4, implementation="gpu")
    with pytest.raises(ValueError, match="interpret mode"):
        bits.pack(codes, bits=4, implementation="gpu")  # There is no GPU here.


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
