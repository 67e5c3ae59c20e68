"""The import of the package, and its checks during tests."""

import subprocess
import sys

import jax.numpy as jnp
import jaxtyping
import pytest

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


def test_annotations_are_checked():
    """The tests run with `--jaxtyping-packages`, in each process of theirs."""
    with pytest.raises(jaxtyping.TypeCheckError, match="lengths"):
        stream.begins(jnp.ones((2, 3)))
