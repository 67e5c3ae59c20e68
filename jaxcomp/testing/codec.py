"""The contract of a codec: what it must do on inputs that training produces sooner or later."""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp import noise, offers, summing, trees, wire
from jaxcomp.protocols import Array, ArrayLike, Codec, PyTree

SEED = 20240229


def check_codec(codec: Codec, *, size: int = 700) -> None:
    """Runs every property that a codec must have on a few inputs.

    It is a hashable setting; shapes and dtypes survive; zeros stay zeros; extreme but finite
    inputs give finite results; what is not finite stays visible; `jit`, `vmap` and eager agree bit
    for bit and twice the same; `decode_sum` is the sum of `decode`; the payload costs what is
    claimed; it is unbiased, or contractive, as declared.

    Args:
        codec: the codec.
        size: elements of the main test input.

    Raises:
        AssertionError: naming the first property that does not hold.

    Example:
        >>> import jaxcomp
        >>> check_codec(jaxcomp.top_k(fraction=0.1))
    """
    assert_is_setting(codec)
    x = gaussian(size)
    assert_keeps_shape(codec)
    assert_deterministic(codec, x)
    assert_handles_extremes(codec)
    assert_shows_nonfinite(codec)
    assert_sums(codec, x)
    assert_wire_bytes(codec, x)
    if codec.unbiased:
        assert_unbiased(codec, x)
    if offers.contractive(codec):
        assert_contractive(codec, x)


def assert_is_setting(codec: Any) -> None:
    """It offers what the `Codec` protocol asks for, and is hashable and comparable by value."""
    if isinstance(codec, type):
        raise AssertionError(f"check an instance, as in {codec.__name__}(...), not the class")
    if not isinstance(codec, Codec):
        missing = [
            name
            for name in ("bucket_size", "unbiased", "linear", "init", "encode", "decode")
            if not hasattr(codec, name)
        ]
        raise AssertionError(f"a codec must have {missing}, and {codec!r} does not")
    assert_hashable(codec)


def assert_hashable(setting: Any) -> None:
    """It is an instance, hashable and equal by value, so that equal ones compile once."""
    if isinstance(setting, type):
        raise AssertionError(f"check an instance, as in {setting.__name__}(...), not the class")
    try:
        hash(setting)
    except TypeError as error:
        raise AssertionError(
            f"a setting must be hashable by value, so that equal ones compile once: {error}. Use "
            "@dataclasses.dataclass(frozen=True) with numbers, strings, tuples or other settings."
        ) from error
    if dataclasses.is_dataclass(setting) and dataclasses.replace(cast(Any, setting)) != setting:
        raise AssertionError(f"two settings with the same values must be equal: {setting!r}")


def assert_keeps_shape(codec: Codec) -> None:
    """Any shape and floating dtype comes back as it was, empty ones included."""
    for shape, dtype in [
        *((shape, jnp.float32) for shape in [(), (1,), (7,), (0,), (3, 0, 2), (5, 129)]),
        *((shape, dtype) for shape in [(7,), (5, 129)] for dtype in (jnp.bfloat16, jnp.float16)),
    ]:
        like = jax.ShapeDtypeStruct(shape, dtype)
        back = jax.eval_shape(lambda x: trees.roundtrip(codec, SEED, x), like)
        if (back.shape, back.dtype) != (like.shape, like.dtype):
            raise AssertionError(
                f"{codec!r} must return {like.dtype.name}{list(shape)} as it was, got "
                f"{back.dtype.name}{list(back.shape)}"
            )
    payload = trees.encode(codec, SEED, gaussian(300))
    for batch, part in zip(
        trees.layout(codec, gaussian(300)).batches, payload.batches, strict=True
    ):
        for leaf in jax.tree.leaves(part):
            if leaf.ndim == 0 or leaf.shape[0] != batch.buckets:
                raise AssertionError(
                    f"every array of a payload must have a leading axis of {batch.buckets} "
                    f"buckets, and {codec!r} sends one of shape {leaf.shape}"
                )


def assert_deterministic(codec: Codec, x: Array) -> None:
    """The same input and key give the same bits: twice, under `jit` and under `vmap`."""

    def both(key, x):
        payload = trees.encode(codec, key, x)
        return payload, trees.decode(codec, key, payload, x)

    keys = jnp.stack([noise.fold(noise.raw(SEED), i) for i in range(3)])
    xs = jnp.stack([x, 2 * x, -x[::-1]])
    eager = [both(key, row) for key, row in zip(keys, xs, strict=True)]
    _same_bits(codec, "called twice", eager[0], both(keys[0], xs[0]))
    compiled = jax.jit(both)
    for i, want in enumerate(eager):
        _same_bits(codec, "under jit", want, compiled(keys[i], xs[i]))
    _same_bits(
        codec,
        "under vmap",
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *eager),
        jax.jit(jax.vmap(both))(keys, xs),
    )


