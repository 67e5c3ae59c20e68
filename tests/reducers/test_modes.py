"""Every way to average over workers gives the same bits, however the step is mapped."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import methods
from helpers.suite import few_or_all

import jaxcomp
from jaxcomp.mesh import per_worker
from jaxcomp.numerics import noise

WORKERS, STEPS = 8, 3
MODES = ("typed", "untyped", "pmap", "vmap")
"""`shard_map` with `check_vma` and without, `pmap`, and `vmap` on one device."""
LEVELS = {"slow": 2, "fast": 4}

PLAIN = {"w": jnp.zeros((40, 64)), "c": jnp.zeros(700)}
MIXED = {**PLAIN, "v": jnp.zeros((33, 50), jnp.bfloat16), "d": jnp.zeros(900, jnp.bfloat16)}
"""Leaves that are compressed, and dense ones that are long enough for `vmap` to add their elements
in another order."""

EF21 = jaxcomp.Link(jaxcomp.sign(), jaxcomp.Shift())
SPARSE = jaxcomp.random_k(fraction=0.1, unbiased=False)
MOMENTUM = jaxcomp.Link(SPARSE, jaxcomp.MomentumCorrection(0.9))
RESIDUAL = jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual())


class Case(NamedTuple):
    """A transformation, the parameters that it is made for, and the axes of the workers.

    A matrix product rounds as it is compiled, so means of what is multiplied are only close.
    """

    tx: Any
    params: Any = PLAIN
    sizes: dict[str, int] = {"data": WORKERS}
    close: float = 0.0


def mean(reducer, axis_name: Any = "data", **settings):
    return jaxcomp.compressed_mean(reducer, axis_name, key=5, **settings)


CASES = {
    "dense": Case(mean(jaxcomp.Dense()), MIXED),
    "whole leaves": Case(mean(jaxcomp.terngrad(shared=True)), MIXED),
    "two shots": Case(mean(jaxcomp.TwoShot(EF21, EF21))),
    "votes": Case(mean(jaxcomp.Vote()), MIXED),
    "summed samples": Case(mean(jaxcomp.Psum(jaxcomp.random_k(fraction=0.1))), MIXED),
    "summed codes": Case(
        mean(jaxcomp.Psum(dataclasses.replace(jaxcomp.qsgd_inf(bits=4), shared=True))), MIXED
    ),
    "summed rotated codes": Case(mean(jaxcomp.Psum(jaxcomp.thc(bucket_size=512)))),
    "power iteration": Case(mean(jaxcomp.PowerIteration(rank=4)), close=1e-4),
    "power iteration in turns": Case(
        mean(jaxcomp.PowerIteration(rank=4, alternate=True)), close=1e-4
    ),
    "over senders": Case(
        mean(
            jaxcomp.Gather(
                jaxcomp.Link(jaxcomp.demo(k=6, chunk=8), jaxcomp.Residual(decay=0.9)),
                over="senders",
            )
        )
    ),
    "robust": Case(
        mean(jaxcomp.Robust(jaxcomp.qsgd_inf(bits=4), jaxcomp.aggregates.Credible()), stats=True),
        MIXED,
    ),
    "gated": Case(
        mean(
            jaxcomp.Gather(jaxcomp.Link(jaxcomp.qsgd_inf(bits=4), jaxcomp.Shift(0.3))),
            gate=jaxcomp.gates.Bernoulli(0.4),
        )
    ),
    "clipped, with momentum": Case(optax.chain(jaxcomp.clip_local(1e3, "data"), mean(MOMENTUM))),
    "scheduled": Case(
        mean(
            jaxcomp.ReducerSchedule(
                (
                    (0, jaxcomp.Link(jaxcomp.random_k(0.25, unbiased=False), MOMENTUM.feedback)),
                    (2, MOMENTUM),
                )
            )
        )
    ),
    "local updates": Case(
        jaxcomp.local_updates(  # Adam's own products and sums round otherwise under `vmap`.
            optax.sgd(0.1, 0.9),
            optax.sgd(0.7, 0.9, nesterov=True),
            "data",
            every=2,
            reducer=jaxcomp.Gather(RESIDUAL),
            key=5,
        )
    ),
    "streamed": Case(
        jaxcomp.local_updates(
            optax.sgd(0.1, 0.9), None, "data", every=4, fragments=2, delay=1, mix=0.5, key=5
        )
    ),
    "gossip of differences": Case(
        jaxcomp.gossip(
            optax.sgd(0.1, 0.9),
            jaxcomp.Gossip(EF21),
            "data",
            mixing=0.3,
            key=5,
        ),
        MIXED,
    ),
    "gossip in rounds": Case(
        jaxcomp.gossip(
            optax.sgd(0.1, 0.9),
            jaxcomp.Gossip(RESIDUAL, jaxcomp.graphs.OnePeer()),
            "data",
            mixing=0.3,
            every=2,
            rounds=lambda taken: 1 + taken % 3,
            key=5,
        )
    ),
    "hierarchy": Case(
        mean(
            jaxcomp.Hierarchical(jaxcomp.Dense(), jaxcomp.TwoShot(RESIDUAL, RESIDUAL)),
            tuple(LEVELS),
        ),
        sizes=LEVELS,
    ),
}
MORE_CASES = {
    "default of qsgd": Case(mean(jaxcomp.qsgd(bits=4)), MIXED),
    "adaptive levels": Case(mean(jaxcomp.alq(bits=3)), MIXED),
    "fitted threshold": Case(mean(jaxcomp.sidco(fraction=0.01)), MIXED),
    "gathered codes": Case(mean(jaxcomp.Gather(jaxcomp.qsgd_inf(bits=4))), MIXED),
    "gathered shifts": Case(mean(jaxcomp.Gather(EF21)), MIXED),
    "two shots of both dtypes": Case(mean(jaxcomp.TwoShot(EF21, EF21)), MIXED),
    "medians": Case(
        mean(
            jaxcomp.Robust(jaxcomp.qsgd_inf(bits=4), jaxcomp.aggregates.CoordinateMedian()),
            gate=jaxcomp.gates.Bernoulli(0.6),
        ),
        MIXED,
    ),
    "trimmed": Case(
        mean(jaxcomp.Robust(jaxcomp.qsgd_inf(bits=4), jaxcomp.aggregates.TrimmedMean(0.2)))
    ),
    "shortened": Case(
        mean(jaxcomp.Robust(jaxcomp.qsgd_inf(bits=4), jaxcomp.aggregates.ClippedMean(9.0))), MIXED
    ),
    "robust means": Case(mean(jaxcomp.Robust(RESIDUAL, jaxcomp.aggregates.Mean()))),
    "int_sgd": Case(mean(jaxcomp.Psum(jaxcomp.int_sgd())), MIXED),
    "gossip of random pairs": Case(
        jaxcomp.gossip(
            optax.sgd(0.1, 0.9),
            jaxcomp.Gossip(jaxcomp.qsgd_inf(bits=4), jaxcomp.graphs.RandomPairs()),
            "data",
            outer=optax.sgd(0.7, 0.5),
            key=5,
        )
    ),
    "gossip of tracked gradients": Case(
        jaxcomp.gossip(
            optax.sgd(0.1, 0.9),
            jaxcomp.Gossip(
                jaxcomp.Link(jaxcomp.qsgd_inf(bits=4), jaxcomp.Shift(0.3)),
                jaxcomp.graphs.Torus(2, 4),
            ),
            "data",
            tracking=True,
            key=5,
        )
    ),
    "gossip of what is known": Case(
        jaxcomp.gossip(
            optax.sgd(0.1, 0.9),
            jaxcomp.Gossip(
                jaxcomp.Link(jaxcomp.qsgd_inf(bits=8), jaxcomp.Shift()),
                jaxcomp.graphs.Exponential(),
            ),
            "data",
            stay=True,
            key=5,
        )
    ),
}
EVERY = CASES | MORE_CASES


def gradients(like, workers=WORKERS, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal((workers, *x.shape)), x.dtype), like
    )


def modes_of(name):
    """The modes of a case in every run. `pmap` is `shard_map` without types over one axis."""
    alike = ("summed rotated codes", "power iteration in turns")  # As others that have three.
    return {
        "two shots": MODES,
        "hierarchy": ("typed", "untyped", "vmap"),
        **dict.fromkeys(alike, ("typed", "vmap")),
    }.get(name, ("typed", "pmap", "vmap"))


def outcome(case, step, batches, mode):
    """The updates of all steps, the parameters and the state, all with a leading workers axis."""
    names = tuple(case.sizes)
    axis = names[0] if len(names) == 1 else names
    shape = tuple(case.sizes.values())
    if mode in ("typed", "untyped"):
        mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))

        def own(params, state, batch):
            return step(params, state, jax.tree.map(lambda x: x[0], batch))

        run = jaxcomp.data_parallel(own, mesh, axis, check_vma=mode == "typed")
        params, state = case.params, jaxcomp.init_state(case.tx, case.params, mesh, axis)
    else:
        batches = [jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), b) for b in batches]
        everyone: Any = functools.partial(jax.pmap, axis_name=axis)
        if mode == "vmap":

            def everyone(f):
                for name in reversed(names):
                    f = jax.vmap(f, axis_name=name)
                return jax.jit(f)

        run = everyone(step)
        params = jax.tree.map(lambda x: jnp.broadcast_to(x, (*shape, *x.shape)), case.params)
        state = everyone(lambda _: case.tx.init(case.params))(jnp.zeros(shape))
    found = []
    for batch in batches:
        updates, params, state = run(params, state, batch)
        found.append(updates)

    def rows(path, x):
        """Arrays that are the same for all workers are kept once by `data_parallel`."""
        x = np.asarray(x)
        if mode in ("typed", "untyped") and not per_worker.marked(path):
            x = np.broadcast_to(x, (WORKERS, *x.shape))
        return x.reshape(WORKERS, -1)

    return jax.tree_util.tree_map_with_path(rows, (found, params, state))


def assert_alike(case, found):
    """The same in all modes, and on all workers but for memory of their own."""
    want = found["typed"]
    for mode, got in found.items():
        for leaf in jax.tree.leaves(per_worker.replicated_part(got)):
            np.testing.assert_array_equal(leaf, leaf[:1].repeat(WORKERS, 0), err_msg=mode)
        for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            if case.close:
                one, other = (np.asarray(x, np.float64) for x in (one, other))
                np.testing.assert_allclose(one, other, case.close, case.close, err_msg=mode)
            else:
                np.testing.assert_array_equal(one, other, err_msg=mode)
    moved = want[0] if any(np.any(x != 0) for x in jax.tree.leaves(want[0])) else offsets(want)
    assert any(np.any(x != 0) for x in jax.tree.leaves(moved))


def offsets(tree):
    """Of workers that have parameters of their own."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: hasattr(node, "offset"))
    return [node.offset.tree for node in nodes if hasattr(node, "offset")]


