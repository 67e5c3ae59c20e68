"""Results are on the mesh that the user gave, for all types of its axes."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers.sharding import EF_SIGN
from helpers.suite import compilations, slow
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxcomp

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SPECS = {"in": P(None, "fsdp"), "bias": P("fsdp"), "out": P("fsdp")}
RNG = np.random.default_rng(0)
PARAMS = {
    "in": RNG.standard_normal((16, 512), np.float32) / 4,
    "bias": np.zeros(512, np.float32),
    "out": RNG.standard_normal((512, 16), np.float32) / 24,
}
BATCH = RNG.standard_normal((32, 16), np.float32)


def loss_of(params, x):
    return jnp.mean((jnp.tanh(x @ params["in"] + params["bias"]) @ params["out"] - x) ** 2)


def around(mesh):
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def trainer(mesh, axis, specs=None, **settings):
    """The transformation, the step, and how often it was traced."""
    traces = []
    tx = optax.chain(
        jaxcomp.compressed_mean(jaxcomp.Gather(EF_SIGN), axis, param_specs=specs), optax.adam(1e-2)
    )

    def step(params, state, x):
        traces.append(1)
        loss, grads = jax.value_and_grad(loss_of)(jaxcomp.local(params, axis), x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, axis)

    return tx, jaxcomp.data_parallel(step, mesh, axis, **settings), traces


def assert_lies(tree, mesh):
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        assert isinstance(x.sharding, NamedSharding), path
        assert x.sharding.mesh == mesh, path


@pytest.fixture(scope="module")
def expected():
    """Three steps on automatic axes, and what the loss is then."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AUTO,))
    tx, run, _ = trainer(mesh, "data")
    params, state = PARAMS, jaxcomp.init_state(tx, PARAMS, mesh, "data")
    for _ in range(3):
        params, state, _ = run(params, state, BATCH)
    return params, state, loss_of(params, BATCH)


@pytest.mark.core("AxisType.Explicit-AxisType.Auto-True")
@pytest.mark.parametrize(
    ("kind", "ambient", "check_vma"),
    [
        (EXPLICIT, None, True),
        (EXPLICIT, EXPLICIT, True),
        (EXPLICIT, EXPLICIT, False),
        (EXPLICIT, AUTO, True),
        (AUTO, EXPLICIT, True),
        slow(EXPLICIT, None, False),
        slow(AUTO, None, True),
        slow(AUTO, AUTO, False),
    ],
)
def test_training_and_evaluation(kind, ambient, check_vma, expected):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    surroundings = (
        None if ambient is None else jax.make_mesh((8,), ("data",), axis_types=(ambient,))
    )
    tx, run, traces = trainer(mesh, "data", check_vma=check_vma, donate_argnums=(0, 1))
    batch = jax.device_put(BATCH, NamedSharding(mesh, P("data")))
    with around(surroundings):
        state = jaxcomp.init_state(tx, PARAMS, mesh, "data")
        assert_lies(state, mesh)
        params = jaxcomp.place(PARAMS, mesh, "data")
        with compilations() as programs:
            for _ in range(3):
                before = params, state
                params, state, loss = run(params, state, batch)
        # Without types, one more compares the first results between the workers.
        assert len(traces) == 1
        assert len(programs) == (1 if check_vma else 2)
    assert all(x.is_deleted() for x in jax.tree.leaves(before))
    assert_lies((params, state, loss), mesh)
    assert {x.sharding.spec[0] for x in jax.tree.leaves(state[0].memory)} == {"data"}
    jax.tree.map(np.testing.assert_array_equal, (params, state), expected[:2])

    with around(mesh if ambient == kind else None):
        value, grads = jax.jit(jax.value_and_grad(loss_of))(params, batch)
        np.testing.assert_allclose(value, expected[2], rtol=1e-6)
        assert_lies(grads, mesh)
        assert_lies(optax.apply_updates(params, grads), mesh)


