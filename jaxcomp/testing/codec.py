"""The contract of a codec, on inputs that occur in training."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.base import Codec, decode_sum
from jaxcomp.base.codec import HOOKS
from jaxcomp.layout import batches as batches_, trees
from jaxcomp.numerics import addition, noise
from jaxcomp.reducers import choose
from jaxcomp.testing import bias, facts, programs, rows
from jaxcomp.testing.programs import SEED
from jaxcomp.testing.settings import assert_is_setting
from jaxcomp.types import Array, ArrayLike, Key, PyTree
from jaxcomp.wire import buffer

_LARGEST = float(np.finfo(np.float32).max)


def check_codec(
    codec: Codec,
    *,
    size: int = 700,
    eager: bool = True,
    dtypes: tuple[str, ...] = ("float16", "bfloat16"),
) -> None:
    """Checks all properties of a codec on a few inputs.

    The codec is a hashable setting; it keeps shapes and dtypes; it has the hooks that its facts
    declare; zeros decode to zeros; extreme but
    finite inputs of every dtype give finite results; non-finite elements stay visible; `jit`,
    `vmap` and eager agree bit for bit, and repeated calls too; a slice of a batch is encoded as in
    the whole batch; `decode_sum` is the sum of `decode`; the payload has the claimed size; the
    state keeps its shapes; every fact that it declares holds, and so do its bounds; payloads add up
    if it is linear; the codec is unbiased, or contractive, as declared.

    Args:
        codec: the codec.
        size: elements of the test input.
        eager: whether to run it also operation by operation, which takes longest.
        dtypes: the dtypes besides float32 whose largest finite value is tested.

    Raises:
        AssertionError: with the first property that does not hold.

    Example:
        >>> import jaxcomp
        >>> check_codec(jaxcomp.top_k(fraction=0.1))
    """
    assert_is_setting(codec)
    x = bias.gaussian(size)
    assert_keeps_shape(codec)
    assert_declares_hooks(codec, x)
    assert_deterministic(codec, x, eager=eager)
    rows.assert_follows_first(codec)
    assert_handles_extremes(codec, x)
    rows.assert_handles_largest(codec, dtypes)
    rows.assert_keeps_zeros(codec)
    assert_shows_nonfinite(codec, x)
    assert_sums(codec, x)
    assert_wire_bytes(codec, x)
    facts.assert_keeps_state(codec, x)
    facts.assert_within_bounds(codec, x)
    facts.assert_spans(codec)
    facts.assert_reads_guesses(codec, x)
    facts.assert_counts_clipped(codec, x)
    facts.assert_names_senders(codec, x)
    facts.assert_adds_up(codec)
    if codec.unbiased:
        bias.assert_unbiased(codec, x)
        bias.assert_every_part_arrives(codec, size)
    if codec.contractive:
        bias.assert_contractive(codec, x)
        bias.assert_feedback_sends_all(codec, size)


def assert_keeps_shape(codec: Codec) -> None:
    """Checks that decoding restores every shape and floating dtype, empty arrays included."""
    for shape, dtype in [
        *((shape, jnp.float32) for shape in [(), (7,), (0,), (3, 0, 2), (5, 129)]),
        ((7,), jnp.bfloat16),
        ((5, 129), jnp.float16),
    ]:
        like = jax.ShapeDtypeStruct(shape, dtype)
        back = jax.eval_shape(lambda x: trees.roundtrip(codec, SEED, x), like)
        if (back.shape, back.dtype) != (like.shape, like.dtype):
            raise AssertionError(
                f"{codec!r} must return {like.dtype.name}{list(shape)} unchanged, got "
                f"{back.dtype.name}{list(back.shape)}"
            )
    x = jax.ShapeDtypeStruct((5, 129), jnp.float32)
    layout = trees.layout(codec, x)
    payload = jax.eval_shape(lambda x: trees.encode(codec, SEED, x).batches, x)
    for batch, part in zip(layout.batches, payload, strict=True):
        for leaf in jax.tree.leaves(part):
            if leaf.ndim == 0 or leaf.shape[0] != batch.buckets:
                raise AssertionError(
                    f"every array of a payload must have a leading axis of {batch.buckets} "
                    f"buckets; {codec!r} sends shape {leaf.shape}"
                )


def assert_declares_hooks(codec: Codec, x: Array) -> None:
    """Checks that the codec has the hooks that its facts declare, and declares those that act."""

    def check(holds: bool, fact: str, why: str) -> None:
        if not holds:
            raise AssertionError(f"facts of {codec!r} must have {fact}, since {why}")

    declared = codec.facts
    for fact, hook in HOOKS.items():
        own = getattr(type(codec), hook) is not getattr(Codec, hook)
        check(own or not getattr(declared, fact), f"{fact}=False", f"it does not define {hook}")
    leaf, _ = codec.for_leaf((48, 64), jnp.dtype(jnp.float32))
    check(declared.shaped or leaf == codec, "shaped=True", "for_leaf returns another codec")
    for batch in trees.layout(codec, x).batches:
        rows, state = trees.stack(batch, [x]), batch.codec.init(batch.like)
        agree = functools.partial(
            batch.codec.agree, batches_.batch_key(noise.raw(SEED), 0, 0), rows, batch.counts()
        )
        if not declared.agrees:
            after = jax.vmap(agree, (0, None), axis_name="workers", axis_size=1)(
                jax.tree.map(lambda leaf: leaf[None], state), "workers"
            )
            kept = jax.tree.structure(after) == jax.tree.structure(state) and all(
                np.array_equal(new[0], old, equal_nan=True)
                for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True)
            )
            check(kept, "agrees=True", "agree changes its state")
        side = None if declared.sided else batch.codec.side(state)
        check(side is None, "sided=True", "side returns something")


def assert_deterministic(codec: Codec, x: Array, *, eager: bool = True) -> None:
    """Checks that the same input and key give the same bits.

    Args:
        codec: the codec.
        x: the input.
        eager: whether to compare also with encoding and decoding operation by operation.

    Raises:
        AssertionError: if another way of calling it gives other bits: as one program, as two, under
            `vmap`, or operation by operation.
    """
    _assert_traces_alike(codec, x)
    keys, rows = programs.keys(), [x, 2 * x, -x[::-1]]
    apart = [
        programs.there_and_back(codec, key, row) for key, row in zip(keys[:3], rows, strict=True)
    ]
    for i, want in enumerate(apart):
        _same_bits(codec, "as one program", want, programs.compiled(codec, keys[i], rows[i]))
    if eager:
        _same_bits(codec, "operation by operation", apart[0], _eagerly(codec, keys[0], x))
    xs = jnp.stack([*rows, *[x] * (programs.MANY - 3)])
    mapped = jax.tree.map(lambda leaf: leaf[:3], programs.many(codec, keys, xs))
    wanted = jax.tree.map(lambda *leaves: jnp.stack(leaves), *apart)
    _same_bits(codec, "under vmap", wanted, mapped)


def _eagerly(codec: Codec, key: Array, x: Array) -> tuple[PyTree, Array]:
    """`programs.there_and_back` without compiling more than the codec itself does."""
    layout = trees.layout(codec, x)
    payloads, stacks = [], []
    for number, batch in enumerate(layout.batches):
        key_, rows = batches_.batch_key(key, number, 0), trees.stack(batch, [x])
        payload, _ = codec.encode(key_, rows, batch.counts(), codec.init(batch.like))
        payloads.append(payload)
        stacks.append(codec.decode(key_, payload, batch.like))
    return trees.TreePayload(tuple(payloads), ()), trees.assemble(layout, stacks, ())


def _assert_traces_alike(codec: Codec, x: Array) -> None:
    """Checks that every call traces to the same program, so that only arguments matter."""
    for batch in trees.layout(codec, x).batches:
        key, like = batches_.batch_key(noise.raw(SEED), 0, 0), batch.like

        def both(x, batch=batch, key=key, like=like):
            payload, _ = codec.encode(key, x, batch.counts(), codec.init(like))
            return codec.decode(key, payload, like)

        # A new function each time, since the trace of an old one is remembered.
        first, second = (jax.make_jaxpr(lambda x: both(x))(like) for _ in range(2))
        alike = [np.array_equal(a, b) for a, b in zip(first.consts, second.consts, strict=False)]
        if str(first.jaxpr) != str(second.jaxpr) or not all(alike):
            raise AssertionError(
                f"{codec!r} must give the same bits at every call, but traces to another "
                "program the second time"
            )


def assert_handles_extremes(codec: Codec, x: Array) -> None:
    """Checks that zeros decode to zeros, and that finite input of any size decodes to that size.

    For a contractive codec, the error must not exceed the input.

    Args:
        codec: the codec.
        x: `[n]`, of moderate size, such as `gaussian(700)`.

    Raises:
        AssertionError: naming the input.
    """
    run = _roundtrip(codec)
    inputs = {
        "zeros": jnp.zeros_like(x),
        "1e-30": x * 1e-30,
        "1e30": x * 1e30,
        "denormals": jnp.full_like(x, 1e-40),
        "a constant": jnp.full_like(x, 3.0),
        "one outlier": x.at[17].set(1e4),
        "one element": jnp.zeros_like(x).at[-1].set(-2.0),
        "the largest float32": jnp.full_like(x, _LARGEST),
        "the largest float32 of both signs": jnp.where(x > 0, _LARGEST, -_LARGEST),
    }
    for name, given in inputs.items():
        y = np.asarray(run(given), np.float64)
        if not np.isfinite(y).all():
            raise AssertionError(f"{codec!r} must give finite output for {name}, got {y}")
        if name == "zeros" and y.any():
            raise AssertionError(f"{codec!r} must decode zeros to zeros, got {y[y != 0][:5]}")
        top = float(jnp.max(jnp.abs(given)))
        growth = 1 + (codec.variance_bound(x.size) or 0)
        bound = top * max(np.sqrt(x.size), growth) * 1.01 + 1e-37
        if np.abs(y).max() > bound:
            raise AssertionError(
                f"{codec!r} decodes {name} (largest {top:g}) to {np.abs(y).max():g}, above "
                f"{bound:g}"
            )
    if codec.contractive:
        tiny = np.asarray(x * 1e-35, np.float64)
        lost = np.asarray(run(x * 1e-35), np.float64) - tiny
        ratio = np.sum(lost**2) / np.sum(tiny**2)
        if not ratio < 1 + 1e-3:
            raise AssertionError(
                f"{codec!r} must be contractive for inputs of 1e-35 too: its error there is "
                f"{ratio:.4g} of the input's energy"
            )
    for scale in (2.0**-40, 2.0**60) if codec.facts.homogeneous else ():
        want = np.asarray(run(x)) * np.float32(scale)
        got = np.asarray(run(x * scale))
        if not np.array_equal(want, got):
            raise AssertionError(
                f"{codec!r} must scale with its input by powers of two, bit for bit; at "
                f"factor {scale:g} {np.sum(want != got)} of {want.size} elements differ"
            )


def assert_shows_nonfinite(codec: Codec, x: Array) -> None:
    """Checks that one NaN or Inf in the input makes at least that output element non-finite."""
    run = _roundtrip(codec)
    for bad in (np.nan, np.inf, -np.inf):
        for place in (0, x.size // 2, x.size - 1):
            y = np.asarray(run(x.at[place].set(bad)))
            if np.isfinite(y[place]):
                raise AssertionError(
                    f"{codec!r} hides {bad} at element {place}: it decodes to {y[place]}, so no "
                    "overflow check can see it"
                )


def assert_sums(codec: Codec, x: Array) -> None:
    """Checks that `decode_sum` is the sum of `decode` in worker order, without weight zero."""
    layout = trees.layout(codec, x)
    key = noise.raw(SEED)
    rows = [x, -2 * x, x[::-1]]
    payloads = [trees.encode(codec, key, row, worker=i) for i, row in enumerate(rows)]
    for number, batch in enumerate(layout.batches):
        keys = [batches_.batch_key(key, number, i) for i in range(3)]
        parts = [payload.batches[number] for payload in payloads]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
        everyone = keys[0]._replace(own=jnp.stack([k.own for k in keys]))
        for weights in (None, jnp.array([1.0, 0.0, 2.0])):
            given = (keys, parts, everyone, stacked, batch.like, weights)
            # A compiler may fuse a codec's own product with the sum, which then rounds once: sums
            # that differ by rounding when compiled must be equal operation by operation.
            alike, close = _sums(codec, _decoded, _summed, *given)
            if close and not alike:
                alike, _ = _sums(codec, type(codec).decode, decode_sum.decode_sum, *given)
            if not alike:
                raise AssertionError(
                    f"decode_sum of {codec!r} must be the sum of decode in worker order"
                    + ("" if weights is None else f" with weights {weights}")
                )


def _sums(
    codec: Codec,
    decode: Callable[..., Array],
    decode_sum: Callable[..., Array],
    keys: list[Key],
    parts: list[PyTree],
    everyone: Key,
    stacked: PyTree,
    batch_like: ArrayLike,
    weights: Array | None,
) -> tuple[bool, bool]:
    """Whether this `decode_sum` is the sum of this `decode`, and whether it is up to rounding."""
    like = addition.accumulator(batch_like)
    got = decode_sum(codec, everyone, stacked, batch_like, weights)
    want = jnp.zeros(like.shape, like.dtype)
    for i, (key, part) in enumerate(zip(keys, parts, strict=True)):
        want = want + (1.0 if weights is None else float(weights[i])) * decode(
            codec, key, part, like
        )
    atol = 1e-6 * float(jnp.abs(want).max())
    close = np.allclose(np.asarray(want), np.asarray(got), rtol=1e-5, atol=atol)
    equal = np.array_equal(np.asarray(want), np.asarray(got))
    return (close if codec.facts.reorders else equal), close


_decoded = jax.jit(lambda codec, *args: codec.decode(*args), static_argnums=(0, 3))
_summed = jax.jit(decode_sum.decode_sum, static_argnums=(0, 3))


def assert_wire_bytes(codec: Codec, like: ArrayLike) -> None:
    """Checks that the payload has the size that `wire_bytes` returns, and that the codec claims.

    The claim is `bits_per_element` in the codec's facts, which holds for full buckets.
    """
    x = jnp.zeros(like.shape, like.dtype)
    payload = trees.encode(codec, SEED, x)
    measured = buffer.fuse(payload.batches).nbytes + sum(leaf.nbytes for leaf in payload.dense)
    counted = choose.wire_bytes(codec, like)
    if measured != counted:
        raise AssertionError(f"{codec!r} sends {measured} bytes, and wire_bytes says {counted}")
    claim = codec.facts.bits_per_element
    if claim is None:
        return
    size = codec.bucket_size or 4096
    full = jax.ShapeDtypeStruct((8, size), like.dtype)
    sent = 8 * choose.wire_bytes(codec, full) / (8 * size)
    slack = 0 if codec.bucket_size else 32 * 2 * 8 / size
    if sent > claim + slack + 1e-9:
        raise AssertionError(
            f"{codec!r} claims {claim:g} bits an element, but sends {sent:g}: a larger payload "
            "than declared"
        )


def _roundtrip(codec: Codec) -> Callable[[Array], Array]:
    """A round trip with one key."""
    return lambda x: programs.compiled(codec, noise.raw(SEED), x)[1]


def _same_bits(codec: Codec, how: str, want: PyTree, got: PyTree) -> None:
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        if not np.array_equal(_bits(a), _bits(b)):
            raise AssertionError(
                f"{codec!r} must give the same bits {how} as in two programs: "
                f"{np.sum(_bits(a) != _bits(b))} of {a.size} differ"
            )


def _bits(x: Array) -> np.ndarray:
    return np.asarray(x).view(np.dtype(f"u{jnp.dtype(x.dtype).itemsize}"))
