"""Sharded models: each device compresses its own shard, and only that crosses the slow axis."""

import functools
import math
import pathlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxcomp
from jaxcomp import noise, wire
from jaxcomp.transforms import sharded

TWO, THREE = {"dcn": 2, "fsdp": 4}, {"dcn": 2, "fsdp": 2, "tp": 2}
SPECS = {"kernel": P("fsdp"), "table": P(None, "fsdp"), "bias": P("fsdp")}
SHAPES = {"kernel": (64, 96), "table": (40, 128), "bias": (96,)}
# Replicated over tp or over all: cut further where something divides, and filled up elsewhere.
_MIXED = {
    "kernel": ((64, 96), P("fsdp", "tp"), (32, 48)),
    "wide": ((32, 128), P(None, ("tp", "fsdp")), (32, 32)),
    "half": ((64, 80), P("fsdp"), (16, 80)),
    "head": ((64, 64), None, (16, 64)),
    "odd": ((46, 57), P("fsdp"), (23, 29)),
    "prime": ((47, 43), P(), (12, 43)),
    "scale": ((), P(), ()),
    "empty": ((0, 3), P(), (0, 3)),
}
MIXED_SHAPES, MIXED, MIXED_LOCAL = (
    {name: given[number] for name, given in _MIXED.items()} for number in range(3)
)
QSGD = jaxcomp.qsgd_inf(bits=8, bucket_size=128)
EF_SIGN = jaxcomp.Link(jaxcomp.sign(bucket_size=256), jaxcomp.Residual())
REDUCERS = {
    "dense": jaxcomp.Dense(),
    "gather": jaxcomp.Gather(QSGD),
    "two shot": jaxcomp.TwoShot(QSGD),
    "two shot, both ways": jaxcomp.TwoShot(EF_SIGN, EF_SIGN),
}

QUICK = {"xla_backend_optimization_level": 0}
"""What machine code comes of a program does not matter to what it sends."""


def make_mesh(sizes):
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


def put(tree, mesh, specs, *before):
    def one(x, spec):
        return jax.device_put(x, NamedSharding(mesh, P(*before, *(spec or P()))))

    return {name: one(x, specs[name]) for name, x in tree.items()}


def draw(shapes, seed=0, workers=2):
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal((workers, *s)).astype(np.float32) for k, s in shapes.items()}


def zeros(shapes, mesh, specs):
    return put({k: np.zeros(s, np.float32) for k, s in shapes.items()}, mesh, specs)


def homes(tree):
    return [x.sharding for x in jax.tree.leaves(tree)]


def stepper(tx, mesh, **settings):
    """Gradients come with a leading axis of workers."""

    def step(state, grads):
        mean, state = tx.update(jax.tree.map(lambda x: x[0], grads), state)
        return state, mean

    return jaxcomp.data_parallel(step, mesh, "dcn", **settings)