@pytest.mark.core("AxisType.Auto")
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_two_workers_without_a_downlink(kind):
    """Their state has no memory of a downlink, before and after a step."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=jax.devices()[:2])
    tx = jaxcomp.compressed_mean(jaxcomp.sign(), "data")
    params = jaxcomp.place({"w": PARAMS["in"]}, mesh, "data")
    state = jaxcomp.init_state(tx, params, mesh, "data")
    specs = jaxcomp.state_specs(state, "data")
    assert state.memory.reducer == ()

    def step(params, state):
        return tx.update(jaxcomp.local(params, "data"), state)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), specs), out_specs=(P(), specs))
    compiled = jaxcomp.data_parallel(lambda *given: step(*given[:2]), mesh, "data")
    found = []
    for run in (jax.jit(mapped), lambda *given: compiled(*given, ())):
        with compilations() as programs:
            _, after = run(params, state)
            first = len(programs)
            found.append(run(params, after))
        assert len(programs) == first
    jax.tree.map(np.testing.assert_array_equal, *found)
    for _, after in found:
        jax.tree.map(lambda x, y: np.testing.assert_equal(x.shape, y.shape), after, state)


@pytest.mark.core("kinds1-True")
@pytest.mark.parametrize(
    ("kinds", "ambient"),
    [
        ((EXPLICIT, EXPLICIT), False),
        ((EXPLICIT, EXPLICIT), True),
        ((EXPLICIT, AUTO), True),
        ((AUTO, EXPLICIT), False),
        slow((EXPLICIT, AUTO), False),
        slow((AUTO, EXPLICIT), True),
    ],
)
def test_sharded_models(kinds, ambient, sharded_run):
    """Parameters stay sharded, each shard's memory lies beside it, and nothing is gathered."""
    mesh = jax.make_mesh((2, 4), ("dcn", "fsdp"), axis_types=kinds)
    tx, run, traces = trainer(mesh, "dcn", SPECS, batch_spec=P(("dcn", "fsdp")))
    batch = jax.device_put(BATCH, NamedSharding(mesh, P(("dcn", "fsdp"))))
    params = {k: jax.device_put(x, NamedSharding(mesh, SPECS[k])) for k, x in PARAMS.items()}
    with around(mesh if ambient else None):
        state = jaxcomp.init_state(tx, params, mesh, "dcn")
        lies = [x.sharding for x in jax.tree.leaves((params, state))]
        with compilations() as programs:
            for _ in range(2):
                params, state, _ = run(params, state, batch)
        assert len(traces) == len(programs) == 1
        for x, before in zip(jax.tree.leaves((params, state)), lies, strict=True):
            assert x.sharding.is_equivalent_to(before, x.ndim)
        assert_lies((params, state), mesh)
        # A product of two arrays that are split alike is for JAX's users to resolve.
        evaluate = jax.sharding.auto_axes(loss_of, out_sharding=NamedSharding(mesh, P()))
        value = jax.jit(evaluate)(params, batch)
    want, after = sharded_run
    jax.tree.map(np.testing.assert_array_equal, (params, state), want)
    np.testing.assert_allclose(value, after, rtol=1e-5)


@pytest.fixture(scope="module")
def sharded_run():
    mesh = jax.make_mesh((2, 4), ("dcn", "fsdp"), axis_types=(AUTO, AUTO))
    tx, run, _ = trainer(mesh, "dcn", SPECS, batch_spec=P(("dcn", "fsdp")))
    params = {k: jax.device_put(x, NamedSharding(mesh, SPECS[k])) for k, x in PARAMS.items()}
    state = jaxcomp.init_state(tx, params, mesh, "dcn")
    for _ in range(2):
        params, state, _ = run(params, state, BATCH)
    return (params, state), loss_of(params, BATCH)


