"""The import of the package, and its checks during tests."""

import pathlib
import subprocess
import sys

import jax.numpy as jnp
import jaxtyping
import pytest

import jaxcomp
from jaxcomp.entropy import stream


def test_nothing_happens_at_import():
    """No device is touched, no configuration changed."""
    script = """
import jax
from jax._src import xla_bridge
before = dict(jax.config.values)
import jaxcomp
assert not xla_bridge._backends, "a backend was initialised"
after = {name: jax.config.values[name] for name in before}  # Modules of JAX add options.
assert before == after, "configuration changed"
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_the_import_is_light():
    """Neither scipy's solvers nor Pallas, which a CPU never uses, nor anything of an extra."""
    script = """
import sys
import jaxcomp
heavy = "scipy jax.experimental.pallas matplotlib flax equinox flwr sklearn rich".split()
print(*(name for name in heavy if name in sys.modules))
"""
    command = [sys.executable, "-c", script]
    said = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    assert said.stdout.split() == []


def test_a_sites_app_and_checkpoints_import_no_jax():
    script = """
import sys
import jaxcomp_files.versions, jaxcomp_site.courier, jaxcomp_site.packing
print(*({"jax", "jaxcomp"} & sys.modules.keys()))
"""
    command = [sys.executable, "-c", script]
    said = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    assert said.stdout.split() == []


def test_the_deprecated_backend_of_pallas_is_used_in_one_place():
    package = pathlib.Path(jaxcomp.__file__).parent
    users = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "pallas.triton" in path.read_text() or "pallas import triton" in path.read_text()
    }
    assert users == {"backend/triton.py"}


def test_annotations_are_checked():
    """The tests run with `--jaxtyping-packages`, in each process of theirs."""
    with pytest.raises(jaxtyping.TypeCheckError, match="lengths"):
        stream.begins(jnp.ones((2, 3)))
