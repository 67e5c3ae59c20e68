"""Every example runs, and prints the expected results."""

import ast
import json
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers.paths import ROOT

EXAMPLES = ROOT / "examples"
TINY = (
    *("--layers", 1, "--width", 32, "--context", 32),
    *("--batch-size", 8, "--steps", 6, "--checkpoint-every", 3),
)
KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import byte_lm, byte_lm_model

draw = byte_lm_model.batch_of

def batch_of(text, step, **settings):
    if step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return draw(text, step, **settings)

byte_lm_model.batch_of = batch_of
byte_lm.main(sys.argv[2:])
"""


def run(name, *options, code=0):
    command = [sys.executable, str(EXAMPLES / name), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_quickstart():
    said = run("quickstart.py")
    assert "'all-to-all': 29120, 'all-gather': 29120" in said
    assert len((EXAMPLES / "quickstart.py").read_text().splitlines()) <= 40


@pytest.mark.core("gate-Slowing")
@pytest.mark.parametrize(("part", "name"), [("codec", "Int8"), ("gate", "Slowing")])
def test_a_part_of_ones_own_takes_fifteen_lines_and_passes_its_contract(part, name):
    assert f"{name} passes the contract" in run(f"own_{part}.py")
    source = (EXAMPLES / f"own_{part}.py").read_text()
    made = next(node for node in ast.parse(source).body if getattr(node, "name", "") == name)
    lines = source.splitlines()[made.lineno - 1 : made.end_lineno]
    assert sum(bool(line.strip()) for line in lines) <= 15


@pytest.mark.full
def test_federated_socket():
    """Over real sockets between processes, and without the strangers."""
    said = run("federated_socket.py", "--clients", 2, "--rounds", 2)
    assert "a stranger is refused: it does not have the key of a client" in said
    assert "Traceback" not in said
    *_, last = (line for line in said.splitlines() if "%" in line)
    round_, _, _, clients, *_ = last.split()
    assert (round_, clients) == ("2", "2")


@pytest.mark.full
def test_federated_digits_resumes_bit_for_bit(tmp_path):
    settings = ("--out", tmp_path, "--method")
    run("federated_digits.py", *settings, "fedpaq", "stc", "--rounds", 4)
    whole = results_of(tmp_path)["runs"]
    assert (tmp_path / "federated.png").stat().st_size > 10_000
    assert [one["name"] for one in whole] == ["fedpaq", "stc"]
    assert whole[1]["up"] < whole[0]["up"]
    # The method whose clients remember what they did not send.
    run("federated_digits.py", *settings, "stc", "--rounds", 2, "--checkpoint-every", 2)
    run("federated_digits.py", *settings, "stc", "--rounds", 4, "--resume")
    assert results_of(tmp_path)["runs"] == whole[1:]


@pytest.mark.full
def test_diloco_resumes_while_an_exchange_is_under_way(tmp_path):
    """Between two processes; after step 14 of 20 the first fragment's mean is on its way."""
    small = ("--layers", 1, "--width", 32, "--context", 32, "--batch-size", 4)
    rounds = ("--rounds", 2, "--every", 10, "--method", "streaming", "--checkpoint-every", 7)

    def trained(*more):
        said = run("diloco.py", *small, *rounds, "--out", tmp_path, *more)
        (found,) = results_of(tmp_path)["runs"]
        assert "round   2 of 2" in said
        return found

    whole = trained()
    assert (tmp_path / "diloco.png").stat().st_size > 10_000
    assert "holds a checkpoint" in run("diloco.py", *small, *rounds, "--out", tmp_path, code=1)
    resumed = trained("--resume")  # From step 14 on.
    assert resumed["digest"] == whole["digest"]
    assert resumed["scores"] == whole["scores"]


