"""How long a codec or a reducer takes on this very device: the clock behind `plan` and `bench`."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxcomp import checks, mesh as mesh_, trees
from jaxcomp.feedback import Link
from jaxcomp.protocols import Array, PyTree
from jaxcomp.reducers import reduction, senders
from jaxcomp.reducers.gather import Gather
from jaxcomp.theory.cost import Work
from jaxcomp.transforms.mean import compressed_mean

_AXIS = "measured"
_MORE = 4
"""Payloads on top of the first one by which the time of adding one is told."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Seconds for `elements` elements on this device, medians.

    Attributes:
        elements: how many.
        whole: a mean over one worker: encode, what the feedback does, and decode.
        decode: one payload, for a link; 0.0 for a reducer that is measured as a whole.
        add: each further payload of a sum.
        error: mean squared error over mean square of what arrives of a first message, of elements
            drawn from a normal law.
    """

    elements: int
    whole: float
    decode: float
    add: float
    error: float

    def faster(self, times: float) -> "Measured":
        """The same on a device that is so many times faster."""
        return dataclasses.replace(
            self, whole=self.whole / times, decode=self.decode / times, add=self.add / times
        )

    @property
    def work(self) -> Work:
        """The same an element."""
        encode = max(0.0, self.whole - self.decode)
        return Work(*(seconds / self.elements for seconds in (encode, self.decode, self.add)))


@functools.lru_cache(maxsize=256)
def measure(
    way: Any,
    elements: int = 2**22,
    *,
    dtype: str = "float32",
    repeats: int = 5,
    meet: Callable[[], Any] | None = None,
) -> Measured:
    """Measures a link, or a whole reducer, on this process's first device, in its own programs.

    A link is measured as `Gather` uses it. A reducer is measured over one worker, with nothing to
    send. Outputs are written over buffers of the call before, since fresh ones cost a page fault a
    page. What was measured once is remembered.

    Args:
        way: a `Link`, or a reducer.
        elements: of a square matrix, or nearly one.
        dtype: of the elements.
        repeats: timed calls after two that warm up.
        meet: called before each of them: processes that share a machine wait for each other there,
            to compete for it as they do in training.

    Raises:
        ValueError: if there is nothing to measure or no time to tell.
    """
    checks.integer("elements", elements, 1)
    checks.integer("repeats", repeats, 1)
    side = max(1, round(elements**0.5))
    shape = (side, -(-elements // side))
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32), dtype)
    clock = functools.partial(seconds, repeats=repeats, meet=meet)
    reducer = Gather(way) if isinstance(way, Link) else way
    whole, first = _whole(reducer, x, clock)
    decode = add = 0.0
    if isinstance(way, Link):
        one, more = (_sum(way, x, count, clock) for count in (1, 1 + _MORE))
        decode, add = one, max(0.0, (more - one) / _MORE)
    wide = np.asarray(x, np.float64)
    error = float(np.mean((first - wide) ** 2) / np.mean(wide**2))
    return Measured(x.size, whole, decode, add, error)


def _whole(reducer: Any, x: Array, clock: Callable[..., float]) -> tuple[float, np.ndarray]:
    """Seconds of a mean over one worker, and the first of these means."""
    mesh = jax.make_mesh((1,), (_AXIS,), devices=jax.local_devices()[:1])
    tx = compressed_mean(reducer, _AXIS)

    def step(mean: Array, state: PyTree, x: Array) -> tuple[Any, PyTree]:
        del mean  # Its buffer is written over.
        return tx.update(x, state)

    here = PartitionSpec()
    mapped = jax.shard_map(step, mesh=mesh, in_specs=here, out_specs=here, check_vma=False)
    run = jax.jit(mapped, donate_argnums=(0, 1), keep_unused=True)
    state = mesh_.init_state(tx, x, mesh, _AXIS)
    held = list(run(jnp.zeros_like(x), state, x))
    first = np.asarray(held[0], np.float64)

    def again():
        held[:] = jax.block_until_ready(run(*held, x))

    return clock(again), first


def _sum(link: Link, x: Array, count: int, clock: Callable[..., float]) -> float:
    """Seconds of decoding so many payloads into one mean."""
    layout, key = reduction.plan(Gather(link), x), jnp.zeros(2, jnp.uint32)
    batches, worker = layout.batches, jnp.zeros((), jnp.uint32)
    if not batches:
        raise ValueError(f"`way` must compress a matrix of shape {x.shape}, got {link!r}")

    def encode(x: Array) -> tuple[Any, Any]:
        stacks, _ = trees.stacks(layout, x)
        own = senders.encode(key, batches, stacks, senders.init(batches), worker, _AXIS)
        return own.payloads, own.sides

    def total(mean: PyTree, payloads: PyTree, sides: PyTree) -> PyTree:
        del mean
        return senders.mean(key, batches, payloads, sides, None, count)

    payloads, sides = jax.jit(jax.vmap(encode, axis_name=_AXIS))(x[None])
    many = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * count), payloads)
    sides = jax.tree.map(lambda leaf: leaf[0], sides)
    run = jax.jit(total, donate_argnums=0, keep_unused=True)
    held = [tuple(jnp.zeros(b.like.shape, b.dtype) for b in batches)]

    def again():
        held[:] = [jax.block_until_ready(run(held[0], many, sides))]

    return clock(again)


def seconds(
    run: Callable[[], Any], repeats: int = 5, meet: Callable[[], Any] | None = None
) -> float:
    """The median time of a call, after two that warm up."""
    times = []
    for turn in range(repeats + 2):
        if meet is not None:
            meet()
        start = time.perf_counter()
        run()
        if turn >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def copy(elements: int = 2**22, repeats: int = 9) -> float:
    """Seconds an element of a float32 copy on the first device, into a buffer that is there."""
    x = jnp.ones(elements)
    run = jax.jit(lambda out, x: x + 1, donate_argnums=0, keep_unused=True)
    held = [jnp.zeros(elements)]

    def again():
        held[:] = [jax.block_until_ready(run(held[0], x))]

    return seconds(again, repeats) / elements
