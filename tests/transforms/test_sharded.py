"""Sharded models: each device compresses its own shard, and only that crosses the slow axis."""

import math
import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paths import ROOT
from helpers.sharding import (
    EF_SIGN,
    MIXED,
    MIXED_LOCAL,
    MIXED_SHAPES,
    QSGD,
    QUICK,
    REDUCERS,
    SHAPES,
    SPECS,
    TWO,
    crossings,
    draw,
    homes,
    local_likes,
    put,
    simulator,
    stepper,
    zeros,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxcomp
from jaxcomp.backend import axes
from jaxcomp.numerics import noise
from jaxcomp.transforms import sharded


@pytest.mark.core("dense-typed")
@pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])
@pytest.mark.parametrize("name", REDUCERS)
def test_each_shard_crosses_alone(name, check_vma, two):
    """Bytes, groups, the mean and the memory are those of four models of a quarter of the size."""
    reducer, steps = REDUCERS[name], 3
    tx = jaxcomp.compressed_mean(reducer, "dcn", param_specs=SPECS)
    state = jaxcomp.init_state(tx, zeros(SHAPES, two, SPECS), two, "dcn")
    run = stepper(tx, two, check_vma=check_vma)
    drawn = [draw(SHAPES, seed) for seed in range(steps)]
    grads = [put(one, two, SPECS, "dcn") for one in drawn]

    slow, others = crossings(run.lower(state, grads[0]).compile(QUICK))
    local = local_likes(SHAPES, SPECS, TWO)
    assert slow == jaxcomp.wire_bytes(reducer, local, workers=2)
    # Nothing is gathered over fsdp; with memory to guard, one flag is agreed on.
    assert [op for op, *_ in others] == (["all-reduce"] if jax.tree.leaves(state.memory) else [])
    assert all(size == "" for *_, size in others)

    lies = homes(state)
    for one in grads:
        state, mean = run(state, one)
    assert homes(state) == lies
    simulate = simulator(reducer)
    for shard in range(4):

        def part(x, spec, lead, shard=shard):
            at = list(spec).index("fsdp") + lead
            return np.split(x, 4, axis=at)[shard]

        own = [{k: part(x, SPECS[k], 1) for k, x in one.items()} for one in drawn]
        want, after = simulate(own, shard)
        for k, x in mean.items():
            got = part(np.asarray(x), SPECS[k], 0)
            np.testing.assert_allclose(got, want[k], rtol=1e-6, atol=1e-6)
        # A simulated worker has an axis more: the leading one of length 1 that PerWorker has.
        memory = zip(*map(jax.tree.leaves, (state.memory.tree, after.memory)), strict=True)
        for got, expected in memory:
            got = np.asarray(got)[:, shard]
            np.testing.assert_allclose(got, np.asarray(expected)[:, 0], rtol=1e-6, atol=1e-6)


