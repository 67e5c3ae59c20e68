"""The import of the package."""

import subprocess
import sys


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
