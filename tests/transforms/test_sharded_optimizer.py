"""ZeRO-1: the steps of the optimizer, a part of its memory on each worker, both ways compressed."""

import functools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp

IDENTITY = jaxcomp.codecs.Identity()
FOUR = jaxcomp.qsgd_inf(bits=4, bucket_size=64)
BOTH = {"up": FOUR, "down": jaxcomp.Link(FOUR, jaxcomp.Residual())}


def draw(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


PARAMS = {
    "in": {"kernel": draw(0, 24, 60) / 5, "bias": jnp.zeros(60)},
    "out": draw(1, 60, 37) / 8,
    "norm": jnp.ones(37),
}
X, Y = draw(2, 64, 24), draw(3, 64, 37)


def loss(params, x, y):
    hidden = jnp.tanh(x @ params["in"]["kernel"] + params["in"]["bias"])
    return jnp.mean((params["norm"] * (hidden @ params["out"]) - y) ** 2)


def gradients(seed, workers):
    leaves, treedef = jax.tree.flatten(PARAMS)
    return jax.tree.unflatten(
        treedef, [draw(seed + 10 + i, workers, *x.shape) for i, x in enumerate(leaves)]
    )


def simulated(tx, steps, workers=4, params=PARAMS, **settings):
    """All workers' parameters and states after some steps, with `jax.vmap`."""
    params = jax.tree.map(lambda x: jnp.stack([x] * workers), params)
    state = jax.vmap(tx.init, axis_name="data")(params)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, **settings)
        return optax.apply_updates(params, updates), state

    run = jax.jit(jax.vmap(step, axis_name="data"))
    for t in range(steps):
        params, state = run(params, state, gradients(t, workers))
    return params, state


def masked(params):
    return jax.tree.map(lambda x: x.ndim == 2, params)


def unsharded(optimizer, steps, workers=4, params=PARAMS, **settings):
    """The parameters after some steps of an optimizer with the mean gradients."""

    @jax.jit
    def step(params, state, grads):
        mean = jax.tree.map(lambda x: x.mean(0), grads)
        updates, state = optimizer.update(mean, state, params, **settings)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for t in range(steps):
        params, state = step(params, state, gradients(t, workers))
    return params


def assert_steps_of(got, optimizer, steps, **settings):
    """All workers have the parameters that the optimizer gives on one device, up to rounding."""
    want = unsharded(optimizer, steps, **settings)
    for x, y, start in zip(*map(jax.tree.leaves, (got, want, PARAMS)), strict=True):
        np.testing.assert_array_equal(x, jnp.stack([x[0]] * len(x)))
        way = np.abs(y - start).max()
        np.testing.assert_allclose(x[0], y, atol=2e-4 * way + 2e-7, rtol=0)


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, 0.9, nesterov=True),
    "adam": optax.adam(optax.linear_schedule(1e-2, 1e-3, 4)),
    "adamw": optax.adamw(1e-2, weight_decay=0.1, mask=masked),
    "lion": optax.lion(1e-3),
    "adafactor": optax.adafactor(
        1e-2, factored=False, clipping_threshold=None, multiply_by_parameter_scale=False
    ),
}


@pytest.mark.full  # Operation by operation it is some hundred small programs.
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_uncompressed_it_is_the_optimizer_bit_for_bit(name):
    """Operation by operation: a compiler may contract a product and a sum in one and not both."""
    optimizer = OPTIMIZERS[name]
    with jax.disable_jit():
        whole = optax.chain(jaxcomp.compressed_mean(jaxcomp.Dense(), "data"), optimizer)
        want, _ = simulated(whole, 3)
        for feedback in (jaxcomp.NoFeedback(), jaxcomp.Residual()):
            link = jaxcomp.Link(IDENTITY, feedback)
            tx = jaxcomp.sharded_optimizer(optimizer, "data", IDENTITY, link)
            got, _ = simulated(tx, 3)
            jax.tree.map(np.testing.assert_array_equal, got, want)


def test_the_norm_of_all_parts_is_clipped():
    clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0, 0.9))
    whole = optax.chain(jaxcomp.compressed_mean(jaxcomp.Dense(), "data"), clipped)
    want, _ = simulated(whole, 3)
    tx = jaxcomp.sharded_optimizer(optax.sgd(1.0, 0.9), "data", IDENTITY, max_norm=0.5)
    got, _ = simulated(tx, 3)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), got, want)
    loose, _ = simulated(jaxcomp.sharded_optimizer(optax.sgd(1.0, 0.9), "data", IDENTITY), 3)
    assert float(jnp.abs(loose["out"] - got["out"]).max()) > 0.1


