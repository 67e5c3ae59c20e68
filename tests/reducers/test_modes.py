"""One code path, four ways to map it: the same bits, and replicas that stay identical."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from suite import SLOW, label

import jaxcomp
from jaxcomp.mesh import per_worker
from jaxcomp.numerics import noise

WORKERS = 8
RNG = np.random.default_rng(0)
PARAMS = {
    "w": jnp.asarray(RNG.standard_normal((40, 64)), jnp.float32),
    "v": jnp.asarray(RNG.standard_normal((33, 50)), jnp.bfloat16),
    "b": jnp.zeros(64),
    "c": jnp.zeros(700),
    "d": jnp.zeros(900, jnp.bfloat16),
}
"""Two leaves that are compressed, and three dense ones, of which two are long enough to be added in
another order under `vmap`.
"""
GRADS = [
    jax.tree.map(
        lambda p, k=step: jnp.asarray(
            np.random.default_rng(k).standard_normal((WORKERS, *p.shape)) * 0.1, p.dtype
        ),
        PARAMS,
    )
    for step in range(3)
]
EF21 = jaxcomp.Link(jaxcomp.sign(), jaxcomp.Shift())
LINKS = [
    jaxcomp.qsgd(bits=4),
    jaxcomp.terngrad(shared=True),
    jaxcomp.alq(bits=3),
    jaxcomp.sidco(fraction=0.01),
]
"""Over eight workers those of buckets take two shots, leaves taken whole are gathered, and shared
integers are summed. (That each codec alone gives the same bits compiled, under `vmap` and eagerly
is in its contract.)
"""

REDUCERS = [
    jaxcomp.Gather(jaxcomp.qsgd_inf(bits=4)),
    jaxcomp.Gather(EF21),
    jaxcomp.TwoShot(EF21, EF21),
    jaxcomp.Vote(),
    jaxcomp.Psum(jaxcomp.random_k(fraction=0.1)),
    jaxcomp.Dense(),
]
SOME = [LINKS[1], *REDUCERS[2:]]
"""Of each way to reduce one; `JAXCOMP_SLOW=1` runs all."""


def name(value):
    return label(value) if isinstance(value, jaxcomp.Codec) else type(value).__name__


def start(tx):
    """A state whose every array has a leading workers axis, as `pmap` and `vmap` take it."""
    state = tx.init(PARAMS)
    return jax.tree.map(lambda x: jnp.stack([x] * WORKERS), state)


def mapped(tx, mode, mesh):
    """update(grads, state), both with a leading workers axis, in each mode."""

    def update(grads, state):
        return tx.update(grads, state)

    if mode == "vmap":
        return jax.jit(jax.vmap(update, axis_name="data"))
    if mode == "pmap":
        return jax.pmap(update, axis_name="data")

    def body(grads, state):
        out = update(*jax.tree.map(lambda x: x[0], (grads, state)))
        return jax.tree.map(lambda x: x[None], out)

    return jax.jit(
        jax.shard_map(
            body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=mode == "typed"
        )
    )


@pytest.mark.parametrize("codec", [*LINKS, *REDUCERS] if SLOW else SOME, ids=name)
def test_four_modes_give_the_same_bits(codec, mesh):
    """Means and states, after three steps, bit for bit.

    `pmap` is `shard_map` without types, so the latter is compiled for one of them alone.
    """
    tx = jaxcomp.compressed_mean(codec, "data", key=5)
    outcomes = {}
    for mode in ("typed", "pmap", "vmap", *(("untyped",) if codec == REDUCERS[2] else ())):
        step, state = mapped(tx, mode, mesh), start(tx)
        for grads in GRADS:
            mean, state = step(grads, state)
        outcomes[mode] = jax.tree.map(np.asarray, (mean, state))
    for mode, (mean, state) in outcomes.items():
        for leaf in mean:
            np.testing.assert_array_equal(mean[leaf], outcomes["typed"][0][leaf], err_msg=mode)
        for got, want in zip(
            jax.tree.leaves(state), jax.tree.leaves(outcomes["typed"][1]), strict=True
        ):
            np.testing.assert_array_equal(got, want, err_msg=mode)
        # Replicas: what every worker holds of the mean is the same.
        for leaf in jax.tree.leaves(mean):
            assert (leaf == leaf[:1]).all()


def test_the_mean_is_that_of_the_loop_over_workers(mesh):
    """What `shard_map` computes is what `roundtrip` says that each worker sends."""
    for codec in (jaxcomp.qsgd_inf(bits=4), jaxcomp.sign(), jaxcomp.top_k(fraction=0.1)):
        link = jaxcomp.Policy(codec)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # No feedback, on purpose.
            tx = jaxcomp.compressed_mean(jaxcomp.Gather(jaxcomp.Link(link)), "data", key=9)
        mean, _ = mapped(tx, "typed", mesh)(GRADS[0], start(tx))
        key = noise.fold(noise.raw(9), 0)
        sent = [
            jaxcomp.roundtrip(link, key, jax.tree.map(lambda g, i=i: g[i], GRADS[0]), worker=i)
            for i in range(WORKERS)
        ]
        want = functools.reduce(jnp.add, [s["w"] for s in sent]) * np.float32(1 / WORKERS)
        np.testing.assert_array_equal(mean["w"][3], want)


def loss(params, batch):
    x, y = batch
    h = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.mean((h[:, :50] @ params["v"].astype(jnp.float32).T - y) ** 2)


@pytest.mark.parametrize(
    "codec", [jaxcomp.sign(), *([jaxcomp.qsgd_inf(bits=4)] if SLOW else [])], ids=label
)
def test_ten_training_steps_agree(codec, mesh):
    """Through each mode, ten steps of a real model; and no replica ever differs."""
    tx = optax.chain(jaxcomp.compressed_mean(codec, "data"), optax.adam(1e-2))
    rng = np.random.default_rng(1)
    batch = (
        jnp.asarray(rng.standard_normal((64, 40)), jnp.float32),
        jnp.asarray(rng.standard_normal((64, 33)), jnp.float32),
    )

    def step(params, state, batch):
        grads = jax.grad(loss)(jaxcomp.local(params, "data"), batch)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        spread = [
            jax.lax.pmax(x, "data") - jax.lax.pmin(x, "data")
            for x in jax.tree.leaves((params, per_worker.replicated(state)))
        ]
        return params, state, functools.reduce(jnp.maximum, [jnp.max(jnp.abs(s)) for s in spread])

    ends = []
    for check_vma in (True, False):
        run = jaxcomp.data_parallel(step, mesh, "data", check_vma=check_vma)
        params, state = PARAMS, jaxcomp.init_state(tx, PARAMS, mesh, "data")
        for _ in range(10):
            params, state, spread = run(params, state, batch)
            assert float(spread) == 0
        ends.append(params)
    for make in (
        lambda f: jax.pmap(f, axis_name="data"),
        lambda f: jax.jit(jax.vmap(f, axis_name="data")),
    ):
        run = make(step)
        params = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), PARAMS)
        state = start(tx)
        split = jax.tree.map(lambda x: x.reshape(WORKERS, -1, *x.shape[1:]), batch)
        for _ in range(10):
            params, state, spread = run(params, state, split)
            assert float(np.max(spread)) == 0
        ends.append(jax.tree.map(lambda x: x[0], params))
    for end in ends[1:]:
        for got, want in zip(jax.tree.leaves(end), jax.tree.leaves(ends[0]), strict=True):
            np.testing.assert_allclose(
                np.asarray(got, np.float32), np.asarray(want, np.float32), atol=2e-2, rtol=2e-2
            )


def test_a_hundred_workers_on_one_device():
    """`vmap` simulates any number of workers through the very same code, sum and loop."""
    workers = 100
    tx = jaxcomp.compressed_mean(jaxcomp.qsgd_inf(bits=8), "data")
    grads = {"w": jnp.asarray(RNG.standard_normal((workers, 32, 64)), jnp.float32)}
    state = tx.init({"w": grads["w"][0]})
    state = jax.tree.map(lambda x: jnp.stack([x] * workers), state)
    mean, _ = jax.jit(jax.vmap(tx.update, axis_name="data"))(grads, state)
    np.testing.assert_allclose(mean["w"][0], grads["w"].mean(0), atol=0.01)


def test_a_tuple_of_axes():
    """Workers may be on two mesh axes at once."""
    grid = jax.make_mesh((2, 4), ("dcn", "ici"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    tx = jaxcomp.compressed_mean(jaxcomp.qsgd_inf(bits=8), ("dcn", "ici"))
    state = jaxcomp.init_state(tx, PARAMS, grid, ("dcn", "ici"))

    def step(state, grads):
        return tx.update(jax.tree.map(lambda g: g[0], grads), state)

    mean, state = jaxcomp.data_parallel(step, grid, ("dcn", "ici"))(state, GRADS[0])
    np.testing.assert_allclose(mean["w"], GRADS[0]["w"].mean(0), atol=0.01)


def test_one_worker_alone():
    grid = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = jaxcomp.compressed_mean(jaxcomp.qsgd_inf(bits=8), "data")
    state = jaxcomp.init_state(tx, PARAMS, grid, "data")
    run = jaxcomp.data_parallel(lambda s, g: tx.update(g, s), grid, "data")
    mean, _ = run(state, jax.tree.map(lambda g: g[0], GRADS[0]))
    np.testing.assert_allclose(mean["w"], GRADS[0]["w"][0], atol=0.01)
