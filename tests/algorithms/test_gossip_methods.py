"""Every decentralised method: kept means, checkpoints, shards, and every kind of link."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers.methods import AXIS, GOSSIP, SIZE, build, everywhere, mean
from helpers.suite import few_or_all

import jaxcomp
from jaxcomp import algorithms, graphs
from jaxcomp.algorithms import decentralised, finite_sums
from jaxcomp.exchange import legs
from jaxcomp.exchange.plan import Plan
from jaxcomp.layout import trees
from jaxcomp.testing import problems
from jaxcomp.testing.mingling import mingle

WORKERS = 8
LINKS = {
    "4 bits": (everywhere(jaxcomp.qsgd_inf(bits=4, bucket_size=SIZE)), jaxcomp.NoFeedback()),
    "sign": (everywhere(jaxcomp.sign(bucket_size=None)), jaxcomp.Residual()),
    "top": (everywhere(jaxcomp.top_k(0.1)), jaxcomp.Residual()),
}
VARYING = {
    "one peer": graphs.OnePeer(),
    "pairs": graphs.RandomPairs(),
    "in turns": graphs.Alternating((graphs.Ring(), graphs.Torus(2, 4))),
}


def test_every_gossip_method_is_tried():
    recipes = set()
    for module in (decentralised, finite_sums):
        made = inspect.getmembers(module, inspect.isfunction)
        recipes |= {name for name, f in made if f.__module__ == module.__name__ and name[0] != "_"}
    assert recipes - set(GOSSIP) == {"neighbours", "qsvrg"}  # A helper, and a mean.


def stepper(tx):
    """A step of a worker, whose loss is `½|x − batch|²`."""

    def step(params, state, batch):
        def grad_fn(at):
            return {"x": at["x"] - batch.reshape(1, SIZE)}

        at = jaxcomp.local(jaxcomp.view(params, state), AXIS)
        given = {"grad_fn": grad_fn, "full_grad_fn": grad_fn}
        _, state = tx.update(grad_fn(at), state, params, **given)
        return state

    return step


@pytest.mark.core("choco_sgd")
@pytest.mark.parametrize("name", few_or_all(["choco_sgd", "gradient_tracking", "noloco"], GOSSIP))
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(name, tmp_path):
    tx, mesh = build(name), jax.make_mesh((4,), (AXIS,), (jax.sharding.AxisType.Auto,))
    params = {"x": jnp.zeros((1, SIZE))}
    batch = np.random.default_rng(0).standard_normal((4, SIZE)).astype(np.float32)
    state = jaxcomp.init_state(tx, params, mesh, AXIS)
    run = jaxcomp.data_parallel(stepper(tx), mesh, AXIS)
    for _ in range(3):
        state = run(params, state, batch)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
        saver.wait_until_finished()
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        loaded = saver.restore(tmp_path / "state", shapes)
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    for _ in range(3):
        state, loaded = run(params, state, batch), run(params, loaded, batch)
    for got, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(got, want)
    assert (jaxcomp.consensus(params, state)["x"] != 0).any()


def still(worker, step):
    return jnp.zeros_like, jnp.zeros_like


@pytest.mark.core("one peer-4 bits")
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("graph", VARYING)
def test_every_link_agrees_over_graphs_that_change(graph, link, x64):
    """Models come near each other, down to the error of a message, and keep their mean."""
    codec, memory = LINKS[link]
    reducer = jaxcomp.Gossip(jaxcomp.Link(codec, memory), VARYING[graph])
    tx = jaxcomp.gossip(optax.sgd(0.0), reducer, AXIS, mixing=0.3)
    start = jnp.asarray(np.random.default_rng(0).standard_normal((WORKERS, SIZE)))
    measure = lambda x: (jnp.mean((x - x.mean(0)) ** 2), x.mean(0))  # noqa: E731
    (spread, means), _ = mingle(
        tx, still, measure, workers=WORKERS, size=SIZE, steps=150, start=start
    )
    assert spread[-1] < 0.1 * jnp.mean((start - start.mean(0)) ** 2), spread[-1]
    np.testing.assert_allclose(means[-1], start.mean(0), rtol=0, atol=1e-12)


QSVRG = {
    "4 bits": LINKS["4 bits"][0],
    "4 bits, shifts": jaxcomp.Link(LINKS["4 bits"][0], jaxcomp.Shift(0.5)),
    "sign": jaxcomp.Link(LINKS["sign"][0], jaxcomp.Shift()),
    "top": jaxcomp.Link(LINKS["top"][0], jaxcomp.Shift()),
}


@pytest.mark.core("4 bits")
@pytest.mark.parametrize("link", QSVRG)
def test_qsvrg_converges_with_every_link(link, x64):
    """Workers differ, so messages do not vanish: shifts go on where 4 bits alone stop."""
    problem = problems.quadratics()
    tx = mean(algorithms.qsvrg, every=20)(QSVRG[link], 0.05)
    error = problems.descend(tx, problem, 600, AXIS).error
    assert error[-1] < (1e-2 if link == "4 bits" else 1e-8), error[-1]
    assert error[-1] > 1e-12 or link != "4 bits"


def test_gates_and_shards_that_cannot_work_are_refused():
    ring = jaxcomp.Gossip(LINKS["4 bits"][0])
    with pytest.raises(ValueError, match="`param_specs` must be None with a graph that draws"):
        algorithms.noloco(LINKS["4 bits"][0], AXIS, param_specs=jax.P("model"))
    with pytest.raises(ValueError, match="`param_specs` must leave out the axis of the workers"):
        jaxcomp.gossip(optax.sgd(0.1), ring, AXIS, param_specs=jax.P(AXIS))
    with pytest.raises(ValueError, match=r"same mean.*jaxcomp\.gossip"):
        jaxcomp.compressed_mean(ring, AXIS, gate=jaxcomp.gates.Every(2))
    with pytest.raises(ValueError, match=r"same mean.*jaxcomp\.gossip"):
        jaxcomp.local_updates(optax.sgd(0.1), None, AXIS, every=2, reducer=ring).init(
            {"x": jnp.zeros((1, SIZE))}
        )
    with pytest.raises(ValueError, match=r"`gate` must be None.*Without\(graph, silent\)"):
        jax.vmap(functools.partial(weighted, ring), axis_name=AXIS)(jnp.ones((4, 8, 64)))


def weighted(reducer, x):
    plan = Plan.of(reducer, x, AXIS)
    message, key = trees.stacks(plan.layout, x)[0], jnp.zeros(2, jnp.uint32)
    return legs.collect(plan, key, message, legs.init(plan), jnp.ones(())).value


@pytest.mark.core("plain")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prox": lambda params, taken: params},
        {"every": 5, "outer": optax.sgd(0.1, 0.9)},
    ],
    ids=["plain", "prox", "outer"],
)
def test_small_steps_of_narrow_parameters_add_up(settings):
    """Each is 1e-4, where bfloat16 numbers near two are 1/64 apart."""

    def moved(dtype):
        params = jnp.full(3, 2.0, dtype)
        tx = jaxcomp.gossip(optax.sgd(0.01), jaxcomp.codecs.Identity(), AXIS, **settings)

        def run(grads):
            def step(state, _):
                return tx.update(grads, state, params)[1], None

            return jax.lax.scan(step, tx.init(params), None, length=200)[0].offset.tree[0]

        grads = jnp.full((4, 3), 0.01, dtype)
        return np.asarray(jax.jit(jax.vmap(run, axis_name=AXIS))(grads), np.float32)

    want, got = moved(jnp.float32), moved(jnp.bfloat16)
    assert (want < -0.01).all()
    np.testing.assert_allclose(got, want, rtol=0.01)