ACCEPTED = OPTIMIZERS | {
    "adabelief": optax.adabelief(1e-2),
    "adadelta": optax.adadelta(1.0),
    "adagrad": optax.adagrad(1e-2),
    "adamax": optax.adamax(1e-2),
    "adamaxw": optax.adamaxw(1e-2),
    "adan": optax.adan(1e-2),
    "amsgrad": optax.amsgrad(1e-2),
    "optimistic_adam_v2": optax.optimistic_adam_v2(1e-2),
    "optimistic_gradient_descent": optax.optimistic_gradient_descent(1e-2),
    "radam": optax.radam(1e-2),
    "rmsprop": optax.rmsprop(1e-2, momentum=0.9, centered=True),
    "rprop": optax.rprop(1e-2),
    "sign_sgd": optax.sign_sgd(1e-2),
    "signum": optax.signum(1e-2),
    "yogi": optax.yogi(1e-2),
    "acprop": optax.contrib.acprop(1e-2),
    "ademamix": optax.contrib.ademamix(1e-2),
    "adopt": optax.contrib.adopt(1e-2),
    "cocob": optax.contrib.cocob(),
    "madgrad": optax.contrib.madgrad(1e-2),
    "reduce_on_plateau": optax.chain(
        optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=0, factor=0.5)
    ),
    "schedule_free_adamw": optax.contrib.schedule_free_adamw(1e-2),
    "schedule_free_sgd": optax.contrib.schedule_free_sgd(1e-2),
    "simplified_ademamix": optax.contrib.simplified_ademamix(1e-2),
    "factored": optax.chain(optax.scale_by_factored_rms(), optax.scale(-1e-2)),
    "by rank": optax.multi_transform(
        {"matrix": optax.adam(1e-2), "rest": optax.sgd(0.1)},
        lambda params: jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "rest", params),
    ),
    "hyperparameters": optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(1e-2, 1e-3, 4)
    ),
    "several steps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.core("schedule_free_adamw", "by rank", "reduce_on_plateau")
def test_every_elementwise_optimizer_of_optax_makes_its_own_steps(name):
    settings = {"value": jnp.float32(1.0)} if name == "reduce_on_plateau" else {}
    tx = jaxcomp.sharded_optimizer(ACCEPTED[name], "data", IDENTITY)
    got, _ = simulated(tx, 4, **settings)
    assert_steps_of(got, ACCEPTED[name], 4, **settings)


AROUND = {
    "a scale": lambda tx: optax.chain(tx(optax.scale_by_adam()), optax.scale(-1e-2)),
    "half": lambda tx: optax.chain(tx(optax.adam(1e-2)), optax.scale(0.5)),
    "decay": lambda tx: optax.chain(tx(optax.adam(1e-2)), optax.add_decayed_weights(-0.1)),
    "schedule free": lambda tx: optax.contrib.schedule_free(tx(optax.adam(1e-2, b1=0.0)), 1e-2),
}


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.core("decay", "half")
def test_what_follows_or_wraps_it_is_kept(name):
    around = AROUND[name]
    for bits, steps in ((IDENTITY, 4), (jaxcomp.qsgd_inf(bits=8, bucket_size=64), 12)):
        tx = around(lambda one: jaxcomp.sharded_optimizer(one, "data", IDENTITY, bits))  # noqa: B023
        got, _ = simulated(tx, steps)
        if bits == IDENTITY:
            assert_steps_of(got, around(lambda one: one), steps)
        else:  # Rounded off at one step, and sent at the next.
            want = unsharded(around(lambda one: one), steps)
            for x, y, start in zip(*map(jax.tree.leaves, (got, want, PARAMS)), strict=True):
                assert np.abs(x[0] - y).max() < 0.05 * np.abs(y - start).max() + 1e-6


