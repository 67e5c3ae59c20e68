"""Records, writers and alarms of a run, and its picture."""

import contextlib
import json
import math
import os
import re
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.paths import ROOT

import jaxcomp
import jaxcomp_command
from jaxcomp import telemetry

CODEC = jaxcomp.sign()
NOTHING = {
    "residual_norm": 0.0,
    "residual_ratio": 0.0,
    "relative_error": 0.0,
    "payload_bytes": 100.0,
}


def after(tx, params, steps=1, bad=False):
    """The state after some steps of two workers, simulated by `vmap`."""

    def run(seed):
        state = tx.init(params)
        for step in range(steps):
            x = jax.tree.map(lambda p, step=step: p * (seed + step + 1.0), params)
            x = jax.tree.map(lambda p: p.at[0, 0].set(jnp.nan), x) if bad else x
            _, state = tx.update(x, state, params)
        return state

    states = jax.vmap(run, axis_name="data")(jnp.arange(2.0))
    return jax.tree.map(lambda leaf: leaf[0], states)


def matrix(rows=64):
    return jax.random.normal(jax.random.key(rows), (rows, 64))


@pytest.mark.full
def test_a_record_is_the_statistics_of_the_state():
    tx = jaxcomp.skip_nonfinite(jaxcomp.compressed_mean(CODEC, "data", stats=True))
    state = after(tx, {"w": matrix()}, steps=2)
    found = telemetry.record(state)
    assert found.pop("step") == 2
    assert found.pop("skipped") == 0
    stats = state.inner.stats
    whole = stats._asdict()
    assert whole.pop("groups") == ()
    assert found == {name: float(value) for name, value in whole.items()}
    assert 0.1 < found["relative_error"] < 1
    assert found["residual_ratio"] > 0
    assert found["residual_norm"] == pytest.approx(found["residual_ratio"] * found["gradient_norm"])
    gradients = [2 * matrix(), 3 * matrix()]  # Of the two workers in the second step.
    norm = np.sqrt(np.mean([np.sum(np.square(g)) for g in gradients]))
    assert found["gradient_norm"] == pytest.approx(norm)
    assert found["payload_bytes"] == jaxcomp.wire_bytes(CODEC, {"w": matrix()})


@pytest.mark.full
def test_a_gate_adds_its_counts_and_a_skipped_step_is_counted():
    gate = jaxcomp.gates.Every(2)
    tx = jaxcomp.skip_nonfinite(jaxcomp.compressed_mean(CODEC, "data", gate=gate, stats=True))
    found = telemetry.record(after(tx, {"w": matrix()}, steps=2))
    assert (found["rounds"], found["messages"]) == (1, 2)
    plain = jaxcomp.skip_nonfinite(jaxcomp.compressed_mean(CODEC, "data", stats=True))
    assert telemetry.record(after(plain, {"w": matrix()}, bad=True))["skipped"] == 1


@pytest.mark.full
def test_means_of_groups_of_leaves_have_their_labels():
    means = {
        "signs": jaxcomp.compressed_mean(CODEC, "data", stats=True),
        "few": jaxcomp.compressed_mean(jaxcomp.top_k(0.1), "data", stats=True),
    }
    tx = optax.partition(means, {"a": "signs", "b": "few"})
    found = telemetry.record(after(tx, {"a": matrix(), "b": matrix(32)}))
    assert found["signs/payload_bytes"] == jaxcomp.wire_bytes(CODEC, matrix())
    assert found["few/payload_bytes"] == jaxcomp.wire_bytes(jaxcomp.top_k(0.1), matrix(32))
    two = optax.chain(*means.values())
    names = set(telemetry.record(after(two, {"a": matrix()})))
    assert {"0/relative_error", "1/relative_error"} <= names