@pytest.mark.core("new")
@pytest.mark.parametrize("ambient", [None, "old", "new"])
def test_another_number_of_workers_and_a_checkpoint(ambient, tmp_path):
    """With memory of both directions, resized, saved, restored and put on another mesh."""
    old, new = (
        jax.make_mesh((n,), ("data",), devices=jax.devices()[:n], axis_types=(EXPLICIT,))
        for n in (8, 4)
    )
    reducer = jaxcomp.TwoShot(EF_SIGN, EF_SIGN)
    tx = optax.chain(jaxcomp.compressed_mean(reducer, "data"), optax.adam(1e-2))
    params = jaxcomp.place(PARAMS, old, "data")
    state = jaxcomp.init_state(tx, params, old, "data")
    state = jax.tree.map(lambda x: x + jnp.ones((), x.dtype), state)
    with around({None: None, "old": old, "new": new}[ambient]):
        moved = jaxcomp.resize_workers(tx, state, params, 4)
        assert_lies(moved, old)
        moved = jaxcomp.place(moved, new, "data")
        assert_lies(moved, new)

        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", moved)
            target = ocp.checkpoint_utils.construct_restore_args(moved)
            restored = checkpointer.restore(tmp_path / "state", item=moved, restore_args=target)
    assert_lies(restored, new)
    jax.tree.map(np.testing.assert_array_equal, restored, moved)
    for x, before in zip(*map(jax.tree.leaves, (restored, moved)), strict=True):
        assert x.sharding == before.sharding


def test_arrays_change_types_where_they_are(expected):
    """From a mesh with automatic axes to the explicit one: the same buffers."""
    explicit = jax.make_mesh((8,), ("data",))
    _, run, traces = trainer(explicit, "data")
    params, state, _ = expected
    moved, memory = jaxcomp.place((params, state), explicit, "data")
    assert_lies((moved, memory), explicit)
    for x, before in zip(*map(jax.tree.leaves, ((moved, memory), (params, state))), strict=True):
        here, there = (
            [s.data.unsafe_buffer_pointer() for s in y.addressable_shards] for y in (x, before)
        )
        assert here == there
    want = run(moved, memory, BATCH)
    jax.tree.map(np.testing.assert_array_equal, run(params, state, BATCH), want)
    assert len(traces) == 1


@pytest.mark.full
def test_within_programs():
    """Lowered, and in a program that computes with what comes back."""
    mesh = jax.make_mesh((2, 4), ("dcn", "fsdp"))
    tx, run, _ = trainer(mesh, "dcn", SPECS)
    params = {k: jax.device_put(x, NamedSharding(mesh, SPECS[k])) for k, x in PARAMS.items()}
    state = jaxcomp.init_state(tx, params, mesh, "dcn")
    compiled = run.lower(params, state, BATCH).compile()
    want = compiled(params, state, BATCH)
    assert_lies(want, mesh)

    @jax.jit
    def many(params, state, batches):
        def one(carry, x):
            params, state, loss = run(*carry, x)
            return (params, state), loss

        return jax.lax.scan(one, (params, state), batches)

    (got, _), losses = many(params, state, BATCH[None])
    assert {k: x.sharding.spec for k, x in got.items()} == {
        k: x.sharding.spec for k, x in want[0].items()
    }
    assert_lies(got, mesh)
    np.testing.assert_allclose(losses[0], want[2], rtol=1e-6)


def test_an_explicit_mesh_in_a_shard_map_of_ones_own():
    mesh = jax.make_mesh((8,), ("data",))
    tx = jaxcomp.compressed_mean(jaxcomp.Gather(EF_SIGN), "data")
    state = jaxcomp.place(tx.init(PARAMS), mesh, "data")
    specs = jaxcomp.state_specs(state, "data")
    grads = jax.tree.map(lambda x: np.broadcast_to(x, (8, *x.shape)), PARAMS)
    grads = jax.device_put(grads, NamedSharding(mesh, P("data")))

    def step(state, grads):
        mean, state = tx.update(jax.tree.map(lambda x: x[0], grads), state)
        return state, mean

    own = jax.shard_map(step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P()))
    got = jax.jit(own)(state, grads)
    assert_lies(got, mesh)
    want = jaxcomp.data_parallel(step, mesh, "data")(state, grads)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.core("amq")
@pytest.mark.parametrize("codec", [jaxcomp.amq(bits=3), jaxcomp.ecsq(bits=3)], ids=["amq", "ecsq"])
def test_constants_of_a_codec_may_be_found_first_within_a_mapped_function(codec):
    """Levels and tables are computed while the program is traced, and are no part of its mesh."""
    mesh = jax.make_mesh((8,), ("data",))
    tx = jaxcomp.compressed_mean(codec, "data")
    like = {"w": jnp.zeros((64, 72))}
    state = jaxcomp.init_state(tx, like, mesh, "data")
    assert state.step.sharding.mesh == mesh