def test_against_plain_codecs(two):
    """One step of Gather is the mean of each shard's own round trip."""
    tx = jaxcomp.compressed_mean(REDUCERS["gather"], "dcn", key=5, param_specs=SPECS)
    state = jaxcomp.init_state(tx, zeros(SHAPES, two, SPECS), two, "dcn")
    grads = draw(SHAPES)
    _, mean = stepper(tx, two)(state, put(grads, two, SPECS, "dcn"))
    key = noise.fold(noise.fold(noise.raw(5), 3), 0)  # The last shard's, in the first step.
    policy, sent = jaxcomp.Policy(QSGD), []
    for worker in range(2):
        own = {"kernel": grads["kernel"][worker, 48:], "table": grads["table"][worker, :, 96:]}
        own["bias"] = grads["bias"][worker, 72:]
        sent.append(jaxcomp.roundtrip(policy, key, own, worker=worker))
    want = jax.tree.map(lambda a, b: (a + b) / 2, *sent)
    np.testing.assert_allclose(mean["kernel"][48:], want["kernel"], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(mean["table"][:, 96:], want["table"], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(mean["bias"][72:], want["bias"], rtol=1e-6, atol=1e-7)


def test_without_specs_whole_leaves_cross(two):
    """The trap, of which we warn: XLA gathers first, and each device sends everything."""
    tx = jaxcomp.compressed_mean(REDUCERS["gather"], "dcn")
    params = zeros(SHAPES, two, SPECS)
    state = jaxcomp.init_state(tx, params, two, "dcn")
    grads = put(draw(SHAPES), two, SPECS, "dcn")
    with pytest.warns(UserWarning, match=r"automatic axes \('fsdp',\) beside 'dcn'.*param_specs"):
        slow, others = crossings(stepper(tx, two).lower(state, grads).compile(QUICK))
    compressed = {"kernel": params["kernel"], "table": params["table"]}
    assert slow >= jaxcomp.wire_bytes(REDUCERS["gather"], compressed, workers=2)
    assert any(op == "all-gather" for op, *_ in others)


@pytest.mark.full
def test_leaves_that_are_not_sharded_are_shared_out(three):
    """No device sends what another one sends, whatever divides."""
    reducer = jaxcomp.Gather(QSGD)
    tx = jaxcomp.compressed_mean(reducer, "dcn", param_specs=MIXED, stats=True)
    params = zeros(MIXED_SHAPES, three, MIXED)
    state = jaxcomp.init_state(tx, params, three, "dcn")
    grads = draw(MIXED_SHAPES)
    laid, run = put(grads, three, MIXED, "dcn"), stepper(tx, three)
    state, mean = run(state, laid)
    local = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in MIXED_LOCAL.items()}
    assert int(state.stats.link_bytes) == jaxcomp.wire_bytes(reducer, local, workers=2)
    assert 0 < float(state.stats.relative_error) < 1e-3
    compressed = [grads[k] for k in ("kernel", "wide", "half", "head")]
    squares = sum(np.square(x).reshape(2, -1).sum(axis=1) for x in compressed)
    assert float(state.stats.gradient_norm) == pytest.approx(np.sqrt(squares.mean()), rel=1e-5)
    for k, x in grads.items():
        assert mean[k].sharding == params[k].sharding
        np.testing.assert_allclose(mean[k], x.mean(0), atol=0.05)
        for shard in mean[k].addressable_shards:  # Alike on all devices that have this part.
            np.testing.assert_array_equal(shard.data, np.asarray(mean[k])[shard.index])
    np.testing.assert_allclose(mean["scale"], grads["scale"].mean(), rtol=1e-6)  # Sent dense.

    quiet = jaxcomp.compressed_mean(reducer, "dcn", param_specs=MIXED)
    state = jaxcomp.init_state(quiet, params, three, "dcn")
    slow, _ = crossings(stepper(quiet, three).lower(state, laid).compile(QUICK))
    assert slow == jaxcomp.wire_bytes(reducer, local, workers=2)


def test_all_axes_manual_needs_no_specs(two):
    """Gradients are local already; the shards draw alike, each on its own elements."""
    tx = jaxcomp.compressed_mean(REDUCERS["gather"], "dcn", key=5)
    grads, everything = draw(SHAPES), {"dcn", "fsdp"}

    def step(state, grads):
        return tx.update(jax.tree.map(lambda x: x[0], grads), state)[0]

    of_grads = {k: P("dcn", *spec) for k, spec in SPECS.items()}
    state = tx.init(local_likes(SHAPES, SPECS, TWO))
    specs = jaxcomp.state_specs(state, "dcn")
    run = jax.jit(
        jax.shard_map(
            step, mesh=two, in_specs=(specs, of_grads), out_specs=SPECS, axis_names=everything
        )
    )
    laid = put(grads, two, SPECS, "dcn")
    slow, others = crossings(run.lower(state, laid).compile(QUICK))
    local = local_likes(SHAPES, SPECS, TWO)
    assert slow == jaxcomp.wire_bytes(REDUCERS["gather"], local, workers=2)
    assert others == []
    np.testing.assert_allclose(run(state, laid)["kernel"], grads["kernel"].mean(0), atol=0.05)


@pytest.mark.full
@pytest.mark.parametrize("check_vma", [True, False])
def test_specs_of_the_state_name_all_manual_axes(check_vma, two):
    """The memory of every shard is an array's own part, so that a copy of the state is whole."""
    tx = jaxcomp.compressed_mean(REDUCERS["two shot, both ways"], "dcn", key=5)
    with axes.assume_workers(2):
        like = jax.eval_shape(tx.init, local_likes(SHAPES, SPECS, TWO))
    lies = jaxcomp.state_specs(like, ("dcn", "fsdp"))
    of_grads = {k: P("dcn", *spec) for k, spec in SPECS.items()}

    def step(grads, *state):
        grads = jax.tree.map(lambda x: x[0], grads)
        return tx.update(grads, state[0] if state else tx.init(grads))

    def mapped(*more, out=lies):
        specs = {"in_specs": (of_grads, *more), "out_specs": (SPECS, out)}
        return jax.jit(jax.shard_map(step, mesh=two, **specs, check_vma=check_vma))

    laid = put(draw(SHAPES), two, SPECS, "dcn")
    _, state = mapped()(laid)
    assert {x.shape[0] for x in jax.tree.leaves(state.memory.feedback)} == {two.size}
    copy = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), state)
    again, same = (mapped(lies)(laid, each)[0] for each in (copy, state))
    jax.tree.map(np.testing.assert_array_equal, again, same)
    if check_vma:
        with pytest.raises(ValueError, match="require replication"):
            mapped(out=jaxcomp.state_specs(like, "dcn"))(laid)