@pytest.mark.parametrize("stats", [True, "rules"])
def test_a_state_of_nnx_is_read_as_its_optimizer_is(stats, mesh):
    """Its levels are mappings in place of named tuples, without the fields that are empty."""
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    mean = jaxcomp.compressed_mean(CODEC, "data", stats=stats)
    gated = jaxcomp.compressed_mean(CODEC, "data", stats=True, gate=jaxcomp.gates.Every(2))

    def labels(params):
        return jax.tree.map(lambda leaf: "matrices" if leaf.ndim == 2 else "rest", params)

    for tx in (
        jaxcomp.skip_nonfinite(optax.chain(mean, optax.sgd(0.1))),
        optax.partition({"rest": gated, "matrices": mean}, labels),
    ):
        with warnings.catch_warnings(action="ignore"):  # The bias alone is sent dense.
            optimizer = nnx.Optimizer(model, jaxcomp.on_mesh(tx, mesh, "data"), wrt=nnx.Param)
        known = jax.tree.map(lambda x: x + 2, nnx.state(optimizer))  # As if after steps.
        nnx.update(optimizer, known)
        found = telemetry.record(optimizer)
        assert found["step"] == 2
        assert ("rounds" in found) == ("matrices/lost" in found)
        assert telemetry.record(known) == found
        assert telemetry.record(nnx.to_pure_dict(known)) == found
        assert telemetry.record(nnx.split(optimizer)) == found


def test_means_with_one_label_have_numbers(mesh):
    mean = jaxcomp.compressed_mean(CODEC, "data", stats=True)
    state = {"two": jaxcomp.init_state(optax.chain(mean, mean), matrix(), mesh, "data")}
    assert {"0/lost", "1/lost"} <= set(telemetry.record(state))


def test_a_dict_of_the_users_with_fields_of_a_state_changes_nothing():
    state = after(jaxcomp.compressed_mean(CODEC, "data", stats=True), {"w": matrix()})
    mine = {"key": 1, "step": 7, "inside": state}
    assert telemetry.record(mine) == telemetry.record({"key": 1, "step": 7, "stats": (state,)})
    assert telemetry.record(mine) == telemetry.record(state)


@pytest.mark.wrong_types
def test_states_without_statistics_are_refused():
    with pytest.raises(ValueError, match="got a mean without them"):
        telemetry.record(after(jaxcomp.compressed_mean(CODEC, "data"), {"w": matrix()}))
    with pytest.raises(ValueError, match="got a state without compressed_mean"):
        telemetry.record(optax.adam(1e-3).init(matrix()))
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    tx = jaxcomp.compressed_mean(jaxcomp.qsgd_inf(), "data")
    with pytest.raises(ValueError, match="got a mean without them"):
        telemetry.record(nnx.state(nnx.Optimizer(model, tx, wrt=nnx.Param)))
    tx = jaxcomp.compressed_mean(jaxcomp.qsgd_inf(), "data", stats=True)
    with pytest.raises(ValueError, match="is being traced"):
        jax.eval_shape(telemetry.record, tx.init(matrix()))
    with pytest.raises(ValueError, match="`writers` must be a function"):
        telemetry.Log("run.csv")
    with pytest.raises(ValueError, match="`path` must be the name of a file"):
        telemetry.Csv(1)
    with pytest.raises(ValueError, match="`every` must be at least 1"):
        telemetry.Log(every=0)


def test_a_log_writes_every_few_steps_and_refuses_names_of_statistics():
    state = after(jaxcomp.compressed_mean(CODEC, "data", stats=True), {"w": matrix()})
    written = []
    log = telemetry.Log(lambda step, record: written.append((step, record["loss"])), every=2)
    for number in range(5):
        log(state, {"loss": jnp.float32(number)})
    assert written == [(1, 0.0), (1, 2.0), (1, 4.0)]
    with pytest.raises(ValueError, match=r"names of statistics, got .'lost'."):
        telemetry.Log()(state, {"lost": 0.0})