def test_other_changes_of_the_parameters_are_kept():
    """Weights that are set to zero in the loop move on from zero, with and without compression."""
    for down in (IDENTITY, FOUR):
        tx = jaxcomp.sharded_optimizer(optax.sgd(1e-3), "data", IDENTITY, down)
        params, state = simulated(tx, 2)
        zeroed = params | {"out": jnp.zeros_like(params["out"])}
        updates, _ = jax.jit(jax.vmap(tx.update, axis_name="data"))(gradients(5, 4), state, zeroed)
        moved = optax.apply_updates(zeroed, updates)["out"]
        want = -1e-3 * gradients(5, 4)["out"].mean(0)
        # Four bits round a step by a seventh of the largest of a bucket, twice.
        np.testing.assert_allclose(moved[0], want, atol=1e-9 if down == IDENTITY else 2e-3)


@pytest.mark.parametrize(
    ("optimizer", "culprit"),
    [
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), "clip_by_global_norm"),
        (
            optax.chain(
                optax.clip_by_global_norm(1000.0),
                optax.adamw(optax.warmup_cosine_decay_schedule(0, 3e-4, 10_000, 20_000)),
            ),
            "clip_by_global_norm",
        ),
        (optax.lamb(1e-3), "scale_by_trust_ratio"),
        (optax.lars(1e-3), "masked"),
        (optax.adafactor(1e-3), "scale_by_factored_rms|clip_by_block_rms|scale_by_param_block_rms"),
        (optax.contrib.muon(1e-3), "."),
        (
            optax.chain(
                optax.adam(1e-3),
                optax.masked(optax.scale(2.0), {"in": True, "out": False, "norm": True}),
            ),
            "masked",
        ),
        (
            optax.multi_transform(
                {"a": optax.sgd(0.1), "b": optax.sgd(1.0)},
                lambda params: jax.tree.map_with_path(
                    lambda path, _: "a" if "out" in str(path) else "b", params
                ),
            ),
            "multi_transform|partition",
        ),
        (optax.adamw(1e-3, mask={"in": True, "out": False, "norm": True}), "."),
        (optax.contrib.prodigy(), "prodigy"),
        (optax.contrib.dadapt_adamw(), "dadapt_adamw"),
        (optax.contrib.mechanize(optax.adam(1e-3)), "mechanize"),
        (optax.chain(optax.zero_nans(), optax.adam(1e-3)), "zero_nans"),
        (optax.apply_if_finite(optax.adam(1e-3), 3), "apply_if_finite"),
        (
            optax.adamw(1e-3, mask=lambda p: jax.tree.map(lambda x: x.size > 2000, p)),
            "masked|weight",
        ),
        (optax.adamw(1e-3, mask=lambda params: {k: True for k, _ in params.items()}), "masked|."),
    ],
    ids=[
        "clip",
        "high clip and warmup",
        "lamb",
        "lars",
        "adafactor",
        "muon",
        "masked",
        "by name",
        "decay by name",
        "prodigy",
        "dadapt",
        "mechanize",
        "zero_nans",
        "apply_if_finite",
        "decay by size",
        "keys",
    ],
)
def test_optimizers_of_whole_leaves_are_refused_by_name(optimizer, culprit):
    tx = jaxcomp.sharded_optimizer(optimizer, "data", FOUR)
    with pytest.raises(
        ValueError, match=f"element by itself.*one in which .*({culprit}).* does not"
    ):
        jax.vmap(tx.init, axis_name="data", in_axes=None, axis_size=2)(PARAMS)


@pytest.mark.wrong_types
def test_wrong_arguments_of_sharded_optimizers(mesh):
    def make(optimizer=optax.adam(1e-3), up=FOUR, down=None, **settings):
        return jaxcomp.sharded_optimizer(optimizer, "data", up, down, **settings)

    shift = jaxcomp.Link(jaxcomp.sign(), jaxcomp.Shift())
    for settings, says in (
        ({"optimizer": "adam"}, "`optimizer` must be"),
        ({"up": jaxcomp.Dense()}, "`up` must be a codec, a Policy or a Link"),
        ({"down": shift}, r"`down` must have Residual\(\)"),
        ({"down": jaxcomp.qsgd_inf(bits=4, bucket_size=512)}, "no longer than those of `up`"),
        ({"max_norm": 0.0}, "`max_norm` must be"),
        ({"guard": 1}, "`guard` must be"),
    ):
        with pytest.raises(ValueError, match=says):
            make(**settings)
    sharded = make(optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)), param_specs=P())
    with pytest.raises(ValueError, match="clip_by_global_norm"):
        jaxcomp.init_state(sharded, {"kernel": jnp.zeros((64, 64))}, mesh, "data")
    tx = make()
    state = jax.vmap(tx.init, axis_name="data", in_axes=None, axis_size=2)(PARAMS)
    with pytest.raises(ValueError, match="`params` must be given to the update"):
        jax.vmap(tx.update, axis_name="data")(gradients(0, 2), state)