def test_a_sharded_model_in_a_shard_map_of_ones_own(two):
    """`state_specs` names the workers' axis alone; the rest lies as it is placed."""
    tx = jaxcomp.compressed_mean(jaxcomp.Gather(EF_SIGN), "dcn", param_specs=SPECS)
    params = zeros(SHAPES, two, SPECS)
    with pytest.raises(ValueError, match=r"needs a mesh.*init_state\(tx, params, mesh, "):
        tx.init({k: np.zeros(s, np.float32) for k, s in SHAPES.items()})
    state = jaxcomp.place(tx.init(params), two, "dcn", params=params)
    made = jaxcomp.init_state(tx, params, two, "dcn")
    assert homes(state) == homes(made)
    specs = jaxcomp.state_specs(state, "dcn")
    assert {tuple(s) for s in jax.tree.leaves(specs.memory)} == {("dcn",)}

    def step(state, grads):
        return tx.update(jax.tree.map(lambda x: x[0], grads), state)

    run = jax.shard_map(
        step,
        mesh=two,
        in_specs=(specs, P("dcn")),
        out_specs=(P(), specs),
        axis_names={"dcn"},
    )
    grads = put(draw(SHAPES), two, SPECS, "dcn")
    mean, after = jax.jit(run)(state, grads)
    want, expected = stepper(tx, two)(made, grads)
    jax.tree.map(np.testing.assert_array_equal, mean, expected)
    jax.tree.map(np.testing.assert_array_equal, after, want)


