"""Compressed collectives and their gradients on a GPU, beside the same on its machine's CPU.

One device stands for all workers, by `jax.vmap` with an axis name.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp
from jaxcomp import collectives

AXIS, WORKERS, ROWS, WIDTH = "workers", 4, 8, 1_030
CODECS = {
    "qsgd_inf 4-bit": jaxcomp.qsgd_inf(bits=4),
    "qsgd_inf 8-bit": jaxcomp.qsgd_inf(bits=8),
    "mxfp8": jaxcomp.mx("mxfp8"),
    "mxfp4": jaxcomp.mx("mxfp4"),
    "eden 4-bit": jaxcomp.eden(bits=4),
    "sign": jaxcomp.sign(),
    "top_k 10 %": jaxcomp.top_k(fraction=0.1),
}
KINDS: dict[str, Callable[..., Any]] = {
    "all_gather": collectives.all_gather,
    "psum_scatter": collectives.psum_scatter,
    "pmean": collectives.pmean,
    "all_to_all": functools.partial(collectives.all_to_all, split_axis=0, concat_axis=0),
    "ppermute": functools.partial(
        collectives.ppermute, perm=[(i, (i + 1) % WORKERS) for i in range(WORKERS)]
    ),
}
TOLERANCE = 1e-6
"""The largest difference, over the largest element: sums of rotated elements may round apart."""


def both_ways(kind: Callable[..., Any], codec: Any) -> Callable[[jax.Array], Any]:
    """From each worker's rows to what arrives, and to the gradient of half its square."""

    def one(x: jax.Array) -> Any:
        sent = functools.partial(kind, axis_name=AXIS, codec=codec, key=7, back=codec)
        arrived, pull = jax.vjp(sent, x)
        return arrived, *pull(arrived)

    return jax.jit(jax.vmap(one, axis_name=AXIS))


def differences() -> Iterator[tuple[str, float]]:
    """The largest difference of each between both platforms, over the largest element."""
    draw = np.random.default_rng(0).standard_normal((WORKERS, ROWS, WIDTH), np.float32)
    for of_codec, codec in CODECS.items():
        for of_kind, kind in KINDS.items():
            run = both_ways(kind, codec)
            places = jax.devices("cpu")[0], jax.devices()[0]
            want, got = (jax.device_get(run(jax.device_put(draw, place))) for place in places)
            pairs = zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True)
            apart = max(float(jnp.max(abs(a - b)) / jnp.max(abs(a))) for a, b in pairs)
            yield f"{of_kind}, {of_codec}", apart
