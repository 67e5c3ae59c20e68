"""Adam in one bit: against its parent, the published recursion, and on workers that disagree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp.algorithms.adaptive import one_bit_adam, zero_one_adam
from jaxcomp.backend import axes
from jaxcomp.optimizers import means, moments, zero_one_adam as zero_one
from jaxcomp.optimizers.one_bit_adam import scale_by_one_bit_adam
from jaxcomp.optimizers.zero_one_adam import step_by_zero_one_adam
from jaxcomp.testing import problems
from jaxcomp.transforms.view import view

PROBLEM = problems.quadratics()
SIZE, WORKERS = PROBLEM.solution.size, PROBLEM.workers


def everything(codec):
    """A codec for every leaf, however small."""
    return jaxcomp.Policy(codec, min_size=0, min_ndim=0)


LOSSLESS = everything(jaxcomp.codecs.Identity(bucket_size=16))
ONE_BIT = everything(jaxcomp.sign(bucket_size=16))


def gradient(x, matrix, target):
    return matrix.T @ (matrix @ x - target) + PROBLEM.ridge * x


def gradients(seen, matrix, target):
    """A last element never has any."""
    return {"x": jnp.pad(gradient(seen["x"][0, :-1], matrix, target), (0, 1))[None]}


def run(tx, steps, dtype="float64", bad=(-1, -1)):
    """Workers simulated by `vmap`: the centre after each step, their views, and the end's state.

    In step `bad[0]`, the gradient of worker `bad[1]` is not finite.
    """
    data = (PROBLEM.matrices.astype(dtype), PROBLEM.targets.astype(dtype))
    start = {"x": jnp.zeros((1, SIZE + 1), dtype)}

    def one(params, matrix, target, state, ill):
        seen = view(params, state)
        grads = gradients(seen, matrix, target)
        grads["x"] = grads["x"].at[0, 3].set(jnp.where(ill, jnp.inf, grads["x"][0, 3]))
        return (*tx.update(grads, state, params), seen["x"][0])

    everyone = jax.vmap(one, in_axes=(None, 0, 0, 0, 0), axis_name="workers")

    def step(carry, number):
        params, state = carry
        ill = (number == bad[0]) & (jnp.arange(WORKERS) == bad[1])
        updates, state, seen = everyone(params, *data, state, ill)
        alike = jnp.all(updates["x"] == updates["x"][:1])
        params = {"x": params["x"] + updates["x"][0]}
        return (params, state), (params["x"][0], seen, alike)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def all_steps():  # Compiling takes longer than running.
        every = jnp.arange(WORKERS)
        state = jax.vmap(lambda _: tx.init(start), axis_name="workers")(every)
        return jax.lax.scan(step, (start, state), jnp.arange(1, steps + 1))

    (_, state), (centres, views, alike) = all_steps()
    assert alike.all(), "replicas differ"
    centres, views = np.asarray(centres), np.asarray(views)
    assert not centres[:, -1].any(), "what has no gradient moved"
    return centres[:, :-1], views[..., :-1], state


FREEZE, ADAM_STEPS, RATE, DECAY = 6, 14, 0.05, 0.1


def rate(count):
    return RATE * (1 - count * (0.5 / ADAM_STEPS))  # Float64 where there is such a thing.


@pytest.fixture(scope="module")
def uncompressed():
    """1-bit Adam through a codec that loses nothing."""
    with jax.enable_x64(True):
        tx = one_bit_adam(LOSSLESS, "workers", freeze_step=FREEZE, weight_decay=DECAY)
        return run(optax.chain(tx, optax.scale_by_learning_rate(rate)), ADAM_STEPS)[0]


def test_one_bit_adam_without_loss_is_adam_with_a_frozen_variance(uncompressed):
    matrices, targets = np.asarray(PROBLEM.matrices), np.asarray(PROBLEM.targets)
    x, m, v = np.zeros(SIZE), np.zeros(SIZE), np.zeros(SIZE)
    for t in range(ADAM_STEPS):
        g = np.mean([gradient(x, a, b) for a, b in zip(matrices, targets, strict=True)], axis=0)
        m = 0.9 * m + 0.1 * g
        v = v if t >= FREEZE else 0.999 * v + 0.001 * g**2
        unbiased = m / (1 - 0.9 ** (t + 1)) if t < FREEZE else m
        scale = np.sqrt(v / (1 - 0.999 ** min(t + 1, FREEZE))) + 1e-8
        x = x - rate(t) * (unbiased / scale + DECAY * x)
        np.testing.assert_allclose(uncompressed[t], x, rtol=1e-10, atol=1e-10)


def test_without_a_freeze_it_is_optax_adamw(uncompressed):
    with jax.enable_x64(True):
        tx = optax.adamw(rate, weight_decay=DECAY)
        x = jnp.zeros(SIZE)
        state = tx.init(x)
        for t in range(FREEZE):
            g = jax.vmap(gradient, (None, 0, 0))(x, PROBLEM.matrices, PROBLEM.targets).mean(0)
            updates, state = tx.update(g, state, x)
            x = x + updates
            np.testing.assert_allclose(uncompressed[t], x, rtol=1e-10, atol=1e-10)


def test_zero_one_adam_at_intervals_of_one_without_loss_is_the_same(uncompressed):
    with jax.enable_x64(True):
        tx = zero_one_adam(
            LOSSLESS,
            "workers",
            learning_rate=rate,
            freeze_step=FREEZE,
            renewals=FREEZE,
            max_interval=1,
            weight_decay=DECAY,
        )
        centres, views, _ = run(tx, ADAM_STEPS)
    np.testing.assert_allclose(centres, uncompressed, rtol=1e-10, atol=1e-10)
    np.testing.assert_array_equal(views[1:], np.repeat(centres[:-1, None], WORKERS, 1))


def test_zero_one_adam_is_the_published_recursion():
    """Written once more in numpy: rare renewals, local steps, meetings; the codec loses nothing.

    In a local step, a gradient that is not finite is left out by its own worker.
    """
    settings = {"freeze_step": 7, "renewals": 2, "double_every": 3, "max_interval": 4}
    steps = 24
    with jax.enable_x64(True):
        tx = zero_one_adam(LOSSLESS, "workers", learning_rate=RATE, **settings)
        centres, views, state = run(tx, steps, bad=(12, 5))
    matrices, targets = np.asarray(PROBLEM.matrices), np.asarray(PROBLEM.targets)
    renewed, met = (1, 2, 4, 6), (8, 9, 10, 11, 13, 15, 19, 23)  # By hand.
    x, mu, v, times = np.zeros(SIZE), np.zeros(SIZE), np.zeros(SIZE), 0
    own, local, total = np.zeros((WORKERS, SIZE)), np.zeros((WORKERS, SIZE)), 0.0
    for t in range(1, steps + 1):
        seen = x + own
        np.testing.assert_allclose(views[t - 1], seen, rtol=1e-9, atol=1e-10)
        grads = np.stack([gradient(*each) for each in zip(seen, matrices, targets, strict=True)])
        if t in renewed:
            v, times = 0.999 * v + 0.001 * grads.mean(0) ** 2, times + 1
        scale = np.sqrt(v / (1 - 0.999**times)) + 1e-8
        if t <= settings["freeze_step"]:
            mu = 0.9 * mu + 0.1 * grads.mean(0)
            x = x - RATE * mu / (1 - 0.9**t) / scale
            local = np.stack([mu] * WORKERS)
        else:
            sound = np.arange(WORKERS) != 5 if t == 12 else np.ones(WORKERS, bool)
            local[sound] = 0.9 * local[sound] + 0.1 * grads[sound]
            own[sound] -= RATE * local[sound] / scale
            total += RATE
            if t in met:
                c = (own * scale).mean(0)
                x, own, local = x + c / scale, 0 * own, np.stack([-c / total] * WORKERS)
                total = 0.0
        np.testing.assert_allclose(centres[t - 1], x, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(state.offset.tree["x"][:, 0, 0, :-1], own, atol=1e-9)


def test_intervals_double():
    for block in (1, 3):
        renewals, number, t = [], 0, 0
        while t < 400:
            t += 2 ** (number // block)
            number += 1
            renewals.append(t)
        steps = jnp.arange(1, 401)
        go, times = jax.jit(jax.vmap(functools.partial(moments.interval, block=block)))(steps)
        want = np.isin(steps, renewals)
        np.testing.assert_array_equal(go, want)
        np.testing.assert_array_equal(times, np.cumsum(want))
    assert moments.interval(jnp.int32(2**31 - 1), 2**30)[1] == 2**30 + (2**30 - 1) // 2
    assert bool(zero_one._meets(jnp.int32(2**31 - 16), 1, 16))
    meets = zero_one._meets(jnp.arange(1, 13), 4, 3)
    assert [t for t, met in enumerate(meets, 1) if met] == [1, 2, 3, 4, 6, 8, 9, 12]


EARLY, LONG = 10, 800


def one_bit(make, codec, rate, freeze_step, **more):
    settings = {"freeze_step": freeze_step, **more}
    if make is zero_one_adam:
        return make(codec, "workers", learning_rate=rate, **settings)
    return optax.chain(make(codec, "workers", **settings), optax.scale_by_learning_rate(rate))


@pytest.fixture(scope="module", params=[one_bit_adam, zero_one_adam])
def trained(request):
    """An optimizer of one bit an element, and the centres that it passes."""
    more = {"double_every": 100, "max_interval": 4} if request.param is zero_one_adam else {}
    schedule = optax.cosine_decay_schedule(0.05, LONG)
    tx = one_bit(request.param, ONE_BIT, schedule, EARLY, **more)
    return tx, run(tx, LONG, "float32")[0]


@pytest.mark.core("one_bit_adam")
def test_one_bit_converges(trained):
    """With steps that shrink, and workers whose gradients differ at the solution."""
    solution = np.asarray(PROBLEM.solution)
    errors = ((trained[1] - solution) ** 2).sum(1) / (solution**2).sum()
    assert errors[EARLY] > 0.1
    assert errors[-1] < 1e-3


def collectives(jaxpr, branch=()):
    """Pairs of a collective and the branches that it is in, of a traced program."""
    found = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith(("psum", "all_", "pmax", "pmin", "ppermute")):
            found.add((eqn.primitive.name.split("_inv")[0], branch))
        inner = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr"))
        for number, sub in enumerate(x for x in inner if hasattr(x, "jaxpr") or hasattr(x, "eqns")):
            below = (*branch, number) if eqn.primitive.name == "cond" else branch
            found |= collectives(getattr(sub, "jaxpr", sub), below)
    return found


@pytest.mark.core("one_bit_adam")
def test_shard_map_and_vmap_agree(trained, mesh):
    """With `check_vma`, the centre is typed as replicated; and a step runs its own mean alone."""
    tx, centres = trained
    devices = jax.sharding.Mesh(mesh.devices, ("workers",))

    def own(params, state, matrix, target):
        seen = jaxcomp.local(view(params, state), "workers")
        updates, state = tx.update(gradients(seen, matrix[0], target[0]), state, params)
        return optax.apply_updates(params, updates), state

    step = jaxcomp.data_parallel(own, devices, "workers", batch_argnums=(2, 3))
    params = {"x": jnp.zeros((1, SIZE + 1))}
    state = jaxcomp.init_state(tx, params, devices, "workers")
    program = step.trace(params, state, PROBLEM.matrices, PROBLEM.targets).jaxpr.jaxpr
    found = collectives(program)
    exact = {branch for name, branch in found if name == "psum"}
    coded = {branch for name, branch in found if name == "all_to_all"}
    assert {name for name, _ in found} == {"psum", "all_to_all", "all_gather"}
    assert {branch[0] for branch in exact}.isdisjoint(branch[0] for branch in coded)
    for t in range(2 * EARLY):
        params, state = step(params, state, PROBLEM.matrices, PROBLEM.targets)
        shards = [np.asarray(shard.data) for shard in params["x"].addressable_shards]
        assert all((shard == shards[0]).all() for shard in shards)
        np.testing.assert_allclose(shards[0][0, :-1], centres[t], rtol=1e-4, atol=1e-5)
    for workers in (3, 8):
        resized = jaxcomp.resize_workers(tx, state, params, workers)
        assert jax.tree.structure(resized) == jax.tree.structure(state)


@pytest.mark.core("zero_one_adam")
@pytest.mark.parametrize("make", [one_bit_adam, zero_one_adam])
def test_states_made_outside_and_narrow_dtypes(make):
    """A step from a state that was made outside is a legal program, and keeps what is in it."""
    params = {"w": jnp.zeros((64, 33), jnp.bfloat16), "b": jnp.zeros(7)}
    tx = one_bit(make, jaxcomp.sign(), 1e-3, 3)
    with axes.assume_workers(WORKERS):
        single = jax.eval_shape(tx.init, params)

    def many(tree, dtype=None):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((WORKERS, *x.shape), dtype or x.dtype), tree
        )

    for each in (jax.vmap, jax.pmap):
        mapped = each(tx.update, in_axes=(0, 0, None), axis_name="workers")
        given = many(params, "float16" if each is jax.pmap else None)
        updates, state = jax.eval_shape(mapped, given, many(single), params)
        assert updates == given
        for old, new in zip(jax.tree.leaves(single), jax.tree.leaves(state), strict=True):
            assert old.dtype == new.dtype


def test_forgetting_clears_the_memory_and_keeps_key_and_count():
    tx = jaxcomp.compressed_mean(everything(jaxcomp.sign()), "workers", key=5)
    like = {"w": jnp.zeros((4, 8))}
    with axes.assume_workers(1):
        fresh = tx.init(like)
    used = jax.tree.map(lambda x: np.asarray(x) + np.ones_like(x), fresh)

    @jax.jit
    def forgotten(now):
        with axes.assume_workers(1):
            return means.forget(tx, now, used, like)

    cleared = jax.tree.map(
        lambda new, old: new if jnp.issubdtype(old.dtype, jnp.floating) else old, fresh, used
    )
    jax.tree.map(np.testing.assert_array_equal, forgotten(True), cleared)
    jax.tree.map(np.testing.assert_array_equal, forgotten(False), used)
    assert any(x.dtype == jnp.float32 and x.size for x in jax.tree.leaves(fresh))


def test_wrong_arguments_of_adam_say_so():
    mean = jaxcomp.compressed_mean(jaxcomp.Dense(), "workers")
    for scale in (scale_by_one_bit_adam, functools.partial(step_by_zero_one_adam, 0.1)):
        with pytest.raises(ValueError, match="`freeze_step` must be from 1 to 2147483647, got 0"):
            scale(mean, mean, "workers", freeze_step=0)
        with pytest.raises(ValueError, match="`dense` must be a transformation that averages"):
            scale(jaxcomp.Dense(), mean, "workers", freeze_step=1)
        with pytest.raises(ValueError, match="`compressed` must be a transformation that averages"):
            scale(mean, jaxcomp.sign(), "workers", freeze_step=1)
        with pytest.raises(ValueError, match=r"`b2` must be a number in \[0, 1\), got 1"):
            scale(mean, mean, "workers", freeze_step=1, b2=1)
    with pytest.raises(ValueError, match="`max_interval` must be from 1 to"):
        zero_one_adam(jaxcomp.sign(), "workers", learning_rate=0.1, freeze_step=1, max_interval=0)
    with pytest.raises(ValueError, match=r"`learning_rate` must be a number at least 0.0"):
        zero_one_adam(jaxcomp.sign(), "workers", learning_rate=-0.1, freeze_step=1)
    tx = zero_one_adam(
        jaxcomp.sign(), "workers", learning_rate=0.1, freeze_step=1, weight_decay=0.1
    )
    with pytest.raises(
        ValueError, match="`params` must be given to the update, since `weight_decay`"
    ):
        jax.vmap(lambda x: tx.update(x, tx.init(x)), axis_name="workers")(jnp.zeros((2, 40, 40)))
