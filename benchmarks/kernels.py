"""Every operation that has a kernel, and its input: `aot.py` compiles them, `gpu.py` times them."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from cases import KERNEL_CODECS, WORKERS

from jaxcomp import bits
from jaxcomp.numerics import noise
from jaxcomp.rotate import hadamard

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 1.6)
KEY = 3


class Operation(NamedTuple):
    """An operation that has a kernel.

    Attributes:
        name: in results.
        run: a function of arrays, with the keyword `implementation`.
        inputs: makes the arrays; `jax.eval_shape` of it gives their shapes.
        bytes: of the array that is not packed.
    """

    name: str
    run: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]
    bytes: int


def buckets(n: int, size: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Gaussian buckets after one of every special kind, and their counts."""
    x = _gaussian(n, size).copy()
    x[0], x[1, 3], x[4, size // 2 :], x[5, 7], x[6, 1] = 0, np.nan, 0, 1e4, -1e-40
    with np.errstate(under="ignore"):
        x[2], x[3] = x[2] * np.float32(1e30), x[3] * np.float32(1e-40)
    return jnp.asarray(x).astype(dtype), jnp.full(n, size, jnp.int32).at[4].set(size // 2)


@functools.lru_cache(2)  # Drawing a hundred million takes longer than anything that is timed.
def _gaussian(n: int, size: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((n, size), np.float32)


def packing(n: int) -> Iterator[Operation]:
    for width in WIDTHS:
        size, top = (640, 3) if width == 1.6 else (512, 2 ** int(width))

        def codes(size: int = size, top: int = top) -> tuple[jax.Array]:
            drawn = np.random.default_rng(1).integers(0, top, (n, size), np.uint32)
            return (jnp.asarray(drawn),)

        def words(codes: Any = codes, width: float = width) -> tuple[jax.Array]:
            return (bits.pack(*codes(), bits=width),)

        pack = functools.partial(bits.pack, bits=width)
        unpack = functools.partial(bits.unpack, bits=width, size=size)
        yield Operation(f"pack {width}", pack, codes, 4 * n * size)
        yield Operation(f"unpack {width}", unpack, words, 4 * n * size)


def coding(n: int, dtypes: tuple[Any, ...]) -> Iterator[Operation]:
    for name, codec in KERNEL_CODECS.items():
        size = codec.bucket_size or 0
        for dtype in dtypes:
            out = jax.ShapeDtypeStruct((n, size), dtype)

            def encode(x, count, key, codec=codec, **how):
                return bits.encode(codec, x, count, key, jnp.uint32(0), **how)

            def add(words, steps, codec=codec, out=out, **how):
                return bits.decode_sum(codec, words, steps, out, **how)

            def given(size=size, dtype=dtype):
                return (*buckets(n, size, dtype), noise.raw(KEY))

            def payloads(given=given, encode=encode):
                one = encode(*given(), implementation="reference")
                return tuple(jnp.stack([part] * WORKERS) for part in one)

            label, large = f"{name}, {jnp.dtype(dtype).name}", n * size * out.dtype.itemsize
            yield Operation(f"encode {label}", encode, given, large)
            yield Operation(f"decode and sum of {WORKERS}, {label}", add, payloads, large)


def rotations(elements: int, blocks: tuple[int, ...]) -> Iterator[Operation]:
    for block in blocks:

        def inputs(block=block):
            # Without the smallest elements: a CPU flushes subnormal numbers to zero.
            x = buckets(elements // block, block, jnp.float32)[0].at[3].set(0).at[6, 1].set(0)
            return (x, *noise.seeds(noise.raw(KEY), jnp.uint32(0), len(x)))

        for turn in (hadamard.rotate, hadamard.unrotate):

            def run(x, high, low, turn=turn, block=block, **how):
                return turn(x, high, low, block, down=1 / block, up=8.0, **how)

            yield Operation(f"{turn.__name__}, blocks of {block}", run, inputs, 4 * elements)
