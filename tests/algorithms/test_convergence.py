"""Methods on workers that disagree: the guarantees of theory, and methods without guarantees."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.methods import AXIS, IDENTITY, QSGD, RANDOM, SIGN, SIZE, TOP, alone, everywhere, mean

import jaxcomp
from jaxcomp.testing import problems


def theory(problem, delta):
    """EF21's step for a contraction of `delta`."""
    left = np.sqrt(np.mean(problem.smoothnesses**2))
    theta = 1 - np.sqrt(1 - delta)
    return 1 / (problem.smoothness + left * np.sqrt((1 - delta) / theta**2))


def last(tx, steps, problem=None):
    run = problems.descend(tx, problem or problems.quadratics(), steps, AXIS)
    assert run.alike
    return run.error[-1]


@pytest.mark.full
def test_memories_are_exact_where_residuals_are_not(x64):
    """On workers that disagree, after 2,000 steps at the lengths that the theory allows."""
    problem = problems.quadratics()
    unit = 1 / problem.smoothness
    assert last(mean(jaxcomp.algorithms.ef21)(TOP, theory(problem, 0.1)), 2000) < 1e-14
    assert last(mean(jaxcomp.algorithms.ef_sgd)(TOP, 0.2 * unit), 2000) > 1e-3
    assert last(mean(jaxcomp.algorithms.double_squeeze)(TOP, 0.2 * unit), 2000) > 1e-3
    bare = optax.chain(
        jaxcomp.compressed_mean(jaxcomp.Gather(jaxcomp.Link(QSGD)), AXIS), optax.sgd(0.052 * unit)
    )
    diana = last(mean(jaxcomp.algorithms.diana)(QSGD, 0.052 * unit), 2000)
    assert diana < 1e-7
    assert last(bare, 2000) > 1e-3
    mcm = last(jaxcomp.algorithms.mcm(QSGD, AXIS, learning_rate=0.052 * unit), 2000)
    assert np.log(mcm) < 0.85 * np.log(diana)  # Within 15 % of DIANA's slope.
    omega, workers, p = 9, problem.workers, 0.1
    left = np.sqrt(np.mean(problem.smoothnesses**2) * (1 - p) * omega / (p * workers))
    rate = 1 / (problem.smoothness + left)
    assert last(mean(jaxcomp.algorithms.marina, p=p)(RANDOM, rate), 2000) < 1e-15


@pytest.mark.full
def test_the_absent_are_remembered(x64):
    """Artemis with half of the workers: exact with all memories (PP2), not without them (PP1)."""
    rate = 0.02 / problems.quadratics().smoothness
    both = {
        absent: last(mean(jaxcomp.algorithms.artemis, p=0.5, absent=absent)(QSGD, rate), 20_000)
        for absent in ("remembered", "left out")
    }
    assert both["remembered"] < 1e-20
    assert both["left out"] > 1e-3


def test_a_preserved_model_with_half_of_the_workers(x64):
    """MCM with partial participation: absent workers stay in the mean, so it is exact too."""
    rate = 0.05 / problems.quadratics().smoothness
    half = jaxcomp.algorithms.mcm(QSGD, AXIS, learning_rate=rate, p=0.5)
    assert last(half, 4000) < 1e-15
    with pytest.raises(ValueError, match="`p` must be"):
        jaxcomp.algorithms.rand_mcm(QSGD, AXIS, learning_rate=rate, p=0.0)


@pytest.mark.full
def test_one_bit_both_ways_before_an_adaptive_step(x64):
    """AMSGrad reaches the solution with shifts, not with residuals."""
    problem = problems.quadratics()

    def rate(step):
        return 0.03 / jnp.sqrt(1 + step / 100)

    def steepness(tx):
        run = problems.descend(tx, problem, 6000, AXIS)
        pulls = jax.vmap(functools.partial(problem.gradient, run.params))(*problem.data)
        return float(jnp.sum(pulls.mean(axis=0) ** 2))

    assert steepness(mean(jaxcomp.algorithms.cd_adam)(SIGN, rate)) < 1e-20
    link = jaxcomp.Link(SIGN, jaxcomp.Residual())
    residuals = optax.chain(
        jaxcomp.compressed_mean(jaxcomp.TwoShot(link, link), AXIS), optax.amsgrad(rate, 0.9, 0.99)
    )
    assert steepness(residuals) > 1e-5


def steep(problem):
    """The same problem with workers whose smoothness is 1.3^{2i}."""
    wanted = 1.3 ** (2 * np.arange(problem.workers))
    own = (wanted / problem._replace(ridge=0.0).smoothnesses) ** 0.5
    matrices, targets = (
        np.asarray(rows) * own.reshape(-1, *[1] * (rows.ndim - 1)) for rows in problem.data
    )
    curvature = np.einsum("nmd,nme->de", matrices, matrices) / problem.workers
    pull = np.einsum("nmd,nm->d", matrices, targets) / problem.workers
    return problem._replace(
        matrices=jnp.asarray(matrices),
        targets=jnp.asarray(targets),
        ridge=0.0,
        solution=jnp.asarray(np.linalg.solve(curvature, pull)),
        smoothness=float(np.linalg.eigvalsh(curvature)[-1]),
    )


