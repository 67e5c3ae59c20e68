"""Which devices a collective of a compiled program joins, and which axes of a mesh it crosses.

HLO numbers the devices of a program, in the order of its device assignment: in JAX, the order of
`mesh.devices.flat`. It writes groups of them as lists, as a reshaped and transposed range of
numbers, or by the axes of a mesh of its own.
"""

import itertools
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

_LISTS = re.compile(r"replica_groups=\{(?P<groups>(?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(
    r"replica_groups=\[(?P<shape>[\d,]+)\]<=\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
)
_MESH = re.compile(
    r"replica_groups=mesh\[(?P<sizes>[^\]]*)\](?:, device_ids=\((?P<ids>[^{]*)\))? ?"
    r"\{(?P<axes>[^}]*)\}"
)
_IDS = re.compile(r"\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?")
_AXIS = re.compile(r"'?(?P<name>[\w.]+)'?(?::\((?P<before>\d+)\)(?P<size>\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{(?P<pairs>(?:\{\d+,\d+\},?)*)\}")


class Layout(NamedTuple):
    """The axes of a mesh.

    Attributes:
        names: of the axes.
        sizes: of the axes.
        places: the position in the mesh of each device of the program.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    places: np.ndarray

    def crossed(self, groups: list[np.ndarray]) -> str | tuple[str, ...]:
        """The axes along which devices of one group differ: a name, or a tuple of names."""
        differ = np.zeros(len(self.sizes), bool)
        for devices in groups:
            at = np.stack(np.unravel_index(self.places[devices], self.sizes))
            differ |= (at != at[:, :, :1]).any(axis=(1, 2))
        along = tuple(name for name, is_along in zip(self.names, differ, strict=True) if is_along)
        return along[0] if len(along) == 1 else along


def layout(mesh: Any, compiled: Any, everyone: int) -> Layout:
    """The layout of a mesh of this many devices.

    Args:
        mesh: a mesh, or a dictionary of the names and sizes of its axes.
        compiled: the program, which may number the same devices in another order.
        everyone: the number of devices of the program.

    Raises:
        ValueError: if `mesh` is neither, or has another number of devices.
    """
    shape = getattr(mesh, "shape", mesh)
    if not isinstance(shape, Mapping) or not all(
        isinstance(name, str) and isinstance(size, int) and size > 0 for name, size in shape.items()
    ):
        raise ValueError(
            "`mesh` must be a mesh, or a dictionary of the sizes of its axes such as "
            f"{{'data': 2, 'fsdp': 4}}, got {mesh!r}"
        )
    names, sizes = tuple(shape), tuple(shape.values())
    if math.prod(sizes) != everyone:
        raise ValueError(
            f"`mesh` must have as many devices as the program, {everyone}, got "
            f"{math.prod(sizes)}: {dict(shape)}"
        )
    places = np.arange(everyone)
    own, run = list(mesh.devices.flat) if isinstance(mesh, Mesh) else [], _devices(compiled)
    if own != run and set(own) == set(run):
        at = {device: place for place, device in enumerate(own)}
        places = np.asarray([at[device] for device in run])
    return Layout(names, sizes, places)


def _devices(compiled: Any) -> list[Any]:
    """The devices of a program in its order; none if only its text is known."""
    fields = ("output_shardings", "input_shardings")
    for sharding in jax.tree.leaves([getattr(compiled, name, None) for name in fields]):
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return list(sharding.mesh.devices.flat)
    return []


def group_size(line: str, everyone: int) -> int:
    """The number of devices in a group of a collective; all of them if the line has no groups."""
    if found := _IOTA.search(line):
        return _numbers(found["shape"])[-1]
    if found := _LISTS.search(line):
        first = found["groups"].partition("}")[0].strip("{")
        return len(_numbers(first)) or everyone
    if found := _MESH.search(line):
        return math.prod(size for _, _, size in _along(found))
    return everyone


def groups(line: str, everyone: int) -> list[np.ndarray]:
    """The groups of a collective, as arrays `[groups, devices]`.

    Raises:
        ValueError: for groups of other devices than those of the program.
    """
    if found := _IOTA.search(line):
        each = [_range(found["dims"], found["order"], everyone).reshape(_numbers(found["shape"]))]
    elif found := _MESH.search(line):
        each = [_of_mesh(found, everyone)]
    elif (found := _LISTS.search(line)) and found["groups"]:
        lists = re.findall(r"\{([\d,]*)\}", found["groups"])
        each = [np.asarray([_numbers(one)]) for one in lists if one]
    else:
        each = [np.arange(everyone)[None]]
    if any(one.max() >= everyone for one in each):
        raise ValueError(f"groups of {everyone} devices")
    return each


def pairs(line: str) -> list[tuple[int, int]] | None:
    """The pairs of source and target of a permutation."""
    found = _PAIRS.search(line)
    if not found:
        return None
    return [(int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", found["pairs"])]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _range(dims: str, order: str | None, everyone: int) -> np.ndarray:
    """The numbers of all devices, in the shape `dims` and transposed."""
    shape = _numbers(dims)
    if math.prod(shape) != everyone:
        raise ValueError(f"groups of {everyone} devices")
    devices = np.arange(everyone).reshape(shape)
    return devices.transpose(_numbers(order)) if order else devices


def _along(found: re.Match) -> list[tuple[str, int, int]]:
    """The name of each axis of a group, the size of its part before the group's, and that."""
    sizes = _sizes(found)
    axes = [(axis["name"], axis["before"], axis["size"]) for axis in _AXIS.finditer(found["axes"])]
    return [(name, int(before or 1), int(size or sizes[name])) for name, before, size in axes]


def _sizes(found: re.Match) -> dict[str, int]:
    return {name: int(n) for name, n in re.findall(r"'?([\w.]+)'?=(\d+)", found["sizes"])}


def _of_mesh(found: re.Match, everyone: int) -> np.ndarray:
    """The groups along axes of a mesh, or along parts of them: `'b':(2)2` of 8 is `[2, 2, 2]`."""
    ids = _IDS.match(found["ids"] or "")
    if ids:
        devices = _range(ids["dims"], ids["order"], everyone).reshape(-1)
    else:
        devices = np.asarray(_numbers(found["ids"] or ""), int)
        devices = devices if devices.size else np.arange(everyone)
    shape, chosen, part = [], {}, _along(found)
    for name, size in _sizes(found).items():
        # Boundaries of the parts of this axis: products of the sizes before them.
        own = [(before, of) for other, before, of in part if other == name]
        ends = sorted({1, size, *(before for before, _ in own), *(a * b for a, b in own)})
        for start, end in itertools.pairwise(ends):
            if any(before <= start and end <= before * of for before, of in own):
                chosen[len(shape)] = None
            shape.append(end // start)
    others = [at for at in range(len(shape)) if at not in chosen]
    last = devices.reshape(shape).transpose([*others, *chosen])
    return last.reshape(-1, group_size(found[0], everyone))