@pytest.mark.core(
    "two shots", "votes", "gated", "local updates", "gossip of differences", "summed codes"
)
@pytest.mark.parametrize(
    ("name", "modes"),
    few_or_all(
        [(name, modes_of(name)) for name in CASES],
        [(name, MODES) for name in EVERY if name != "hierarchy"],
    ),
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_means_and_memory_are_the_same_in_all_modes(name, modes):
    case = EVERY[name]

    def step(params, state, grads):
        updates, state = case.tx.update(grads, state, params)
        return updates, params, state

    batches = [gradients(case.params, seed=seed) for seed in range(STEPS)]
    assert_alike(case, {mode: outcome(case, step, batches, mode) for mode in modes})


@pytest.mark.core("marina-typed, pmap, vmap")
@pytest.mark.parametrize(
    ("name", "modes"),
    few_or_all(
        [(name, ("typed", "pmap", "vmap")) for name in ("marina", "rand_mcm")],
        [(name, MODES) for name in methods.METHODS],
    ),
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_methods_are_the_same_in_all_modes(name, modes):
    """On losses `½ Σ aᵢ (x − bᵢ)²`. Updates and parameters are multiplied and added differently."""
    like = {"x": jnp.zeros((1, methods.SIZE))}
    case = Case(methods.build(name), like, {methods.AXIS: WORKERS}, close=1e-6)

    def step(params, state, batch):
        def grad_fn(at):
            return {"x": batch["slopes"] * (at["x"] - batch["optima"])}

        at = jaxcomp.local(jaxcomp.view(params, state), methods.AXIS)
        updates, state = case.tx.update(grad_fn(at), state, params, grad_fn=grad_fn)
        return updates, optax.apply_updates(params, updates), state

    slopes = np.random.default_rng(7).uniform(0.5, 1.5, (WORKERS, 1, methods.SIZE))
    batch = {"slopes": jnp.asarray(slopes, jnp.float32), "optima": gradients(like)["x"]}
    assert_alike(case, {mode: outcome(case, step, [batch] * 4, mode) for mode in modes})


@pytest.mark.filterwarnings("ignore:.*is biased.*:UserWarning")
def test_the_mean_is_that_of_the_loop_over_workers(mesh):
    """What `shard_map` computes is what `roundtrip` says that each worker sends."""
    like = {"w": PLAIN["w"]}
    grads = gradients(like)
    for codec in (jaxcomp.qsgd_inf(bits=4), SPARSE):
        tx = jaxcomp.compressed_mean(jaxcomp.Gather(jaxcomp.Link(codec)), "data", key=9)

        def step(state, grads, tx=tx):
            return tx.update(jax.tree.map(lambda x: x[0], grads), state)

        state = jaxcomp.init_state(tx, like, mesh, "data")
        mean, _ = jaxcomp.data_parallel(step, mesh, "data")(state, grads)
        key = noise.fold(noise.raw(9), 0)

        @jax.jit
        def sent(grad, worker, codec=codec, key=key):
            return jaxcomp.roundtrip(jaxcomp.Policy(codec), key, {"w": grad}, worker=worker)["w"]

        each = [sent(grads["w"][i], jnp.uint32(i)) for i in range(WORKERS)]
        want = functools.reduce(jnp.add, each) * np.float32(1 / WORKERS)
        np.testing.assert_array_equal(mean["w"], want)


def test_a_hundred_workers_on_one_device():
    """`vmap` simulates any number of workers through the very same code, sum and loop."""
    workers = 100
    tx = jaxcomp.compressed_mean(jaxcomp.qsgd_inf(bits=8), "data")
    grads = gradients({"w": jnp.zeros((32, 64))}, workers)
    state = tx.init({"w": grads["w"][0]})
    state = jax.tree.map(lambda x: jnp.stack([x] * workers), state)
    mean, _ = jax.jit(jax.vmap(tx.update, axis_name="data"))(grads, state)
    np.testing.assert_allclose(mean["w"][0], grads["w"].mean(0), atol=0.01)


@pytest.mark.core("alone")
@pytest.mark.parametrize("sizes", [{"dcn": 2, "ici": 4}, {"data": 1}], ids=["two axes", "alone"])
def test_a_tuple_of_axes_and_a_worker_alone(sizes):
    axis = tuple(sizes) if len(sizes) > 1 else "data"
    kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
    grid = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)
    tx = jaxcomp.compressed_mean(jaxcomp.qsgd_inf(bits=8), axis)
    state = jaxcomp.init_state(tx, PLAIN, grid, axis)

    def step(state, grads):
        return tx.update(jax.tree.map(lambda g: g[0], grads), state)

    grads = gradients(PLAIN, grid.size)
    mean, _ = jaxcomp.data_parallel(step, grid, axis)(state, grads)
    np.testing.assert_allclose(mean["w"], grads["w"].mean(0), atol=0.03)