def assert_handles_extremes(codec: Codec) -> None:
    """Zeros decode to zeros, and finite input of any size to finite output of that size."""
    shape = (600,)
    run = jax.jit(lambda x: trees.roundtrip(codec, SEED, x))
    gauss = gaussian(shape[0])
    inputs = {
        "zeros": jnp.zeros(shape),
        "1e-30": gauss * 1e-30,
        "1e30": gauss * 1e30,
        "denormals": jnp.full(shape, 1e-40),
        "a constant": jnp.full(shape, 3.0),
        "one outlier": gauss.at[17].set(1e4),
        "one element": jnp.zeros(shape).at[599].set(-2.0),
    }
    for name, x in inputs.items():
        y = np.asarray(run(x), np.float64)
        if not np.isfinite(y).all():
            raise AssertionError(f"{codec!r} must give finite output for {name}, got {y}")
        if name == "zeros" and y.any():
            raise AssertionError(f"{codec!r} must decode zeros to zeros, got {y[y != 0][:5]}")
        top = float(jnp.max(jnp.abs(x)))
        growth = 1 + (offers.variance_bound(codec, shape[0]) or 0)
        bound = top * max(np.sqrt(shape[0]), growth) * 1.01 + 1e-37
        if np.abs(y).max() > bound:
            raise AssertionError(
                f"{codec!r} decodes {name} (largest {top:g}) to {np.abs(y).max():g}, above "
                f"{bound:g}"
            )
    for scale in (2.0**-40, 2.0**60) if offers.homogeneous(codec) else ():
        want, got = np.asarray(run(gauss)) * np.float32(scale), np.asarray(run(gauss * scale))
        if not np.array_equal(want, got):
            raise AssertionError(
                f"{codec!r} must scale with its input bit for bit by powers of two; by {scale:g} "
                f"{np.sum(want != got)} of {want.size} elements differ"
            )


def assert_shows_nonfinite(codec: Codec) -> None:
    """One NaN or Inf in the input makes at least that element of the output non-finite."""
    run = jax.jit(lambda x: trees.roundtrip(codec, SEED, x))
    for bad in (np.nan, np.inf, -np.inf):
        for place in (0, 311, 599):
            y = np.asarray(run(gaussian(600).at[place].set(bad)))
            if np.isfinite(y[place]):
                raise AssertionError(
                    f"{codec!r} hides {bad} at element {place}: it decodes to {y[place]}, so no "
                    "overflow check can see it"
                )


def assert_sums(codec: Codec, x: Array) -> None:
    """`decode_sum` is the sum of `decode` in worker order, and weight zero silences a worker."""
    plan = trees.layout(codec, x)
    key = noise.raw(SEED)
    rows = [x, -2 * x, x[::-1]]
    payloads = [trees.encode(codec, key, row, worker=i) for i, row in enumerate(rows)]
    for weights in (None, jnp.array([1.0, 0.0, 2.0])):
        for number, batch in enumerate(plan.batches):
            keys = [trees.batch_key(key, number, i) for i in range(3)]
            parts = [payload.batches[number] for payload in payloads]
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
            everyone = keys[0]._replace(own=jnp.stack([k.own for k in keys]))
            got = summing.decode_sum(codec, everyone, stacked, batch.like, weights)
            like = summing.accumulator(batch.like)
            want = jnp.zeros(like.shape, like.dtype)
            for i, (k, part) in enumerate(zip(keys, parts, strict=True)):
                factor = 1.0 if weights is None else float(weights[i])
                want = want + factor * codec.decode(k, part, like)
            close = functools.partial(
                np.allclose, rtol=1e-5, atol=1e-6 * float(jnp.abs(want).max())
            )
            alike = close if offers.reorders(codec) else np.array_equal
            if not alike(np.asarray(want), np.asarray(got)):
                raise AssertionError(
                    f"decode_sum of {codec!r} must be the sum of decode in worker order"
                    + ("" if weights is None else f" with weights {weights}")
                )


