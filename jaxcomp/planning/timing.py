"""Measures codecs and reducers on this device, for `plan` and `bench`."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxcomp import checks
from jaxcomp.exchange import receive, send
from jaxcomp.exchange.plan import Plan
from jaxcomp.feedback import Link
from jaxcomp.layout import trees
from jaxcomp.mesh import data_parallel
from jaxcomp.reducers.gather import Gather
from jaxcomp.theory.cost import Work
from jaxcomp.transforms.mean import compressed_mean
from jaxcomp.types import Array, PyTree

_AXIS = "measured"
_MORE = 4
"""Further payloads of a sum, from which the time to add one is measured."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Seconds for `elements` elements on this device.

    Attributes:
        elements: the number of elements.
        whole: the time of a mean over one worker: encoding, feedback and decoding.
        decode: the time to decode one payload, for a link; 0.0 for a reducer measured as a whole.
        add: the time to decode and add each further payload of a sum.
        error: the mean squared error over the mean square of a first message, of normally
            distributed elements.
        spread: the difference of the median and the fastest repeat, as a fraction of `whole`; it is
            large if the machine does other work.
        machine: the machine that was timed, if it is another one: its times are scaled by a copy.
    """

    elements: int
    whole: float
    decode: float
    add: float
    error: float
    spread: float = 0.0
    machine: str = ""

    def faster(self, times: float) -> "Measured":
        """The times on a device that is `times` times faster."""
        return dataclasses.replace(
            self, whole=self.whole / times, decode=self.decode / times, add=self.add / times
        )

    @property
    def free(self) -> "Measured":
        """The same measurement with zero time for encoding and decoding."""
        free = dataclasses.replace(self, whole=0.0, decode=0.0, add=0.0, spread=0.0)
        return dataclasses.replace(free, machine="")

    @property
    def work(self) -> Work:
        """The times divided by the number of elements."""
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
    choose: Callable[[list[float]], float] = min,
) -> Measured:
    """Measures a link, or a whole reducer, on this process's first device.

    A link is measured as in `Gather`. A reducer is measured over one worker, without sending.
    Outputs reuse the buffers of the previous call, since new buffers cost page faults. Results are
    cached. The fastest of the repeats counts, since other work on the machine only adds time.

    Args:
        way: a `Link`, or a reducer.
        elements: the number of elements, of a square matrix or nearly one.
        dtype: the dtype of the elements.
        repeats: the number of timed calls after two calls for warm-up.
        meet: a function called before each timed call, in which processes on one machine can wait
            for each other, to compete for it as in training.
        choose: the function that selects one of the times: the fastest by default; use
            `statistics.median` if the competition of `meet` should count.

    Raises:
        ValueError: if `way` compresses nothing, or an argument is out of range.
    """
    checks.integer("elements", elements, 1)
    checks.integer("repeats", repeats, 1)
    x = _normal(elements, dtype)
    clock = functools.partial(times, repeats=repeats, meet=meet)
    again, mean = _whole(way, x)
    whole = clock(again)
    decode = add = 0.0
    if isinstance(way, Link):
        one, more = (choose(_sum(way, x, count, clock)) for count in (1, 1 + _MORE))
        decode, add = one, max(0.0, (more - one) / _MORE)
    spread = statistics.median(whole) / min(whole) - 1
    return Measured(x.size, choose(whole), decode, add, _error(mean, x), spread)


@functools.lru_cache(maxsize=256)
def untimed(way: Any, elements: int = 2**18, *, dtype: str = "float32") -> Measured:
    """`measure` without timing: only the error, and zero time for the work.

    Args:
        way: as for `measure`.
        elements: as for `measure`.
        dtype: as for `measure`.
    """
    checks.integer("elements", elements, 1)
    x = _normal(elements, dtype)
    _, mean = _whole(way, x)
    return Measured(x.size, 0.0, 0.0, 0.0, _error(mean, x))


def _normal(elements: int, dtype: str) -> Array:
    """A square matrix, or nearly one, of a normal law."""
    side = max(1, round(elements**0.5))
    shape = (side, -(-elements // side))
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32), dtype)


def _error(mean: np.ndarray, x: Array) -> float:
    wide = np.asarray(x, np.float64)
    return float(np.mean((mean - wide) ** 2) / np.mean(wide**2))


def _whole(way: Any, x: Array) -> tuple[Callable[[], None], np.ndarray]:
    """A function that takes a mean over one worker, to be timed, and the first of these means."""
    mesh = Mesh(np.array(jax.local_devices()[:1]), (_AXIS,))
    tx = compressed_mean(Gather(way) if isinstance(way, Link) else way, _AXIS)

    def step(mean: Array, state: PyTree, x: Array) -> tuple[Any, PyTree]:
        del mean  # Its buffer is donated to the result.
        return tx.update(x, state)

    here = PartitionSpec()
    mapped = jax.shard_map(step, mesh=mesh, in_specs=here, out_specs=here, check_vma=False)
    run = jax.jit(mapped, donate_argnums=(0, 1), keep_unused=True)
    state = data_parallel.init_state(tx, x, mesh, _AXIS)
    held = list(run(jnp.zeros_like(x), state, x))
    mean = np.asarray(held[0], np.float64)

    def again() -> None:
        held[:] = jax.block_until_ready(run(*held, x))

    return again, mean


def _sum(link: Link, x: Array, count: int, clock: Callable[..., list[float]]) -> list[float]:
    """Seconds of decoding so many payloads into one mean."""
    layout = Plan.of(Gather(link), x, sizes=(1,)).layout
    key = jnp.zeros(2, jnp.uint32)
    batches, worker = layout.batches, jnp.zeros((), jnp.uint32)
    if not batches:
        raise ValueError(f"`way` must compress a matrix of shape {x.shape}, got {link!r}")

    def encode(x: Array) -> tuple[Any, Any]:
        stacks, _ = trees.stacks(layout, x)
        own = send.send(key, batches, stacks, send.Memory((), send.init(batches)), worker, _AXIS)
        return own.payloads, own.sides

    def total(mean: PyTree, payloads: PyTree, sides: PyTree) -> PyTree:
        del mean
        return receive.mean(key, batches, payloads, sides, None, count)

    payloads, sides = jax.jit(jax.vmap(encode, axis_name=_AXIS))(x[None])
    many = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * count), payloads)
    sides = jax.tree.map(lambda leaf: leaf[0], sides)
    run = jax.jit(total, donate_argnums=0, keep_unused=True)
    held = [tuple(jnp.zeros(b.like.shape, b.dtype) for b in batches)]

    def again():
        held[:] = [jax.block_until_ready(run(held[0], many, sides))]

    return clock(again)


def times(
    run: Callable[[], Any], repeats: int = 5, meet: Callable[[], Any] | None = None
) -> list[float]:
    """Seconds of so many calls, after two that warm up."""
    found = []
    for turn in range(repeats + 2):
        if meet is not None:
            meet()
        start = time.perf_counter()
        run()
        if turn >= 2:
            found.append(time.perf_counter() - start)
    return found


def copy(elements: int = 2**22, repeats: int = 9) -> float:
    """Seconds an element of a float32 copy on the first device, into a buffer that is there."""
    x = jnp.ones(elements)
    run = jax.jit(lambda out, x: x + 1, donate_argnums=0, keep_unused=True)
    held = [jnp.zeros(elements)]

    def again():
        held[:] = [jax.block_until_ready(run(held[0], x))]

    return min(times(again, repeats)) / elements