def local_likes(shapes, specs, sizes):
    def one(shape, spec):
        over = [(e if isinstance(e, tuple) else (e,)) if e else () for e in spec]
        over += [()] * (len(shape) - len(over))
        local = [n // math.prod(sizes[a] for a in e) for n, e in zip(shape, over, strict=True)]
        return jax.ShapeDtypeStruct(tuple(local), jnp.float32)

    return {name: one(shape, specs[name]) for name, shape in shapes.items()}


def groups_of(line):
    """The groups of devices among which a collective moves data."""
    found = re.search(r"replica_groups=\{(\{.*?\})\}", line)
    pairs = re.search(r"source_target_pairs=\{(\{.*?\})\}", line)
    if found or pairs:
        text = (found or pairs)[1]
        return [[int(n) for n in part.split(",")] for part in re.findall(r"\{([\d,]+)\}", text)]
    found = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    shape, dims, order = ([int(n) for n in (part or "").split(",") if n] for part in found.groups())
    devices = np.arange(math.prod(dims)).reshape(dims)
    return (devices.transpose(order) if order else devices).reshape(shape).tolist()


def crossings(compiled, slow=2):
    """Bytes a device sends over dcn, and the other collectives: their name, dtype and size."""
    text = compiled.as_text()
    header, *lines = text.splitlines()
    total, others, each = 0, [], jax.device_count() // slow
    for line in lines:
        moved = wire.collective_bytes(f"{header}\n{line}")
        if not moved:
            continue
        if any(len({device // each for device in group}) > 1 for group in groups_of(line)):
            assert all(len(group) == slow for group in groups_of(line)), line  # {0, 4}, {1, 5}, …
            total += sum(moved.values())
        else:
            others.append((*moved, *re.search(r" = \(?(\w+)\[([\d,]*)\]", line).groups()))
    return total, others


def simulator(reducer, workers=2):
    """What one shard's devices come to on their own: a model that is not sharded, under vmap."""
    tx = jaxcomp.compressed_mean(reducer, "dcn")
    each = functools.partial(jax.vmap, axis_name="dcn", axis_size=workers)
    update = jax.jit(each(tx.update))

    def run(grads, shard):
        state = each(lambda g: tx.init(g))(grads[0])
        key = noise.fold(noise.raw(0), shard)
        state = state._replace(key=jnp.broadcast_to(key, (workers, 2)))
        for one in grads:
            mean, state = update(one, state)
        return jax.tree.map(lambda x: np.asarray(x[0]), mean), state

    return run


@pytest.fixture(scope="module")
def two():
    return make_mesh(TWO)


@pytest.fixture(scope="module")
def three():
    return make_mesh(THREE)


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


def loss_of(params, batch):
    x, y = batch
    hidden = jnp.tanh(x @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


MODEL = {"in": (32, 256), "bias": (256,), "out": (256, 32)}
MODEL_SPECS = {"in": P("fsdp", "tp"), "bias": P(), "out": P("tp", "fsdp")}
BATCH = tuple(jnp.asarray(x[0]) for x in draw({"x": (64, 32), "y": (64, 32)}, 7, 1).values())


def trainer(mesh, specs, reducer=REDUCERS["two shot, both ways"], **settings):
    tx = optax.chain(
        jaxcomp.compressed_mean(reducer, "dcn", param_specs=specs, **settings), optax.adamw(1e-2)
    )

    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_of)(jaxcomp.local(params, "dcn"), batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, "dcn")

    return tx, jaxcomp.data_parallel(step, mesh, "dcn", batch_spec=P(("dcn", "fsdp")))


@pytest.fixture(scope="module")
def trained(three):
    """Six steps: the step, and what there was before each and in the end."""
    tx, run = trainer(three, MODEL_SPECS)
    start = {k: x[0] * 0.1 for k, x in draw(MODEL, 3, 1).items()}
    params = put(start, three, MODEL_SPECS)
    state, seen, losses = jaxcomp.init_state(tx, params, three, "dcn"), [], []
    for _ in range(6):
        seen.append((params, state))
        params, state, loss = run(params, state, BATCH)
        losses.append(float(loss))
    return tx, run, [*seen, (params, state)], losses


def test_trains_with_adamw(trained):
    _, _, seen, losses = trained
    assert losses[-1] < 0.9 * losses[0]
    params, state = seen[-1]
    for x in params.values():  # Replicas have the same bits.
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(x)[shard.index])
    assert len({jax.tree.structure(one) for one in seen}) == 1
    assert all(homes(one) == homes(seen[0]) for one in seen)  # So nothing is compiled twice.
    mean, (adam, *_) = state
    assert {k: x.sharding.spec for k, x in adam.mu.items()} == MODEL_SPECS
    memory = jax.tree.leaves(mean.memory)
    assert all(x.sharding.spec == P("dcn", ("fsdp", "tp")) for x in memory)
    assert all(x.shape[:2] == (2, 4) for x in memory)
    assert all(x.addressable_shards[0].data.shape[:2] == (1, 1) for x in memory)


def test_checkpoints(trained, three):
    """What was saved is placed again, and goes on bit for bit."""
    tx, run, seen, _ = trained
    (params, state), end = seen[3], seen[-1]
    saved = jax.device_get((params, state))
    again = jax.device_put(saved, jax.tree.map(lambda x: x.sharding, (params, state)))
    placed = jaxcomp.place(saved[1], three, "dcn", params=params)
    assert homes(placed) == homes(state)
    for one in (again, (params, placed)):
        for _ in range(3):
            *one, _ = run(*one, BATCH)
        jax.tree.map(np.testing.assert_array_equal, tuple(one), end)

    held = serialization.from_bytes(state, serialization.to_bytes(state))
    jax.tree.map(np.testing.assert_array_equal, held, saved[1])
    more = jaxcomp.resize_workers(tx, state, params, 3)
    first = jax.tree.leaves(state[0].memory.tree.feedback)[0]
    moved = jax.tree.leaves(more[0].memory.tree.feedback)[0]
    assert moved.shape == (3, *first.shape[1:])
    np.testing.assert_allclose(moved[2], np.mean(first, axis=0), rtol=1e-6)


def test_one_shard_that_is_not_finite_stops_all(trained):
    _, run, seen, _ = trained
    params, state = seen[-1]
    params["out"] = params["out"].at[0, 0].set(jnp.nan)  # In the forward pass it reaches all.
    _, after, _ = run(params, state, BATCH)
    jax.tree.map(np.testing.assert_array_equal, after[0].memory, state[0].memory)


def test_guard_agrees_between_shards(two):
    tx = jaxcomp.compressed_mean(EF_SIGN, "dcn", param_specs=SPECS)
    state = jaxcomp.init_state(tx, zeros(SHAPES, two, SPECS), two, "dcn")
    run, grads = stepper(tx, two), draw(SHAPES)
    before, _ = run(state, put(grads, two, SPECS, "dcn"))
    grads["kernel"][1, 20, 3] = np.inf  # Of one worker, and one shard.
    after, mean = run(before, put(grads, two, SPECS, "dcn"))
    assert np.isfinite(np.asarray(mean["kernel"])).all(axis=1).reshape(4, 16).all(axis=1).sum() == 3
    jax.tree.map(np.testing.assert_array_equal, after.memory, before.memory)
    assert int(after.step) == 2


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


def test_in_a_shard_map_of_ones_own(two):
    """`state_specs` names the workers' axis alone; the rest lies as it is placed."""
    tx = jaxcomp.compressed_mean(jaxcomp.Gather(EF_SIGN), "dcn", param_specs=SPECS)
    params = zeros(SHAPES, two, SPECS)
    with pytest.raises(ValueError, match=r"needs to know the mesh.*init_state\(tx, params, mesh, "):
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


@pytest.mark.parametrize(
    "settings",
    [
        {"codec": jaxcomp.PowerIteration(rank=2)},
        {"codec": EF_SIGN, "gate": jaxcomp.Every(2)},
        {
            "codec": jaxcomp.Phases(
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
    with pytest.raises(ValueError, match=r"must divide every leaf, .* 'w' of shape \(66, 64\)"):
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
    with (
        jax.set_mesh(explicit),
        pytest.raises(ValueError, match="must be automatic for `param_specs`, and 'fsdp' is expl"),
    ):
        tx.init(params)
    with pytest.raises(ValueError, match=r"`batch_spec` must begin with the axis of the workers"):
        jaxcomp.data_parallel(lambda x: x, two, "dcn", batch_spec=P("fsdp"))
    run = jaxcomp.data_parallel(lambda x: x, two, "dcn", batch_spec=P(("dcn", "fsdp")))
    with pytest.raises(ValueError, match="multiple of the 8 workers"):
        run(jnp.zeros(4))


def test_the_page_runs():
    """`docs/sharded.md`, as it stands there."""
    page = (pathlib.Path(__file__).parent.parent / "docs" / "sharded.md").read_text()
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
