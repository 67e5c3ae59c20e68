"""Decentralised methods: what they keep, where they end, and how they relate to each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.methods import AXIS, IDENTITY, everywhere, mean

import jaxcomp
from jaxcomp import algorithms, graphs
from jaxcomp.mesh import per_worker
from jaxcomp.testing import problems
from jaxcomp.testing.mingling import mingle

WORKERS, SIZE = 8, 50
TOP = everywhere(jaxcomp.top_k(0.1))
SIGN = everywhere(jaxcomp.sign(bucket_size=None))
FOUR = everywhere(jaxcomp.qsgd_inf(bits=4, bucket_size=SIZE))
pytestmark = pytest.mark.usefixtures("x64")


def start(workers, size=SIZE, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((workers, size)))


def still(worker, step):
    return jnp.zeros_like, jnp.zeros_like


def spread(models):
    return jnp.sum((models - models.mean(axis=0)) ** 2) / len(models)


def mixed(tx, models, steps):
    """The variance after each step of workers that only mix, and the final models."""
    workers, size = models.shape
    (variance, found), _ = mingle(
        tx, still, lambda x: (spread(x), x), workers=workers, size=size, steps=steps, start=models
    )
    return np.asarray(variance), np.asarray(found[-1])


@functools.cache
def heterogeneous():
    return problems.quadratics()


def descended(tx, steps):
    """The error of the mean model, the distance between models, and the last models."""
    problem = heterogeneous()
    matrices, targets = problem.data

    def oracle(worker, step):
        def whole(x):
            return problem.gradient(x, matrices[worker], targets[worker])

        return whole, whole

    def measure(x):
        return problem.error(x.mean(axis=0)), spread(x), x

    found, _ = mingle(tx, oracle, measure, workers=WORKERS, size=SIZE, steps=steps)
    error, apart, models = map(np.asarray, found)
    return error, apart, models[-1]


@pytest.mark.core("0.2")
@pytest.mark.parametrize("mixing", [0.2, 0.34])
def test_choco_agrees_and_keeps_the_mean(mixing):
    models = start(16)
    tx = algorithms.choco_sgd(TOP, AXIS, learning_rate=0.0, mixing=mixing)
    variance, after = mixed(tx, models, 3000)
    assert variance[-1] < 1e-20
    np.testing.assert_allclose(after.mean(axis=0), models.mean(axis=0), rtol=0, atol=1e-12)


@pytest.mark.full
def test_choco_diverges_with_too_long_a_step_and_naive_gossip_stays_apart():
    models = start(16)
    make = functools.partial(algorithms.choco_sgd, TOP, AXIS, learning_rate=0.0)
    assert mixed(make(mixing=0.5), models, 1000)[0][-1] > 1e6
    with pytest.warns(UserWarning, match="is biased"):
        naive = jaxcomp.Link(TOP, jaxcomp.NoFeedback())
    tx = algorithms.dpsgd(naive, AXIS, learning_rate=0.0, mixing=0.2)
    assert mixed(tx, models, 1000)[0][-1] > 1e-3


def test_a_lean_state_is_that_of_copies_of_all_neighbours():
    """CHOCO with full copies, in numpy, on a ring of 8 and the largest tenth of the elements."""
    models, mixing, steps = start(WORKERS), 0.3, 60
    tx = algorithms.choco_sgd(TOP, AXIS, learning_rate=0.0, mixing=mixing)
    _, got = mixed(tx, models, steps)
    (matrix,) = graphs.Ring().matrices(WORKERS)
    x, known = np.asarray(models), np.zeros((WORKERS, SIZE))
    for _ in range(steps):
        change = x - known
        kept = np.argsort(-np.abs(change), axis=1, kind="stable")[:, : SIZE // 10]
        sent = np.zeros_like(x)
        np.put_along_axis(sent, kept, np.take_along_axis(change, kept, 1), 1)
        known = known + sent
        x = x + mixing * (matrix @ known - known)
    np.testing.assert_allclose(got, x, rtol=0, atol=1e-12)


@pytest.mark.full
def test_methods_without_compression_are_the_same():
    rate = {"learning_rate": 0.05}
    _, _, want = descended(algorithms.dpsgd(IDENTITY, AXIS, **rate), 30)
    same = {
        "deepsqueeze": algorithms.deepsqueeze(IDENTITY, AXIS, **rate),
        "choco_sgd": algorithms.choco_sgd(IDENTITY, AXIS, mixing=1.0, **rate),
        "dspg": algorithms.dspg(IDENTITY, AXIS, **rate),
        "noloco": algorithms.noloco(
            IDENTITY,
            AXIS,
            every=1,
            inner=optax.sgd(0.05),
            learning_rate=1.0,
            momentum=0.0,
            graph=graphs.Ring(),
        ),
    }
    for name, tx in same.items():
        np.testing.assert_allclose(descended(tx, 30)[2], want, rtol=0, atol=1e-12, err_msg=name)


def test_a_complete_graph_is_one_model():
    """Then D-PSGD is descent by the mean gradient."""
    tx = algorithms.dpsgd(IDENTITY, AXIS, learning_rate=0.05, graph=graphs.Complete())
    error, apart, models = descended(tx, 30)
    central = optax.chain(jaxcomp.compressed_mean(jaxcomp.Dense(), AXIS), optax.sgd(0.05))
    want = problems.descend(central, heterogeneous(), 30, AXIS)
    np.testing.assert_allclose(error, want.error, rtol=1e-9)
    np.testing.assert_allclose(models[0], want.params, rtol=0, atol=1e-12)
    assert apart[-1] < 1e-28


@pytest.mark.full
def test_the_distance_between_models_is_of_the_order_of_the_squared_rate():
    rates = (0.004, 0.002)
    found = [descended(algorithms.dpsgd(IDENTITY, AXIS, learning_rate=r), 3000)[1] for r in rates]
    assert 3.4 < found[0][-1] / found[1][-1] < 4.1
    tracked = algorithms.gradient_tracking(IDENTITY, AXIS, learning_rate=0.02)
    error, apart, _ = descended(tracked, 1500)
    assert apart[-1] < 1e-18
    assert error[-1] < 1e-18


@pytest.mark.full
@pytest.mark.parametrize("workers", [8, 16])
def test_pairs_shrink_the_variance_as_in_theory(workers):
    """A pair of `n/(2(n − 1))` of the variance on average loses all but 0.09 of it."""
    models, found = start(workers, 4000), []
    for key in range(12):
        tx = algorithms.noloco(IDENTITY, AXIS, every=1, inner=optax.sgd(0.0), key=key)
        variance, after = mixed(tx, models, 1)
        np.testing.assert_allclose(after.mean(axis=0), models.mean(axis=0), rtol=0, atol=1e-14)
        found.append(variance[0] / float(spread(models)))
    want = {8: 0.48, 16: 0.5147}[workers]
    np.testing.assert_allclose(np.mean(found), want, atol=0.01)


@pytest.mark.core("deepsqueeze, top")
@pytest.mark.parametrize(
    ("codec", "method"),
    [
        pytest.param(codec, method, id=f"{method}, {name}")
        for method, name, codec in (
            ("choco_sgd", "sign", SIGN),
            ("choco_sgd", "4 bits", FOUR),
            ("deepsqueeze", "sign", SIGN),
            ("deepsqueeze", "top", TOP),
            ("dcd", "4 bits", FOUR),
        )
    ],
)
def test_compressed_methods_end_where_the_uncompressed_one_does(codec, method):
    settings = {"learning_rate": 0.02} | ({"mixing": 0.3} if method != "dcd" else {})
    make = functools.partial(getattr(algorithms, method), axis_name=AXIS, **settings)
    error, apart, _ = descended(make(codec), 400)
    want, _, _ = descended(make(IDENTITY), 400)
    assert error[-1] < 1.5 * want[-1]
    assert error[-1] < error[0] / 5
    assert np.isfinite(apart[-1])


@pytest.mark.full
def test_workers_move_to_another_graph_and_keep_their_mean():
    params = {"w": jnp.zeros((4, 5), jnp.float64)}
    link = jaxcomp.Link(TOP, jaxcomp.Shift())
    tx = jaxcomp.gossip(optax.sgd(0.1, 0.9), jaxcomp.Gossip(link), AXIS, mixing=0.3)

    @functools.partial(jax.vmap, in_axes=(None, 0), axis_name=AXIS)
    def run(params, grads):
        state = tx.init(params)
        for _ in range(5):
            _, state = tx.update({"w": grads}, state, params)
        return state

    state = run(params, start(6, 20).reshape(6, 4, 5))
    state = jax.tree_util.tree_map_with_path(
        lambda path, x: x[:, 0] if per_worker.marked(path) else x[0], state
    )
    new = jaxcomp.resize_workers(tx, state, params, 4)
    want = jaxcomp.consensus(params, state)["w"]
    np.testing.assert_allclose(jaxcomp.consensus(params, new)["w"], want, rtol=0, atol=1e-15)
    own, mirror = (np.asarray(x.tree[0]) for x in new.memory.tree.feedback)
    (matrix,) = graphs.Ring().matrices(4)
    np.testing.assert_allclose(mirror, np.einsum("ij,j...->i...", matrix, own), rtol=0, atol=1e-14)


def lasso(workers=WORKERS, rows=30, size=10):
    rng = np.random.default_rng(0)
    a = rng.standard_normal((workers, rows, size))
    x = np.where(np.arange(size) < 3, 1.0, 0) + 0.2 * rng.standard_normal((workers, 1, size))
    return jnp.asarray(a), jnp.asarray(np.sum(a * x, axis=2))


@pytest.mark.full
def test_variance_reduction_is_a_hundred_times_closer_at_equal_steps():
    a, b = lasso()
    penalty, steps, rows = 0.05, 4000, a.shape[1]
    flat, targets = a.reshape(-1, a.shape[2]), b.reshape(-1)

    def value(x):
        return jnp.mean((flat @ x - targets) ** 2) / 2 + penalty * jnp.sum(jnp.abs(x))

    def least():
        x = jnp.zeros(flat.shape[1])
        for _ in range(400):
            z = x - 0.5 * flat.T @ (flat @ x - targets) / len(flat)
            x = jnp.sign(z) * jnp.maximum(jnp.abs(z) - 0.5 * penalty, 0)
        return value(x)

    def oracle(worker, step):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), step), worker)
        row = jax.random.randint(key, (), 0, rows)
        one = lambda x: a[worker, row] * (a[worker, row] @ x - b[worker, row])  # noqa: E731
        return one, lambda x: a[worker].T @ (a[worker] @ x - b[worker]) / rows

    def gap(tx):
        measure = lambda models: jax.vmap(value)(models).mean()  # noqa: E731
        found, _ = mingle(tx, oracle, measure, workers=WORKERS, size=a.shape[2], steps=steps)
        return np.asarray(found) - float(best)

    best = jax.jit(least)()
    shared = {"regularizer": jaxcomp.optimizers.L1(penalty)}
    falling = lambda t: 0.05 / jnp.sqrt(1.0 + t)  # noqa: E731
    plain = gap(algorithms.dspg(IDENTITY, AXIS, learning_rate=falling, **shared))
    for graph in (graphs.Ring(), graphs.OnePeer()):
        reduced = gap(algorithms.dpsvrg(IDENTITY, AXIS, learning_rate=0.02, graph=graph, **shared))
        assert reduced[-1] < plain[-1] / 100, (graph, reduced[-1], plain[-1])


@pytest.mark.full
def test_quantised_variance_reduction_converges_where_quantised_descent_stalls():
    a, b = lasso()
    b = b + 0.5 * start(*b.shape)  # With no noise, every row's gradient vanishes at the solution.
    pooled = jnp.broadcast_to(a[:1], a.shape), jnp.broadcast_to(b[:1], b.shape)
    solution = jnp.linalg.lstsq(a[0], b[0])[0]
    params = {"x": jnp.zeros((1, a.shape[2]))}

    def end(tx, steps=1500):
        def one(params, state, data, worker, step):
            rows, targets = data
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), step), worker)
            row = jax.random.randint(key, (), 0, len(rows))

            def single(at):
                x = at["x"][0]
                return {"x": (rows[row] * (rows[row] @ x - targets[row]))[None]}

            def whole(at):
                return {"x": (rows.T @ (rows @ at["x"][0] - targets) / len(rows))[None]}

            given = {"grad_fn": single, "full_grad_fn": whole}
            return tx.update(single(params), state, params, **given)

        everyone = jax.vmap(one, (None, 0, 0, 0, None), axis_name=AXIS)

        def step(carry, number):
            params, state = carry
            updates, state = everyone(params, state, pooled, jnp.arange(WORKERS), number)
            return ({"x": params["x"] + updates["x"][0]}, state), None

        state = jax.vmap(lambda _: tx.init(params), axis_name=AXIS)(jnp.arange(WORKERS))
        (last, _), _ = jax.jit(lambda c: jax.lax.scan(step, c, jnp.arange(steps)))((params, state))
        return float(jnp.sum((last["x"][0] - solution) ** 2) / jnp.sum(solution**2))

    codec = everywhere(jaxcomp.qsgd(bits=4, bucket_size=10))
    tx = mean(algorithms.qsvrg, every=60)(codec, 0.03)
    plain = optax.chain(jaxcomp.compressed_mean(codec, AXIS), optax.sgd(0.03))
    assert end(tx) < 1e-8
    assert end(optax.with_extra_args_support(plain)) > 1e-6
