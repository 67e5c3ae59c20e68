"""ALQ and AMQ: the gain of adapted levels, when they change, and agreement between workers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.suite import KEY, few_or_all, law, nmse

import jaxcomp
from jaxcomp.layout import batches as batches_, trees
from jaxcomp.numerics import noise


def adapted(codec, x, turns=2):
    """The codec's error after the workers have agreed on levels for the input."""
    plan = trees.layout(codec, x)
    (batch,), (rows,) = plan.batches, trees.stacks(plan, x)[0]
    count, key = batch.counts(), batches_.batch_key(KEY, 0, 0)

    def run(rows):
        state = codec.init(batch.like)
        for _ in range(turns):
            state = codec.agree(key, rows, count, state, "data")
        payload, _ = codec.encode(key, rows, count, state)
        return codec.decode(key, payload, batch.like, codec.side(state)), state

    y, state = jax.jit(jax.vmap(run, axis_name="data"))(jnp.stack([rows, -rows]))
    np.testing.assert_array_equal(state.levels[0], state.levels[1])
    error = (y[0].reshape(-1)[: x.size] - x) / jnp.sqrt(jnp.sum(x * x))
    return float(jnp.sum(error**2))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "bits"),
    few_or_all([("gaussian", 4)], itertools.product(("gaussian", "heavy", "laplace"), (3, 4))),
)
def test_adaptive_levels_beat_fixed_ones(name, bits):
    """ALQ < AMQ < NUQSGD < QSGD."""
    x, every = law(name, 2**18), {"every": 2}
    errors = [
        adapted(jaxcomp.alq(bits, **every), x),
        adapted(jaxcomp.amq(bits, **every), x),
        nmse(jaxcomp.nuqsgd(bits), x),
        nmse(jaxcomp.qsgd(bits), x),
    ]
    assert errors == sorted(errors), errors
    if name == "gaussian":
        np.testing.assert_allclose(errors[0], {3: 0.2922, 4: 0.0363}[bits], rtol=0.03)


@pytest.mark.full
def test_adaptive_levels_follow_their_schedule():
    codec = jaxcomp.alq(3, every=3)
    x = law("heavy", 512 * 8).reshape(8, 512)
    count, key = jnp.full(8, 512), batches_.batch_key(KEY, 0, 0)
    agree = jax.jit(jax.vmap(lambda x, s: codec.agree(key, x, count, s, "data"), axis_name="data"))
    state = jax.tree.map(lambda leaf: leaf[None], codec.init(x))
    seen = []
    for turn in range(8):
        state = agree(x[None] ** (turn + 1), state)
        seen.append(tuple(np.asarray(state.levels[0])))
    changes = [i for i in range(1, 8) if seen[i] != seen[i - 1]]
    assert changes == [1, 4, 7]
    assert int(state.step[0]) == 8


@pytest.mark.core("pooled amq")
@pytest.mark.parametrize(
    "codec",
    [jaxcomp.alq(3, every=2), jaxcomp.amq(3, every=2, pooled=True)],
    ids=["alq", "pooled amq"],
)
def test_levels_are_those_of_what_all_workers_saw(codec):
    """Histograms add up over workers and turns, by squared norm unless pooled; no bias after."""
    turns, half, size = 2, 4, 512
    draws = (np.asarray(law(name, turns * half * size)) for name in ("gaussian", "heavy"))
    draws = (x.reshape(turns, half, size) for x in draws)
    gaussian, heavy = (x / np.linalg.norm(x, axis=2, keepdims=True) for x in draws)
    none = np.zeros_like(gaussian)

    def rows(first, second):  # Those of one worker; zeros are not counted.
        return np.concatenate([first, second], axis=1)

    cases = {
        "apart": (rows(gaussian, none), rows(none, heavy)),
        "together": (rows(gaussian, heavy), rows(none, none)),
        "in turns": (np.stack([gaussian, heavy]).reshape(turns, -1, size), rows(none, none)),
        "gaussian": (rows(gaussian, none), rows(none, none)),
        "heavy": (rows(none, heavy), rows(none, none)),
        "long": (rows(gaussian, none), rows(none, 64 * heavy)),
    }
    like, count = jax.ShapeDtypeStruct((2 * half, size), jnp.float32), jnp.full(2 * half, size)

    def run(seen):
        def turn(state, x):
            key = batches_.batch_key(KEY, 0, 0)
            return codec.agree(key, x, count, state, "data"), None

        return jax.lax.scan(turn, codec.init(like), seen)[0].levels

    all_of_them = np.stack([np.stack(seen) for seen in cases.values()])
    found = np.asarray(jax.jit(jax.vmap(jax.vmap(run, axis_name="data")))(all_of_them))
    np.testing.assert_array_equal(found[:, 0], found[:, 1])
    levels = dict(zip(cases, found[:, 0], strict=True))

    def same(one, other):  # Sums are in another order, and a level is rounded.
        np.testing.assert_allclose(levels[one], levels[other], rtol=5e-3, atol=1)

    same("apart", "together")
    same("in turns", "together")
    same("long", "together" if codec.pooled else "heavy")
    # Without a sum over workers the largest level of any worker would win.
    alone = levels["gaussian"], levels["heavy"]
    for other in (*alone, np.maximum(*alone)):
        assert np.abs(other[1:-1] / levels["together"][1:-1] - 1).max() > 0.03

    state = codec.init(like)._replace(levels=jnp.asarray(levels["apart"]))
    x, times = jnp.asarray(rows(gaussian, heavy)[0]), 1024

    def draw(number):
        key = batches_.batch_key(noise.fold(KEY, number), 0, 0)
        payload, _ = codec.encode(key, x, count, state)
        return codec.decode(key, payload, like, codec.side(state))

    y = np.asarray(jax.jit(jax.vmap(draw))(jnp.arange(times, dtype=jnp.uint32)), np.float64)
    variance = ((y - np.asarray(x)) ** 2).mean(0).sum()
    assert ((y.mean(0) - np.asarray(x)) ** 2).sum() < 1.5 * variance / times
