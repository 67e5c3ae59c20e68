"""Another number of workers: nothing unsent is lost, or the move is refused."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import methods, resizing
from helpers.methods import GOSSIP, LOCAL, METHODS, build, everywhere
from helpers.resizing import AXIS, PARAMS, check_moved, filled, shapes
from helpers.suite import CODECS, COMMON, few_or_all, label

import jaxcomp
from jaxcomp.backend import axes
from jaxcomp.layout import trees
from jaxcomp.mesh import per_worker, pmapped
from jaxcomp.reducers import choose

MOVES = [(8, 1), (8, 3), (8, 4), (1, 8)]
SIGN = everywhere(jaxcomp.sign(bucket_size=64))
TOP = everywhere(jaxcomp.top_k(fraction=0.1, bucket_size=64))
QSGD = everywhere(jaxcomp.qsgd(bits=2, bucket_size=64))
SIDCO = everywhere(jaxcomp.sidco(fraction=0.1, bucket_size=64))
ADAPTIVE = everywhere(jaxcomp.alq(bits=3, bucket_size=64))
ECSQ = everywhere(jaxcomp.ecsq(2, 4096))
HALF = jaxcomp.sign(bucket_size=20)
"""Does not divide the buckets of the uplink: four cuts of each, the last one padded."""
FEEDBACKS = {
    "residual": jaxcomp.Residual(),
    "decayed": jaxcomp.Residual(decay=0.5),
    "bfloat16": jaxcomp.Residual(dtype="bfloat16"),
    "int8": jaxcomp.Residual(dtype="int8"),
    "momentum": jaxcomp.MomentumCorrection(masking=False),
    "ef21": jaxcomp.Shift(),
    "wide ef21": jaxcomp.Shift(dtype="float32"),
}
REDUCERS = {
    "chosen": lambda link: link,
    "gather": jaxcomp.Gather,
    "two shots": jaxcomp.TwoShot,
    "both ways": lambda link: jaxcomp.TwoShot(link, link),
    "recut": lambda link: jaxcomp.TwoShot(link, jaxcomp.Link(HALF, jaxcomp.Residual())),
    "mirrored": lambda link: jaxcomp.TwoShot(link, jaxcomp.Link(HALF, jaxcomp.Shift())),
    "phases": lambda link: jaxcomp.ReducerSchedule(((0, link), (5, link))),
    "phases of shots": lambda link: jaxcomp.ReducerSchedule(((0, jaxcomp.TwoShot(link, link)),)),
}


def mean(codec, **settings):
    return jaxcomp.compressed_mean(codec, AXIS, key=3, **settings)


def twice(codec):
    """Both ways, with a residual for each."""
    link = jaxcomp.Link(codec, jaxcomp.Residual())
    return jaxcomp.TwoShot(link, link)


RESIDUAL = jaxcomp.Link(SIGN, jaxcomp.Residual())
COMPOSITIONS = {
    **{
        f"{reducer}, {feedback}": lambda r=make, f=memory: mean(r(jaxcomp.Link(SIGN, f)))
        for (reducer, make), (feedback, memory) in itertools.product(
            REDUCERS.items(), FEEDBACKS.items()
        )
    },
    "diana": lambda: mean(jaxcomp.Link(QSGD, jaxcomp.Shift(step=0.02))),
    "sidco": lambda: mean(twice(SIDCO)),
    "sidco by default": lambda: mean(SIDCO),
    "levels": lambda: mean(jaxcomp.TwoShot(ADAPTIVE, ADAPTIVE.codec)),
    "tables": lambda: mean(twice(ECSQ)),
    "sum": lambda: mean(jaxcomp.Psum(everywhere(jaxcomp.int_sgd(bucket_size=64)))),
    "vote": lambda: mean(jaxcomp.Vote(everywhere(jaxcomp.codecs.Ballot()))),
    "credible": lambda: mean(jaxcomp.Robust(QSGD, jaxcomp.aggregates.Credible())),
    "low rank": lambda: mean(jaxcomp.PowerIteration(rank=2)),
    "low rank in turns": lambda: mean(jaxcomp.PowerIteration(rank=2, alternate=True)),
    "coded factors": lambda: mean(jaxcomp.PowerIteration(rank=2, factors=jaxcomp.sidco(0.1, 64))),
    "gated": lambda: mean(RESIDUAL, gate=jaxcomp.gates.Every(2), stats=True),
    "gated shifts": lambda: mean(
        jaxcomp.Link(SIGN, jaxcomp.Shift()), gate=jaxcomp.gates.Bernoulli(0.5)
    ),
    "before": lambda: optax.chain(jaxcomp.per_worker(optax.trace(0.9)), mean(TOP), optax.adam(0.1)),
    "accumulated": lambda: jaxcomp.accumulate(
        optax.chain(mean(SIGN), optax.adam(0.1)), AXIS, every=4
    ),
    "skipping": lambda: jaxcomp.skip_nonfinite(optax.chain(mean(SIGN), optax.sgd(0.1))),
    "displaced": lambda: jaxcomp.algorithms.displaced_mean(SIGN, AXIS, learning_rate=0.1),
    "local steps": lambda: jaxcomp.local_updates(
        optax.adam(0.1), optax.sgd(0.7), AXIS, every=2, reducer=RESIDUAL, keep_inner=False
    ),
    "own models": lambda: jaxcomp.algorithms.preserved_center(QSGD, AXIS, step=0.02, own=True),
}
METHOD = {f"{name} in buckets": lambda name=name: bucketed(name) for name in METHODS}
WHOLE = {
    "whole": lambda: mean(twice(everywhere(jaxcomp.top_k(0.1)))),
    **{name: lambda name=name: build(name) for name in METHODS},
}
CUT = [
    "whole",
    "ef21_bc",
    "double_squeeze",
    "neolithic",
    "cd_adam",
    "one_bit_adam",
    "zero_one_adam",
]
"""Of those, two shots of leaves that are taken whole."""
EVERY = {
    **COMPOSITIONS,
    **{name: lambda name=name: build(name) for name in GOSSIP},
    **METHOD,
    **{name: make for name, make in WHOLE.items() if name not in CUT},
}
RARE = ("decayed", "bfloat16", "wide ef21", "sidco by default", "levels")


def cases():
    """All compositions with four moves each, of which by turns two are quick."""
    alike = {f"{name}{form}" for name in LOCAL for form in ("", " in buckets")}  # "local steps".
    common = [name for name in EVERY if not name.endswith(RARE) and name not in alike]
    for name in EVERY:
        gathers = [(8, 2), (2, 8)] if name == "chosen, residual" else []  # Two, by default.
        quick = []
        if name in common and ("int8" not in name or name.startswith("recut")):
            quick = [*MOVES[common.index(name) % 2 :: 2], *gathers]
        for move in [*MOVES, *gathers]:
            marks = () if move in quick else pytest.mark.slow
            yield pytest.param(name, *move, id=f"{name}, {move[0]} to {move[1]}", marks=marks)


def bucketed(name):
    """A method with its codec, in buckets that workers can share."""
    codec = METHODS[name][1]
    if codec is None or codec.codec.bucket_size is not None:
        return build(name)
    return build(name, SIGN if codec is methods.SIGN else TOP)


def moved(tx, state, workers):
    """The state for other workers, in the shapes that theirs has from the start."""
    found = jaxcomp.resize_workers(tx, state, PARAMS, workers)
    jax.tree.map(check_alike, found, shapes(tx, (workers,)))
    return found


def check_alike(x, like):
    assert (x.shape, x.dtype) == (like.shape, like.dtype)


def random_state(tx, *sizes):
    """A state of so many workers, and the shapes of that of one."""
    one = resizing.all_rows(tx)
    return filled(shapes(tx, sizes), one), one


@pytest.mark.core("chosen, residual, 8 to 1")
@pytest.mark.filterwarnings("ignore:compressed_mean compresses")
@pytest.mark.parametrize(("name", "workers", "others"), list(cases()))
def test_nothing_unsent_is_lost(name, workers, others):
    """Mean residuals, shifts and their mirrors, shares and counters, whatever is composed."""
    tx = EVERY[name]()
    state, one = random_state(tx, workers)
    check_moved(state, moved(tx, state, others), one, 5e-2 if "int8" in name else 1e-2)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:compressed_mean compresses")
def test_no_state_that_may_be_copied_to_all_workers_is_taken_for_a_slice():
    """`tx.init` makes it, or says how to; `test_pmapped.py` has slices."""
    made = 0
    for make in (EVERY | WHOLE).values():
        tx = make()
        pmapped.check_rows(shapes(tx, (8,)))
        with contextlib.suppress(ValueError):
            pmapped.check_rows(jax.eval_shape(tx.init, PARAMS))
            made += 1
            continue
        with pytest.raises(ValueError, match=r"`tx\.init` must know the number of workers"):
            tx.init(PARAMS)
    assert made > len(EVERY) // 2


@pytest.mark.parametrize("codec", few_or_all(COMMON[::3], CODECS), ids=label)
def test_every_recipe_moves(codec):
    """A codec with the feedback of its class and with its own state."""
    tx = mean(jaxcomp.Gather(choose.link_or_reducer(everywhere(codec))))
    state, one = random_state(tx, 8)
    check_moved(state, moved(tx, state, 3), one, 1e-2)


@pytest.mark.parametrize("name", few_or_all(CUT[:2], CUT))
def test_leaves_that_are_taken_whole_are_refused(name):
    """Under two shots the number of workers says what a bucket is."""
    tx = WHOLE[name]()
    for workers, others in MOVES:
        state, _ = random_state(tx, workers)
        assert jaxcomp.resize_workers(tx, state, PARAMS, workers) is state
        with pytest.raises(ValueError, match=r"memory.*takes whole is cut by the number"):
            jaxcomp.resize_workers(tx, state, PARAMS, others)


def test_a_hierarchy_is_refused():
    """Of one bucket a batch, too, where all shapes are those of other workers."""
    params = {"w": jnp.zeros((8, 8))}
    link = jaxcomp.Link(SIGN, jaxcomp.Residual())
    codec = jaxcomp.qsgd(bucket_size=64)
    plain = everywhere(codec)
    for outer in (link, jaxcomp.TwoShot(link, link), jaxcomp.TwoShot(plain, link)):
        reducer = jaxcomp.Hierarchical(jaxcomp.Dense(), outer)
        tx = jaxcomp.compressed_mean(reducer, ("slow", "fast"))
        state = shapes(tx, (2, 4), params)
        for workers in (1, 3, 4):
            with pytest.raises(ValueError, match=r"must not be that of jaxcomp\.Hierarchical"):
                jaxcomp.resize_workers(tx, state, params, workers)
    forgetful = jaxcomp.Hierarchical(jaxcomp.Dense(), jaxcomp.TwoShot(plain, codec))
    tx = jaxcomp.compressed_mean(forgetful, ("slow", "fast"))
    state = tx.init(params)
    assert jax.tree.leaves(jaxcomp.resize_workers(tx, state, params, 4))


def test_a_downlink_with_nowhere_to_go_is_refused():
    with pytest.warns(UserWarning, match="what it drops is lost"):
        link = jaxcomp.Link(SIGN, jaxcomp.NoFeedback())
    tx = mean(link)
    state, one = random_state(tx, 8)
    check_moved(state, moved(tx, state, 3), one)
    with pytest.raises(ValueError, match="no memory to which it can be added"):
        jaxcomp.resize_workers(tx, state, PARAMS, 1)
    even, _ = random_state(mean(twice(SIGN)), 8)
    uneven = jax.tree_util.tree_map_with_path(
        lambda path, x: x[:4] if x.shape[:1] == (8,) and not per_worker.shared_out(path) else x,
        even,
    )
    with pytest.raises(ValueError, match="memory of one number of workers, got leading"):
        jaxcomp.resize_workers(mean(twice(SIGN)), uneven, PARAMS, 3)


@pytest.mark.full
def test_both_ways_go_on_after_a_move():
    """EF21 in both directions, whose replicated mirror was filled up for other workers."""
    tx = mean(jaxcomp.Link(SIGN, jaxcomp.Shift()))
    state, one = random_state(tx, 8)
    after = moved(tx, state, 3)
    grads = jax.tree.map(lambda p: jnp.ones((3, *p.shape), p.dtype), PARAMS)
    mean_of, last = jax.jit(jax.vmap(tx.update, axis_name=AXIS))(grads, inside(after, 3))
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(mean_of))
    down = (
        jax.tree_util.tree_map_with_path(
            lambda path, x: x[:, 0] if per_worker.marked(path) else x[0], last
        )
        .memory.reducer[1]
        .memory
    )
    whole = resizing.counts(one.memory.reducer[1].memory.own)
    batches = trees.layout(SIGN, PARAMS, mixed=True).batches
    for batch, (own, mirror) in zip(batches, resizing.shift(down, whole), strict=True):
        real = np.arange(batch.size) < np.asarray(batch.counts())[:, None]
        np.testing.assert_allclose(own[real], mirror[real], rtol=1e-2)


def inside(state, workers):
    """As `vmap` has it: everything with an axis of workers."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x[:, None] if per_worker.marked(path) else jnp.stack([x] * workers), state
    )