def test_a_file_of_a_run_is_continued_and_read_back(tmp_path):
    path = tmp_path / "run.csv"
    records = [{"step": float(k), "loss": 0.1 * k, "big": 1e30, "none": math.nan} for k in (1, 2)]
    for record in records:
        telemetry.Csv(path)(int(record["step"]), record)  # As if resumed for each.
    assert path.read_text().startswith("step,loss,big,none\n1,0.1,1e+30,nan\n")
    found = telemetry.read_csv(path)
    np.testing.assert_allclose(
        [[*r.values()] for r in found], [[*r.values()] for r in records], rtol=1e-8
    )
    with pytest.raises(ValueError, match="which differ in acc, loss"):
        telemetry.Csv(path)(3, {"step": 3.0, "acc": 0.5, "big": 0.0, "none": 0.0})
    with path.open("a") as file:
        file.write("3,0.")  # A process was stopped while it wrote.
    assert repr(telemetry.read_csv(path)) == repr(found)  # NaN is not equal to itself.


def test_a_file_that_was_cut_anywhere_is_continued(tmp_path):
    """A cut "1" and a step 9 were read as step 19: only numbers that were written are read."""
    path, records = tmp_path / "run.csv", [{"step": float(k), "loss": 1.25 * k} for k in (18, 19)]
    for record in records:
        telemetry.Csv(path)(0, record)
    text = path.read_text()
    for end in range(len(text) + 1):
        path.write_text(text[:end])
        whole = records[: max(text[:end].count("\n") - 1, 0)]
        if whole:
            assert telemetry.read_csv(path) == whole
        telemetry.Csv(path)(0, {"step": 9.0, "loss": 0.5})
        assert telemetry.read_csv(path) == [*whole, {"step": 9.0, "loss": 0.5}]
    path.write_text("notes of mine\nand more")
    with pytest.raises(ValueError, match="`record` must have the columns of"):
        telemetry.Csv(path)(0, records[0])
    assert path.read_text() == "notes of mine\nand more"
    path.write_text("ste")
    with pytest.raises(ValueError, match="`record` must have the columns of"):
        telemetry.Csv(path)(0, {"loss": 0.5, "step": 1.0})
    assert path.read_text() == "ste"


@pytest.mark.parametrize("text", ["", "step,loss\n", "a,b\n1,2\n", "step,loss\n1,x\n2,3\n", "\x00"])
def test_other_files_are_refused(text, tmp_path):
    (tmp_path / "run.csv").write_text(text)
    with pytest.raises(ValueError, match=r"must be a file of jaxcomp\.telemetry\.Csv"):
        telemetry.read_csv(tmp_path / "run.csv")
    with pytest.raises(ValueError, match="cannot read"):
        telemetry.read_csv(tmp_path / "none.csv")


class Torch:
    def __init__(self):
        self.said = {}

    def add_scalar(self, tag, value, step):
        self.said[tag] = (value, step)


class Flax(Torch):
    add_scalar = None

    def scalar(self, tag, value, step):
        self.said[tag] = (value, step)


class Clu(Torch):
    add_scalar = None

    def write_scalars(self, step, scalars):
        self.said |= {tag: (value, step) for tag, value in scalars.items()}


@pytest.mark.parametrize("kind", [Torch, Flax, Clu])
def test_the_writers_of_tensorboard(kind):
    writer = kind()
    telemetry.TensorBoard(writer)(7, {"step": 7.0, "loss": 0.5, "none": math.nan})
    assert writer.said == {"jaxcomp/loss": (0.5, 7)}
    with pytest.raises(
        ValueError, match="`writer` must have one of the methods add_scalar, scalar"
    ):
        telemetry.TensorBoard(print)


def told(records, window=4, prefix=""):
    alarms = telemetry.Alarms(window=window)
    found = []
    for number, record in enumerate(records):
        values = {prefix + name: value for name, value in (NOTHING | record).items()}
        found += alarms({"step": float(number), **values})
    return found


def test_a_residual_that_grows_faster_and_faster_raises_one_alarm():
    grows = [{"residual_norm": 1.1**k} for k in range(60)]
    (alarm,) = told(grows)
    assert (alarm.name, alarm.step, alarm.where) == ("residual grows", 15, "")
    assert "Residual(decay=0.9)" in str(alarm)
    (alarm,) = told(grows, prefix="head/")
    assert alarm.where == "head"
    assert str(alarm).startswith("step 15: residual grows of head. ")


