"""A compiled program moves the bytes that `wire_bytes` returns."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.suite import CODECS, COMMON, EVERY, FEW, VARIANTS, few_or_all, label

import jaxcomp
from jaxcomp import testing
from jaxcomp.codecs.adaptive import AdaptiveQuantizer
from jaxcomp.layout import trees
from jaxcomp.reducers import choose
from jaxcomp.wire import buffer, cost as wire_cost

LAYERS = 50


def layers(number):
    return {
        f"layer{i:02d}": {
            "kernel": jnp.ones((64, 128 if i % 2 else 96)) * 0.01,
            "bias": jnp.zeros(128 if i % 2 else 96),
        }
        for i in range(number)
    }


PARAMS, FEWER = layers(LAYERS), layers(4)


def loss(params, x):
    return sum(jnp.mean((x @ p["kernel"] + p["bias"]) ** 2) for p in params.values())


def compiled_step(reducer, mesh, params=PARAMS, width=64):
    tx = optax.chain(jaxcomp.compressed_mean(reducer, "data"), optax.sgd(0.1))

    def step(params, state, batch):
        grads = jax.grad(loss)(jaxcomp.local(params, "data"), batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    run = jaxcomp.data_parallel(step, mesh, "data")
    state = jax.eval_shape(lambda: jaxcomp.init_state(tx, params, mesh, "data"))
    lowered = run.lower(params, state, jax.ShapeDtypeStruct((16, width), jnp.float32))
    # What machine code comes of it does not matter to what it sends.
    return lowered.compile({"xla_backend_optimization_level": 0})


def ops(compiled):
    return re.findall(r" (all-gather|all-reduce|all-to-all)(?:-start)?\(", compiled.as_text())


@pytest.mark.core("Q(Sign,MeanAbs,Nearest,b=512)")
@pytest.mark.parametrize("codec", few_or_all(FEW[1:], CODECS), ids=label)
def test_the_program_moves_what_wire_bytes_says(codec, mesh):
    """On a model of many leaves: one collective a direction, and one for what is dense."""
    compiled = compiled_step(codec, mesh, FEWER)
    moved = jaxcomp.collective_bytes(compiled)
    reducer = jaxcomp.choose_reducer(codec, FEWER, workers=8)
    directions = {
        "Gather": ["all-gather"],
        "TwoShot": ["all-gather", "all-to-all"],
        "Psum": ["all-reduce"],
    }[type(reducer).__name__]
    scalars = 8  # An agreed scale or a norm may go beside.
    # Adaptive levels are agreed on in each: now and then, in a branch, two histograms and a norm.
    adapts = isinstance(codec, AdaptiveQuantizer)
    update = len(directions) * [8 * 4, 2 * 512 * 4, 4] if adapts else []
    beside = sum(wire_cost.ring_bytes(size, 8) for size in update) + scalars
    assert abs(sum(moved.values()) - jaxcomp.wire_bytes(reducer, FEWER, workers=8)) <= beside
    others = [op for op in ops(compiled) if op != "all-reduce"]  # XLA joins those.
    assert sorted(others) == [op for op in directions if op != "all-reduce"]
    kernels = {k: v["kernel"] for k, v in FEWER.items()}
    if directions == ["all-gather"]:
        assert moved["all-gather"] == 7 * jaxcomp.wire_bytes(codec, kernels)


@pytest.mark.core("Q(Uniform(steps=7*")
@pytest.mark.parametrize(
    ("codec", "most"),
    [
        (jaxcomp.qsgd_inf(bits=4, bucket_size=512), 4.1),
        (jaxcomp.sign(), 1.1),
        (jaxcomp.terngrad(), 2.05),
    ],
    ids=label,
)
def test_bits_an_element(codec, most, mesh):
    """On a model of 100 leaves, which is two collectives all the same."""
    elements = sum(v["kernel"].size for v in PARAMS.values())
    compiled = compiled_step(jaxcomp.Gather(choose.link_or_reducer(codec)), mesh)
    assert sorted(ops(compiled)) == ["all-gather", "all-reduce"]
    moved = jaxcomp.collective_bytes(compiled)["all-gather"]
    assert 8 * moved / 7 / elements <= most


def test_agreed_scales_are_counted(mesh):
    gather = jaxcomp.Gather(jaxcomp.terngrad(shared=True))
    alone = jaxcomp.Gather(jaxcomp.terngrad())
    said = jaxcomp.wire_bytes(gather, PARAMS, workers=8)
    assert said - jaxcomp.wire_bytes(alone, PARAMS, workers=8) == 2 * 7 * 4 * LAYERS // 8
    moved = sum(jaxcomp.collective_bytes(compiled_step(gather, mesh)).values())
    assert abs(moved - said) <= 2


def test_every_bucket_agrees_on_one_scale():
    codec = jaxcomp.terngrad(shared=True, bucket_size=16)
    for buckets in (1, 2, 5):
        batches = trees.layout(codec, jnp.ones(16 * buckets)).batches
        for workers in (1, 8):
            assert wire_cost.agreed_bytes(batches, workers) == wire_cost.ring(4 * buckets, workers)


def test_dense_costs_what_pmean_costs(mesh):
    ours = compiled_step(jaxcomp.Dense(), mesh)

    def step(params, batch):
        grads = jax.lax.pmean(jax.grad(loss)(jaxcomp.local(params, "data"), batch), "data")
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    run = jaxcomp.data_parallel(step, mesh, "data")
    hand = run.lower(PARAMS, jax.ShapeDtypeStruct((16, 64), jnp.float32)).compile()
    assert jaxcomp.collective_bytes(ours) == jaxcomp.collective_bytes(hand)
    assert ops(ours) == ops(hand)
    assert sum(jaxcomp.collective_bytes(hand).values()) == jaxcomp.wire_bytes(
        jaxcomp.Dense(), PARAMS, workers=8
    )


def test_wire_bytes_in_both_senses():
    like = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    codec = jaxcomp.qsgd_inf(bits=4, bucket_size=512)
    assert jaxcomp.wire_bytes(codec, like) == 1024 * (256 + 4)
    for workers in (1, 2, 3, 8):
        got = jaxcomp.wire_bytes(jaxcomp.Gather(codec), like, workers=workers)
        assert got == (workers - 1) * 1024 * 260
    assert jaxcomp.wire_bytes(jaxcomp.Dense(), like, workers=1) == 0
    assert jaxcomp.wire_bytes(jaxcomp.Dense("bfloat16"), like, workers=2) == 2 * like.size
    with pytest.raises(ValueError, match="`workers` must be a positive integer for a reducer"):
        jaxcomp.wire_bytes(jaxcomp.Dense(), like)
    with pytest.raises(ValueError, match="`workers` must be a positive integer, or a tuple"):
        jaxcomp.wire_bytes(jaxcomp.Dense(), like, workers=0)
    with pytest.raises(ValueError, match="must be a codec, a Policy, a Link or a reducer, got 3"):
        jaxcomp.wire_bytes(3, like)


@pytest.mark.core("Cast(dtype='float16',b=512)0")
@pytest.mark.parametrize("codec", few_or_all(FEW + VARIANTS[::3], EVERY), ids=label)
def test_payload_is_what_is_counted(codec):
    testing.assert_wire_bytes(codec, jax.ShapeDtypeStruct((123, 45), jnp.float32))
    if codec in COMMON[::3]:
        testing.assert_wire_bytes(codec, jax.ShapeDtypeStruct((1000,), jnp.bfloat16))


@pytest.mark.core("float32")
@pytest.mark.parametrize(
    "dtype",
    [jnp.float32, jnp.bfloat16, jnp.uint8, jnp.int8, jnp.bool_, jnp.float8_e4m3fn, jnp.int32],
    ids=lambda d: jnp.dtype(d).name,
)
def test_fuse_and_split_are_inverse(dtype):
    rng = np.random.default_rng(0)
    tree = {
        "a": jnp.asarray(rng.integers(0, 2, (3, 5)), dtype),
        "b": (jnp.asarray(rng.integers(0, 100, 7)).astype(dtype), jnp.ones(2)),
    }
    fused = buffer.fuse(tree)
    assert fused.dtype == jnp.uint32
    assert fused.nbytes == buffer.fused_bytes(tree)
    back = buffer.split(fused, tree)
    stacked = buffer.split(jnp.stack([fused] * 3), tree)
    for got, many, want in zip(*map(jax.tree.leaves, (back, stacked, tree)), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
        np.testing.assert_array_equal(np.asarray(many[2]), np.asarray(want))
    with pytest.raises(ValueError, match="`buffer` must have"):
        buffer.split(fused[:-1], tree)


HEADER = "HloModule m, is_scheduled=true, replica_count=1, num_partitions=4\n"


@pytest.mark.parametrize(
    ("line", "op", "size"),
    [
        (
            "%g = u32[4,100]{1,0} all-gather(%x), replica_groups=[1,4]<=[4], dimensions={0}",
            "all-gather",
            3 * 400,
        ),
        (  # A TPU pads the minor dimension to 128 lanes: 64 words cost 128.
            "%g = u32[4,64,64]{2,1,0:T(8,128)} all-gather(%x), replica_groups={{0,1,2,3}}",
            "all-gather",
            3 * 64 * 128 * 4,
        ),
        (  # Scales as a column cost 128 times their size.
            "%g = f32[4,64,1]{2,1,0:T(8,128)S(1)} all-gather(%x), replica_groups={{0,1,2,3}}",
            "all-gather",
            3 * 64 * 128 * 4,
        ),
        (
            "%r = (f32[100]{0}, bf16[28]{0}) all-reduce(%x, %y), replica_groups={{0,1},{2,3}}",
            "all-reduce",
            456,
        ),
        (
            "%s = (u8[8]{0}, u8[32]{0}) all-gather-start(%x), replica_groups={{0,1,2,3}}",
            "all-gather",
            24,
        ),
        (
            "%t = (u8[8]{0}, u8[8]{0}, u8[8]{0}, u8[8]{0}) all-to-all(%a, %b, %c, %d)",
            "all-to-all",
            24,
        ),
        ("%p = f32[10]{0} collective-permute(%x)", "collective-permute", 40),
        (
            "%a = (f32[1000]{0:T(1024)}, f32[512]{0:T(512)}) all-reduce(%x, %y)",
            "all-reduce",
            6 * (1024 + 512),
        ),
        (
            "%b = (u32[64]{0:T(256)}, u32[256]{0:T(256)}) all-gather-start(%x)",
            "all-gather",
            768,
        ),
        (
            "%c = ((f32[10]{0}, f32[20]{0}), (f32[40]{0}, f32[80]{0})) all-gather-start(%x, %y)",
            "all-gather",
            360,
        ),
        (
            "%d = (f32[1000]{0}, f32[1000]{0}, u32[], u32[]) collective-permute-start(%x)",
            "collective-permute",
            4000,
        ),
        ("%q = f32[10]{0} reduce-scatter(%x), replica_groups=[1,4]<=[4]", "reduce-scatter", 120),
    ],
    ids=lambda v: v if isinstance(v, str) and len(v) < 20 else None,
)
def test_collectives_are_read_in_their_physical_layout(line, op, size):
    assert jaxcomp.collective_bytes(HEADER + "  " + line + "\n") == {op: size}


def test_a_collective_that_is_carried_through_fusions_counts_once():
    """As a TPU does it, which repeats the collective in each; other loops have other chains."""
    line = (
        "  %g.{0} = u32[4096]{{0:T(1024)}} all-gather(%p.{0}), channel_id=3, "
        'replica_groups={{{{0,1,2,3}}}}, frontend_attributes={{chain_id="{1}"}}\n'
    )
    other = "  %h = u32[4096]{0} all-gather(%q), channel_id=4, replica_groups={{0,1,2,3}}\n"
    one = 3 * 4096
    text = HEADER + line.format(1, 0) + line.format(2, 0) + other
    assert jaxcomp.collective_bytes(text) == {"all-gather": 2 * one}
    assert jaxcomp.collective_bytes(text + line.format(3, 1)) == {"all-gather": 3 * one}


def test_describe_says_what_is_dense_and_why():
    like = {
        "net": {"kernel": jnp.zeros((64, 64)), "bias": jnp.zeros(64), "tiny": jnp.zeros((2, 3))}
    }
    table = jaxcomp.describe(jaxcomp.sign(), like, workers=8)
    by_path = {line.path: line for line in table.lines}
    assert by_path["net/bias"].codec == "dense float32"
    assert by_path["net/bias"].reason == "1-D, below min_ndim=2"
    assert by_path["net/tiny"].reason == "below min_size=1024"
    assert by_path["net/kernel"].bits_per_element == 1.0625
    assert "Residual" in table.picked
    text = str(table)
    assert "net/kernel" in text
    assert "less than a dense all-reduce" in text
    assert table.link_bytes == 2 * 7 * 68 + wire_cost.ring_bytes(4 * 70, 8)
    more = jaxcomp.describe(jaxcomp.Gather(jaxcomp.cast("float32")), like, workers=8)
    assert "MORE than" in str(more)
    assert "no leaf is compressed" in str(jaxcomp.describe(jaxcomp.sign(), {"b": jnp.zeros(5)}))


BRANCHES = """HloModule step, num_partitions=8

