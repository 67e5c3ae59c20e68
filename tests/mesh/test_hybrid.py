"""Meshes of several slices: which devices share which axis."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxcomp
from jaxcomp.mesh import hybrid


@dataclasses.dataclass(frozen=True)
class Device:
    """A device of a slice that is not here."""

    id: int
    process_index: int
    slice_index: int
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"
    core_on_chip: int = 0

    @property
    def coords(self):
        """Its place in a slice of two columns."""
        return (self.id % 2, self.id % 8 // 2, 0)


def shuffled(devices):
    return [devices[at] for at in np.random.default_rng(0).permutation(len(devices))]


def test_the_slow_axis_crosses_slices_and_no_other_axis_does():
    devices = shuffled([Device(n, n // 2, n // 8) for n in range(16)])
    placed = hybrid._place(devices, {"dcn": 2}, {"fsdp": 4, "tp": 2})
    assert placed.shape == (2, 4, 2)
    slices = np.vectorize(lambda device: device.slice_index)(placed)
    np.testing.assert_array_equal(slices, np.arange(2)[:, None, None] * np.ones((2, 4, 2)))


def test_two_slow_axes():
    devices = shuffled([Device(n, n // 2, n // 8) for n in range(32)])
    placed = hybrid._place(devices, {"dcn": 2, "sites": 2}, {"fsdp": 8})
    slices = np.vectorize(lambda device: device.slice_index)(placed)
    assert {len(set(row)) for row in slices.reshape(4, 8)} == {1}


def test_without_slices_it_crosses_processes():
    devices = shuffled([Device(n, n // 4, 0, "gpu") for n in range(8)])
    placed = hybrid._place(devices, {"hosts": 2}, {"fsdp": 4})
    processes = np.vectorize(lambda device: device.process_index)(placed)
    np.testing.assert_array_equal(processes, [[0] * 4, [1] * 4])
    with pytest.raises(ValueError, match="`slow` must have 2 places, as many as there are proce"):
        hybrid._place(devices, {"hosts": 4}, {"fsdp": 2})


def test_one_process_has_neighbours():
    mesh = jaxcomp.hybrid_mesh({"dcn": 2}, {"fsdp": 4}, devices=jax.devices()[:8])
    assert mesh.shape == {"dcn": 2, "fsdp": 4}
    assert [device.id for device in mesh.devices[0]] == [d.id for d in jax.devices()[:4]]
    assert mesh.axis_types == (AxisType.Auto,) * 2


def test_sizes_and_names_must_fit():
    for slow, fast, match in (
        ({"dcn": 2}, {"fsdp": 3}, "`slow` and `fast` must have 8 places"),
        ({"x": 2}, {"x": 4}, "`fast` must have other axes"),
        ({}, {"fsdp": 8}, "`slow` must be sizes"),
        ({"dcn": 0}, {"fsdp": 8}, r"`slow\['dcn'\]` must be"),
    ):
        with pytest.raises(ValueError, match=match):
            jaxcomp.hybrid_mesh(slow, fast, devices=jax.devices()[:8])
