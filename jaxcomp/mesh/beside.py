"""A mesh beside another one: the same workers on other devices, for programs that run meanwhile."""

from collections import defaultdict
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxcomp.types import PyTree


def beside(mesh: Mesh) -> Mesh:
    """A mesh of the same shape on CPU devices of the same processes that `mesh` does not use.

    Args:
        mesh: the devices that compute, of any platform.

    Raises:
        ValueError: if a process has too few other CPU devices.
    """
    free: dict[int, list[Any]] = defaultdict(list)
    for device in jax.devices("cpu"):
        if device not in mesh.devices.flat:
            free[device.process_index].append(device)
    found = []
    for device in mesh.devices.flat:
        if not free[device.process_index]:
            used = sum(d.process_index == device.process_index for d in mesh.devices.flat)
            others = 2 * used if device.platform == "cpu" else used
            raise ValueError(
                f"`mesh` must leave each process a CPU device for each of its {used} devices in "
                f"it, got fewer in process {device.process_index}; call "
                f'jax.config.update("jax_num_cpu_devices", {others}) before JAX is used, and make '
                "the mesh of the first half of them"
            )
        found.append(free[device.process_index].pop(0))
    return Mesh(
        np.array(found).reshape(mesh.devices.shape), mesh.axis_names, axis_types=mesh.axis_types
    )


def move_arrays(tree: PyTree, mesh: Mesh) -> PyTree:
    """Arrays of a mesh as the same ones on another mesh of the same shape and processes.

    Every shard goes from its device to the device in the same place, so nothing crosses processes.
    """

    def one(x: jax.Array) -> jax.Array:
        held = x.sharding
        if not isinstance(held, NamedSharding) or not isinstance(held.mesh, Mesh):
            raise ValueError(f"`tree` must have arrays on a mesh, got one with {held}")
        of = dict(zip(held.mesh.devices.flat, mesh.devices.flat, strict=True))
        if x.is_fully_replicated:  # Of such, JAX does not always know the shards.
            here = [to for at, to in of.items() if at.process_index == jax.process_index()]
            shards = [jax.device_put(x.addressable_data(0), device) for device in here]
        else:
            found = x.addressable_shards
            shards = [jax.device_put(shard.data, of[shard.device]) for shard in found]
        sharding = NamedSharding(mesh, held.spec)
        return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)

    return jax.tree.map(one, tree)