def assert_wire_bytes(codec: Codec, like: ArrayLike) -> None:
    """The arrays that `encode` makes cost what `wire_bytes` says, and no more than it claims.

    The claim is the codec's optional `bits_per_element`, which holds for full buckets.
    """
    x = jnp.zeros(like.shape, like.dtype)
    payload = trees.encode(codec, SEED, x)
    measured = wire.fuse(payload.batches).nbytes + sum(leaf.nbytes for leaf in payload.dense)
    counted = wire.wire_bytes(codec, like)
    if measured != counted:
        raise AssertionError(f"{codec!r} sends {measured} bytes, and wire_bytes says {counted}")
    claim = offers.bits_per_element(codec)
    if claim is None:
        return
    size = codec.bucket_size or 4096
    full = jax.ShapeDtypeStruct((8, size), like.dtype)
    sent = 8 * wire.wire_bytes(codec, full) / (8 * size)
    slack = 0 if codec.bucket_size else 32 * 2 * 8 / size
    if sent > claim + slack + 1e-9:
        raise AssertionError(
            f"{codec!r} claims {claim:g} bits an element and sends {sent:g}: a larger payload than "
            "declared"
        )


def assert_unbiased(codec: Codec, x: Array, *, draws: int = 2048) -> None:
    """The mean of `roundtrip(x)` over many keys is `x`, within six standard errors.

    Args:
        codec: the codec.
        x: the input.
        draws: how many keys.

    Raises:
        AssertionError: naming the element that is furthest off.
    """
    x = jnp.asarray(x).reshape(-1).astype(jnp.float32)
    x = x / jnp.maximum(jnp.max(jnp.abs(x)), jnp.finfo(jnp.float32).tiny)

    def moments(start):
        numbers = start + jnp.arange(draws // 16, dtype=jnp.uint32)
        keys = jax.vmap(lambda i: noise.fold(noise.raw(SEED), i))(numbers)
        y = jax.vmap(lambda key: trees.roundtrip(codec, key, x))(keys)
        error = (y - x).astype(jnp.float32)
        return error.sum(0), (error * error).sum(0), jnp.max(jnp.abs(error))

    starts = jnp.arange(16, dtype=jnp.uint32) * (draws // 16)
    first, second, largest = jax.jit(lambda s: jax.lax.map(moments, s))(starts)
    bias = np.asarray(first, np.float64).sum(0) / draws
    spread = np.sqrt(np.maximum(np.asarray(second, np.float64).sum(0) / draws - bias**2, 0))
    error = spread / np.sqrt(draws) + 2.0**-18
    # What is less likely than 6 / draws may never have been drawn: allow for its weight.
    unseen = 6 / draws * float(jnp.max(largest))
    worst = int(np.argmax(np.abs(bias) / (6 * error + unseen)))
    if np.abs(bias[worst]) > 6 * error[worst] + unseen:
        raise AssertionError(
            f"{codec!r} must be unbiased: over {draws} keys element {worst} = {x[worst]:.5f} is "
            f"off by {bias[worst]:+.2e} on average, {np.abs(bias[worst]) / error[worst]:.1f} "
            "standard errors"
        )
    total = float(np.sqrt((error**2).sum()))
    if abs(bias.sum()) > 6 * total + unseen:
        raise AssertionError(
            f"{codec!r} must be unbiased: the sum of all elements is off by {bias.sum():+.2e} on "
            f"average, {abs(bias.sum()) / total:.1f} standard errors"
        )


def assert_contractive(codec: Codec, x: Array, *, draws: int = 16) -> None:
    """The mean of `‖roundtrip(x) − x‖²` over keys is below `‖x‖²`.

    Raises:
        AssertionError: with the measured ratio.
    """
    x = jnp.asarray(x).reshape(-1).astype(jnp.float32)
    keys = jnp.stack([noise.fold(noise.raw(SEED), i) for i in range(draws)])
    for name, row in {
        "x": x,
        "x**3": x**3,
        "one element": jnp.zeros_like(x).at[0].set(1.0),
    }.items():
        y = jax.jit(jax.vmap(lambda key, row=row: trees.roundtrip(codec, key, row)))(keys)
        ratio = float(jnp.mean(jnp.sum((y - row) ** 2, 1)) / jnp.sum(row**2))
        if not ratio < 1:
            raise AssertionError(
                f"{codec!r} must be contractive: its error on {name} is {ratio:.4f} of the input's "
                "energy, and feedback on it would grow"
            )


def gaussian(size: int) -> Array:
    """The standard input of the checks."""
    return jax.random.normal(jax.random.key(SEED), (size,))


def _same_bits(codec: Codec, how: str, want: PyTree, got: PyTree) -> None:
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        if not np.array_equal(_bits(a), _bits(b)):
            raise AssertionError(
                f"{codec!r} must give the same bits {how} as eagerly: "
                f"{np.sum(_bits(a) != _bits(b))} of {a.size} differ"
            )


def _bits(x: Array) -> np.ndarray:
    return np.asarray(x).view(np.dtype(f"u{jnp.dtype(x.dtype).itemsize}"))
