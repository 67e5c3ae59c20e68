"""Every example runs, and says what it should."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def run(name, *options, code=0):
    command = [sys.executable, str(EXAMPLES / name), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_quickstart():
    said = run("quickstart.py")
    assert "'all-gather': 232960" in said
    assert len((EXAMPLES / "quickstart.py").read_text().splitlines()) <= 40


def test_own_codec():
    assert "Int8 passes the contract" in run("own_codec.py")


def test_train_digits(tmp_path):
    run("train_digits.py", "--codec", "dense", "sign", "--epochs", 3, "--out", tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert (tmp_path / "digits.png").stat().st_size > 10_000
    text = json.dumps(results)
    assert "sign" in text
    assert "dense" in text


def test_the_readme_runs():
    """The code that a newcomer copies first, as it stands there."""
    text = (EXAMPLES.parent / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    before = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp
params = {"w": jnp.ones((64, 64)), "b": jnp.zeros(64)}
loss_fn = lambda p, x: jnp.mean((x @ p["w"] + p["b"]) ** 2)
batches = [jnp.ones((16, 64))] * 3
batch = batches[0]
"""
    script = before + "".join(blocks)
    # The first block steps with donated buffers and keeps going; so does the rest of the page.
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "all-gather" in done.stdout


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