@pytest.mark.full
def test_weights_reach_readers_bit_for_bit(tmp_path):
    """Two processes without JAX, one of which is killed and comes back."""
    pytest.importorskip("aiohttp")
    said = run("weights.py", "--quick", "--out", tmp_path)
    assert re.search(r"bit for bit: \d+ versions checked", said)
    assert (tmp_path / "weights.png").stat().st_size > 10_000
    found = results_of(tmp_path)
    assert [event["text"] for event in found["events"]] == ["killed", "comes back"]
    assert [one["version"] for one in found["versions"]] == list(range(1, 15))
    for rows in found["readers"]:
        assert rows[-1]["version"] == 14
        assert not any(row["has_jax"] for row in rows)
    patches = [one["patch"] for one in found["versions"][1:]]
    assert max(patches) < 2 * found["parameters"] / 20
    for version, bound in found["bounds"].items():
        assert 0.9 * bound["bytes"] < patches[int(version) - 2]


@pytest.mark.slow
def test_train_digits(tmp_path):
    """Two hundred steps, in which a residual pays."""
    methods, epochs = ("dense", "top_k", "top_k_alone", "sidco"), 20
    settings = ("--optimizer", "momentum", "--epochs", epochs, "--out", tmp_path)
    run("train_digits.py", "--codec", *methods, *settings)
    assert (tmp_path / "digits.png").stat().st_size > 10_000
    found = {one["name"]: one for one in results_of(tmp_path)["runs"]}
    assert tuple(found) == methods
    score = {name: one["test_accuracy"] for name, one in found.items()}
    assert min(score["dense"], score["top_k"]) > 96, score
    assert score["top_k_alone"] < score["top_k"], score
    assert found["top_k"]["times_less_than_dense"] > 15
    assert score["sidco"] > 94, score
    assert found["sidco"]["times_less_than_dense"] > 80


@pytest.mark.full
def test_sharded_byte_lm():
    """Bytes over the slow axis are those of a quarter of the model, and of the loss."""
    tiny = ("--layers", 1, "--width", 32, "--context", 16, "--batch-size", 8, "--steps", 3)
    said = run("sharded_byte_lm.py", *tiny, "--codec", "dense", "qsgd_inf")
    rows = [line.split() for line in said.splitlines() if "times less" in line]
    dense, compressed = (int(row[2].replace(",", "")) for row in rows)
    assert dense == 28_768 * 4 // 4 + 4
    assert dense > 3 * compressed  # Most of a model this small is in too small shards to compress.
    for name in ("sharded_byte_lm.py", "pipeline.py"):
        refused = run(name, "--batch-size", 12, code=2)
        assert "argument --batch-size: must be a multiple of 8, got 12" in refused


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "times_less"),
    [("fsdp_byte_lm", 4), ("moe_byte_lm", 3), ("pipeline", 3.5), ("tensor_parallel", 3.5)],
)
def test_examples_of_sharded_training_train(name, times_less):
    """A few steps train, with as many bytes fewer as the codecs promise."""
    said = run(f"{name}.py", "--batch-size", 8, "--context", 32, "--steps", 4)
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", said)]
    assert len(losses) == 4
    assert 5 < losses[0] < 6
    assert losses[-1] < losses[0] - 0.5, losses
    (found,) = re.findall(r"in all .* ([\d.]+) times less", said)
    assert float(found) > times_less


