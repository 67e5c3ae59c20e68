"""Several processes compute the same as one, and do not wait for terminated ones."""

import contextlib
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile

import jax
import numpy as np
import pytest
from helpers import processes
from helpers.paths import ROOT, TESTS

EXAMPLE = ROOT / "examples" / "multihost.py"
WORKERS = 4
PATIENCE = 240  # Seconds, of a machine that is busy with other tests.
TINY = (
    *("--layers", 1, "--width", 32, "--context", 32),
    *("--batch-size", 8, "--steps", 6, "--codec", "sign"),
)
KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import byte_lm_model, jax, multihost

draw = byte_lm_model.batch_of

def batch_of(text, step, **settings):
    if step == 5 and jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return draw(text, step, **settings)

byte_lm_model.batch_of = batch_of
multihost.main(sys.argv[2:])
"""
TORN = """
import os, pathlib, signal, sys
sys.path.insert(0, sys.argv[1])
import jax, multihost

rename = os.rename

def dies(source, target, **settings):
    if pathlib.Path(target).name == "6":
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(source, target, **settings)

os.rename = dies
multihost.main(sys.argv[2:])
"""
"""Dies where a checkpoint is all but complete: under its name of a draft, before it is renamed."""
UNEVEN = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax, jaxcomp

address, number = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_num_cpu_devices", number + 1)
jax.distributed.initialize(address, 2, number, initialization_timeout=200)
mesh = jax.make_mesh((3,), ("data",))
tree = {"w": jnp.arange(4.0), "key": jax.random.key(3), "number": 2.0}
placed = jaxcomp.place(tree, mesh, "data")
memory = jaxcomp.place(jaxcomp.per_worker(optax.trace(0.9)).init(tree["w"]), mesh, "data")

def step(tree, memory, x):
    drawn = jax.random.uniform(tree["key"]) * tree["number"] + tree["w"]
    return jax.lax.psum(drawn * x, "data"), memory

run = jaxcomp.data_parallel(step, mesh, "data")
x = np.arange(3.0, dtype=np.float32)
want = 3 * (jax.random.uniform(tree["key"]) * 2 + tree["w"])
for held in (tree, placed):
    found, memory = run(held, memory, x)
    np.testing.assert_allclose(found.addressable_data(0), want, rtol=1e-6)
assert {shard.data.shape for shard in jax.tree.leaves(memory)[0].addressable_shards} == {(1, 4)}
try:
    jaxcomp.place({"w": jnp.full(4, number)}, mesh, "data")
except ValueError as error:
    assert "must have the same value on all of them" in str(error)
else:
    raise AssertionError
"""
DYING = ("-c", KILLED, EXAMPLE.parent)
TEARING = ("-c", TORN, EXAMPLE.parent)
# Half of the time to compile; what is compared has the same flags.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}


@contextlib.contextmanager
def started(commands, launcher=None):
    """Processes with what they print; none outlives the test. A launcher has variables for each."""
    with contextlib.ExitStack() as stack:
        running = []
        for number, command in enumerate(commands):
            said = stack.enter_context(tempfile.TemporaryFile("w+"))
            process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                stdout=said,
                stderr=subprocess.STDOUT,
                env=os.environ | ENVIRONMENT | (launcher(number) if launcher else {}),
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            running.append((process, said))
        yield running


def ended(process, said, within=PATIENCE):
    """Exit code and output of a process, which ends in time."""
    code = process.wait(timeout=within)
    said.seek(0)
    return code, said.read()


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


