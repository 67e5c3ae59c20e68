"""Rounds under a gate: nothing is lost, and closed rounds send nothing."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.gated import GRADS, IDENTITY, LIKE, all_means, gather, own, run, total

import jaxcomp
from jaxcomp.transforms.mean import GateState


def fewer(fraction):
    """A sparsifier that compiles in a fifth of the time of the largest elements."""
    return jaxcomp.random_k(fraction=fraction, unbiased=False)


# Withheld updates.


@pytest.mark.core("all")
@pytest.mark.parametrize(
    ("reducer", "gate"),
    [
        (gather(IDENTITY, jaxcomp.Residual()), jaxcomp.gates.Every(3)),
        (gather(jaxcomp.top_k(fraction=0.1), jaxcomp.Residual()), jaxcomp.gates.Every(3)),
        (gather(fewer(0.1), jaxcomp.Residual()), jaxcomp.gates.Bernoulli(0.4)),
        (jaxcomp.TwoShot(jaxcomp.Link(IDENTITY, jaxcomp.Residual())), jaxcomp.gates.Bernoulli(0.4)),
    ],
    ids=["all", "top_k", "some", "two_shot"],
)
def test_gated_rounds_lose_nothing(reducer, gate):
    """The received and the unsent parts add up to the input, also for dense leaves."""
    means, states = run(jaxcomp.compressed_mean(reducer, "data", gate=gate))
    memory = jax.tree.map(lambda x: np.asarray(x[-1]).mean(0)[0], states.memory)
    arrived, came = total(means), all_means()
    waits = {
        "w": memory.feedback.tree.residual[0].reshape(LIKE["w"].shape),
        "b": memory.dense.tree.residual[0],
    }
    for name in LIKE:
        np.testing.assert_allclose(arrived[name] + waits[name], came[name], atol=2e-6)
    if gate == jaxcomp.gates.Every(3):
        quiet = jax.tree.map(lambda m: np.abs(m[[0, 1, 3, 4]]).max(), means)
        assert max(jax.tree.leaves(quiet)) == 0
        assert not waits["b"].any()  # The sixth step sent all there was.
        assert states.gate.rounds[:, 0].tolist() == [0, 0, 1, 1, 1, 2]
        assert states.gate.messages[:, 0].tolist() == [0, 0, 8, 8, 8, 16]
    else:
        assert 0 < int(states.gate.messages[-1, 0]) < 6 * 8


def test_without_memory_the_mean_of_those_drawn_is_unbiased():
    """`Σ_S g / (p n)`, which is `Σ_S g / r` if exactly `r` are drawn."""
    for gate in (
        jaxcomp.gates.Bernoulli(0.5),
        jaxcomp.gates.SampledWorkers(3),
        jaxcomp.gates.Coin(0.5, rescaled=True),
    ):
        tx = jaxcomp.compressed_mean(gather(IDENTITY, jaxcomp.NoFeedback()), "data", gate=gate)
        means, states = run(tx)
        sizes = np.diff(np.asarray(states.gate.messages[:, 0]), prepend=0)
        for number, size in enumerate(sizes):
            grads = jax.tree.map(lambda g, k=number: np.asarray(g[k], np.float64), GRADS)
            options = {
                chosen: grads["w"][list(chosen)].sum(0) * gate.factor(8) / 8
                for chosen in itertools.combinations(range(8), int(size))
            }
            who = min(options, key=lambda c: np.abs(options[c] - means["w"][number]).max())
            np.testing.assert_allclose(means["w"][number], options[who], atol=1e-5)
            dense = grads["b"][list(who)].sum(0) * gate.factor(8) / 8
            np.testing.assert_allclose(means["b"][number], dense, atol=1e-5)


def test_momentum_gathers_through_closed_steps():
    """The sum of all sent updates equals ungated momentum correction of the summed gradients."""
    feedback = jaxcomp.MomentumCorrection(momentum=0.5, masking=False)
    codec = jaxcomp.top_k(fraction=1.0)
    means, _ = run(
        jaxcomp.compressed_mean(gather(codec, feedback), "data", gate=jaxcomp.gates.Every(2))
    )
    u, sums = 0.0, []
    for g in np.asarray(GRADS["w"], np.float64).mean(1):
        u = 0.5 * u + g
        sums.append(u)
    for number in (1, 3, 5):
        np.testing.assert_allclose(means["w"][number], sums[number - 1] + sums[number], atol=1e-5)
    dense = np.asarray(GRADS["b"], np.float64).mean(1)
    np.testing.assert_allclose(means["b"][3], dense[2] + dense[3], atol=1e-5)


@pytest.mark.full
def test_a_mirror_stays_the_mean_of_all_shifts():
    """For all participants and all messages; also for leaves that are sent dense."""
    codec = jaxcomp.qsgd_inf(bits=8)
    for gate in (jaxcomp.gates.Bernoulli(0.3), jaxcomp.gates.SampledWorkers(3)):
        tx = jaxcomp.compressed_mean(gather(codec, jaxcomp.Shift(0.2)), "data", gate=gate)
        _, states = run(tx)
        for memory in (states.memory.feedback, states.memory.dense):
            for shift, mirror in zip(memory.own.tree, memory.mirror, strict=True):
                np.testing.assert_allclose(mirror[-1, 0], shift[-1].mean(0)[0], atol=1e-6)
                assert np.abs(mirror[-1]).max() > 0.01


def test_a_closed_two_shot_knows_the_mirror_of_the_way_down():
    link = jaxcomp.Link(jaxcomp.sign(), jaxcomp.Shift())
    gate = jaxcomp.gates.Every(2)
    means, states = run(jaxcomp.compressed_mean(jaxcomp.TwoShot(link, link), "data", gate=gate))
    mirror = np.asarray(states.memory.reducer[1].memory.mirror[0])[:, 0].reshape(6, -1)
    for number in range(6):
        np.testing.assert_array_equal(means["w"][number].reshape(-1), mirror[number][: 32 * 40])
    np.testing.assert_array_equal(means["w"][2], means["w"][1])
    np.testing.assert_allclose(means["b"][2], means["b"][1], atol=1e-6)
    assert not means["w"][0].any()
    # Without an uplink that remembers, what comes down is news, and silence is none.
    residual = jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual())
    means, _ = run(jaxcomp.compressed_mean(jaxcomp.TwoShot(residual, link), "data", gate=gate))
    assert [bool(m.any()) for m in means["w"]] == [False, True] * 3


@pytest.mark.full
def test_other_reducers_under_a_gate():
    link = jaxcomp.Link(fewer(0.2), jaxcomp.Residual())
    early = jaxcomp.Link(fewer(0.1), jaxcomp.Residual())
    phases = jaxcomp.ReducerSchedule(((0, early), (2, link)))
    means, states = run(
        jaxcomp.compressed_mean(phases, "data", gate=jaxcomp.gates.Every(2), stats=True)
    )
    assert states.memory.reducer.phase_step[:, 0].tolist() == [0, 1, 1, 2, 2, 3]
    costs = [jaxcomp.describe(one, LIKE).payload_bytes for one in (early, link)]
    assert states.stats.payload_bytes[:, 0].tolist() == [0, costs[0], 0, costs[0], 0, costs[1]]
    assert (states.stats.relative_error[::2] == 0).all()
    assert (states.stats.relative_error[1::2] > 0.1).all()
    assert (states.stats.residual_ratio > 0.1).all()
    power = jaxcomp.PowerIteration(rank=2)
    means, states = run(jaxcomp.compressed_mean(power, "data", gate=jaxcomp.gates.Bernoulli(0.4)))
    memory = np.asarray(states.memory.feedback.tree.residual[0][-1]).mean(0)[0]
    total_ = total(means)["w"] + memory.reshape(LIKE["w"].shape)
    np.testing.assert_allclose(total_, all_means()["w"], atol=1e-5)


# One program, on real devices.


def on(mesh, tx, name="data", **settings):
    return jaxcomp.data_parallel(lambda s, g: tx.update(own(g), s, LIKE), mesh, name, **settings)


def entry(compiled):
    """The computation that runs whatever the gate says."""
    (found,) = re.findall(r"^ENTRY .*?^}", compiled.as_text(), re.MULTILINE | re.DOTALL)
    return found


@pytest.mark.parametrize("kind", ["gather", "two_shot"])
def test_a_closed_round_skips_the_collectives(mesh, kind):
    link = jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual())
    reducer = {"gather": jaxcomp.Gather(link), "two_shot": jaxcomp.TwoShot(link, link)}[kind]
    step = on(mesh, jaxcomp.compressed_mean(reducer, "data", gate=jaxcomp.gates.Every(3)))
    tx = jaxcomp.compressed_mean(reducer, "data", gate=jaxcomp.gates.Every(3))
    state = jaxcomp.init_state(tx, LIKE, mesh, "data")
    first = jax.tree.map(lambda g: g[0], GRADS)
    compiled = step.lower(state, first).compile()
    sent = jaxcomp.collective_bytes(compiled)
    assert sum(sent.values()) == jaxcomp.wire_bytes(reducer, LIKE, workers=8)
    assert " conditional(" in entry(compiled)
    assert jaxcomp.collective_bytes(entry(compiled)) == {}
    norms = []
    for number in range(6):
        mean, state = step(state, jax.tree.map(lambda g, k=number: g[k], GRADS))
        norms.append(float(jnp.abs(mean["w"]).max()))
    assert [norm > 0 for norm in norms] == [False, False, True] * 2
    if kind == "two_shot":
        return
    always = on(mesh, jaxcomp.compressed_mean(reducer, "data", gate=jaxcomp.gates.Always()))
    compiled = always.lower(state._replace(gate=state.gate._replace(state=())), first).compile()
    assert " conditional(" not in compiled.as_text()


def test_two_levels_are_gated_where_they_are_slow():
    """All fast neighbours take part, or none; the slow links are silent in between."""
    grid = jax.make_mesh((2, 4), ("dcn", "ici"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    names = ("dcn", "ici")
    came = all_means()
    for outer, gate in (
        (gather(IDENTITY, jaxcomp.Residual()), jaxcomp.gates.Every(2)),
        (jaxcomp.TwoShot(jaxcomp.Link(IDENTITY, jaxcomp.Residual())), jaxcomp.gates.Bernoulli(0.5)),
    ):
        tx = jaxcomp.compressed_mean(jaxcomp.Hierarchical(outer=outer), names, gate=gate)
        step, state = on(grid, tx, names), jaxcomp.init_state(tx, LIKE, grid, names)
        means = []
        for number in range(6):
            mean, state = step(state, jax.tree.map(lambda g, k=number: g[k], GRADS))
            means.append(mean)
        arrived = jax.tree.map(lambda *m: sum(np.asarray(x, np.float64) for x in m), *means)
        waits = np.asarray(state.memory.dense.tree.residual[0]).mean(0)
        np.testing.assert_allclose(arrived["b"] + waits, came["b"], atol=2e-6)
        rounds, messages = int(state.gate.rounds), int(state.gate.messages)
        assert rounds <= messages <= 2 * rounds
        if gate == jaxcomp.gates.Every(2):
            np.testing.assert_allclose(arrived["w"], came["w"], atol=2e-6)
            assert (rounds, messages) == (3, 6)
    with pytest.raises(ValueError, match="must not use a feedback with a mirror"):
        jaxcomp.Hierarchical(outer=gather(IDENTITY, jaxcomp.Shift()))


# Non-finite values.


def test_what_is_not_finite_and_not_sent_stays_out():
    """Of the mean, of everyone's memory, and of the counts; what is sent shows, and is undone."""
    gate = jaxcomp.gates.Bernoulli(0.5)
    for feedback in (jaxcomp.Residual(), jaxcomp.Shift(0.5)):
        tx = jaxcomp.compressed_mean(gather(IDENTITY, feedback), "data", gate=gate)
        _, states = run(tx)
        sizes = np.diff(np.asarray(states.gate.messages[:, 0]), prepend=0)
        assert (sizes > 0).all()
        for bad in range(4):
            grads = jax.tree.map(lambda g, i=bad: g.at[2, i].set(jnp.nan), GRADS)
            means, after = run(tx, grads)
            seen = not np.isfinite(np.asarray(means["w"][2])).all()
            assert np.isfinite(np.asarray(means["w"][3:])).all()
            for leaf in jax.tree.leaves(after.memory):
                assert np.isfinite(np.asarray(leaf)).all()
            if seen:  # A step that was not.
                memory = jax.tree.leaves((after.memory.feedback, after.memory.dense))
                assert all((leaf[2] == leaf[1]).all() for leaf in memory)
            np.testing.assert_array_equal(after.gate.messages, states.gate.messages)


