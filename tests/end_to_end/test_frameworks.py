"""The programs of `frameworks.md`, `plain_jit.md`, `local.md` and `federated.md` in `docs/` run."""

import re

import jax
import numpy as np
import optax
import pytest
from helpers.paths import ROOT
from jax.sharding import NamedSharding

import jaxcomp

PAGE = (ROOT / "docs" / "frameworks.md").read_text()
PROGRAMS = {
    title: re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    for title, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.M)
}


@pytest.fixture
def traces(monkeypatch):
    """One entry each time that a loss is traced."""
    found, value_and_grad = [], jaxcomp.value_and_grad

    def counted(*args, **settings):
        found.append(args)
        return value_and_grad(*args, **settings)

    monkeypatch.setattr(jaxcomp, "value_and_grad", counted)
    return found


def run(script, names, traces):
    """Thirty steps, traced once."""
    traces.clear()
    exec(script, names)
    assert len(traces) == 1
    assert float(names["loss"]) < 0.5


def check_state(state, mesh):
    """All arrays are on the mesh; each worker has its own residual."""
    for x in jax.tree.leaves(state):
        assert isinstance(x.sharding, NamedSharding)
        assert x.sharding.mesh == mesh
    memory = [x for x in jax.tree.leaves(state) if x.shape[:1] == (8,) and x.ndim == 3]
    assert len(memory) == 2  # One for the uplink and one for the downlink.
    for x in memory:
        assert x.sharding.spec[0] == "data"
        assert not np.array_equal(*np.asarray(x)[:2])


