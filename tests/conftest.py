"""Eight simulated devices for every test."""

import os

os.environ.setdefault("JAX_PLATFORMS", os.environ.get("JAXCOMP_TEST_PLATFORM", "cpu"))

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="session")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
