"""The codecs that are furthest from a copy on a GPU, whole and in parts: where does the time go?

`gpu.py` times these programs beside a copy of the same array, and counts their launches;
`launches.py` counts them without a GPU.
"""

import functools
import pathlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import kernels
import numpy as np

import jaxcomp
from jaxcomp import bits
from jaxcomp.numerics import noise
from jaxcomp.types import Key

CODECS: dict[str, Any] = {
    "qsgd_inf 4-bit": jaxcomp.qsgd_inf(bits=4),
    "qsgd 3-bit": jaxcomp.qsgd(bits=3),
    "nuqsgd 4-bit": jaxcomp.nuqsgd(bits=4),
    "sign": jaxcomp.sign(),
    "terngrad, buckets of 640": jaxcomp.terngrad(bucket_size=640),
    "terngrad": jaxcomp.terngrad(),
    "eden 4-bit": jaxcomp.eden(bits=4),
    "eden 1-bit": jaxcomp.eden(bits=1),
    "top_k 1 %": jaxcomp.top_k(fraction=0.01),
}
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class Part(NamedTuple):
    """A program on an array.

    Attributes:
        codec: its name.
        name: of the program.
        run: a function of arrays.
        inputs: makes the arrays.
        bytes: of the array.
    """

    codec: str
    name: str
    run: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]
    bytes: int


def parts(size: int) -> Iterator[Part]:
    """For each codec and dtype: as users call it, without padding, and its kernels alone.

    "as called" is `jaxcomp.encode` of `size` elements. "whole buckets" is the same of a number of
    elements that needs no padding, and "one bucket" of a few: the cost of a call. "kernel" is the
    fused kernel of quantizers; of rotated codecs, "rotation" is their kernel, and "quantiser" all
    that follows it.
    """
    for dtype_name, dtype in DTYPES.items():
        yield _part("copy", "copy", dtype_name, dtype, size, lambda x: x + jnp.ones((), x.dtype))
        for name, codec in CODECS.items():
            add = functools.partial(_part, name, dtype_name=dtype_name, dtype=dtype)
            bucket = codec.bucket_size or 8192
            whole, encode = size // bucket * bucket, functools.partial(_encode, codec)
            yield add("as called", size=size, run=encode)
            yield add("whole buckets", size=whole, run=encode)
            yield add("one bucket", size=min(bucket, size), run=encode)
            if isinstance(codec, jaxcomp.codecs.Quantizer) and codec.bucket_size:
                yield add("kernel", size=whole, run=functools.partial(_kernel, codec))
            if isinstance(codec, jaxcomp.codecs.Rotated):
                yield add("rotation", size=whole, run=functools.partial(_rotate, codec))
                yield add("quantiser", size=whole, run=functools.partial(_quantise, codec))


def _part(
    codec: str, what: str, dtype_name: str, dtype: Any, size: int, run: Callable[..., Any]
) -> Part:
    def inputs() -> tuple[jax.Array]:
        return (jnp.asarray(_gaussian(size)).astype(dtype),)

    label = f"{codec}, {dtype_name}: {what}"
    return Part(codec, label, run, inputs, size * jnp.dtype(dtype).itemsize)


@functools.lru_cache(4)  # Drawing takes longer than anything that is timed.
def _gaussian(size: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(size, np.float32)


def _encode(codec: Any, x: jax.Array) -> Any:
    return jaxcomp.encode(codec, noise.raw(kernels.KEY), x)


def _key() -> Key:
    return Key(noise.raw(kernels.KEY), noise.raw(kernels.KEY), jnp.uint32(0))


def _kernel(codec: Any, x: jax.Array) -> Any:
    rows = x.reshape(-1, codec.bucket_size)
    count = jnp.full(rows.shape[0], codec.bucket_size, jnp.int32)
    key = _key()
    return bits.encode(codec, rows, count, key.own, key.first, implementation="gpu")


def _rotate(codec: Any, x: jax.Array) -> Any:
    return codec.rotate(_key(), x.reshape(-1, codec.bucket_size))


def _quantise(codec: Any, x: jax.Array) -> Any:
    rows = x.reshape(-1, codec.bucket_size).astype(jnp.float32)
    count = jnp.full(rows.shape[0], codec.bucket_size, jnp.int32)
    return codec.codec.encode(_key(), rows, count, codec.codec.init(rows))[0]


def kernel_times(run: Callable[[], Any], plane: str = "/device:GPU") -> dict[str, float]:
    """Microseconds of each kernel in a run, the longest first, as JAX's profiler has them.

    Args:
        run: launches programs, and waits for them.
        plane: how the profiler calls the device.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        files = [*pathlib.Path(folder).rglob("*.xplane.pb")]
        found = [jax.profiler.ProfileData.from_file(str(path)) for path in files]
    spent: Counter[str] = Counter()
    for data in found:
        for device in data.planes:
            if device.name.startswith(plane):
                for line in device.lines:
                    # Other lines repeat the events of the streams under the names of operations.
                    if plane != "/device:GPU" or line.name.startswith("Stream"):
                        for event in line.events:
                            spent[event.name] += event.duration_ns / 1e3
    return dict(spent.most_common())
