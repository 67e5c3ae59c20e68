"""Parts that a stranger writes from public names work wherever their declared facts allow."""

import ast
import importlib.util
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from helpers import clients
from helpers.paths import ROOT

import jaxcomp
from jaxcomp import federated, graphs, testing

EXAMPLES = ROOT / "examples"
PARAMS = {"w": jnp.zeros((48, 64)), "b": jnp.zeros(30)}


def module(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


FEEDBACK, REDUCER, METHOD = map(module, ("own_feedback", "own_reducer", "own_method"))
CLIPPED = jaxcomp.Link(jaxcomp.sign(), FEEDBACK.Clipped(most=10.0))
FRUGAL = REDUCER.Frugal(jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual()))


def step_of(tx):
    def step(params, state, x):
        grads = jax.tree.map(
            lambda p, t: p - t[0], jaxcomp.local(jaxcomp.view(params, state), "data"), x
        )
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def trained(tx, mesh, steps=4):
    """Parameters and state after some steps, through a checkpoint in the middle."""
    rng, step = np.random.default_rng(0), jaxcomp.data_parallel(step_of(tx), mesh, "data")
    params = jaxcomp.place(PARAMS, mesh, "data")
    state = jaxcomp.init_state(tx, params, mesh, "data")
    for number in range(steps):
        x = jax.tree.map(lambda p: rng.standard_normal((mesh.size, *p.shape)), PARAMS)
        x = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), x)
        params, state = step(params, state, x)
        if number == 1:
            data = serialization.to_bytes(state)
            state = jaxcomp.place(serialization.from_bytes(state, data), mesh, "data")
    return params, state


def code_lines(name, part):
    """Lines of a definition without documentation and blanks."""
    source = (EXAMPLES / f"{name}.py").read_text()
    (made,) = [x for x in ast.parse(source).body if getattr(x, "name", "") == part]
    says = made.body[0] if ast.get_docstring(made) else None
    told = range(says.lineno, says.end_lineno + 1) if says else ()
    lines = source.splitlines()
    return sum(
        bool(lines[number - 1].strip()) and number not in told
        for number in range(made.lineno, made.end_lineno + 1)
    )


def test_they_are_short():
    assert code_lines("own_feedback", "Clipped") <= 20
    assert code_lines("own_reducer", "HalfDown") <= 12
    assert code_lines("own_reducer", "OneByOne") <= 20
    assert code_lines("own_method", "scaffold") + code_lines("own_method", "ScaffoldState") <= 40


def test_they_pass_the_contracts():
    testing.check_feedback(FEEDBACK.Clipped(most=10.0))
    testing.check_reducer(FRUGAL)
    testing.check_reducer(REDUCER.HalfDown(FRUGAL.uplink), downlink_tolerance=1e-2)
    testing.check_reducer(jaxcomp.Gather(CLIPPED))


def test_a_reducer_of_ones_own_is_a_gather(mesh):
    """In a typed step, with memory and a checkpoint, and under a gate; it sends what it says."""
    for settings in ({}, {"gate": jaxcomp.gates.Bernoulli(0.5)}):
        found = [
            trained(jaxcomp.compressed_mean(reducer, "data", key=3, **settings), mesh)[0]
            for reducer in (FRUGAL, jaxcomp.Gather(FRUGAL.uplink))
        ]
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), *found)
    tx = jaxcomp.compressed_mean(FRUGAL, "data")
    step = jaxcomp.data_parallel(step_of(tx), mesh, "data")
    x = jax.tree.map(lambda p: jnp.zeros((8, *p.shape)), PARAMS)
    state = jaxcomp.init_state(tx, PARAMS, mesh, "data")
    sent = jaxcomp.collective_bytes(step.lower(PARAMS, state, x).compile())
    assert abs(sum(sent.values()) - jaxcomp.wire_bytes(FRUGAL, PARAMS, workers=8)) <= 3