@pytest.mark.parametrize(
    "law",
    [
        lambda k: 100 * (1 - math.exp(-k / 40)),
        lambda k: 1.0,
        lambda k: 0.0,
        lambda k: 5 + math.sin(k),
    ],
    ids=["fills up", "constant", "none", "wavers"],
)
def test_a_residual_that_fills_up_or_stays_raises_none(law):
    assert told([{"residual_norm": law(k)} for k in range(200)]) == []


def test_gradients_that_vanish_raise_no_alarm():
    """The ratio grows faster and faster, and the residual falls."""
    records = [{"residual_norm": 0.99**k, "residual_ratio": 1.1**k} for k in range(200)]
    assert told(records) == []


@pytest.mark.parametrize("rate", [1.06, 1.08])
def test_a_residual_at_the_edge_of_the_rule_is_told_at_most_twice(rate):
    """The condition comes and goes with the noise of the medians."""
    wave = {1.06: lambda k: 0.3 * math.sin(1.7 * k), 1.08: lambda k: 0.1 * math.sin(0.9 * k)}[rate]
    records = [{"residual_norm": rate**k * (1 + wave(k))} for k in range(200)]
    assert len(told(records)) in (1, 2)


@pytest.mark.parametrize(
    ("name", "record"),
    {
        "not finite": lambda k: {"relative_error": math.nan},
        "steps are skipped": lambda k: {"skipped": float(k)},
        "elements are lost": lambda k: {"lost": float(k % 4 > 0)},
        "capacity is empty": lambda k: {"spare_bytes": 51.0},
        "values are clipped": lambda k: {"saturation": 0.3},
        "messages are left out": lambda k: {"excluded": 1.0},
    }.items(),
)
def test_each_alarm_is_told_once_and_again_after_it_ended(name, record):
    none = {"skipped": 0.0, "lost": 0.0, "spare_bytes": 50.0, "excluded": 0.0, "saturation": 0.2}
    calm = [none] * 12
    noisy = [calm[0] | record(k) for k in range(8)]
    assert {alarm.name for alarm in told(calm)} == set()
    assert [alarm.name for alarm in told([*noisy, *calm, *noisy])] == [name, name]
    assert name in telemetry.alarms.ADVICE


def test_settings_of_alarms_are_checked():
    with pytest.raises(ValueError, match="`window` must be at least 2"):
        telemetry.Alarms(window=1)
    with pytest.raises(ValueError, match="`growth` must be above 1"):
        telemetry.Alarms(growth=1)


def test_a_log_warns(recwarn):
    tx = jaxcomp.compressed_mean(CODEC, "data", stats=True)
    state = after(tx, {"w": matrix()}, bad=True)
    with pytest.warns(UserWarning, match="step 1: not finite. A gradient was not finite"):
        telemetry.Log()(state)
    said = []
    telemetry.Log(alarm=said.append)(state)
    assert [alarm.name for alarm in said] == ["not finite"]


