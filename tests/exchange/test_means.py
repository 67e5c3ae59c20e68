"""A mean that can be represented is finite, and halves travel as halves."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.suite import few_or_all, slow
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.exchange import fast_axis, legs
from jaxcomp.layout import trees
from jaxcomp.numerics import noise
from jaxcomp.reducers import choose
from jaxcomp.types import AxisName

SIGN, QSGD = jaxcomp.sign(), jaxcomp.qsgd_inf(bits=4)
LARGE = {"float16": 6e4, "bfloat16": 8e37, "float32": 8e37}
"""A sum of five overflows. (The step of a code is at most 2¹²⁶, 8.5e37.)"""
WEIGHTS = np.array([8, 0, 0, 0, 0, 0, 0, 0], np.float32)


def kept(codec):
    """A biased codec with a residual."""
    return jaxcomp.Link(codec, jaxcomp.Residual())


REDUCERS = {
    "gathered signs": jaxcomp.Gather(kept(SIGN)),
    "gathered codes": jaxcomp.Gather(QSGD),
    "gathered sparse": jaxcomp.Gather(kept(jaxcomp.top_k(fraction=1.0))),
    "two shots": jaxcomp.TwoShot(QSGD, QSGD),
    "added": jaxcomp.Psum(jaxcomp.codecs.Identity()),
    "added integers": jaxcomp.Psum(jaxcomp.terngrad(clip=None, shared=True)),
}
MORE_REDUCERS = {
    "gathered rotated": jaxcomp.Gather(jaxcomp.eden(4, 512)),
    "gathered casts": jaxcomp.Gather(kept(jaxcomp.cast("bfloat16"))),
    "two shots of signs": jaxcomp.TwoShot(kept(SIGN), kept(SIGN)),
    "chosen": jaxcomp.Link(QSGD),
    "added samples": jaxcomp.Psum(jaxcomp.random_k(fraction=1.0)),
}


def mean_of(reducer, weighted, axis_name: AxisName = "data"):
    """The mean of trees with a leading axis of workers."""

    def run(grads, weight):
        plan = choose.plan(reducer, grads, axis_name)
        message, dense = trees.stacks(plan.layout, grads)
        message = fast_axis.scatter(plan, message)
        weight = weight if weighted else None
        state = legs.init(plan)
        key = fast_axis.fold_key(plan, noise.raw(1))
        got = legs.collect(plan, key, message, state, weight)
        mean, _ = legs.spread(plan, key, got.value, got.state)
        mean = fast_axis.gather(plan, mean)
        return trees.assemble(plan.layout, mean, plan.dense_mean(dense, weight))

    return run


def large(*lead, names=LARGE):
    """The same large number everywhere, in leaves that are compressed and in dense ones."""
    tree = {}
    for name in names:
        tree[name] = jnp.full((*lead, 32, 40), LARGE[name], name)
        if name == "float16":  # A float32 sum is the all-reduce's own, and ends at the largest.
            tree[f"{name} dense"] = jnp.full((*lead, 37), LARGE[name], name)
    return tree


def assert_large(mean, rtol=0.15):
    for name, leaf in mean.items():
        want = LARGE[name.removesuffix(" dense")]
        np.testing.assert_allclose(np.asarray(leaf, np.float64), want, rtol=rtol, err_msg=name)


@pytest.mark.core("added")
@pytest.mark.parametrize("name", few_or_all(REDUCERS, MORE_REDUCERS))
def test_a_mean_that_can_be_represented_is_finite(name):
    """A mean of eight workers, each with nearly the largest number of its dtype."""
    reducer = (REDUCERS | MORE_REDUCERS)[name]
    run = jax.vmap(mean_of(reducer, False), in_axes=(0, None), axis_name="data")
    assert_large(jax.jit(run)(large(8), jnp.ones(8)))


@pytest.mark.core("added")
@pytest.mark.parametrize("name", ["two shots", "added", slow("gathered codes")])
def test_a_weighted_mean_that_can_be_represented_is_finite(name):
    """The weight times the number is more than the dtype holds, and the mean is not."""
    run = jax.vmap(mean_of(REDUCERS[name], True), axis_name="data")
    mean = jax.jit(run)(large(8), jnp.asarray(WEIGHTS))
    assert_large(mean)
    few = large(8, names=["float16"])
    few["float16"] = few["float16"].at[1:].set(jnp.nan)  # Of weight zero.
    assert_large(jax.jit(run)(few, jnp.asarray(WEIGHTS)))


@pytest.mark.parametrize("inner", [jaxcomp.Dense(), slow(jaxcomp.Dense("bfloat16"))], ids=repr)
def test_means_over_two_levels_are_finite(inner):
    reducer = jaxcomp.Hierarchical(inner, jaxcomp.Gather(kept(SIGN)))
    run = mean_of(reducer, False, ("slow", "fast"))
    run = jax.vmap(run, in_axes=(0, None), axis_name="fast")
    run = jax.vmap(run, in_axes=(0, None), axis_name="slow")
    assert_large(jax.jit(run)(large(2, 4), jnp.ones(8)))


@pytest.mark.parametrize("workers", [3, 8])
def test_dense_means_and_their_limit(workers):
    """Means of 16-bit dtypes are always finite; those of float32 if the sum is, as documented."""
    run = jax.vmap(mean_of(jaxcomp.Dense(), False), in_axes=(0, None), axis_name="data")
    narrow = large(workers, names=["float16", "bfloat16"])
    share = float(np.finfo(np.float32).max) / workers
    mean = jax.jit(run)(
        narrow
        | {
            "float32": jnp.full((workers, 9), 0.999 * share),
            "more": jnp.full((workers, 9), 1.001 * share),
        },
        jnp.ones(workers),
    )
    assert np.isinf(mean.pop("more")).all()
    assert np.isfinite(mean.pop("float32")).all()
    assert_large(mean, rtol=4e-3)


def test_low_rank_means_and_their_limit():
    """Products of float32 matrices must be finite; those of float16 always are."""
    reducer = jaxcomp.PowerIteration(
        rank=1, rules=(jaxcomp.Rule("*", jaxcomp.codecs.LowRank(rank=1, min_ratio=0)),)
    )
    run = jax.vmap(mean_of(reducer, False), in_axes=(0, None), axis_name="data")
    tree = large(8, names=["float16"]) | {"float32": jnp.full((8, 32, 40), 1e36)}
    mean = jax.jit(run)(tree, jnp.ones(8))
    np.testing.assert_allclose(mean.pop("float32"), 1e36, rtol=1e-4)
    assert_large(mean)


SENT = {
    "dense as bfloat16": (jaxcomp.Dense("bfloat16"), "float32"),
    "dense as float16": (jaxcomp.Dense("float16"), "float32"),
    "bfloat16 as it is": (jaxcomp.Dense(), "bfloat16"),
    "float16 as it is": (jaxcomp.Dense(), "float16"),
    "beside codes": (jaxcomp.Gather(QSGD), "bfloat16"),
    "added": (jaxcomp.Psum(jaxcomp.codecs.Identity()), "float16"),
    "factors": (jaxcomp.PowerIteration(rank=1, factors="bfloat16"), "float32"),
}


@pytest.mark.core("dense as bfloat16-2")
@pytest.mark.parametrize(
    ("name", "workers"),
    few_or_all(
        [(name, n) for name in SENT for n in (2, 8) if n == 8 or "dense" in name],
        itertools.product(SENT, (2, 8)),
    ),
)
def test_halves_travel_as_halves(name, workers):
    """The compiled program sends what `wire_bytes` says, and no float of 16 bits as 32."""
    reducer, dtype = SENT[name]
    mesh = jax.make_mesh(
        (workers,),
        ("data",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:workers],
    )
    like = {"w": jnp.zeros((40, 65), dtype), "b": jnp.zeros(523, dtype), "c": jnp.zeros(7)}

    def step(grads, weight):
        return mean_of(reducer, False)(jax.tree.map(lambda x: x[0], grads), weight)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P("data"), P()), out_specs=P())
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((workers, *x.shape), x.dtype), like)
    program = jax.jit(mapped).lower(stacked, jax.ShapeDtypeStruct((), jnp.float32)).compile()
    moved = sum(jaxcomp.collective_bytes(program).values())
    said = jaxcomp.wire_bytes(reducer, like, workers=workers)
    assert abs(moved - said) <= 2
    assert jaxcomp.describe(reducer, like, workers=workers).link_bytes == said
    if isinstance(reducer, jaxcomp.Dense):
        halves = jaxcomp.wire_bytes(jaxcomp.Dense(), jax.tree.map(jnp.float16, like), workers)
        assert said - halves <= (0 if reducer.dtype else 2 * 7 * 2)