def test_phases_are_counted_step_by_step(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import report

    phases = [(0, 100), (3, 10), (5, 1)]
    assert [report.sent(phases, steps) for steps in (0, 1, 3, 4, 5, 7)] == [
        *(0, 100, 300, 310, 320, 322),
    ]
    assert report.sent([(0, 7)], 6) == 42


def test_times_of_few_steps_are_not_compared(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import report

    def made(name, steps, step_ms):
        common = {"score": 1.0, "bytes_per_step": 1, "bytes_by_collective": {}, "sent_mb": 1.0}
        costs = {"times_less_than_dense": 4.0, "bits_per_element": 8.0, "phases": [(0, 1)]}
        curve = [report.Point(steps, 1.0, 1.0)]
        return report.Run(name=name, label=name, step_ms=step_ms, curve=curve, **common, **costs)

    few, many = (
        " ".join(report.notes([made("dense", n, 2.0), made("sign", n, 3.0)], [0] * 8))
        for n in (6, 50)
    )
    assert "Medians of 6 steps say too little" in few
    assert "slower" not in few
    assert "Every compressed step was slower here than the dense one" in many
    assert "sign 1.5x" in many


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A folder with the results of a run that nothing stopped."""
    out = tmp_path_factory.mktemp("straight")
    run("byte_lm.py", *TINY, "--codec", "sign", "--save-gradients", "--out", out)
    return out


def results_of(out):
    return json.loads((out / "results.json").read_text())


def arrays_of(out):
    """Parameters and optax state at the end of the run of `sign`."""
    path = out / "checkpoints" / "sign" / "6" / "arrays"
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(path).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return checkpointer.restore(path, restore_args=as_numpy)


@pytest.mark.full
def test_byte_lm(straight):
    results = results_of(straight)
    assert (straight / "byte_lm.png").stat().st_size > 10_000
    (sign,) = results["runs"]
    assert sign["times_less_than_dense"] > 5
    assert [point["step"] for point in sign["curve"]] == [1, 2, 3, 4, 5, 6]
    assert 8.5 > sign["curve"][0]["bits_per_byte"] > sign["bits_per_byte"] > 4
    assert results["settings"]["gradients"] == {"codec": "sign", "early": 1, "middle": 3, "late": 6}


@pytest.mark.full
def test_byte_lm_resumes_bit_for_bit(straight, tmp_path):
    """Killed between two checkpoints and resumed, against a run that nothing stopped."""
    options = (*TINY, "--codec", "sign", "--out", tmp_path)
    command = [sys.executable, "-c", KILLED, EXAMPLES, *options]
    done = subprocess.run(list(map(str, command)), capture_output=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [step.name for step in (tmp_path / "checkpoints" / "sign").iterdir()] == ["3"]

    assert "holds checkpoints (sign at step 3)" in run("byte_lm.py", *options, code=2)
    said = run("byte_lm.py", *options, "--resume", "--seed", 1, "--learning-rate", 0.5, code=2)
    assert "of sign, which has learning-rate 0.003 (now 0.5), seed 0 (now 1)\n" in said

    run("byte_lm.py", *options, "--resume")
    want, got = arrays_of(straight), arrays_of(tmp_path)
    # Parameters, moments of Adam, residuals of both directions, key, counts.
    assert len(jax.tree.leaves(want)) == 39
    jax.tree.map(np.testing.assert_array_equal, got, want)
    curves = [results_of(out)["runs"][0]["curve"] for out in (straight, tmp_path)]
    assert curves[0] == curves[1]


@pytest.mark.full
def test_saved_gradients(straight, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES.parent / "benchmarks")
    import gradients

    found = [gradients.load(straight / "gradients" / f"{m}.npz") for m in ("early", "late")]
    early, late = map(gradients.flat, found)
    assert early.dtype == np.float32
    assert early.shape == (28_768,)  # Two tables of 256 x 32, a block of 12 x 32 x 32, three norms.
    assert found[0]["params/embedding/kernel"].shape == (256, 32)
    assert np.all(np.isfinite(early))
    assert np.linalg.norm(early) > 0
    assert not np.array_equal(early, late)
    np.savez(tmp_path / "double.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match="float64"):
        gradients.load(tmp_path / "double.npz")


def test_the_readme_runs():
    """The program that a newcomer copies first runs unchanged, and says what the page says."""
    text = (EXAMPLES.parent / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"loss ([\d.]+)", done.stdout)[1]) < 0.2
    (said,) = re.findall(r"It prints the loss, and\s`(.*?)`", text)
    assert said in done.stdout
    assert "all-gather" in done.stdout


@pytest.mark.core("--codec-gzip")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--codec", "gzip"], "gzip"),
        (["--epochs", 0], "epochs"),
        (["--batch-size", 30], "batch-size"),
        (["--devices", 0], "devices"),
    ],
    ids=lambda v: str(v[0]) if isinstance(v, list) else None,
)
def test_train_digits_refuses_bad_options(options, said):
    assert said in run("train_digits.py", *options, code=2)


@pytest.mark.core("--width-argument*")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--width", 48], "argument --width: must be a multiple of 32, got 48"),
        (["--context", 10**9], "argument --context: must be at most"),
        (["--resume"], "argument --resume: there is no checkpoint"),
    ],
    ids=lambda v: str(v[0]) if isinstance(v, list) else None,
)
def test_byte_lm_refuses_bad_options(options, said, tmp_path):
    assert said in run("byte_lm.py", *options, "--out", tmp_path, code=2)