@pytest.mark.core("power iteration")
@pytest.mark.parametrize(
    "settings",
    [
        {"codec": jaxcomp.PowerIteration(rank=2)},
        {"codec": EF_SIGN, "gate": jaxcomp.gates.Every(2)},
        {
            "codec": jaxcomp.ReducerSchedule(
                tuple(
                    (n, jaxcomp.Link(jaxcomp.top_k(fraction=f), jaxcomp.Residual()))
                    for n, f in ((0, 0.1), (2, 0.01))
                )
            )
        },
        {"codec": jaxcomp.Link(jaxcomp.sign(), jaxcomp.Shift())},
        {"codec": jaxcomp.Hierarchical(outer=EF_SIGN), "axis_name": ("dcn", "fsdp")},
    ],
    ids=["power iteration", "gate", "phases", "shift", "hierarchical"],
)
def test_fits_other_parts(settings, three):
    """With types of replication, and statistics."""
    settings = {"axis_name": "dcn", **settings}
    axis = settings["axis_name"]
    specs = {"kernel": P("tp"), "table": P(), "bias": P()}
    # Which cannot say what two levels of links cost.
    stats = axis == "dcn"
    tx = jaxcomp.compressed_mean(**settings, stats=stats, param_specs=specs)
    params = zeros(SHAPES, three, specs)

    def step(state, grads):
        mean, state = tx.update(jax.tree.map(lambda x: x[0], grads), state, params)
        return state, mean

    workers = 4 if axis != "dcn" else 2
    grads = put(draw(SHAPES, workers=workers), three, specs, axis)
    run = jaxcomp.data_parallel(step, three, axis)
    state = jaxcomp.init_state(tx, params, three, axis)
    after, mean = jax.eval_shape(run, state, grads)
    assert jax.tree.map(jnp.shape, mean) == SHAPES
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_workers_of_one_device_each(two):
    """With no axes but the workers', specs that say so change nothing but the noise."""
    mesh = jax.make_mesh((8,), ("dcn",), axis_types=(AxisType.Auto,))
    reducer = jaxcomp.Gather(EF_SIGN)
    tx = jaxcomp.compressed_mean(reducer, "dcn", param_specs=P())
    params = {"w": jnp.zeros((64, 64))}
    grads = draw({"w": (64, 64)}, workers=8)
    state, mean = stepper(tx, mesh)(jaxcomp.init_state(tx, params, mesh, "dcn"), grads)
    assert {x.shape[:2] for x in jax.tree.leaves(state.memory)} == {(8, 1)}
    plain = jaxcomp.compressed_mean(reducer, "dcn")
    _, want = stepper(plain, mesh)(jaxcomp.init_state(plain, params, mesh, "dcn"), grads)
    np.testing.assert_array_equal(mean["w"], want["w"])  # Signs draw nothing.


def test_specs_of_a_filtered_module(two):
    """A leaf that is no array has None among the parameters, and None among the specs."""
    params = eqx.filter(eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0)), eqx.is_array)
    specs = jax.tree.map(lambda x: P("fsdp") if x.ndim == 2 else None, params)
    names = {"wq": params.layers[0].weight, "wk": params.layers[1].weight}
    found = []
    for like, of in ((params, specs), (names, {"wq": P("fsdp"), "wk": P("fsdp")})):
        tx = jaxcomp.compressed_mean(jaxcomp.Gather(EF_SIGN), "dcn", param_specs=of)
        state = jax.eval_shape(lambda p, tx=tx: jaxcomp.init_state(tx, p, two, "dcn"), like)
        found.append([x.shape for x in jax.tree.leaves(state.memory)])
        grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), like)
        _, mean = jax.eval_shape(stepper(tx, two), state, grads)
        assert jax.tree.structure(mean) == jax.tree.structure(like)
    assert found[0] == found[1] != []


