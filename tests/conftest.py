"""Eight simulated devices for every test."""

import gc
import itertools
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", os.environ.get("JAXCOMP_TEST_PLATFORM", "cpu"))

import jax
import jaxtyping
import pytest
from helpers import programs, tiers

# Nothing here imports jaxcomp: old versions of jaxtyping, such as 0.3.0, instrument packages only
# after this file is read, and refuse those that are imported already.

jax.config.update("jax_num_cpu_devices", 8)

# A trace makes millions of objects that live on. With the usual limits, looking through them
# again and again takes a sixth of the tests' time.
gc.set_threshold(100_000, 50, 100)


@pytest.fixture(scope="session")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.fixture(scope="session")
def two() -> jax.sharding.Mesh:
    """Two slices, of four devices that share a model."""
    from helpers import sharding

    return sharding.make_mesh(sharding.TWO)


@pytest.fixture(scope="session")
def three() -> jax.sharding.Mesh:
    """Two slices, of devices that share a model along two axes."""
    from helpers import sharding

    return sharding.make_mesh(sharding.THREE)


@pytest.fixture
def x64():
    """Double precision."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch, tmp_path_factory):
    """Times that a test invents, or measures beside others, must reach no plan of the user."""
    folder = tmp_path_factory.getbasetemp() / "caches" / str(next(_numbers))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


_numbers = itertools.count()


@pytest.fixture(autouse=True)
def annotations(request):
    """Disables the annotation checks, so that wrong arguments reach our own errors."""
    if request.node.get_closest_marker("wrong_types") is None:
        yield
        return
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


def pytest_addoption(parser):
    parser.addoption("--costs", help="writes what each test compiled and cost to this CSV file")
    help = "fails if more programs are compiled than programs.json allows this suite"
    parser.addoption("--budget", choices=("core", "full"), help=help)


def pytest_configure(config):
    """Registers our plugins.

    Slow tests are left out of every selection (`-m`) that is not empty and does not name them.
    """
    chosen = config.option.markexpr
    if chosen and "slow" not in chosen:
        config.option.markexpr = f"({chosen}) and not slow"
    config.pluginmanager.register(programs.Programs(config), "programs")
    config.pluginmanager.register(tiers.Tiers(), "tiers")


def pytest_collection_modifyitems(items):
    """Skips tests that need an accelerator where there is none."""
    for item in items:
        for platform in ("gpu", "tpu"):
            if item.get_closest_marker(platform) and jax.default_backend() != platform:
                item.add_marker(pytest.mark.skip(reason=f"needs a {platform.upper()}"))


MAPS = pathlib.Path("/proc/self/maps")
MOST_MAPS = 40_000


def pytest_runtest_teardown(nextitem):
    """Frees compiled programs before there are too many.

    A program takes some thirty memory maps, and Linux refuses more than 65,530 to a process: the
    compiler then aborts in the middle of a test.
    """
    if nextitem is None or not MAPS.exists():
        return
    teardowns[0] += 1
    if teardowns[0] % 50 == 0 and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


teardowns = [0]
