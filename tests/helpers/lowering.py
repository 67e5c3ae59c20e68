"""Lowering for accelerators where there is none: JAX must be told which device is meant."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

DEVICES = {
    "cuda": AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"),
    "tpu": AbstractDevice(device_kind="TPU v5e", num_cores=1, platform="tpu"),
    "cpu": None,
}


def mesh_of(platform, shape=(), names=()):
    """A mesh of such devices, for `jax.shard_map`."""
    types = (AxisType.Auto,) * len(shape)
    return AbstractMesh(shape, names, axis_types=types, abstract_device=DEVICES[platform])


def lowered(f, *args, mesh):
    """The text of a program for the devices of `mesh`."""
    (platform,) = (name for name, device in DEVICES.items() if device == mesh.abstract_device)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()
