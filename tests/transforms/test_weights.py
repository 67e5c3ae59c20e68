"""What an update is asked for is done or refused: `weight` and `exchange`."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.methods import AXIS, GOSSIP, IDENTITY, METHODS, SIZE, TOP, build, everywhere

import jaxcomp

START = {"x": np.zeros((1, SIZE), np.float32)}
WEIGHTS = np.asarray([1, 3], np.float32)


def everyone(tx, rows, weights, steps, **asked):
    """The parameters of all workers after some steps; without weights they count alike."""

    def worker(slope, optimum, weight):
        def one(carry, _):
            params, state = carry
            extra = asked if weights is None else {**asked, "weight": weight}

            def grad_fn(at):
                return {"x": slope * (at["x"] - optimum)}

            at = jaxcomp.local(jaxcomp.view(params, state), AXIS)
            updates, state = tx.update(grad_fn(at), state, params, grad_fn=grad_fn, **extra)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(one, (START, tx.init(START)), length=steps)[0][0]["x"]

    slopes, optima = rows
    given = np.ones(len(slopes), np.float32) if weights is None else weights
    return jax.jit(jax.vmap(worker, axis_name=AXIS))(slopes, optima, given)


def rows_of(workers):
    rng = np.random.default_rng(7)
    slopes = rng.uniform(0.5, 1.5, (workers, 1, SIZE)).astype(np.float32)
    return slopes, rng.standard_normal(slopes.shape).astype(np.float32)


MEANS = {
    "compressed_mean": lambda: jaxcomp.compressed_mean(IDENTITY, AXIS),
    "directional_mean": lambda: jaxcomp.directional_mean(IDENTITY, AXIS),
    "accumulate": lambda: jaxcomp.accumulate(
        jaxcomp.compressed_mean(IDENTITY, AXIS), AXIS, every=2
    ),
    "local_updates": lambda: jaxcomp.local_updates(
        optax.sgd(0.1), None, AXIS, every=2, reducer=IDENTITY, synchronous=2
    ),
    "sharded_optimizer": lambda: jaxcomp.sharded_optimizer(optax.adam(0.1), AXIS, IDENTITY),
    "dense": lambda: jaxcomp.compressed_mean(jaxcomp.Dense(), AXIS),
    "wrapped": lambda: jaxcomp.skip_nonfinite(
        jaxcomp.freeze(jaxcomp.compressed_mean(IDENTITY, AXIS), {"x": False})
    ),
}
MADE = MEANS | {name: lambda name=name: build(name, IDENTITY) for name in METHODS}
CORE = [*MEANS, "diana", "marina", "one_bit_adam", "post_local_sgd"]
VOTES = ["signsgd", "demo_sgd"]


@pytest.mark.core(*CORE)
@pytest.mark.parametrize("name", [name for name in MADE if name not in VOTES])
def test_a_worker_of_weight_three_counts_as_three_workers(name):
    """In every transformation and method, in several steps."""
    slopes, optima = rows_of(2)
    three = np.asarray([0, 1, 1, 1])
    make = MADE[name]
    found = everyone(make(), (slopes, optima), WEIGHTS, 4)
    want = everyone(make(), (slopes[three], optima[three]), None, 4)
    found, want = np.asarray(found), np.asarray(want)
    np.testing.assert_allclose(found[0], want[0], rtol=2e-4, atol=2e-5)
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.core(*VOTES, "dpsgd", "choco_sgd")
@pytest.mark.parametrize("name", [*VOTES, *GOSSIP])
def test_who_takes_no_weighted_mean_says_so(name):
    with pytest.raises(ValueError, match="`weight` must be None"):
        jax.eval_shape(lambda: everyone(build(name), rows_of(2), WEIGHTS, 1, full_grad_fn=len))


SENDERS = jaxcomp.Gather(jaxcomp.Link(TOP, jaxcomp.Residual()), over="senders")
REFUSED = {
    "vote": jaxcomp.Vote(everywhere(jaxcomp.codecs.Ballot())),
    "median": jaxcomp.Robust(IDENTITY, jaxcomp.aggregates.CoordinateMedian()),
    "senders": SENDERS,
    "phases": jaxcomp.ReducerSchedule(((0, SENDERS), (2, SENDERS))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_reducers_without_a_weighted_mean_refuse_weights(name):
    reducer = REFUSED[name]
    made = [
        jaxcomp.compressed_mean(reducer, AXIS),
        jaxcomp.local_updates(optax.sgd(0.1), None, AXIS, every=1, reducer=reducer),
    ]
    for tx in made:
        with pytest.raises(ValueError, match="`weight` must be None with"):
            jax.eval_shape(lambda tx=tx: everyone(tx, rows_of(2), WEIGHTS, 1))


@pytest.mark.parametrize(
    "name", ["compressed_mean", "accumulate", "sharded_optimizer", "marina", "dpsgd"]
)
def test_an_exchange_that_cannot_be_left_out_is_no_wish(name):
    tx = MADE[name]() if name in MADE else build(name)
    for exchange in (True, False):
        with pytest.raises(ValueError, match="`exchange` must be None here"):
            jax.eval_shape(lambda: everyone(tx, rows_of(2), None, 1, exchange=exchange))  # noqa: B023


def test_every_transformation_over_workers_is_tried():
    """Those that hand their arguments on, and those that take no mean, are named here."""
    others = {"clip_local", "gossip", "on_mesh"}
    taking = set()
    for name, made in inspect.getmembers(jaxcomp, inspect.isfunction):
        parts = inspect.signature(made)
        returned = parts.return_annotation
        if "axis_name" in parts.parameters and inspect.isclass(returned):
            taking |= {name} if issubclass(returned, optax.GradientTransformation) else set()
    assert taking - others <= set(MEANS)
    assert {"compressed_mean", "accumulate", "local_updates", "directional_mean"} <= taking


def test_tokens_weigh_on_a_mesh(mesh):
    """The mean over all tokens, of workers whose losses are means over their own."""
    tx = jaxcomp.compressed_mean(jaxcomp.Dense(), "data")
    rows, tokens = jnp.arange(8.0)[:, None] * jnp.ones(4), jnp.asarray([1, 2, 3, 4, 5, 6, 7, 36.0])

    def step(params, state, batch):
        row, weight = batch
        return tx.update({"w": row[0]}, state, params, weight=weight[0])

    params = {"w": jnp.zeros(4)}
    state = jaxcomp.init_state(tx, params, mesh, "data")
    mean, _ = jaxcomp.data_parallel(step, mesh, "data")(params, state, (rows, tokens))
    np.testing.assert_allclose(mean["w"], np.average(rows, axis=0, weights=tokens), rtol=1e-6)


@pytest.mark.full
def test_lanes_of_a_device_have_weights_of_their_own():
    tx = jaxcomp.compressed_mean(jaxcomp.Dense(), ("device", "lane"))
    rows, weights = jnp.arange(8.0).reshape(4, 2), jnp.arange(1.0, 9.0).reshape(4, 2)

    def step(row, weight):
        return tx.update(row, tx.init(row), weight=weight)[0]

    found = jax.pmap(jax.vmap(step, axis_name="lane"), axis_name="device")(rows, weights)
    np.testing.assert_allclose(found, np.average(rows, weights=weights), rtol=1e-6)


def test_a_round_of_micro_batches_is_weighted_as_a_whole():
    """Weights differ between the steps of a round; half of them is refused by NaN."""
    tx = jaxcomp.accumulate(jaxcomp.compressed_mean(jaxcomp.Dense(), AXIS), AXIS, every=2)
    rows, weights = np.float32([[0, 4], [6, 8]]), np.float32([[1, 3], [4, 0]])

    def worker(rows, weights, second):
        like = {"w": rows[0]}
        _, state = tx.update(like, tx.init(like), weight=weights[0])
        last = {"weight": weights[1]} if second else {}
        return tx.update({"w": rows[1]}, state, **last)[0]["w"]

    def run(second):
        each = jax.vmap(lambda r, w: worker(r, w, second), axis_name=AXIS)
        return np.asarray(jax.jit(each)(rows, weights))

    np.testing.assert_allclose(run(second=True), np.average(rows, weights=weights))
    assert np.isnan(run(second=False)).all()


def test_a_weight_is_one_number_and_none_or_all_may_be_zero():
    tx = jaxcomp.compressed_mean(jaxcomp.Dense(), AXIS)

    def worker(row, weight):
        return tx.update(row, tx.init(row), weight=weight)[0]

    run = jax.jit(jax.vmap(worker, axis_name=AXIS))
    rows = np.float32([[1], [np.nan]])
    assert run(rows, np.float32([2, 0])).tolist() == [[1.0], [1.0]]
    assert run(np.ones_like(rows), np.zeros(2, np.float32)).tolist() == [[0.0], [0.0]]
    with pytest.raises(ValueError, match="`weight` must be one number, this worker's"):
        run(rows, np.ones((2, 3), np.float32))
