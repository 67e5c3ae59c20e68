"""What comes back lies on the mesh that the user gave, whatever the types of its axes."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from sharding import EF_SIGN

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


@contextlib.contextmanager
def compilations():
    """The programs that are compiled in here."""
    found = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="module")
def expected():
    """Three steps on automatic axes, and what the loss is then."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AUTO,))
    tx, run, _ = trainer(mesh, "data")
    params, state = PARAMS, jaxcomp.init_state(tx, PARAMS, mesh, "data")
    for _ in range(3):
        params, state, _ = run(params, state, BATCH)
    return params, state, loss_of(params, BATCH)


@pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])
@pytest.mark.parametrize("ambient", [None, EXPLICIT, AUTO], ids=["", "set_mesh", "other mesh"])
@pytest.mark.parametrize("kind", [EXPLICIT, AUTO], ids=["explicit", "auto"])
def test_training_and_evaluation(kind, ambient, check_vma, expected):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    surroundings = None if ambient is None else jax.make_mesh((8,), ("data",), axis_types=(ambient,))
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
        assert len(traces) == len(programs) == 1
    assert all(x.is_deleted() for x in jax.tree.leaves(before))
    assert_lies((params, state, loss), mesh)
    assert {x.sharding.spec[0] for x in jax.tree.leaves(state[0].memory)} == {"data"}
    jax.tree.map(np.testing.assert_array_equal, (params, state), expected[:2])

    with around(mesh if ambient == kind else None):
        value, grads = jax.jit(jax.value_and_grad(loss_of))(params, batch)
        np.testing.assert_allclose(value, expected[2], rtol=1e-6)
        assert_lies(grads, mesh)
        assert_lies(optax.apply_updates(params, grads), mesh)


@pytest.mark.parametrize("ambient", [False, True], ids=["", "set_mesh"])
@pytest.mark.parametrize(
    "kinds",
    [(EXPLICIT, EXPLICIT), (EXPLICIT, AUTO), (AUTO, EXPLICIT)],
    ids=["explicit", "automatic shards", "explicit shards"],
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
