"""Methods of rounds: what they share with simpler ones, their bytes, and ADPSGD's claim."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.methods import AXIS, IDENTITY, QSGD, SIZE, everywhere

import jaxcomp
from jaxcomp.testing import problems

WORKERS = 8
PLAIN = functools.partial(optax.sgd, 0.05)


def final(tx, steps=24):
    run = problems.descend(tx, problems.quadratics(), steps, AXIS)
    assert run.alike
    return run.params


@pytest.fixture(scope="module")
def local():
    """Four local steps of descent, then the mean of the models."""
    with jax.enable_x64(True):
        return final(jaxcomp.local_updates(PLAIN(), None, AXIS, every=4))


@pytest.mark.full
def test_all_methods_of_averages_agree_without_compression(local, x64):
    """Sent whole, residuals stay empty, and outer steps of length one are averages."""
    rounds = {"inner": PLAIN(), "every": 4}
    whole = jaxcomp.Policy(jaxcomp.top_k(fraction=1.0), min_size=0, min_ndim=0)
    same = {
        "local_sgd": jaxcomp.algorithms.local_sgd(IDENTITY, AXIS, learning_rate=0.05, every=4),
        "fedpaq": jaxcomp.algorithms.fedpaq(
            IDENTITY, AXIS, learning_rate=0.05, every=4, participants=WORKERS
        ),
        "genqsgd": jaxcomp.algorithms.genqsgd(
            IDENTITY, AXIS, learning_rate=0.05, local_steps=[4] * WORKERS, down=IDENTITY.codec
        ),
        "diloco": jaxcomp.algorithms.diloco(
            IDENTITY, AXIS, learning_rate=1.0, momentum=0.0, **rounds
        ),
        "muloco": jaxcomp.algorithms.muloco(
            IDENTITY, AXIS, learning_rate=0.05, outer_rate=1.0, momentum=0.0, **rounds
        ),
        "sparseloco": jaxcomp.algorithms.sparseloco(whole, AXIS, **rounds),
    }
    for name, tx in same.items():
        np.testing.assert_allclose(final(tx), local, rtol=0, atol=1e-10, err_msg=name)


def finals(make, steps=4, runs=24):
    """The parameters after a round, for each of several seeds, in one program."""
    problem = problems.quadratics()
    start = {"x": jnp.zeros((1, SIZE))}

    def one(key):
        tx = make(key=key)

        def worker(params, state, data):
            at = jaxcomp.view(params, state)["x"][0]
            return tx.update({"x": problem.gradient(at, *data)[None]}, state, params)

        def step(carry, _):
            params, state = carry
            updates, state = jax.vmap(worker, (None, 0, 0), axis_name=AXIS)(
                params, state, problem.data
            )
            return ({"x": params["x"] + updates["x"][0]}, state), None

        state = jax.vmap(lambda _: tx.init(start), axis_name=AXIS)(jnp.arange(WORKERS))
        return jax.lax.scan(step, (start, state), None, length=steps)[0][0]["x"][0]

    keys = jax.random.bits(jax.random.key(0), (runs, 2), jnp.uint32)
    return np.asarray(jax.jit(jax.vmap(one))(keys))


def assert_unbiased(runs, exact):
    error = np.linalg.norm(runs.mean(0) - exact)
    assert 0 < error < 2 * np.linalg.norm(runs.std(0)) / np.sqrt(len(runs))


@pytest.mark.full
def test_genqsgd_takes_unequal_numbers_of_steps_and_quantises_both_ways(x64):
    """Both ways unbiased: the mean of many runs is the run without quantisation."""
    numbers = [4, 4, 4, 4, 2, 2, 2, 2]
    make = functools.partial(jaxcomp.algorithms.genqsgd, axis_name=AXIS, learning_rate=0.05)
    whole = functools.partial(make, IDENTITY, down=IDENTITY.codec)
    exact = final(whole(local_steps=numbers), 4)
    assert_unbiased(finals(functools.partial(make, QSGD, local_steps=numbers)), exact)
    even = final(whole(local_steps=[4] * WORKERS), 4)
    assert np.linalg.norm(even - exact) > 1e-3


def test_fedpaq_with_some_workers_is_unbiased(x64):
    make = functools.partial(jaxcomp.algorithms.fedpaq, axis_name=AXIS, learning_rate=0.05, every=4)
    assert_unbiased(finals(functools.partial(make, QSGD, participants=3)), final(make(IDENTITY), 4))


def test_chunks_send_what_they_say():
    """At most 0.162 bits an element and round; two magnitudes a block, of the largest elements."""
    like = {"w": jnp.zeros((512, 4096))}
    codec = jaxcomp.chunk_top_k()
    bits = 8 * jaxcomp.wire_bytes(codec, like) / like["w"].size
    assert bits == pytest.approx(0.1602, abs=1e-4)
    normal = jax.random.normal(jax.random.key(0), (2, 4, 8192))
    x = normal[0] * jnp.exp(normal[1])
    sent = np.asarray(jaxcomp.roundtrip(jaxcomp.Policy(codec), 0, x))
    assert ((sent != 0).sum(1) == 128).all()
    chosen = np.argsort(-np.abs(np.asarray(x)), axis=1)[:, :128]
    assert all(sent[row, at].all() for row, at in enumerate(chosen))
    magnitudes = [np.unique(np.abs(row[row != 0])) for row in sent]
    assert all(len(found) == 2 and found[1] == 2 * found[0] for found in magnitudes)
    assert np.linalg.norm(x - sent) < 0.75 * np.linalg.norm(x)


@pytest.mark.full
@pytest.mark.parametrize("subtract", ["own", "aggregate"])
def test_decoupled_momentum_keeps_what_nobody_sends(subtract):
    """With every coefficient sent, the own momentum is empty after each step; the aggregate leaves
    what differs from the others."""
    make = functools.partial(jaxcomp.algorithms.demo_sgd, AXIS, chunk=8, subtract=subtract)
    like = {"w": jnp.zeros((16, 64))}
    grads = {"w": jax.random.normal(jax.random.key(0), (WORKERS, 16, 64))}

    def momentum(tx):
        state = jax.vmap(lambda _: tx.init(like), axis_name=AXIS)(grads["w"])
        update = jax.jit(jax.vmap(tx.update, axis_name=AXIS))
        updates, state = update(grads, state)
        assert set(np.unique(np.abs(updates["w"]))) <= {np.float32(0), np.float32(1)}
        return state[0].memory.feedback.tree.residual[0][:, 0].reshape(WORKERS, -1)

    kept = momentum(make(k=64))
    own = grads["w"].reshape(WORKERS, -1)
    want = 0 * own if subtract == "own" else 0.999 * (own - own.mean(0))
    np.testing.assert_allclose(kept, want, atol=1e-5)
    assert np.abs(momentum(make(k=4))).max() > 0.1


@pytest.mark.core("2")
@pytest.mark.parametrize("workers", [2, 8, 64])
def test_directions_that_differ_keep_their_length(workers):
    """Orthogonal vectors of length one: the plain mean is `1/√n` long."""
    tx = jaxcomp.directional_mean(jaxcomp.Dense(), AXIS, plain=lambda path: path == "plain")
    rows = jnp.eye(64)[:workers]
    updates = {"w": rows, "plain": rows, "zero": 0 * rows}
    mean = jax.vmap(lambda u: tx.update(u, tx.init(u))[0], axis_name=AXIS)(updates)
    np.testing.assert_allclose(np.linalg.norm(mean["w"], axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(mean["plain"], axis=1), workers**-0.5, rtol=1e-5)
    assert not mean["zero"].any()


@pytest.mark.full
def test_directions_are_weighted_and_take_part_in_rounds():
    tx = jaxcomp.directional_mean(jaxcomp.Dense(), AXIS)
    rows, weights = jnp.asarray([[3.0, 0], [0, 1]]), jnp.asarray([3.0, 1])

    def merged(u, w):
        return tx.update({"w": u}, tx.init({"w": u}), weight=w)[0]["w"]

    found = jax.vmap(merged, axis_name=AXIS)(rows, weights)[0]
    want = (3 * 3 + 1 * 1) / 4 * np.asarray([3, 1]) / np.sqrt(10)
    np.testing.assert_allclose(found, want, rtol=1e-5)
    tx = jaxcomp.directional_mean(QSGD, AXIS)
    assert np.isfinite(final(jaxcomp.local_updates(PLAIN(), None, AXIS, every=4, reducer=tx))).all()
    with pytest.raises(
        ValueError, match="`reducer` must be a codec, policy, link or reducer beside"
    ):
        jaxcomp.local_updates(PLAIN(), None, AXIS, every=4, reducer=tx, stats=True)


@pytest.mark.full
def test_momentum_is_decoupled_in_vectors_too_and_weights_decay():
    """A vector sends half of its coefficients, and keeps the others for later steps."""
    like = {"vector": jnp.full(192, 2.0), "scalar": jnp.full((), 2.0)}
    grads = jax.random.normal(jax.random.key(0), (WORKERS, 192))

    def moved(decay):
        tx = jaxcomp.algorithms.demo_sgd(AXIS, weight_decay=decay)

        def worker(g):
            tree = {"vector": g, "scalar": g[0]}
            updates, state = tx.update(tree, tx.init(like), like)
            return updates, state[0].memory.feedback

        return jax.vmap(worker, axis_name=AXIS)(grads)

    plain, memory = moved(0.0)
    kept = [np.asarray(x).reshape(WORKERS, -1) for x in jax.tree.leaves(memory)]
    vectors = next(x for x in kept if x.shape[1] >= 192)
    lengths = np.linalg.norm(vectors, axis=1) / np.linalg.norm(grads, axis=1)
    assert ((lengths > 0.1) & (lengths < 0.7)).all()
    decayed, _ = moved(0.5)
    for name, x in plain.items():
        np.testing.assert_array_equal(np.abs(x), 1)
        np.testing.assert_allclose(decayed[name], x + 0.5 * 2, rtol=1e-5)


def rounds_on_devices():
    make = {"axis_name": AXIS, "learning_rate": 0.1}
    genqsgd = functools.partial(jaxcomp.algorithms.genqsgd, local_steps=[2] * 8, **make)
    return functools.partial(jaxcomp.algorithms.fedpaq, every=2, **make), genqsgd


def rounds_of_clients():
    given = {"loss": lambda w, x: jnp.mean((w - x) ** 2), "learning_rate": 0.1}
    methods = (jaxcomp.federated.fedpaq, jaxcomp.federated.genqsgd)
    return tuple(functools.partial(make, **given) for make in methods)


@pytest.mark.parametrize("made", [rounds_on_devices, rounds_of_clients])
def test_methods_for_unbiased_codecs_take_others_in_links_only(made):
    """The same in `jaxcomp.algorithms` and `jaxcomp.federated`: no feedback is added silently."""
    fedpaq, genqsgd = made()
    works = r"jaxcomp.Link\(codec, jaxcomp.Residual\(\)\)"
    with pytest.raises(ValueError, match=rf"`codec` must be unbiased, .*{works}"):
        fedpaq(jaxcomp.top_k(0.1))
    with pytest.raises(ValueError, match=rf"`codec` must be unbiased, .*{works}"):
        genqsgd(everywhere(jaxcomp.sign()))
    with pytest.raises(ValueError, match=rf"`down` must be unbiased, .*{works}"):
        genqsgd(jaxcomp.qsgd(), down=jaxcomp.sign())
    link = jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual())
    fedpaq(link)
    genqsgd(link)
    genqsgd(jaxcomp.qsgd(), down=link)


@pytest.mark.full
def test_muloco_steps_by_the_shapes_of_its_matrices():
    """Singular values are `√(out/in)` times the rate; a second step has no Nesterov look-ahead."""
    params = {"w": jnp.ones((4, 16)), "t": jnp.ones((16, 4)), "b": jnp.ones(4)}
    tx = jaxcomp.algorithms.muloco(jaxcomp.blockwise(bits=2), AXIS, learning_rate=0.1)
    inner = tx.setup.inner
    keys = jax.random.split(jax.random.key(0), 2)
    grads = [
        jax.tree.map(lambda p, key=key: jax.random.normal(key, p.shape), params) for key in keys
    ]
    theirs = optax.contrib.muon(
        *(0.1,), beta=0.9, nesterov=False, weight_decay=1e-4, adam_learning_rate=0.1
    )
    adam = optax.adamw(0.1, 0.9, 0.99, weight_decay=1e-4)
    states = [each.init(params) for each in (inner, theirs, adam)]
    for grad in grads:
        (found, states[0]), (want, states[1]), (rest, states[2]) = (
            each.update(grad, state, params)
            for each, state in zip((inner, theirs, adam), states, strict=True)
        )
        np.testing.assert_allclose(found["w"], want["w"], rtol=1e-4, atol=1e-6)
        decay = 0.1 * 1e-4
        np.testing.assert_allclose(
            found["t"] + decay, (want["t"] + decay) / 2, rtol=1e-4, atol=1e-6
        )
        np.testing.assert_allclose(found["b"], rest["b"], rtol=1e-5)


@pytest.mark.full
def test_what_needs_the_whole_mean_says_so():
    with pytest.raises(ValueError, match="`subtract` must be one of 'own', 'aggregate'"):
        jaxcomp.algorithms.demo_sgd(AXIS, subtract="all")
    with pytest.raises(ValueError, match="`policy` must be None beside k=8 and chunk=64"):
        jaxcomp.algorithms.demo_sgd(AXIS, k=8, policy=jaxcomp.demo())
    link = jaxcomp.Link(jaxcomp.sign(bucket_size=64), jaxcomp.Aggregated(jaxcomp.Residual(0.9)))
    tx = jaxcomp.compressed_mean(jaxcomp.TwoShot(link, jaxcomp.qsgd(6, bucket_size=64)), AXIS)
    grads = {"w": jnp.ones((WORKERS, 64, 64))}
    with pytest.raises(ValueError, match="gives every device the whole mean"):
        jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name=AXIS)(grads)


def local_variance(tx, steps):
    """The mean variance of the models before an exchange and in all steps, and the exchanges."""
    rng = np.random.default_rng(3)
    curvature = jnp.asarray(rng.uniform(0.5, 1.5, (WORKERS, SIZE)), jnp.float32)
    optimum = jnp.asarray(rng.standard_normal((WORKERS, SIZE)), jnp.float32)
    start = {"x": jnp.zeros(SIZE)}

    def one(params, state, curvature, optimum, noise):
        here = jaxcomp.view(params, state)
        grads = {"x": curvature * (here["x"] - optimum) + noise}
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.vmap(one, axis_name=AXIS)

    @jax.jit
    def run():
        everyone = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), start)
        state = jax.vmap(lambda _: tx.init(start), axis_name=AXIS)(optimum)

        def body(carry, key):
            noise = jax.random.normal(key, (WORKERS, SIZE))
            params, state = step(*carry, curvature, optimum, noise)
            own = jax.vmap(jaxcomp.view)(params, state)["x"]
            spread = jnp.mean(jnp.sum((own - own.mean(0)) ** 2, 1))
            return (params, state), (spread, state.waited[0] == 0, state.period)

        keys = jax.random.split(jax.random.key(0), steps)
        return jax.lax.scan(body, (everyone, state), keys)[1]

    spread, exchanged, period = run()
    return float(spread.mean()), int(exchanged.sum()), period


@pytest.mark.full
def test_an_adaptive_period_needs_fewer_exchanges_at_the_same_variance():
    """At most 70 % of the exchanges of a constant period of four, at 1.1 times its variance; the
    period grows when the rate falls."""
    steps = 4000
    rate = optax.piecewise_constant_schedule(0.1, {steps // 2: 0.1, 3 * steps // 4: 0.1})
    constant = jaxcomp.algorithms.local_sgd(jaxcomp.Dense(), AXIS, learning_rate=rate, every=4)
    adaptive = jaxcomp.algorithms.adpsgd(
        jaxcomp.Dense(), AXIS, learning_rate=rate, warmup=steps // 16
    )
    usual, often, _ = local_variance(constant, steps)
    found, seldom, period = local_variance(adaptive, steps)
    assert often == steps // 4
    assert found <= 1.1 * usual
    assert seldom <= 0.7 * often
    lengths = period.steps[:, 0]
    assert lengths[steps // 2 - 1] < lengths[3 * steps // 4 - 1] < lengths[-1]
