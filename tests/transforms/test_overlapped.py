"""Local updates whose exchanges run beside the steps: the same numbers, and the steps go on."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcomp

pytestmark = pytest.mark.filterwarnings("ignore:jaxcomp.Overlapped hides nothing")
AXIS, WORKERS, EVERY = "data", 4, 8
EVERYTHING = jaxcomp.Policy(jaxcomp.natural_dithering(bits=4), min_size=0, min_ndim=0)
RNG = np.random.default_rng(0)
PARAMS = {
    "a": jnp.asarray(RNG.standard_normal((16, 40)), jnp.float32),
    "b": jnp.asarray(RNG.standard_normal((40, 8)), jnp.float32),
    "c": jnp.zeros(8, jnp.float32),
}


def streaming(**settings):
    return jaxcomp.local_updates(
        optax.adam(1e-2),
        optax.sgd(0.7, 0.9, nesterov=True),
        AXIS,
        **{"every": EVERY, "fragments": 2, "delay": 3, "mix": 0.5, "reducer": EVERYTHING}
        | settings,
    )


def loss_of(params, batch):
    x, y = batch
    return ((jnp.tanh(x @ params["a"]) @ params["b"] + params["c"] - y) ** 2).mean()


def batch_of(step):
    """The one of step 6 is not finite for the first worker."""
    draw = np.random.default_rng(step)
    x = draw.standard_normal((32, 16)).astype(np.float32)
    if step == 6:
        x[3] = np.nan
    return x, np.tanh(x[:, :8])


def half(devices=None):
    devices = jax.devices()[:WORKERS] if devices is None else devices
    return jax.make_mesh((len(devices),), (AXIS,), devices=devices)


def begun(tx, mesh):
    params = jaxcomp.place(PARAMS, mesh, AXIS)
    return params, jaxcomp.init_state(tx, params, mesh, AXIS)


def spoilt(carry):
    """The third worker's model of the first fragment is lost."""
    params, state = carry
    first, *others = state.fragments

    def lost(x):
        third = (np.arange(WORKERS) == 2).reshape(-1, *[1] * (x.ndim - 1))
        return jax.device_put(np.where(third, np.float32(np.nan), x), x.sharding)

    offset = jax.tree.map(lost, first.offset)
    return params, state._replace(fragments=(first._replace(offset=offset), *others))