@pytest.mark.full
def test_the_page_runs_and_its_run_is_drawn(tmp_path, capsys):
    page = (ROOT / "docs" / "telemetry.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    with contextlib.chdir(tmp_path):
        names = {}
        for block in blocks:
            exec(block, names)
        assert names["signs"].feedback == names["factors"].feedback == jaxcomp.Residual(decay=0.9)
        advice = telemetry.alarms.ADVICE["residual grows"]
        expressions = re.findall(r"jaxcomp\.(?:Link|PowerIteration)\(.*?\)\)", advice)
        told = [eval(text, {"jaxcomp": jaxcomp, "codec": CODEC}) for text in expressions]
        assert told == [names["signs"], names["factors"]]
        jaxcomp_command.main(["report", "run.csv"])
        out = capsys.readouterr().out
        assert "10 records of steps 1 to 19; the picture is run.png." in out
        assert re.search(r"^loss +\d", out, flags=re.MULTILINE)
        assert "Alarms over windows of 50 records (--window):" in out
        assert out.endswith("not checked: the file has 10 records.\nno alarms\n")
        assert os.path.getsize("run.png") > 20_000
        jaxcomp_command.main(["report", "run.csv", "--plot", "other.svg", "--json"])
        told = json.loads(capsys.readouterr().out)
        (link,) = (line for line in told["values"] if line["name"] == "link_bytes")
        assert link["total"] == pytest.approx(20 * link["last"])
        assert told["alarms"] == []


def test_a_report_of_two_means_with_alarms(tmp_path, capsys):
    path = tmp_path / "run.csv"
    for step in range(1, 40):
        each = {f"{name}/{field}": value for name in "ab" for field, value in NOTHING.items()}
        each |= {"a/link_bytes": 1e6, "b/link_bytes": 2e6, "b/excluded": float(step > 30)}
        telemetry.Csv(path)(step, {"step": float(step), **each})
    jaxcomp_command.main(["report", str(path)])
    out = capsys.readouterr().out
    assert "step 31: messages are left out of b. Robust left out" in out
    assert re.search(r"b/link_bytes .* 78,000,000", out)


@pytest.mark.parametrize("settings", [{}, {"window": 20}])
def test_a_log_and_a_report_raise_the_same_alarms(settings, tmp_path, capsys):
    state = after(jaxcomp.compressed_mean(CODEC, "data", stats=True), {"w": matrix()})
    alarms, said = telemetry.Alarms(**settings), []
    log = telemetry.Log(telemetry.Csv(tmp_path / "run.csv"), alarms=alarms, alarm=said.append)
    for step in range(165):
        stats = state.stats._replace(residual_norm=1.02**step, saturation=0.3 * (step > 60))
        log(state._replace(step=step, stats=stats))
    options = [f"--{name}={value}" for name, value in settings.items()]
    jaxcomp_command.main(["report", str(tmp_path / "run.csv"), "--json", *options])
    told = json.loads(capsys.readouterr().out)
    assert told["alarms"] == [str(alarm) for alarm in said]
    assert told["window"] == alarms.window == settings.get("window", telemetry.alarms.WINDOW)
    names = ["residual grows", "values are clipped"] if settings else ["values are clipped"]
    assert [alarm.name for alarm in said] == names
    short = "4 windows need 200 records, and the file has 165. Take --window 41."
    assert told["unchecked"] == ([] if settings else [f"'residual grows' is not checked: {short}"])


def test_a_file_of_an_older_version_is_reported(tmp_path, capsys):
    """It has a ratio and no norms, so nobody can say whether the residual grows."""
    path = tmp_path / "run.csv"
    for step in range(1, 60):
        telemetry.Csv(path)(step, {"step": float(step), "residual_ratio": 1.1**step, "lost": 1.0})
    jaxcomp_command.main(["report", str(path), "--window", "8"])
    out = capsys.readouterr().out
    assert "'residual grows' is not checked: the file has no residual_norm.\nstep 8: el" in out
    assert out.count("\nstep ") == 1


def test_a_report_without_matplotlib_prints_all_but_the_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = tmp_path / "run.csv"
    telemetry.Csv(path)(1, {"step": 1.0, "loss": 0.5} | NOTHING)
    with pytest.raises(SystemExit) as stopped:
        jaxcomp_command.main(["report", str(path)])
    out, err = capsys.readouterr()
    assert stopped.value.code == 2
    assert out.startswith("1 records of steps 1 to 1; no picture.")
    assert re.search(r"^loss +0.5", out, flags=re.MULTILINE)
    assert out.endswith("no alarms\n")
    assert err.startswith("jaxcomp report: a picture needs matplotlib, which is not installed")
    extra = "pip install 'jaxcomp[plot]', or pip install '.[plot]' in a clone"
    assert err.endswith(f"{extra}\n")


def test_alarms_are_all_in_the_page():
    page = (ROOT / "docs" / "telemetry.md").read_text()
    assert re.findall(r"^\| ([a-z ]+) \|.*\|.*\|$", page, flags=re.MULTILINE)[1:] == list(
        telemetry.alarms.ADVICE
    )
