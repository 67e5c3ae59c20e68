"""A mesh of slow links between slices or hosts, and fast ones inside of each."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxcomp import checks


def hybrid_mesh(
    slow: Mapping[str, int],
    fast: Mapping[str, int],
    *,
    devices: Sequence[Any] | None = None,
    axis_type: AxisType = AxisType.Auto,
) -> Mesh:
    """A mesh whose first axes cross the slow links, and whose others stay inside of one slice.

    On TPUs of several slices `jax.make_mesh` raises: a mesh must say which axes cross the
    data-centre network. Elsewhere nothing keeps the devices of an axis on one host but their order.

    Args:
        slow: the axes between slices of TPUs, or between processes where there are no slices, with
            their sizes, such as `{"dcn": 2}`.
        fast: the axes inside of a slice or process, such as `{"fsdp": 4, "tp": 2}`.
        devices: the devices; None for `jax.devices()`. In one process without slices, such as one
            with simulated devices, neighbours count as close.
        axis_type: of all axes.

    Raises:
        ValueError: if the sizes do not fit the devices, or an axis is named twice.

    Example:
        >>> hybrid_mesh({"dcn": 1}, {"fsdp": len(jax.devices())}).axis_names
        ('dcn', 'fsdp')
    """
    for name, axes in (("slow", slow), ("fast", fast)):
        if not isinstance(axes, Mapping) or not axes:
            raise ValueError(
                f"`{name}` must be sizes by the names of axes, such as {{'dcn': 2}}, got {axes!r}"
            )
        for axis, size in axes.items():
            checks.integer(f"{name}[{axis!r}]", size, 1)
    names = (*slow, *fast)
    if len(set(names)) != len(names):
        raise ValueError(f"`fast` must have other axes than `slow`, {list(slow)}, got {list(fast)}")
    placed = _place(jax.devices() if devices is None else devices, slow, fast)
    return Mesh(placed, names, axis_types=(axis_type,) * len(names))


def _place(devices: Sequence[Any], slow: Mapping[str, int], fast: Mapping[str, int]) -> np.ndarray:
    """The devices by their places on all axes."""
    sizes = (*slow.values(), *fast.values())
    if math.prod(sizes) != len(devices):
        raise ValueError(
            f"`slow` and `fast` must have {len(devices)} places, as many as there are devices, got "
            f"{math.prod(sizes)} of {dict(slow)} and {dict(fast)}"
        )
    slices = {getattr(device, "slice_index", 0) for device in devices}
    processes = {device.process_index for device in devices}
    parts = slices if len(slices) > 1 else processes
    if len(parts) == 1:
        return np.array(devices, object).reshape(sizes)
    if math.prod(slow.values()) != len(parts):
        kind = "slices" if parts is slices else "processes"
        raise ValueError(
            f"`slow` must have {len(parts)} places, as many as there are {kind}, got {dict(slow)}"
        )
    return mesh_utils.create_hybrid_device_mesh(
        (*[1] * len(slow), *fast.values()),
        (*slow.values(), *[1] * len(fast)),
        devices,
        process_is_granule=parts is processes,
    )