def in_one_program(tx, mesh):
    def step(params, state, batch):
        here = jaxcomp.local(jaxcomp.view(params, state), AXIS)
        grads = jax.grad(loss_of)(here, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jaxcomp.data_parallel(step, mesh, AXIS)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


@pytest.mark.full
def test_the_numbers_are_those_of_one_program():
    """With a step and a model that are not finite, and saved and resumed while exchanges are under
    way.
    """
    mesh, tx = half(), streaming()
    step, (params, state) = in_one_program(tx, mesh), spoilt(begun(tx, mesh))
    got, held = spoilt(begun(tx, mesh))
    with jaxcomp.Overlapped(tx, jax.value_and_grad(loss_of), mesh, AXIS) as run:
        for number in range(1, 2 * EVERY + 3):
            params, state = step(params, state, batch_of(number))
            got, held, losses = run(got, held, batch_of(number))
            assert losses.shape == (WORKERS,)
            # A pseudo-gradient is taken after steps 1 and 5 of a round, and moves after 4 and 8.
            if number in (3, 6, 14):
                settled = run.settle(held)
                assert_same((got, settled), (params, state))
                if number == 6:
                    held = jax.tree.map(jnp.array, settled)  # As from a checkpoint.
                if number == 14:
                    got, held = step(got, settled, batch_of(99))
                    params, state = step(params, state, batch_of(99))
        assert_same((got, run.settle(held)), (params, state))
    assert np.asarray(state.skipped.tree).tolist() == [1, 0, 1, 0]
    assert np.asarray(state.fragments[0].lost.tree).tolist() == [0, 0, 1, 0]
    assert np.isfinite(params["a"]).all()
    assert np.abs(np.asarray(params["a"] - PARAMS["a"])).max() > 1e-3


def test_steps_go_on_while_an_exchange_is_under_way():
    mesh, tx = half(), streaming(fragments=1, delay=4)
    params, state = begun(tx, mesh)
    arrived = threading.Event()
    with jaxcomp.Overlapped(tx, jax.value_and_grad(loss_of), mesh, AXIS) as run:
        for number in range(1, EVERY + 1):
            params, state, _ = run(params, state, batch_of(number + 10))
        run.times = type(run.times)()
        (talk,) = run._talks

        def late(*args):
            assert arrived.wait(60)
            return talk(*args)

        run._talks[:] = [late]
        before = np.asarray(params["a"])
        for number in range(1, EVERY):
            params, state, losses = run(params, state, batch_of(number))
        jax.block_until_ready((state.steps, losses))  # While nothing has been exchanged.
        np.testing.assert_array_equal(params["a"], before)
        arrived.set()
        params, state, _ = run(params, state, batch_of(EVERY))
    assert run.times.exchanges == 1
    assert 0 <= run.times.hidden <= 1
    assert (np.asarray(params["a"]) != before).any()


def test_an_error_in_an_exchange_is_raised_by_the_step_that_needs_it():
    mesh, tx = half(), streaming(fragments=1, delay=2)
    params, state = begun(tx, mesh)

    def broken(*_):
        raise ConnectionError("a peer is gone")

    with jaxcomp.Overlapped(tx, jax.value_and_grad(loss_of), mesh, AXIS) as run:
        for number in range(1, EVERY):
            run._talks[:] = [broken]
            params, state, _ = run(params, state, batch_of(number))
        with pytest.raises(ConnectionError, match="a peer is gone"):
            run.settle(state)
        with pytest.raises(ConnectionError, match="a peer is gone"):
            run(params, state, batch_of(EVERY))


def test_no_collective_is_in_the_program_of_the_steps():
    mesh, tx = half(), streaming()
    params, state = begun(tx, mesh)
    with jaxcomp.Overlapped(tx, jax.value_and_grad(loss_of), mesh, AXIS) as run:
        _, state, _ = run(params, state, batch_of(1))
        compiled = run._alone.lower(state.steps, params, batch_of(2)).compile()
    assert jaxcomp.collective_bytes(compiled) == {}


@pytest.mark.full
def test_shards_of_a_model_exchange_their_own_parts():
    """Two workers of two devices each."""
    first, second = (
        jax.make_mesh(
            (2, 2),
            (AXIS, "model"),
            devices=jax.devices()[at : at + 4],
            axis_types=(AxisType.Auto,) * 2,
        )
        for at in (0, 4)
    )
    specs = {"a": PartitionSpec(None, "model"), "b": PartitionSpec("model"), "c": PartitionSpec()}
    tx = streaming(fragments=1, param_specs=specs)
    lies = jax.tree.map(lambda spec: NamedSharding(first, spec), specs)
    step, start = in_one_program(tx, first), jax.device_put(PARAMS, lies)
    params, state = start, jaxcomp.init_state(tx, start, first, AXIS)
    got, held = start, jaxcomp.init_state(tx, start, first, AXIS)
    grads = jax.value_and_grad(loss_of)
    with jaxcomp.Overlapped(tx, grads, first, AXIS, through=second) as run:
        for number in range(10, 10 + EVERY):
            params, state = step(params, state, batch_of(number))
            got, held, _ = run(got, held, batch_of(number))
        assert_same((got, run.settle(held)), (params, state))


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("tx", "devices", "said"),
    [
        (streaming(delay=0), 4, "`tx` must have a delay of at least one step"),
        (optax.sgd(0.1), 4, "`tx` must be jaxcomp.local_updates"),
        (optax.chain(streaming(), optax.scale(0.5)), 4, "neither wrapped nor chained"),
        (streaming(fragments=1, synchronous=2), 4, "`tx` must not begin with synchronous steps"),
        (streaming(), 5, r'jax.config.update\("jax_num_cpu_devices", 10\)'),
    ],
)
def test_wrong_use_of_overlapped(tx, devices, said):
    with pytest.raises(ValueError, match=said):
        jaxcomp.Overlapped(tx, loss_of, half(jax.devices()[:devices]), AXIS)


def test_a_process_with_several_cpu_devices_is_warned():
    with pytest.warns(UserWarning, match="several CPU devices in the mesh, here 4"):
        jaxcomp.Overlapped(streaming(), loss_of, half(), AXIS)


def test_wrong_meshes_and_states():
    with pytest.raises(ValueError, match="`through` must have the axes of the mesh"):
        jaxcomp.Overlapped(streaming(), loss_of, half(), AXIS, through=half(jax.devices()[4:6]))
    with (
        jaxcomp.Overlapped(streaming(), loss_of, half(), AXIS) as run,
        pytest.raises(ValueError, match="`state` must be that of the transformation"),
    ):
        run(PARAMS, optax.EmptyState(), batch_of(1))