@pytest.mark.full
def test_who_is_silent_and_how_often(x64):
    """Censoring: no worker sends twice in a row, with fewer messages than descent."""
    problem = steep(problems.quadratics(workers=9, rows=20))
    rate, steps = 1 / problem.smoothness, 120
    start = {"x": jnp.zeros((1, SIZE))}

    def run(censoring):
        tx = jaxcomp.algorithms.censored_heavy_ball(
            None, AXIS, learning_rate=rate, censoring=censoring
        )

        def one(params, data, state):
            grads = {"x": problem.gradient(params["x"][0], *data)[None]}
            updates, after = tx.update(grads, state, params)
            held = [s[0].memory.feedback.own.own()[0] for s in (state, after)]
            return updates, after, jnp.any(held[0] != held[1])

        def step(carry, _):
            params, state = carry
            everyone = jax.vmap(one, (None, 0, 0), axis_name=AXIS)
            updates, state, sent = everyone(params, problem.data, state)
            params = {"x": params["x"] + updates["x"][0]}
            return (params, state), (sent, problem.error(params["x"][0]), params["x"][0])

        state = jax.vmap(lambda _: tx.init(start), axis_name=AXIS)(jnp.arange(problem.workers))
        return jax.lax.scan(step, (start, state), None, length=steps)[1]

    messages = []
    for censoring in (0.1, 0.0):
        sent, error, points = (np.asarray(x) for x in run(censoring))
        reached = int(np.argmax(error < 1e-6))
        assert reached > 1
        messages.append(sent[: reached + 1].sum())
        if censoring:
            calm = problem.smoothnesses**2 <= censoring / rate**2
            assert calm.sum() >= 3
            assert sent[0].all()
            assert not (sent[1:, calm] & sent[:-1, calm]).any()
    assert messages[0] < 0.7 * messages[1]
    parent = alone(optax.sgd(rate, momentum=0.4), problem, steps)
    np.testing.assert_allclose(points[-1], parent[-1], rtol=0, atol=1e-12)


@pytest.mark.full
def test_gradients_where_no_error_had_been_made(x64):
    """DGD-DEF on one worker: exact descent at the displaced point, and its rate from three bits."""
    problem = problems.quadratics(workers=1)
    least = problem.smoothness / problem.condition
    rate = 2 / (problem.smoothness + least)

    def coded(bits, steps):
        codec = everywhere(jaxcomp.ndsc(bits=bits, dithered=False, bucket_size=SIZE))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # Not always contractive.
            tx = jaxcomp.algorithms.dgd_def(codec, AXIS, learning_rate=rate)
        return problems.descend(tx, problem, steps, AXIS)

    run = coded(2, 12)
    own = jax.tree.map(lambda leaf: leaf[0], run.state)
    seen = jaxcomp.view({"x": run.params[None]}, own)["x"][0]
    np.testing.assert_allclose(seen, alone(optax.sgd(rate), problem, 12)[-1], rtol=0, atol=1e-10)
    error = np.sqrt(coded(3, 60).error)
    slope = (error[50] / error[10]) ** (1 / 40)
    assert slope <= (problem.condition - 1) / (problem.condition + 1) + 0.01


@pytest.mark.full
def test_sparse_solutions_of_real_data(x64):
    """QRDA finds the zeros of uncompressed dual averaging; a better ternary code keeps them."""
    data = pytest.importorskip("sklearn.datasets").load_breast_cancer()
    problem = problems.logistic(data.data, data.target, workers=8)._replace(ridge=0.0)
    found = {}
    for name, make, codec in (
        ("whole", jaxcomp.algorithms.qrda_adagrad, IDENTITY),
        ("ternary", jaxcomp.algorithms.qrda_adagrad, everywhere(jaxcomp.threshold_ternary())),
        ("mirror", jaxcomp.algorithms.qcmd_adagrad, everywhere(jaxcomp.threshold_ternary())),
    ):
        settings = {"learning_rate": 0.1, "regularizer": jaxcomp.optimizers.L1(0.02)}
        run = problems.descend(make(codec, AXIS, **settings), problem, 400, AXIS)
        assert problem.accuracy(run.params) > 0.97
        found[name] = np.asarray(run.params == 0)
    assert found["whole"].sum() >= 8
    assert abs(int(found["ternary"].sum()) - int(found["whole"].sum())) <= 2
    assert found["mirror"].sum() <= found["ternary"].sum()


@pytest.mark.full
def test_subgradients_in_a_ball(x64):
    """DQ-PSGD: the mean of all points comes near the best point of a ball, at half a bit."""
    rng = np.random.default_rng(0)
    target = jnp.asarray(2 * rng.standard_normal((4, 1, SIZE)))  # Outside of the ball.
    codec = everywhere(jaxcomp.ndsc(bits=0.5, bucket_size=SIZE))

    def shrink(tree):
        return optax.projections.projection_l2_ball(tree, 1.0)

    tx = jaxcomp.algorithms.dq_psgd(codec, AXIS, learning_rate=0.02, projection=shrink)
    start = {"x": jnp.zeros((1, SIZE))}

    def one(params, own, state):
        away = params["x"] - own
        return tx.update({"x": away / jnp.linalg.norm(away)}, state, params)

    def step(carry, _):
        params, state = carry
        updates, state = jax.vmap(one, (None, 0, 0), axis_name=AXIS)(params, target, state)
        return ({"x": params["x"] + updates["x"][0]}, state), None

    state = jax.vmap(lambda _: tx.init(start), axis_name=AXIS)(jnp.arange(4))
    _, state = jax.lax.scan(step, (start, state), None, length=4000)[0]
    mean = jaxcomp.optimizers.average(jax.tree.map(lambda leaf: leaf[0], state))["x"]

    def loss(x):
        return float(jnp.mean(jnp.linalg.norm(x - target, axis=(1, 2))))

    points = jnp.zeros((1, SIZE))
    for _ in range(400):
        away = points - target
        pull = jnp.mean(away / jnp.linalg.norm(away, axis=(1, 2), keepdims=True), axis=0)
        points = shrink(points - 0.05 * pull)
    assert loss(mean) < loss(points) + 0.05 * (loss(jnp.zeros((1, SIZE))) - loss(points))