def test_no_warning_where_nothing_is_gathered(two):
    params = {"w": jnp.zeros((64, 64))}
    grads = draw({"w": (64, 64)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given in ({"codec": jaxcomp.Dense()}, {"codec": EF_SIGN, "param_specs": P()}):
            tx = jaxcomp.compressed_mean(**given, axis_name="dcn")
            state = jaxcomp.init_state(tx, params, two, "dcn")
            jax.eval_shape(stepper(tx, two), state, grads)


def test_wrong_specs_say_so(two):
    def mean(specs):
        return jaxcomp.compressed_mean(EF_SIGN, "dcn", param_specs=specs)

    def init(specs, params=None):
        return jaxcomp.init_state(mean(specs), params or {"w": jnp.ones((66, 64))}, two, "dcn")

    with pytest.raises(ValueError, match=r"tree of jax.sharding.PartitionSpec.*got 'fsdp'"):
        mean({"w": "fsdp"})
    with pytest.raises(ValueError, match="must leave out the axis of the workers, 'dcn'"):
        mean({"w": P(("dcn", "fsdp"))})
    with pytest.raises(ValueError, match=r"must name automatic axes .* \('fsdp',\), got .* 'w'"):
        init({"w": P("tp")})
    with pytest.raises(
        ValueError,
        match=r"must divide the dimensions of every leaf evenly, .* 'w' of shape \(66, 64\)",
    ):
        init({"w": P("fsdp")})
    with pytest.raises(ValueError, match="must be a tree of PartitionSpecs like the parameters"):
        init({"v": P("fsdp")})


def test_wrong_places_say_so(two):
    tx = jaxcomp.compressed_mean(EF_SIGN, "dcn", param_specs=P(None, "fsdp"))
    params = {"w": jnp.zeros((64, 64))}
    state = jaxcomp.init_state(tx, params, two, "dcn")
    grads = draw({"w": (64, 64)})
    with pytest.raises(ValueError, match=r"surrounding jax.shard_map that is manual over 'dcn'"):
        jax.vmap(lambda g: tx.update(g, state)[0], axis_name="dcn")(grads)
    with pytest.raises(ValueError, match=r"must name automatic axes .* \(\), got .*local already"):
        jax.pmap(lambda g: tx.update(g, state)[0], axis_name="dcn", devices=jax.devices()[:2])(
            grads
        )
    other = jaxcomp.init_state(jaxcomp.compressed_mean(EF_SIGN, "dcn"), params, two, "dcn")
    with pytest.raises(ValueError, match=r"memory of the 4 shards over \('fsdp',\): make it with"):
        stepper(tx, two)(other, grads)
    explicit = jax.make_mesh((2, 4), ("dcn", "fsdp"))
    own = jax.shard_map(
        lambda g: tx.update(jax.tree.map(lambda x: x[0], g), state)[0],
        mesh=explicit,
        in_specs=P("dcn"),
        out_specs=P(),
        axis_names={"dcn"},
    )
    grads = jax.device_put(grads, NamedSharding(explicit, P("dcn")))
    with pytest.raises(
        ValueError, match="needs automatic axes for the shards, got the explicit axis 'fsdp'"
    ):
        jax.eval_shape(own, grads)
    with pytest.raises(ValueError, match=r"`batch_spec` must begin with the axis of the workers"):
        jaxcomp.data_parallel(lambda x: x, two, "dcn", batch_spec=P("fsdp"))
    run = jaxcomp.data_parallel(lambda x: x, two, "dcn", batch_spec=P(("dcn", "fsdp")))
    with pytest.raises(ValueError, match="multiple of the 8 workers"):
        run(jnp.zeros(4))


def test_the_page_runs():
    """The blocks of `docs/sharded.md` run unchanged."""
    page = (ROOT / "docs" / "sharded.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    found = {}
    exec(script, found)
    assert found["params"]["in"].sharding.spec == P(None, "fsdp")
    assert np.isfinite(float(found["loss"]))


def test_cuts():
    """Every leaf is laid over all shards; what goes in comes out."""
    shards = sharded.Shards(("fsdp", "tp"), (2, 4))
    for shape, spec, local in [
        ((16, 3), P("fsdp"), (2, 3)),
        ((6, 8), P("fsdp"), (3, 2)),
        ((6, 5), P("fsdp"), (3, 2)),
        ((5, 6), P(None, "fsdp"), (2, 3)),
        ((5, 7), P(), (5, 1)),
        ((8, 4), P("fsdp", "tp"), (4, 1)),
        ((8,), P(("tp", "fsdp")), (1,)),
        ((), P(), ()),
        ((0, 3), P(), (0, 3)),
    ]:
        cut = sharded._cut("x", shape, spec, shards)
        assert cut.local == local, (shape, spec)
        laid = cut.lay(jnp.arange(math.prod(shape)).reshape(shape))
        over = [(e if isinstance(e, tuple) else (e,)) if e else () for e in cut.spec]
        assert sorted(n for entry in over for n in entry) == ["fsdp", "tp"] or laid.size == 0
        np.testing.assert_array_equal(cut.back(laid), jnp.arange(math.prod(shape)).reshape(shape))
        assert laid.size == 8 * math.prod(local) or not shape
        assert all(n % shards.size(e) == 0 for n, e in zip(laid.shape, over, strict=False))
