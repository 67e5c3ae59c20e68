"""The choice of visible changes, beside numpy's own casts to bfloat16."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxcomp
from jaxcomp.federated import GlobalModel, Uplink, uplink
from jaxcomp.layout import trees
from jaxcomp.numerics import noise
from jaxcomp.sparsify.competitors import Row
from jaxcomp.sparsify.visible import Visible

TINY = np.finfo(np.float32).tiny


@functools.partial(jax.jit, static_argnums=(0, 1))
def choose(choice, parts, x, params, start):
    return choice.choose(x, start, params, parts)


def visible(params, x):
    """As numpy casts, with what a CPU flushes as zero."""
    params, x = (np.where(np.abs(v) < TINY, 0, v).astype(np.float32) for v in (params, x))
    with np.errstate(all="ignore"):
        after = params - x
        after = np.where(np.abs(after) < TINY, 0, after)
        old, new = (v.astype(ml_dtypes.bfloat16) for v in (params, after))
        return (old != new) | ~np.isfinite(x)


def hard_pairs():
    """Parameters of every exponent, and changes at and beside ties of their rounding."""
    draw = np.random.default_rng(0)
    high = np.arange(0x7F80, dtype=np.uint32)[::37] << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    sizes = (high[:, None] | low).ravel().view(np.float32)
    params = np.concatenate([sizes, -sizes, [0.0, -0.0, np.inf]]).astype(np.float32)
    rounded = np.abs(params.astype(ml_dtypes.bfloat16))
    unit = np.spacing(np.where(np.isfinite(rounded), rounded, 1)).astype(np.float32)
    tie = np.where(np.isfinite(unit), unit, 1) / 2
    changes = [
        np.zeros_like(params),
        *(sign * step for sign in (1, -1) for step in (tie, np.nextafter(tie, 0), tie * 1.01)),
        *(tie * draw.normal(size=params.size) for _ in range(2)),
        params,
        2 * params.clip(-1e38, 1e38),
        np.full_like(params, -0.0),
        np.full_like(params, TINY / 4),
        draw.choice([np.nan, np.inf, -np.inf], params.size),
        10.0 ** draw.uniform(-45, 38, params.size),
    ]
    x = np.stack(changes).astype(np.float32)
    return np.broadcast_to(params, x.shape), x


def test_visible_is_what_numpy_rounds_to_another_value():
    params, x = hard_pairs()
    n, size = x.shape
    found = choose(Visible(1.0), Row(size), x, params[None], jnp.zeros((n, 1), jnp.uint32))
    want = visible(params, x)
    assert 0.2 < want.mean() < 0.8
    for row, number, places in zip(want, found.number[:, 0], found.places, strict=True):
        np.testing.assert_array_equal(np.nonzero(row)[0], places[: int(number)])


def test_without_parameters_all_but_zeros_are_visible():
    x = jnp.array([[0.0, 3.0, -0.0, -1e-30, jnp.nan, TINY / 2, 5.0, 0.0]])
    found = choose(Visible(1.0), Row(8), x, (), jnp.zeros((1, 1), jnp.uint32))
    np.testing.assert_array_equal(found.places[0, : int(found.number[0, 0])], [1, 3, 4, 6])


SHAPES = {"a": (40, 50), "b": (25, 30), "c": (64, 64), "bias": (7,)}


def updates(dtype, number):
    """Of which some percent are visible; zeros among them."""
    draw = np.random.default_rng(number)
    params = {k: draw.normal(0, 0.05, shape).astype(dtype) for k, shape in SHAPES.items()}
    moved = {
        k: draw.normal(0, 1e-5, shape) * (draw.random(shape) < 0.9) for k, shape in SHAPES.items()
    }
    return params, {k: x.astype(dtype) for k, x in moved.items()}


@functools.cache
def sender(up, dtype):
    plan = up.plan({k: jax.ShapeDtypeStruct(shape, dtype) for k, shape in SHAPES.items()})
    send = lambda n, u, m, p: uplink.message(up, plan, n, 0, 1.0, u, m, (), p)  # noqa: E731
    return plan, jax.jit(send)


def unsent(up, memory):
    """The residual of each leaf in float32; zeros for those that are sent dense."""
    plan, _ = sender(up, jnp.dtype("float32"))
    none = [np.zeros(like.shape, np.float32) for like in plan.dense_likes]
    return trees.assemble(plan, memory.feedback.residual, none)


@pytest.mark.parametrize(
    ("fraction", "dtype"),
    [
        (0.3, "float32"),
        (0.001, "float32"),
        pytest.param(0.3, "bfloat16", marks=pytest.mark.full),
    ],
)
def test_what_is_invisible_stays_in_the_residual(fraction, dtype):
    """Each element of `u` is sent as it is or kept as it is, and sent only if it is visible."""
    up = Uplink(jaxcomp.visible(fraction), GlobalModel())
    dtype = jnp.dtype(dtype)
    plan, send = sender(up, dtype)
    memory = uplink.init(up, updates(dtype, 0)[0])
    for number in range(4):
        params, moved = updates(dtype, number)
        before = unsent(up, memory)
        message = send(noise.raw(number), moved, memory, params)
        sent = trees.assemble(plan, *message.sent)
        memory = message.accepted
        after = unsent(up, memory)
        for name, shape in SHAPES.items():
            if len(shape) < 2 or np.prod(shape) < 1024:  # Dense.
                np.testing.assert_array_equal(sent[name], moved[name])
                continue
            whole = np.float32(before[name]) + np.float32(moved[name])
            u = whole.astype(dtype).astype(np.float32)
            seen = visible(np.float32(params[name]), u)
            gone = np.asarray(sent[name], np.float32)
            hits = gone != 0
            assert hits.sum() > 0
            assert not (hits & ~seen).any()
            if fraction == 0.3:
                np.testing.assert_array_equal(hits, seen)
            else:
                assert hits.sum() == up.policy.codec.choice.room(u.size) < seen.sum()
            np.testing.assert_array_equal(gone, np.where(hits, u, 0))
            np.testing.assert_array_equal(after[name], whole - gone)


def test_messages_have_the_length_of_what_is_visible():
    """Bits of an element that is sent: 32 of its value, and about those of its place."""
    up = Uplink(jaxcomp.visible(0.3), GlobalModel())
    _, send = sender(up, jnp.dtype("float32"))
    params, moved = updates("float32", 0)
    lengths = []
    for times in (1, 4):
        given = jax.tree.map(lambda x, times=times: times * x, moved)
        message = send(noise.raw(0), given, uplink.init(up, params), params)
        data = jaxcomp.to_bytes(up.policy, message.payload, params)
        hits = sum(int(np.count_nonzero(x)) for x in jax.tree.leaves(message.sent[0]))
        lengths.append((hits, len(data)))
        back = jaxcomp.from_bytes(up.policy, data, params)
        jax.tree.map(np.testing.assert_array_equal, back, message.payload)
    (few, short), (many, long) = lengths
    assert 2 * few < many
    assert 8 * (long - short) / (many - few) < 45
    dense = 4 * (params["b"].size + params["bias"].size)
    assert 8 * (short - dense) / few < 65


def test_a_site_that_is_not_finite_sends_it():
    up = Uplink(jaxcomp.visible(0.001), GlobalModel())
    plan, send = sender(up, jnp.dtype("float32"))
    params, moved = updates("float32", 0)
    moved["a"][3, 4] = np.inf
    message = send(noise.raw(0), moved, uplink.init(up, params), params)
    assert not bool(message.sound)
    assert np.isinf(np.asarray(trees.assemble(plan, *message.sent)["a"])[3, 4])


def test_wrong_use_of_visible_names_what_works():
    codec, ziv = jaxcomp.visible(), jaxcomp.wyner_ziv()
    for side in (jaxcomp.federated.NoSide(), jaxcomp.federated.LastMean()):
        with pytest.raises(ValueError, match=r"`side` must be jaxcomp.federated.GlobalModel\(\)"):
            Uplink(codec, side)
    with pytest.raises(ValueError, match="`side` must give the server guesses"):
        Uplink(ziv, GlobalModel())
    with pytest.raises(ValueError, match="`side` must be NoSide"):
        jaxcomp.federated.pulseloco(jaxcomp.top_k(), lambda w, x: jnp.sum(w * x))
    with pytest.raises(ValueError, match="needs nothing beside its input"):
        jaxcomp.codecs.Clipped(codec=codec)
    with pytest.raises(ValueError, match="`fraction`"):
        Visible(0.0)