@pytest.mark.parametrize("part", ["feedback", "reducer", "method"])
def test_states_move_to_other_workers(part, mesh):
    """Of eight to two, where the default reducer has no downlink, and to three."""
    make = {
        "feedback": lambda: jaxcomp.compressed_mean(CLIPPED, "data"),
        "reducer": lambda: jaxcomp.compressed_mean(FRUGAL, "data"),
        "method": lambda: METHOD.scaffold(0.1, "data", 2, jaxcomp.qsgd_inf()),
    }
    tx = make[part]()
    _, state = trained(tx, mesh)
    for workers in (2, 3):
        smaller = jax.make_mesh((workers,), ("data",), devices=jax.devices()[:workers])
        moved = jaxcomp.resize_workers(tx, state, PARAMS, workers)
        wanted = jaxcomp.init_state(tx, PARAMS, smaller, "data")
        assert jax.tree.structure(moved) == jax.tree.structure(wanted)
        jax.tree.map(lambda x, y: np.testing.assert_equal(x.shape, y.shape), moved, wanted)
        step = jaxcomp.data_parallel(step_of(tx), smaller, "data")
        x = jax.tree.map(lambda p, n=workers: jnp.ones((n, *p.shape)), PARAMS)
        params, _ = step(PARAMS, jaxcomp.place(moved, smaller, "data"), x)
        assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params))
    if part == "feedback":  # What neither direction has sent is kept.
        down = state.memory.reducer[1].memory.tree.residual[0].reshape(-1, 512)
        up = state.memory.feedback.tree.rest[0].mean(0)
        moved = jaxcomp.resize_workers(tx, state, PARAMS, 2).memory.feedback.tree.rest[0]
        np.testing.assert_allclose(moved.mean(0), up + down[: len(up)], atol=1e-6)


def test_a_feedback_of_ones_own_in_gossip_and_in_a_federation(mesh):
    everything = jaxcomp.Policy(jaxcomp.sign(), min_size=0, min_ndim=0)
    link = jaxcomp.Link(everything, FEEDBACK.Clipped(most=10.0))
    tx = jaxcomp.gossip(optax.sgd(0.1), jaxcomp.Gossip(link, graphs.Ring()), "data", mixing=0.2)
    params, state = trained(tx, mesh)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((params, state)))
    method = federated.Method(clients.WORK, link)
    sim = clients.simulation(method)
    before = jax.tree.map(jnp.array, sim.params)
    reports = sim.run(2)
    assert all(np.isfinite(report.loss) for report in reports)
    moved = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), before, sim.params)
    assert max(jax.tree.leaves(moved)) > 0


REDUCERS = {
    "two shots": lambda link: jaxcomp.TwoShot(link, link),
    "phases": lambda link: jaxcomp.ReducerSchedule(((0, link), (2, link))),
    "of two legs": REDUCER.HalfDown,
    "of an own combination": REDUCER.Frugal,
}


@pytest.mark.parametrize("name", REDUCERS)
def test_a_feedback_of_ones_own_under_reducers_and_local_updates(name, mesh):
    """With its statistics; with a limit that nothing reaches, it is error feedback."""
    found = []
    for feedback in (FEEDBACK.Clipped(most=1e6), jaxcomp.Residual()):
        reducer = REDUCERS[name](jaxcomp.Link(jaxcomp.sign(), feedback))
        tx = jaxcomp.compressed_mean(reducer, "data", key=3, stats=True)
        params, state = trained(tx, mesh)
        assert float(state.stats.residual_norm) > 0
        inner = jaxcomp.local_updates(optax.sgd(0.1), None, "data", every=2, reducer=reducer)
        found.append((params, trained(inner, mesh)[0]))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), *found)


def test_parts_of_ones_own_are_the_slow_level_of_a_hierarchy():
    two = jaxcomp.Hierarchical(jaxcomp.Dense(), FRUGAL)
    testing.check_reducer(two, workers=(2, 2))
    testing.check_reducer(jaxcomp.Hierarchical(jaxcomp.Dense(), CLIPPED), workers=(2, 2))


def test_scaffold_reaches_the_minimum_that_local_steps_miss():
    plain = jaxcomp.local_updates(optax.sgd(0.05), None, "data", every=5, reducer=jaxcomp.Dense())
    assert METHOD.distance(plain) > 0.1
    assert METHOD.distance(METHOD.scaffold(0.05, "data", 5, jaxcomp.Dense())) < 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        coded = METHOD.distance(METHOD.scaffold(0.05, "data", 5, jaxcomp.qsgd_inf(bits=8)))
    assert coded < 0.02


@pytest.mark.parametrize("name", ["own_feedback", "own_reducer", "own_method"])
def test_the_pages_show_the_examples(name):
    page, example = (ROOT / "docs" / f"{name}.md").read_text(), EXAMPLES / f"{name}.py"
    part = {"own_feedback": "Clipped", "own_reducer": "HalfDown", "own_method": "scaffold"}[name]
    (made,) = [x for x in ast.parse(example.read_text()).body if getattr(x, "name", "") == part]
    first = min([made.lineno, *(line.lineno for line in made.decorator_list)])
    lines = example.read_text().splitlines()[first - 1 : made.end_lineno]
    assert "\n".join(lines) in page