@pytest.mark.full
def test_means_of_four_workers_in_one_two_and_four_processes(tmp_path):
    """Compressed ones and all memory bit for bit; sums of floats, whose order is free, nearly."""
    commands = []
    for count in (1, 2, 4):
        address = f"localhost:{free_port()}"
        commands += [
            (
                *(TESTS / "helpers" / "processes.py", address, count, number, WORKERS // count),
                tmp_path / f"{count}-{number}",
            )
            for number in range(count)
        ]
    with started(commands) as running:
        for process, said in running:
            code, text = ended(process, said)
            assert code == 0, text
    wanted = pickle.loads((tmp_path / "1-0").read_bytes())
    for file in [*tmp_path.glob("2-*"), *tmp_path.glob("4-*")]:
        for worker, found in pickle.loads(file.read_bytes()).items():
            compare(found, wanted[worker])


def test_processes_with_unequal_numbers_of_devices():
    """Arrays and keys that every process has are put on all devices, and compared."""
    address = f"localhost:{free_port()}"
    with started([("-c", UNEVEN, address, number) for number in range(2)]) as running:
        for process, said in running:
            code, text = ended(process, said)
            assert code == 0, text


def compare(found, want):
    """The arrays of a worker, with those of the same worker in one process."""
    for name in (*processes.EXACT, "local rounds"):
        jax.tree.map(np.testing.assert_array_equal, found[name], want[name])
    for name, times in processes.TIMES.items():
        for step in range(processes.STEPS):
            for leaf, rows in processes.gradients(step, range(WORKERS)).items():
                got, expected = (one[name][0][step][leaf] for one in (found, want))
                # For the mean: n times as much for the sum, which is n times as large.
                bound = np.finfo(np.float32).eps * np.abs(times * rows).sum(axis=0)
                assert (np.abs(got - expected) <= bound).all(), (name, step, leaf)


def example(out, count, devices, *options, script=(EXAMPLE,)):
    address = f"localhost:{free_port()}"
    return [
        (
            *(*script, "--coordinator", address, "--num-processes", count, "--process-id", number),
            *("--devices-per-process", devices, "--out", out, *options),
        )
        for number in range(count)
    ]


def slurm(count):
    """Slurm's variables for each task on this host: JAX takes the port from the job."""
    first = 2**16 - 2**12
    for job in range(2**12):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("localhost", first + job))
            break
    known = {"JOB_ID": job, "STEP_NODELIST": "localhost", "NTASKS": count, "STEP_NUM_NODES": 1}

    def launcher(number):
        told = known | {"PROCID": number, "LOCALID": number}
        return {f"SLURM_{name}": str(value) for name, value in told.items()}

    return launcher


def digest(out):
    return json.loads((out / "results.json").read_text())["settings"]["parameters_sha256"]


@pytest.mark.full
def test_the_example_is_killed_and_resumed_and_equals_one_process(tmp_path):
    """The second of two processes dies after a checkpoint, and the first does not wait for ever.

    One process goes on alone, and dies while it writes the last checkpoint: what is there of it is
    not taken for one. Both come back under Slurm, which says who is who in the environment, go on
    from the checkpoint before, and end with the bits of the run that was never stopped.
    """
    together, alone = tmp_path / "together", tmp_path / "alone"
    options, patience = (*TINY, "--checkpoint-every", 3), 30
    dying = example(together, 2, 2, *options, "--timeout", patience, script=DYING)
    with started([*dying, *example(alone, 1, 4, *TINY)]) as (*both, one):
        (first, said), (second, _) = both
        assert second.wait(timeout=PATIENCE) == -signal.SIGKILL
        code, text = ended(first, said, within=2 * patience)
        assert code == 1, text
        assert re.search("multihost.py: error: (waited 30 .* for step 5|.* failed in a step)", text)
        assert "Traceback" not in text
        code, text = ended(*one)
        assert code == 0, text
    with started(example(together, 1, 4, *options, "--resume", script=TEARING)) as ((torn, said),):
        code, text = ended(torn, said)
        assert code == -signal.SIGKILL, text
    kept = sorted(path.name for path in (together / "checkpoints" / "sign").iterdir())
    assert kept[0] == "3"
    assert kept[1].startswith("6.")  # All of it, under the name of a draft.
    assert list((together / "checkpoints" / "sign" / kept[1]).rglob("*"))
    # Together again as Slurm would start them.
    command = (EXAMPLE, "--devices-per-process", 2, "--out", together, *options, "--resume")
    with started([command, command], slurm(2)) as running:
        texts = []
        for process, said in running:
            code, text = ended(process, said)
            assert code == 0, text
            texts.append(text)
    assert "bits per byte on held-out files" in texts[0]
    assert "bits per byte" not in texts[1]
    assert digest(together) == digest(alone)


@pytest.mark.full
def test_a_missing_peer_ends_the_wait(tmp_path):
    command, _ = example(tmp_path, 2, 1, "--timeout", 2)
    with started([command]) as ((process, said),):
        code, text = ended(process, said, within=120)
    assert code == 1, text
    assert "waited 2 seconds (--timeout) for 2 processes to join at localhost:" in text
    assert "Traceback" not in text
    assert "stack trace" not in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--process-id", 0], "--coordinator, --num-processes and --process-id: give all three"),
        (
            ["--coordinator", "localhost:1", "--num-processes", 2, "--process-id", 2],
            "argument --process-id: must be below 2, got 2",
        ),
        *(
            (
                ["--coordinator", given, "--num-processes", 2, "--process-id", 0],
                "argument --coordinator: must be HOST:PORT with a port from 1 to 65535, as in "
                f"localhost:1234, got {given!r}",
            )
            for given in ("localhost", ":1234", "localhost:http", "localhost:99999", "::1")
        ),
    ],
    ids=lambda value: str(value[1]) if isinstance(value, list) else "",
)
def test_refused_options(options, said, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    import multihost

    with pytest.raises(SystemExit, match="2"):
        multihost.parse(list(map(str, options)))
    assert said in capsys.readouterr().err
