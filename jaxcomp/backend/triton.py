"""The one place that uses Pallas' Triton backend, by which kernels are lowered for a GPU.

JAX deprecates this backend from 0.11 on, without a date of removal. The other one, Mosaic GPU, has
no interpreter in which bits could be checked without a device, and needs Hopper or newer. A change
of backend is a change of these four functions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxcomp.backend import axes
from jaxcomp.lazy import Lazy
from jaxcomp.types import Array

pallas = Lazy("jax.experimental.pallas")
_triton = Lazy("jax.experimental.pallas.triton")


def call(
    kernel: Callable[..., None],
    outputs: Sequence[tuple[tuple[int, ...], Any]],
    arrays: Sequence[Array],
    *,
    programs: int,
    warps: int,
    name: str,
    interpret: bool,
) -> list[jax.Array]:
    """Runs a kernel as so many programs of a GPU.

    Args:
        kernel: takes a reference for each array, then one for each output.
        outputs: shape and dtype of each.
        arrays: the inputs, typed alike by `axes.match_vma`.
        programs: the number of programs, counted by `pallas.program_id(0)`.
        warps: groups of 32 threads of a program.
        name: of the kernel in profiles, after "jaxcomp_".
        interpret: whether Pallas interprets the kernel, on any device.
    """
    return pallas.pallas_call(
        kernel,
        out_shape=[axes.result(shape, dtype, arrays[-1]) for shape, dtype in outputs],
        grid=(programs,),
        interpret=interpret,
        compiler_params=_triton.CompilerParams(num_warps=warps, num_stages=1),
        name=f"jaxcomp_{name}",
    )(*arrays)


def load(ref: Any, *, mask: Array | None = None, other: Array | None = None) -> Array:
    """Reads the elements at `ref.at[places]`; where `mask` is False, `other` in their place."""
    return _triton.load(ref, mask=mask, other=other)


def store(ref: Any, values: Array, *, mask: Array | None = None) -> None:
    """Writes the elements at `ref.at[places]` where `mask` is not False."""
    _triton.store(ref, values, mask=mask)


def instruction(name: str, x: Array) -> Array:
    """The instruction of this name for each element, by NVIDIA's manual of PTX."""
    (found,) = _triton.elementwise_inline_asm(
        f"{name} $0, $1;",
        args=[x],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return found