def test_a_step_that_is_undone_does_not_count_in_time():
    tx = jaxcomp.compressed_mean(
        gather(IDENTITY, jaxcomp.Residual()), "data", gate=jaxcomp.gates.Every(2)
    )
    grads = jax.tree.map(lambda g: g.at[1, 0].set(jnp.nan), GRADS)
    means, states = run(tx, grads)
    finite = [bool(np.isfinite(np.asarray(m)).all()) for m in means["w"]]
    assert finite == [True, False, True, True, True, True]
    # Tried again in the next step, with what had been gathered before.
    want = np.asarray(GRADS["w"][0] + GRADS["w"][2], np.float64).mean(0)
    np.testing.assert_allclose(means["w"][2], want, atol=1e-6)
    assert states.gate.rounds[:, 0].tolist() == [0, 1, 2, 2, 3, 3]


def test_no_gate_no_state():
    tx = jaxcomp.compressed_mean(gather(jaxcomp.sign(), jaxcomp.Residual()), "data")
    state = tx.init(LIKE)
    assert state.gate == ()
    assert state.memory.dense == ()
    gated = jaxcomp.compressed_mean(
        gather(jaxcomp.sign(), jaxcomp.Residual()), "data", gate=jaxcomp.gates.Every(2)
    ).init(LIKE)
    assert isinstance(gated.gate, GateState)
    assert int(optax.tree.get(gated, "rounds")) == 0
    assert int(optax.tree.get(gated, "gate_wait")) == 1
    smaller = jaxcomp.resize_workers(
        jaxcomp.compressed_mean(
            gather(jaxcomp.sign(), jaxcomp.Residual()), "data", gate=jaxcomp.gates.Every(2)
        ),
        gated,
        LIKE,
        2,
    )
    assert smaller.memory.dense.tree.residual[0].shape == (2, 40)


