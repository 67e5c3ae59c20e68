"""The contenders of `make bench`: every codec of the library, and other tools in use today.

Each contender prepares its buffers for one vector. Then it encodes, decodes, and, where it can,
decodes and sums eight payloads.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from cases import CODECS, WORKERS
from timing import into_fresh, into_warm

import jaxcomp
from jaxcomp.base import decode_sum as sums
from jaxcomp.exchange import receive as keys_of
from jaxcomp.layout import trees
from jaxcomp.numerics import noise
from jaxcomp.sparsify import choices

BUCKETS = (512, 1024, 4096, 65_536)
SHARES = (0.001, 0.01, 0.1)
EIGHTH = 0.00125
"""Of the elements in each of eight payloads: a hundredth in all."""


class Prepared(NamedTuple):
    """The work on one vector, ready to be timed.

    Attributes:
        runs: what to time, of "encode", "decode", "decode_sum_8" and "fresh_sum_8".
        bits: bits an element that a worker would send.
        decoded: what the others would see.
    """

    runs: dict[str, Callable[[], Any]]
    bits: float
    decoded: Callable[[], np.ndarray]


Contender = Callable[[np.ndarray], Prepared]


def decode_sum(plan: trees.Layout, key: Any, payloads: Any) -> Any:
    """The sum of what eight workers sent."""

    every = keys_of.everyone(key, plan.batches, WORKERS)

    def one(number: int, part: Any) -> Any:
        batch, keys = plan.batches[number], every[number]
        return sums.decode_sum(batch.codec, keys, part, batch.like)

    leaves = trees.decoded(plan.batches, plan.likes, payloads.batches, one, leading=2)
    return jax.tree.unflatten(plan.treedef, leaves)


def ours(codec: Any) -> Contender:
    def prepare(data: np.ndarray) -> Prepared:
        x, key = jnp.asarray(data), noise.raw(0)
        plan = trees.layout(codec, x)
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        payload = jax.jit(lambda x: jaxcomp.encode(codec, key, x))(x)
        payloads = jax.tree.map(lambda leaf: jnp.stack([leaf] * WORKERS), payload)
        decode = into_warm(lambda p: jaxcomp.decode(codec, key, p, like), payload)
        runs = {
            "encode": into_warm(lambda x: jaxcomp.encode(codec, key, x), x),
            "decode": decode,
            "decode_sum_8": into_warm(lambda p: decode_sum(plan, key, p), payloads),
            "fresh_sum_8": into_fresh(lambda p: decode_sum(plan, key, p), payloads),
        }
        bits = 8 * jaxcomp.wire_bytes(codec, like) / data.size
        return Prepared(runs, bits, lambda: np.asarray(decode()))

    return prepare


def torch_cast(dtype: str) -> Contender:
    def prepare(data: np.ndarray) -> Prepared:
        import torch  # pyright: ignore[reportMissingImports]

        x = torch.from_numpy(data)
        sent, out = torch.empty_like(x, dtype=getattr(torch, dtype)), torch.empty_like(x)
        sent.copy_(x)

        def add():
            out.zero_()
            for _ in range(WORKERS):
                out.add_(sent)

        runs = {"encode": lambda: sent.copy_(x), "decode": lambda: out.copy_(sent)}
        bits = 8.0 * sent.element_size()
        return Prepared(runs | {"decode_sum_8": add}, bits, lambda: out.copy_(sent).numpy())

    return prepare


def lax_top_k(fraction: float, bucket_size: int | None = None) -> Contender:
    """The usual way in JAX: float32 values and int32 indices."""

    def prepare(data: np.ndarray) -> Prepared:
        size = bucket_size or data.size
        x, k = jnp.asarray(data), choices.share(fraction, size)

        def encode(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            buckets = jnp.pad(x, (0, -x.size % size)).reshape(-1, size)
            _, places = jax.lax.top_k(jnp.abs(buckets), k)
            places = places + size * jnp.arange(len(buckets), dtype=jnp.int32)[:, None]
            return x[places], places

        values, places = jax.jit(encode)(x)

        def decode(values: jax.Array, places: jax.Array, times: int = 1) -> jax.Array:
            total = jnp.zeros(x.shape, x.dtype)
            for _ in range(times):
                total = total.at[places].add(values, unique_indices=True)
            return total

        once = into_warm(decode, values, places)
        runs = {
            "encode": into_warm(encode, x),
            "decode": once,
            "decode_sum_8": into_warm(lambda v, p: decode(v, p, WORKERS), values, places),
            "fresh_sum_8": into_fresh(lambda v, p: decode(v, p, WORKERS), values, places),
        }
        return Prepared(runs, 64 * k / size, lambda: np.asarray(once()))

    return prepare


def torch_top_k(fraction: float) -> Contender:
    """As in GRACE: float32 values and int64 indices, although 32 bits would suffice."""

    def prepare(data: np.ndarray) -> Prepared:
        import torch  # pyright: ignore[reportMissingImports]

        x, k = torch.from_numpy(data), int(fraction * data.size)
        out, held = torch.empty_like(x), []

        def encode():
            _, places = torch.topk(x.abs(), k, sorted=False)
            held[:] = [torch.gather(x, 0, places), places]

        def decode():
            return out.zero_().scatter_(0, held[1], held[0])

        def add():
            out.zero_()
            for _ in range(WORKERS):
                out.scatter_add_(0, held[1], held[0])

        encode()
        runs = {"encode": encode, "decode": decode, "decode_sum_8": add}
        return Prepared(runs, 64 * fraction, lambda: decode().numpy())

    return prepare


def piquant(bits: int, mode: str) -> Contender:
    """pi-quant's own buffers-to-buffers interface; its parameters are part of encoding."""

    def prepare(data: np.ndarray) -> Prepared:
        import piquant as pq  # pyright: ignore[reportMissingImports]

        context = pq.Context()
        narrow, wide = getattr(pq.DataType, f"UINT{bits}"), pq.DataType.F32
        rounding = getattr(pq.RoundMode, mode.upper())
        sent, out = np.zeros(data.size * bits // 8 + 1, np.uint8), np.zeros_like(data)
        settings: dict[str, Any] = {}

        def encode():
            scale, zero = context.compute_quant_params_ptr_float32(
                data.ctypes.data, narrow, data.size
            )
            settings.update(scale=scale, zero_point=zero)
            context.quantize_ptr(
                data.ctypes.data, wide, sent.ctypes.data, narrow,
                numel=data.size, round_mode=rounding, **settings,
            )  # fmt: skip

        def decode(add=False):
            context.dequantize_ptr(
                sent.ctypes.data, narrow, out.ctypes.data, wide,
                numel=data.size, reduce_op=pq.ReduceOp.ADD if add else pq.ReduceOp.SET, **settings,
            )  # fmt: skip
            return out

        def decode_sum_8():
            for worker in range(WORKERS):
                decode(add=worker > 0)

        encode()
        runs = {"encode": encode, "decode": decode, "decode_sum_8": decode_sum_8}
        return Prepared(runs, float(bits), lambda: decode().copy())

    return prepare


def fedjax(levels: int) -> Contender:
    """fedjax's quantizer simulates: it gives back floats, so all its time is encoding."""

    def prepare(data: np.ndarray) -> Prepared:
        from fedjax.aggregators import (
            compression,  # pyright: ignore[reportMissingImports]
        )

        x, key = jnp.asarray(data), jax.random.key(0)
        encode = into_warm(lambda x: compression.uniform_stochastic_quantize(x, levels, key), x)
        return Prepared({"encode": encode}, 32.0, lambda: np.asarray(encode()))

    return prepare


PEERS: dict[str, tuple[str, Contender]] = {
    "torch bfloat16": ("torch", torch_cast("bfloat16")),
    "torch float16": ("torch", torch_cast("float16")),
    "lax.top_k 1 %": ("jax", lax_top_k(0.01)),
    "lax.top_k 0.1 %": ("jax", lax_top_k(0.001)),
    "torch top-k 1 %, as GRACE": ("torch", torch_top_k(0.01)),
    "torch top-k 0.1 %, as GRACE": ("torch", torch_top_k(0.001)),
    "pi-quant 4-bit nearest": ("piquant", piquant(4, "nearest")),
    "pi-quant 4-bit stochastic": ("piquant", piquant(4, "stochastic")),
    "pi-quant 8-bit nearest": ("piquant", piquant(8, "nearest")),
    "pi-quant 8-bit stochastic": ("piquant", piquant(8, "stochastic")),
    "fedjax 16 levels": ("fedjax", fedjax(16)),
}


def encoding(contender: Contender) -> Contender:
    """Encoding alone, for contenders without decoding."""

    def prepare(data: np.ndarray) -> Prepared:
        prepared = contender(data)
        return prepared._replace(runs={"encode": prepared.runs["encode"]})

    return prepare


EIGHTHS: dict[str, Contender] = {
    "top_k 0.125 %": ours(jaxcomp.top_k(EIGHTH)),
    "sidco 0.125 %": ours(jaxcomp.sidco(EIGHTH)),
    "dgc 0.125 %": ours(jaxcomp.dgc(EIGHTH)),
    "lax.top_k 0.125 %": lax_top_k(EIGHTH),
}
IN_BUCKETS: dict[str, Contender] = {
    f"{name} {100 * share:g} %, buckets of {size:,}": encoding(contender)
    for size in BUCKETS
    for share in SHARES
    for name, contender in (
        ("top_k", ours(jaxcomp.top_k(share, size))),
        ("lax.top_k", lax_top_k(share, size)),
    )
}
GROUPS = {"eighths": EIGHTHS, "buckets": IN_BUCKETS}
"""Measured where they are asked for by the name of their group."""


def contenders() -> tuple[dict[str, Contender], list[str]]:
    """All contenders that can run here, and the names of those that are not installed."""
    found: dict[str, Contender] = {name: ours(codec) for name, codec in CODECS.items()}
    missing = []
    for name, (module, contender) in PEERS.items():
        try:
            importlib.import_module(module)
        except ImportError:
            missing.append(name)
        else:
            found[name] = contender
    return found, missing