%region_0 (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %p.0 = f32[8]{0} collective-permute(%a), source_target_pairs={{0,1},{1,0},{2,2},{3,3}}
}

%inner (b: f32[8]) -> f32[16] {
  ROOT %g = f32[64]{0} all-gather(%b), replica_groups=[1,8]<=[8]
}

%region_1 (b: f32[8]) -> f32[8] {
  %w = f32[64]{0} while(%b), condition=%never, body=%inner
  ROOT %p.1 = f32[8]{0} collective-permute(%b), source_target_pairs={{0,1},{1,0}}
}

%region_2 (c: f32[8]) -> f32[8] {
  ROOT %r = f32[8]{0} all-reduce(%c), replica_groups=[1,8]<=[8], to_apply=%add
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %first = f32[8]{0} all-reduce(%x), replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %s = f32[8]{0} conditional(%i, %x, %x, %x), BRANCHES
}
"""


def test_of_the_branches_of_a_conditional_the_one_that_sends_most_counts():
    named = "branch_computations={%region_0, %region_1, %region_2}"
    own = {"all-reduce": 2 * 7 * 32 // 8}
    within = {"all-gather": 7 * 32, "collective-permute": 2 * 32 // 8}
    assert jaxcomp.collective_bytes(BRANCHES.replace("BRANCHES", named)) == own | within
    two = "true_computation=%region_0, false_computation=%region_2"
    both = jaxcomp.collective_bytes(BRANCHES.replace("BRANCHES", two))
    assert both == {"all-reduce": 2 * own["all-reduce"]}