def test_shards_of_a_model_open_together():
    """Over axes that shard the parameters, with the same workers drawn for every shard."""
    grid = jax.make_mesh((2, 4), ("dcn", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs, like = {"w": jax.P("fsdp")}, {"w": jnp.zeros((128, 40))}
    params = jax.tree.map(lambda x, s: jax.device_put(x, jax.NamedSharding(grid, s)), like, specs)
    link = jaxcomp.Link(fewer(0.5), jaxcomp.Residual())
    settings = {"gate": jaxcomp.gates.Bernoulli(0.5), "param_specs": specs}
    tx = jaxcomp.compressed_mean(jaxcomp.Gather(link), "dcn", **settings)
    state = jaxcomp.init_state(tx, params, grid, "dcn")
    step = jaxcomp.data_parallel(lambda s, g: tx.update(own(g), s), grid, "dcn")
    ones, arrived, shares = {"w": jnp.ones((2, 128, 40))}, 0, []
    for _ in range(6):
        mean, state = step(state, ones)
        arrived = arrived + np.asarray(mean["w"])
        shares.append(np.asarray(mean["w"]).reshape(4, -1).any(axis=1))
    assert (np.stack(shares) == np.stack(shares)[:, :1]).all()
    waits = sum(np.asarray(x).sum() for x in jax.tree.leaves(state.memory.tree.feedback)) / 2
    np.testing.assert_allclose(arrived.sum() + waits, 6 * 128 * 40, rtol=1e-5)
    assert int(state.gate.rounds) == np.stack(shares)[:, 0].sum()
    shift = jaxcomp.Gather(jaxcomp.Link(IDENTITY, jaxcomp.Shift()))
    with pytest.raises(ValueError, match="on replicated parameters"):
        jaxcomp.compressed_mean(shift, "dcn", gate=jaxcomp.gates.Censored(1.0), param_specs=specs)