@pytest.mark.full
@pytest.mark.parametrize("codec", [HALF, jaxcomp.sidco(0.1, bucket_size=64)], ids=["cut", "sidco"])
def test_states_of_downlinks_have_their_shapes_from_the_beginning(codec):
    """In shorter buckets than the uplink's, or with a codec that counts for each bucket."""
    tx = mean(jaxcomp.TwoShot(RESIDUAL, jaxcomp.Link(codec, jaxcomp.Residual())))
    with pytest.raises(ValueError, match=r"`tx\.init` must know .* of 'workers', on which"):
        tx.init(PARAMS)
    grads = jax.tree.map(lambda p: jnp.ones((3, *p.shape), p.dtype), PARAMS)
    state = jax.eval_shape(jax.vmap(tx.init, axis_name=AXIS), grads)
    _, after = jax.eval_shape(jax.vmap(tx.update, axis_name=AXIS), grads, state)
    jax.tree.map(check_alike, after, state)


def test_shards_keep_their_own():
    """In a sharded model, the residual of each shard's downlink joins that shard's residuals."""
    mesh = jax.make_mesh((4, 2), (AXIS, "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    lie = jax.NamedSharding(mesh, jax.P("fsdp"))
    params = {"w": jax.device_put(jnp.zeros((40, 33)), lie)}
    tx = mean(SIGN, param_specs={"w": jax.P("fsdp")})
    rng = np.random.default_rng(0)

    def drawn(path, x):
        if not per_worker.marked(path):
            return jnp.zeros(x.shape, x.dtype)
        held = rng.standard_normal((4, *x.shape[1:]))
        if per_worker.shared_out(path):  # Eleven buckets a shard, three a worker and one empty one.
            assert held.shape[:3] == (4, 2, 3)
            held[3, :, 2:] = 0
        return jnp.asarray(held, x.dtype)

    with axes.assume_workers(4):
        like = jax.eval_shape(tx.init, params)
    state = jax.tree_util.tree_map_with_path(drawn, like)
    after = jaxcomp.resize_workers(tx, state, params, 1)
    up, down, kept = (
        s.memory.tree.feedback.tree.residual[0]
        if at == "up"
        else s.memory.tree.reducer[1].memory.tree.residual[0]
        for s, at in ((state, "up"), (state, "down"), (after, "up"))
    )
    assert kept.shape == (1, 2, 11, 64)
    for shard in range(2):
        want = up[:, shard].mean(0) + down[:, shard].reshape(-1, 64)[:11]
        np.testing.assert_allclose(kept[0, shard], want, rtol=1e-5, atol=1e-6)
