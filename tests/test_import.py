"""The import of the package, and its checks during tests."""

import importlib
import inspect
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


def test_names_are_imported_when_they_are_first_used():
    """A user of one codec does not wait for planners, federated training and the like."""
    script = """
import sys
import jaxcomp
def loaded():
    return {name for name in sys.modules if name.startswith("jaxcomp.")}
assert len(loaded()) < 40, sorted(loaded())
jaxcomp.qsgd_inf
assert "jaxcomp.recipes.quantizers" in loaded()
assert not {"jaxcomp.planning.planner", "jaxcomp.federated.simulation"} & loaded()
from jaxcomp import *
assert qsgd_inf is jaxcomp.qsgd_inf and planning is jaxcomp.planning
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_every_name_of_a_stub_is_there():
    """And none is a module of its package, whose import would take the name's place."""
    package = pathlib.Path(jaxcomp.__file__).parent
    stubs = [stub for stub in package.rglob("__init__.pyi") if stub.parent != package]
    assert len(stubs) > 10
    for stub in stubs:
        name = ".".join(stub.parent.relative_to(package.parent).parts)
        found = importlib.import_module(name)
        assert found.__all__
        assert set(found.__all__) <= set(dir(found))
        values = {own: getattr(found, own) for own in found.__all__}
        modules = {own for own, value in values.items() if inspect.ismodule(value)}
        assert not {path.stem for path in stub.parent.glob("*.py")} & (values.keys() - modules)
        with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'absent'"):
            _ = found.absent


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
