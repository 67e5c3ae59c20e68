"""Weights for others: arrays of numpy, tensors of torch, and files of safetensors."""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxcomp_weights.layouts import Layout

_SAFETENSORS = {
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "bool": "BOOL",
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}
"""The names of dtypes in safetensors."""


class Written:
    """What was written where, so that only changed leaves are copied again."""

    def __init__(self) -> None:
        self._written: dict[str, tuple[np.ndarray, Any]] = {}

    def write(
        self, weights: Mapping[str, np.ndarray], layout: Layout, into: Mapping[str, Any]
    ) -> None:
        """Copies changed leaves, after all targets are checked.

        Raises:
            ValueError: for missing targets, or other shapes or dtypes.
        """
        if not isinstance(into, Mapping):
            raise ValueError(
                "`into` must be a dict from names to arrays of numpy or tensors of torch, got "
                f"{type(into).__name__}"
            )
        names = {leaf.name: leaf.dtype for leaf in layout.leaves}
        for name, array in weights.items():
            _check(name, names[name], array, into)
        for name, array in weights.items():
            before, target = self._written.pop(name, (None, None))
            if before is not array or not _is_same(target, into[name]):
                _copy(array, names[name], into[name])
            self._written[name] = array, into[name]


def save(
    path: "str | os.PathLike[str]",
    weights: Mapping[str, np.ndarray],
    names: Mapping[str, str],
    about: dict[str, str],
) -> None:
    """Writes weights as a file of safetensors: a header of JSON, then the arrays."""
    header: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name, array in weights.items():
        begin, end = end, end + array.nbytes
        dtype = _SAFETENSORS[names[name]]
        header[name] = {"dtype": dtype, "shape": [*array.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # Arrays begin at a multiple of eight bytes.
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in weights.values():
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _check(name: str, dtype: str, array: np.ndarray, into: Mapping[str, Any]) -> None:
    if name not in into:
        raise ValueError(f"`into` must have all leaves that are read, got none named {name!r}")
    target = into[name]
    if _is_tensor(target):
        came = str(target.dtype).removeprefix("torch.")
    elif isinstance(target, np.ndarray) and target.flags.writeable:
        came = target.dtype.name
    else:
        raise ValueError(
            f"`into[{name!r}]` must be a writable array of numpy or a tensor of torch, got "
            f"{type(target).__name__}"
        )
    if tuple(target.shape) != array.shape or came not in (dtype, array.dtype.name):
        raise ValueError(
            f"`into[{name!r}]` must be {dtype}{list(array.shape)}, got {came}{list(target.shape)}"
        )


def _copy(array: np.ndarray, dtype: str, target: Any) -> None:
    if not _is_tensor(target):
        np.copyto(target, array.view(target.dtype))
        return
    import torch

    # By integers of the same bits: torch has bfloat16 and float8, and numpy may not.
    width = array.dtype.itemsize
    whole = np.ascontiguousarray(array).reshape(array.shape).view(f"<i{width}")
    whole = whole if whole.flags.writeable else whole.copy()
    with torch.no_grad():
        bits = torch.from_numpy(whole)
        target.copy_(bits.view(target.dtype) if target.dtype != torch.bool else bits.bool())


def _is_same(target: Any, other: Any) -> bool:
    """Whether two targets are one. `state_dict` makes new tensors of the same memory."""
    if target is other:
        return True
    if not (_is_tensor(target) and _is_tensor(other)):
        return False
    places = [
        (x.device, x.data_ptr(), x.dtype, tuple(x.shape), x.stride()) for x in (target, other)
    ]
    return places[0] == places[1]


def _is_tensor(target: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(target, torch.Tensor)