def trainer(tx, mesh, mode="typed", **settings):
    def step(params, state, x, y):
        value, grads = jaxcomp.value_and_grad(loss, "data")(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(value, "data")

    return jaxcomp.data_parallel(
        step, mesh, "data", batch_argnums=(2, 3), check_vma=mode == "typed", **settings
    )


@functools.cache
def trained(tx, steps=3):
    """Parameters and state on the mesh of all devices, after some steps; and the losses."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params = jaxcomp.place(PARAMS, mesh, "data")
    state, step = jaxcomp.init_state(tx, params, mesh, "data"), trainer(tx, mesh)
    losses = []
    for _ in range(steps):
        params, state, value = step(params, state, X, Y)
        losses.append(float(value))
    return params, state, losses


ADAM = jaxcomp.sharded_optimizer(optax.adam(1e-2), "data", max_norm=1.0, stats=True, **BOTH)


def test_each_worker_has_a_part_of_the_moments_and_masters(mesh):
    _, state, _ = trained(ADAM)
    whole = sum(x.size for x in jax.tree.leaves(PARAMS))
    rest = sum(x.size for x in jax.tree.leaves((PARAMS["in"]["bias"], PARAMS["norm"])))
    held = [
        shard.data.size
        for x in jax.tree.leaves(state.memory.optimizer)
        for shard in x.addressable_shards
        if shard.device == mesh.devices[0]
    ]
    # Two moments and a master of an eighth of the large leaves, in whole buckets; small ones whole.
    assert sum(held) <= 3 * ((whole - rest) / 8 + 64) + 3 * rest + 8
    assert float(state.stats.link_bytes) == jaxcomp.describe(ADAM, PARAMS, workers=8).link_bytes


def test_replicas_are_equal_and_lack_less_than_a_step(mesh):
    params, state, losses = trained(ADAM, 12)
    assert losses[-1] < 0.9 * losses[0]
    for x in jax.tree.leaves(params):
        first, *others = [np.asarray(shard.data) for shard in x.addressable_shards]
        for other in others:
            np.testing.assert_array_equal(first, other)
    for residual in state.memory.optimizer.part.residual:
        # An update of Adam is at most 1e-2 and a bit; four bits round it by a seventh of the
        # largest of a bucket at most, which has an earlier error in it, too.
        assert 0 < np.abs(np.asarray(residual.tree)).max() < 1e-2


@pytest.mark.full
def test_all_mappings_have_the_same_bits(mesh):
    tx = jaxcomp.sharded_optimizer(optax.sgd(0.1, 0.9), "data", **BOTH)
    grads = gradients(0, 8)

    def two_steps(params, grads):
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, state.memory

    many = jax.tree.map(lambda x: jnp.stack([x] * 8), PARAMS)
    want = jax.jit(jax.vmap(two_steps, axis_name="data"))(many, grads)
    got = [jax.pmap(two_steps, axis_name="data")(many, grads)]
    for typed in (True, False):

        def one(params, grads):
            found = two_steps(params, jax.tree.map(lambda x: x[0], grads))
            return jax.tree.map(lambda x: x[None], found)

        whole = jax.shard_map(
            one, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=typed
        )
        got.append(jax.jit(whole)(PARAMS, grads))
    for found in got:
        jax.tree.map(np.testing.assert_array_equal, found, want)


@pytest.mark.full
def test_without_masters_rounding_adds_up_as_a_random_walk():
    """The distance from the uncompressed path, with the same gradients: bounded, and not."""

    def distance(feedback, steps):
        link = jaxcomp.Link(FOUR, feedback)
        tx = jaxcomp.sharded_optimizer(optax.sgd(0.01), "data", IDENTITY, link)
        return run(tx, steps)["out"][0]

    def run(tx, steps):
        params = jax.tree.map(lambda x: jnp.stack([x] * 4), PARAMS)
        state = jax.vmap(tx.init, axis_name="data")(params)

        @jax.jit
        def loop(params, state):
            def step(carry, t):
                params, state = carry
                grads = jax.tree.map(
                    lambda x: jax.random.normal(jax.random.fold_in(jax.random.key(0), t), x.shape),
                    params,
                )

                def one(params, state, grads):
                    updates, state = tx.update(grads, state, params)
                    return optax.apply_updates(params, updates), state

                return jax.vmap(one, axis_name="data")(params, state, grads), None

            return jax.lax.scan(step, (params, state), jnp.arange(steps))[0][0]

        return loop(params, state)

    exact = run(jaxcomp.sharded_optimizer(optax.sgd(0.01), "data", IDENTITY, IDENTITY), 400)
    walk, kept = (
        float(jnp.abs(distance(f, 400) - exact["out"][0]).mean())
        for f in (jaxcomp.NoFeedback(), jaxcomp.Residual())
    )
    assert kept < 2e-3
    assert walk > 5 * kept


def test_a_step_that_is_not_finite_changes_no_state():
    for optimizer in (optax.adam(1e-2), optax.lion(1e-2)):
        tx = jaxcomp.sharded_optimizer(optimizer, "data", max_norm=None, **BOTH)
        params, state = simulated(tx, 2)
        update = jax.jit(jax.vmap(tx.update, axis_name="data"))
        for bad in (np.nan, np.inf):
            for name in ("out", "norm"):
                grads = gradients(5, 4)
                grads[name] = grads[name].at[2, 3].set(bad)
                updates, after = update(grads, state, params)
                finite = [bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(updates)]
                assert not all(finite)
                jax.tree.map(np.testing.assert_array_equal, after.memory, state.memory)


def test_further_arguments_reach_the_optimizer():
    def update(updates, state, params=None, *, times=1.0, **extra):
        return jax.tree.map(lambda u: times * u, updates), state

    scaled = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = jaxcomp.sharded_optimizer(optax.chain(scaled, optax.sgd(0.1)), "data", IDENTITY, IDENTITY)
    once, _ = simulated(tx, 1)
    thrice, _ = simulated(tx, 1, times=3.0)
    for one, three, start in zip(
        jax.tree.leaves(once), jax.tree.leaves(thrice), jax.tree.leaves(PARAMS), strict=True
    ):
        np.testing.assert_allclose(three[0] - start, 3 * (one[0] - start), atol=1e-6)


def test_a_closed_gate_takes_no_step_and_keeps_what_was_not_sent():
    gate = jaxcomp.gates.Every(2)
    sign = jaxcomp.Link(jaxcomp.sign(bucket_size=64), jaxcomp.Residual())
    tx = jaxcomp.sharded_optimizer(optax.adam(1e-2), "data", sign, gate=gate)
    params = jax.tree.map(lambda x: jnp.stack([x] * 4), PARAMS)
    state = jax.vmap(tx.init, axis_name="data")(params)
    update = jax.jit(jax.vmap(tx.update, axis_name="data"))
    taken = [0]
    for t in range(4):
        updates, state = update(gradients(t, 4), state, params)
        taken.append(int(state.memory.optimizer.taken[0]))
        moved = any(bool(x.any()) for x in jax.tree.leaves(updates))
        assert moved == (taken[-1] > taken[-2])
    assert taken[-1] == 2
    assert float(jnp.abs(state.memory.reduction.feedback.tree.residual[0]).max()) > 0


def test_a_model_of_small_leaves_is_stepped_whole():
    small = {"norm": jnp.ones(7), "scalar": jnp.ones(()), "none": jnp.ones((0, 3))}
    tx = jaxcomp.sharded_optimizer(optax.adam(1e-2), "data", FOUR)
    with pytest.warns(UserWarning, match="compresses no leaf"):
        state = jax.vmap(tx.init, axis_name="data", in_axes=None, axis_size=4)(small)
    params = jax.tree.map(lambda x: jnp.stack([x] * 4), small)
    updates, _ = jax.vmap(tx.update, axis_name="data")(params, state, params)
    np.testing.assert_allclose(updates["norm"], -1e-2, rtol=1e-5)
    assert updates["none"].shape == (4, 0, 3)


def test_gradients_narrower_than_updates_pass_a_gate():
    gate = jaxcomp.gates.Every(2)
    sign = jaxcomp.Link(jaxcomp.sign(bucket_size=64), jaxcomp.Residual())
    tx = jaxcomp.sharded_optimizer(optax.adam(1e-2), "data", sign, gate=gate)
    params = jax.tree.map(lambda x: jnp.stack([x] * 4).astype(jnp.bfloat16), PARAMS)
    state = jax.vmap(tx.init, axis_name="data")(params)
    grads = jax.tree.map(lambda x: x.astype(jnp.bfloat16), gradients(0, 4))
    update = jax.jit(jax.vmap(tx.update, axis_name="data"))
    for opened in (False, True):
        updates, state = update(grads, state, params)
        assert all(bool(x.any()) == opened for x in jax.tree.leaves(updates))


def test_settings_in_a_state_count_from_the_first_step():
    """Only copies of the parameters are made in the first step."""
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    tx = jaxcomp.sharded_optimizer(optimizer, "data", IDENTITY)
    params = jax.tree.map(lambda x: jnp.stack([x] * 4), PARAMS)
    state = jax.vmap(tx.init, axis_name="data")(params)
    state = optax.tree.set(state, learning_rate=jnp.zeros(4))
    updates, _ = jax.jit(jax.vmap(tx.update, axis_name="data"))(gradients(0, 4), state, params)
    assert not any(bool(x.any()) for x in jax.tree.leaves(updates))


def test_a_division_by_zero_in_the_padding_stays_there():
    tx = jaxcomp.sharded_optimizer(optax.adam(1e-2, eps=0.0), "data", **BOTH)
    _, state = simulated(tx, 2)
    for residual in state.memory.optimizer.part.residual:
        assert bool(jnp.isfinite(residual.tree).all())


def test_moments_in_rows_are_not_grafted(mesh):
    tx = jaxcomp.sharded_optimizer(optax.adam(1e-2), "data", FOUR)
    state = jaxcomp.init_state(tx, PARAMS, mesh, "data")
    with pytest.raises(ValueError, match=r"would begin anew.*resize_workers"):
        jaxcomp.graft(tx, state, PARAMS, mesh, "data")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_steps_too_small_for_bfloat16_arrive_when_they_have_added_up(dtype):
    """Of parameters, and of gradients beside wider parameters."""
    start = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    tx = jaxcomp.sharded_optimizer(optax.sgd(1.0), "data", **BOTH)
    params = jax.tree.map(lambda x: jnp.stack([x] * 4), start)
    state = jax.vmap(tx.init, axis_name="data")(params)
    grads = jax.tree.map(lambda x: jnp.full(x.shape, 1e-4, jnp.bfloat16), params)

    @jax.jit
    def step(params, state):
        updates, state = jax.vmap(tx.update, axis_name="data")(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(100):
        params, state = step(params, state)
    for name in ("out", "norm"):
        got = np.float32(params[name][0])
        assert params[name].dtype == dtype
        # Half a unit in the last place of the largest weights; three gradients' noise of four bits.
        atol = 6e-3 if dtype == jnp.bfloat16 else 3e-4
        np.testing.assert_allclose(got, np.float32(start[name]) - 0.01, atol=atol)
        assert np.abs(got - np.float32(start[name])).mean() > 5e-3


@pytest.mark.full
def test_a_state_is_saved_restored_and_moved_to_other_workers(mesh):
    params, state, _ = trained(ADAM)
    plain = jax.tree.map(np.asarray, state)
    target = jax.eval_shape(lambda: jaxcomp.init_state(ADAM, PARAMS, mesh, "data"))
    restored = flax.serialization.from_bytes(target, flax.serialization.to_bytes(plain))
    placed = jaxcomp.place(restored, mesh, "data")
    step = trainer(ADAM, mesh)
    want, got = step(params, state, X, Y), step(params, placed, X, Y)
    jax.tree.map(np.testing.assert_array_equal, got, want)

    fewer = jaxcomp.resize_workers(ADAM, plain, PARAMS, 3)
    few = jax.make_mesh((3,), ("data",), devices=jax.devices()[:3])
    moved = jaxcomp.place(fewer, few, "data")
    back = jaxcomp.resize_workers(ADAM, fewer, PARAMS, 8)

    def rows(state):
        parts = (state.memory.optimizer.part.residual, state.memory.optimizer.part.optimizer)
        return [np.asarray(x).reshape(-1, 64) for x in jax.tree.leaves(parts) if np.ndim(x) == 3]

    for before, then, again in zip(rows(plain), rows(fewer), rows(back), strict=True):
        number = 23 + 35  # Buckets of 64 in both kernels: 1440 and 2220 elements.
        np.testing.assert_array_equal(then[:number], before[:number])
        np.testing.assert_array_equal(again[:number], before[:number])
    x, y = X[:63], Y[:63]
    after = trainer(ADAM, few)(jaxcomp.place(params, few, "data"), moved, x, y)
    assert np.isfinite(float(after[2]))
    for x in jax.tree.leaves(after[0]):
        assert bool(jnp.isfinite(x).all())


@pytest.mark.full
def test_a_model_that_is_sharded_over_other_axes_too(two):
    """`param_specs`: each device steps its part of its shard, and the norm is that of all."""
    from helpers import sharding

    kinds = {"kernel": sharding.SPECS["kernel"], "table": sharding.SPECS["table"]}
    shapes = {name: sharding.SHAPES[name] for name in kinds}
    optimizer = optax.sgd(0.1, 0.9)
    tx = jaxcomp.sharded_optimizer(optimizer, "dcn", IDENTITY, max_norm=0.7, param_specs=kinds)
    params = sharding.put(
        {name: np.full(s, 0.5, np.float32) for name, s in shapes.items()}, two, kinds
    )
    state = jaxcomp.init_state(tx, params, two, "dcn")

    def step(params, state, grads):
        own = jax.tree.map(lambda x: x[0], grads)
        updates, state = tx.update(own, state, params)
        return optax.apply_updates(params, updates), state

    run = jaxcomp.data_parallel(step, two, "dcn")
    plain = optax.chain(optax.clip_by_global_norm(0.7), optimizer)
    want, held = {k: np.full(s, 0.5, np.float32) for k, s in shapes.items()}, None
    held = plain.init(want)
    for seed in range(3):
        grads = sharding.draw(shapes, seed)
        params, state = run(params, state, sharding.put(grads, two, kinds, "dcn"))
        mean = {name: g.mean(0) for name, g in grads.items()}
        updates, held = plain.update(mean, held, want)
        want = optax.apply_updates(want, updates)
    for name, x in params.items():
        np.testing.assert_allclose(np.asarray(x), want[name], atol=1e-6)


@pytest.mark.full
def test_a_fast_level_moves_no_compressed_bytes_and_changes_no_step():
    """Uncompressed it is the optimizer; a state of two levels cannot be moved."""
    optimizer = optax.sgd(0.1, 0.9)
    tx = jaxcomp.sharded_optimizer(
        optimizer, ("dcn", "ici"), IDENTITY, fast=jaxcomp.Dense(), max_norm=0.6
    )
    params = jax.tree.map(lambda x: jnp.broadcast_to(x, (2, 4, *x.shape)), PARAMS)
    over = (
        functools.partial(jax.vmap, axis_name="dcn"),
        functools.partial(jax.vmap, axis_name="ici"),
    )
    state = over[0](over[1](tx.init))(params)
    update = jax.jit(over[0](over[1](tx.update)))
    plain = optax.chain(optax.clip_by_global_norm(0.6), optimizer)
    want, held = PARAMS, plain.init(PARAMS)
    for t in range(3):
        grads = gradients(t, 8)
        split = jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), grads)
        updates, state = update(split, state, params)
        params = optax.apply_updates(params, updates)
        steps, held = plain.update(jax.tree.map(lambda x: x.mean(0), grads), held, want)
        want = optax.apply_updates(want, steps)
    for got, expected in zip(jax.tree.leaves(params), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(got[0, 0], got[1, 3])
        np.testing.assert_allclose(got[0, 0], expected, atol=1e-5)
    rows = state.memory.optimizer.part.residual[0].tree
    assert rows.shape[:2] == (2, 4)
    assert rows.size < 1.5 * sum(x.size for x in jax.tree.leaves(PARAMS))
    mesh = jax.make_mesh((2, 4), ("dcn", "ici"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    outside = jaxcomp.init_state(tx, PARAMS, mesh, ("dcn", "ici"))
    with pytest.raises(ValueError, match="must not be that of a fast level"):
        jaxcomp.resize_workers(tx, outside, PARAMS, 4)
