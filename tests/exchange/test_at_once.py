"""Messages that are sent at once: the same bits, the counted bytes, fewer waits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import lowering
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.backend import axes
from jaxcomp.exchange import over_workers, trips
from jaxcomp.exchange.plan import Plan
from jaxcomp.reducers import choose

N, DELAY = 8, 0.05
FOUR = jaxcomp.qsgd_inf(bits=4)
SPARSE = jaxcomp.Link(jaxcomp.top_k(fraction=0.1), jaxcomp.Residual())
EF21 = jaxcomp.Link(jaxcomp.sign(), jaxcomp.Shift())
LIKE = {
    "w": jnp.zeros((70, 31)),
    "b": jnp.zeros(31, jnp.bfloat16),
    "n": jnp.zeros(5),
    "e": jnp.zeros((0, 3)),
}
REDUCERS = {
    "two shots": lambda delay: jaxcomp.TwoShot(FOUR, FOUR, delay=delay),
    "gather": lambda delay: jaxcomp.Gather(SPARSE, delay=delay),
    "shifts": lambda delay: jaxcomp.TwoShot(EF21, EF21, delay=delay),
    "dense": lambda delay: jaxcomp.Dense(delay=delay),
    "dense bfloat16": lambda delay: jaxcomp.Dense("bfloat16", delay=delay),
}


def stepped(mesh, reducer):
    """The mean of one step, and the program."""
    tx = jaxcomp.compressed_mean(reducer, "data", key=0)
    state = jaxcomp.init_state(tx, LIKE, mesh, "data")

    def step(params, state, x):
        def grad(leaf):
            place = jnp.arange(leaf.size).reshape(leaf.shape)
            return jnp.sin(x.sum() * (place + 1)).astype(leaf.dtype)

        return tx.update(jax.tree.map(grad, params), state, params)[0]

    run = jaxcomp.data_parallel(step, mesh, "data")
    compiled = run.lower(LIKE, state, jnp.arange(1.0, N + 1)).compile()
    return compiled(LIKE, state, jnp.arange(1.0, N + 1)), compiled


@pytest.mark.parametrize("name", REDUCERS)
def test_messages_at_once_bring_the_same_bits(name, mesh):
    make = REDUCERS[name]
    one_by_one, _ = stepped(mesh, make(0.0))
    at_once, compiled = stepped(mesh, make(DELAY))
    jax.tree.map(np.testing.assert_array_equal, one_by_one, at_once)
    sent = jaxcomp.collective_bytes(compiled)
    assert set(sent) == {"all-to-all"}
    assert sum(sent.values()) == jaxcomp.wire_bytes(make(DELAY), LIKE, N)


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 300_000])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_sums_are_in_the_order_of_the_workers(size, dtype, mesh):
    draw = np.random.default_rng(size)
    x = (draw.standard_normal((N, size)) * 1e3).astype(dtype)

    def total(own):
        return over_workers.total([own[0], own[0, :1]], "data", DELAY)

    found, first = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=P("data"), out_specs=P()))(x)
    expected = x[0]
    for row in x[1:]:
        expected = expected + row
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(first, expected[:1])


def test_simulated_workers_have_the_same_bits():
    x = np.random.default_rng(0).standard_normal((N, 100)).astype(np.float32)
    gathered = jax.vmap(lambda x: axes.gather(x, "w", at_once=True), axis_name="w")(x)
    np.testing.assert_array_equal(gathered, np.broadcast_to(x, (N, N, 100)))
    for delay in (None, DELAY):
        found = jax.vmap(lambda x, d=delay: over_workers.mean([x], "w", delay=d), axis_name="w")(x)
        expected = x[0]
        for row in x[1:]:
            expected = expected + row
        np.testing.assert_array_equal(found[0][0], expected * np.float32(1 / N))


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8, 64])
def test_messages_wait_as_often_as_the_plan_says(workers):
    def rounds(reducer):
        plan = choose.plan(reducer, LIKE, sizes=(workers,))
        return sum(effort.rounds for _, effort in plan.costs.efforts)

    each = max(workers - 1, 1)
    assert rounds(jaxcomp.TwoShot(FOUR, FOUR)) == 2 * each
    assert rounds(jaxcomp.TwoShot(FOUR, FOUR, delay=0.0)) == 2 * each
    assert rounds(jaxcomp.TwoShot(FOUR, FOUR, delay=DELAY)) == 2
    assert rounds(jaxcomp.Gather(FOUR, delay=DELAY)) == 1
    # A sum of float32, and two shots of bfloat16.
    assert rounds(jaxcomp.Dense()) == 4 * each
    assert rounds(jaxcomp.Dense(delay=DELAY)) == 3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_accelerators_send_at_once_where_a_delay_is_given(platform, dtype):
    """As plans count their messages: no all-reduce goes along a ring."""
    mesh = lowering.mesh_of(platform, (N,), ("data",))
    texts = {
        delay: lowering.lowered(
            jax.shard_map(
                lambda x, d=delay: over_workers.mean([x[0]], "data", delay=d)[0],
                mesh=mesh,
                in_specs=P("data"),
                out_specs=P(),
            ),
            jax.ShapeDtypeStruct((N, 1000), dtype),
            mesh=mesh,
        )
        for delay in (None, DELAY)
    }
    assert "all_reduce" in texts[None]
    assert "all_to_all" not in texts[None]
    assert "all_reduce" not in texts[DELAY]
    assert "all_to_all" in texts[DELAY]


def test_long_messages_go_one_after_another():
    long = jax.ShapeDtypeStruct((2**17, 2**11), jnp.float32)
    reducer = jaxcomp.TwoShot(jaxcomp.codecs.Identity(), jaxcomp.codecs.Identity(), delay=1e-3)
    assert not trips.at_once(4 * long.size / N, N, 1e-3)
    assert trips.of_sum(4 * long.size, N, 1e-3) == trips.RING
    plan = Plan.of(reducer, {"w": long}, sizes=(N,))
    assert sum(effort.rounds for _, effort in plan.costs.efforts) == 2 * (N - 1)


def test_a_payload_is_one_message_where_it_would_wait_longer_than_it_is_sent():
    like = {f"w{i}": jax.ShapeDtypeStruct((1024, 1024), jnp.float32) for i in range(8)}
    parts = {
        delay: Plan.of(jaxcomp.TwoShot(FOUR, FOUR, delay=delay), like, sizes=(N,)).collectives
        for delay in (None, 0.0, 1e-4, DELAY)
    }
    assert parts == {None: 4, 0.0: 4, 1e-4: 4, DELAY: 1}


@pytest.mark.parametrize("make", [lambda d: jaxcomp.Dense(delay=d), *list(REDUCERS.values())[:2]])
@pytest.mark.parametrize("delay", [-1.0, float("nan"), "50ms", True])
def test_a_delay_is_a_number_of_seconds(make, delay):
    with pytest.raises(ValueError, match="`delay`"):
        make(delay)


def test_a_sum_in_two_shots_counts_both_and_fills_its_slices():
    """Of 1,000,001 floats each of eight workers sends seven slices of 125,001, twice."""
    size = 4 * 1_000_001
    assert trips.of_sum(size, 8, 0.05) == trips.SHOTS
    assert trips.sum_messages(size, 8, 0.05) == 2
    assert trips.sum_bytes(1_000_001, np.dtype(np.float32), 8, 0.05) == 2 * 7 * 4 * 125_001