def test_plain_jit(traces):
    """At most ten lines change."""
    names, page = {}, (ROOT / "docs" / "plain_jit.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    run(program, names, traces)
    assert names["params"]["inner"].sharding.mesh == names["mesh"]
    (diff,) = re.findall(r"```diff\n(.*?)```", page, flags=re.DOTALL)
    added = [line for line in diff.splitlines() if line.startswith("+") and line.strip("+ ")]
    assert len(added) <= 10
    assert all(line[1:] in program.splitlines() for line in added)


@pytest.mark.full
def test_nnx(traces):
    """Both ways give the same bits; statistics and counters are those of thirty steps."""
    from flax import nnx

    names, found = {}, []
    plain, saving, mapped = PROGRAMS["Flax NNX"]
    for script in (plain, mapped):
        run(script, names, traces)
        model, optimizer = names["model"], names["optimizer"]
        check_state(nnx.state((model, optimizer)), names["mesh"])
        assert int(model.dropout.rngs.count[...]) == int(optimizer.step[...]) == 30
        assert float(abs(model.norm.mean[...]).max()) > 0
        state = nnx.state((model, optimizer), nnx.Not(nnx.RngKey))
        found.append(jax.device_get(jax.tree.leaves(state)))
        model.eval()
        assert np.isfinite(nnx.jit(lambda model, x: model(x))(model, names["x"])).all()
        if script is plain:
            model.train()
            goes_on_from_a_checkpoint(saving, names)
    jax.tree.map(np.testing.assert_array_equal, *found)


def goes_on_from_a_checkpoint(saving, names):
    """The page's next step, of the restored objects, is that of the objects which were saved."""
    from flax import nnx

    objects = names["model"], names["optimizer"]
    exec(saving, names)
    loss = names["step"](*objects, names["x"])
    np.testing.assert_array_equal(names["loss"], loss)
    states = (
        nnx.state(o, nnx.Not(nnx.RngKey)) for o in (objects, (names["model"], names["optimizer"]))
    )
    jax.tree.map(np.testing.assert_array_equal, *map(nnx.as_pure, states))


def test_linen(traces):
    names = {}
    run(PROGRAMS["Flax Linen"][0], names, traces)
    state = names["state"]
    check_state(state, names["mesh"])
    assert int(state.step) == 30
    assert float(abs(state.stats["BatchNorm_0"]["mean"]).max()) > 0
    jaxcomp.place(jax.eval_shape(lambda: state.tx.init(state.params)), names["mesh"], "data")


@pytest.mark.full
def test_scaled_losses():
    """Too large a scale is halved; one worker's infinite gradient changes nothing else."""
    names = {}
    exec(PROGRAMS["Flax Linen"][1], names)
    scale, before = names["scale"], (names["w"], names["state"])
    assert float(scale.scale) in 2.0 ** np.arange(18, 23)
    assert 20 < int(scale.fin_steps) < 30
    assert float(names["loss"]) < 0.7
    w, state, after, _ = names["step"](*before, scale, names["x"].at[3].set(1e5))
    jax.tree.map(np.testing.assert_array_equal, (w, state), before)
    assert (float(after.scale), int(after.fin_steps)) == (float(scale.scale) / 2, 0)


def test_equinox(traces):
    import equinox as eqx

    names = {}
    run(*PROGRAMS["Equinox"], names, traces)
    arrays = eqx.filter((names["model"], names["state"]), eqx.is_array)
    check_state(arrays, names["mesh"])
    assert names["model"](names["x"][0]).shape == (16,)


@pytest.mark.full
def test_haiku(traces):
    names = {}
    run(*PROGRAMS["Haiku"], names, traces)
    check_state((names["params"], names["stats"], names["state"]), names["mesh"])
    counters = [x for x in jax.tree.leaves(names["stats"]) if x.dtype == np.int32]
    assert [int(x) for x in counters] == [30, 30]


@pytest.mark.full
def test_local_steps():
    """One step without an exchange; two rounds of two programs; two with exchanges beside them."""
    page = (ROOT / "docs" / "local.md").read_text()
    step, known, beside = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict = {}
    exec(step, names)
    assert int(names["state"].taken) == int(names["state"].waited) == 1
    np.testing.assert_array_equal(names["params"]["w"], np.ones((64, 64)))
    assert np.isfinite(names["loss"])
    exec(known, names)
    assert int(names["state"].taken) == 20
    assert not np.asarray(names["state"].skipped.tree).any()
    assert (np.asarray(names["params"]["w"]) != 1).any()
    exec(beside, names)
    assert names["run"].times.exchanges == 2
    assert int(names["state"].taken) == 40
    assert np.isfinite(names["losses"]).all()


def test_federated_training(capsys):
    """The page's program, whose rounds it prints: the loss falls."""
    page = (ROOT / "docs" / "federated.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names = {}
    exec(program, names)
    first, *_, last = capsys.readouterr().out.splitlines()
    losses = [float(re.search(r"loss=([\d.]+)", line)[1]) for line in (first, last)]
    assert losses[1] < losses[0] / 1.3, losses
    assert names["simulation"].ledger.up > 0


@pytest.mark.full
def test_pmap():
    """The restored state, and the one that is moved to a mesh, go on with the bits of the loop."""
    trains, moves = PROGRAMS["Loops of `jax.pmap`"]
    names: dict = {}
    exec(trains, names)
    assert float(names["loss"][0]) < 0.5
    params, _, loss = names["step"](names["params"], names["state"], names["x"])
    memory = [x for x in jax.tree.leaves(names["state"]) if x.ndim == 4]
    assert len(memory) == 2
    assert all(not np.array_equal(*np.asarray(x)[:2]) for x in memory)
    exec(moves, names)
    check_state(names["state"], names["mesh"])
    loss_fn, tx = names["loss_fn"], names["tx"]

    def train(params, state, x):
        loss, grads = jaxcomp.value_and_grad(loss_fn, "data")(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    step = jaxcomp.data_parallel(train, names["mesh"], "data")
    moved, _, after = step(names["params"], names["state"], names["x"].reshape(64, 16))
    np.testing.assert_array_equal(after, loss[0])
    for name, leaf in moved.items():
        np.testing.assert_array_equal(leaf, params[name][0])
    assert {x.shape[0] for x in jax.tree.leaves(names["fewer"]) if x.ndim == 3} == {4}


def test_the_diff_of_pmap_is_that_of_its_program():
    page = PAGE.partition("## Loops of `jax.pmap`")[2]
    (diff,) = re.findall(r"```diff\n(.*?)```", page, flags=re.DOTALL)
    program = PROGRAMS["Loops of `jax.pmap`"][0].splitlines()
    lines = [line for line in diff.splitlines() if line.strip()]
    assert all(line[1:] in program for line in lines if line[0] != "-")
    assert all(line[1:] not in program for line in lines if line[0] == "-")
