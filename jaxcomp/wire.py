"""What crosses the wire: a payload tree as one dense buffer, its cost, and the compiled truth.

Small minor dimensions must not reach a collective (a TPU pads them to 128 lanes), and a
collective a leaf costs a latency each, so everything that a worker sends is one 1-D buffer.
"""

import concurrent.futures
import functools
import math
import re
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import UInt32

from jaxcomp import axes, bits, compiler, trees
from jaxcomp.base import Codec, Reducer
from jaxcomp.policy import Policy
from jaxcomp.types import Array, AxisName, Batches, PyTree


def fuse(payload: PyTree) -> UInt32[Array, " words"]:
    """Every array of a payload tree, one after another, as 32-bit words.

    Narrow dtypes are packed; each array begins on a word.
    """
    leaves = jax.tree.leaves(payload)
    if not leaves:
        return jnp.zeros(0, jnp.uint32)
    words = [_to_words(leaf) for leaf in leaves]
    join = compiler.outlined(compiler.joined, size=sum(part.size for part in words))
    # Apart from the encoder, whose loops would else be those over the words of the buffer: a CPU
    # takes five times as long. The barrier keeps the compiler from moving the decoder's widening
    # before the collective.
    return lax.optimization_barrier(join(words))


def split(buffer: UInt32[Array, "*workers words"], like: PyTree) -> PyTree:
    """The payload trees that buffers stand for; leading axes of `buffer` are kept."""
    leaves, treedef = jax.tree.flatten(like)
    counts = [_word_count(leaf) for leaf in leaves]
    if sum(counts) != buffer.shape[-1]:
        raise ValueError(
            f"`buffer` must have {sum(counts)} words for this payload, got shape {buffer.shape}"
        )
    parts, start = [], 0
    for leaf, count in zip(leaves, counts, strict=True):
        parts.append(_from_words(buffer[..., start : start + count], leaf))
        start += count
    return jax.tree.unflatten(treedef, parts)


def gather(payload: PyTree, axis_name: AxisName, collectives: int = 1) -> PyTree:
    """Everyone's payload trees, stacked, by so many collectives."""
    leaves, treedef = jax.tree.flatten(payload)
    found = [split(axes.gather(fuse(part), axis_name), part) for part in _runs(leaves, collectives)]
    return jax.tree.unflatten(treedef, [leaf for part in found for leaf in part])


def exchange(rows: PyTree, axis_name: AxisName, collectives: int = 1) -> PyTree:
    """Of trees with an axis of workers, row `j` to worker `j`, and what came for this one."""
    leaves, treedef = jax.tree.flatten(rows)
    found = []
    for part in _runs(leaves, collectives):
        likes = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in part]
        sent = jax.vmap(fuse, axis_size=axes.size(axis_name))(part)
        found += split(axes.exchange(sent, axis_name), likes)
    return jax.tree.unflatten(treedef, found)


def collectives(payload: PyTree, at_most: int) -> int:
    """How many there are, where `gather` or `exchange` is given this payload and that number."""
    return len(_runs(jax.tree.leaves(payload), at_most))


def _runs(leaves: list[Any], count: int) -> list[list[Any]]:
    return trees.even_runs(leaves, [_word_count(leaf) for leaf in leaves], count) or [[]]


def fused_bytes(like: PyTree) -> int:
    """Bytes of the fused buffer of a payload tree."""
    return 4 * sum(_word_count(leaf) for leaf in jax.tree.leaves(like))


def _word_count(leaf) -> int:
    size, width = math.prod(leaf.shape), jnp.dtype(leaf.dtype).itemsize
    return size * (width // 4) if width >= 4 else -(-size // (4 // width))


def _to_words(x: Array) -> Array:
    """An array of any shape as 32-bit words, in a shape as near to its own as may be."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    width = 8 * x.dtype.itemsize
    if width >= 32:
        return lax.bitcast_convert_type(x, jnp.uint32)
    codes = lax.bitcast_convert_type(x.reshape(-1), jnp.dtype(f"uint{width}")).astype(jnp.uint32)
    return bits.pack(codes[None], bits=width)[0]


def _from_words(words: Array, like) -> Array:
    dtype = jnp.dtype(like.dtype)
    lead, size, width = words.shape[:-1], math.prod(like.shape), 8 * dtype.itemsize
    if width >= 32:
        if width > 32:
            words = words.reshape(*lead, size, width // 32)
        return lax.bitcast_convert_type(words, dtype).reshape(*lead, *like.shape)
    codes = bits.unpack(words.reshape(-1, words.shape[-1]), bits=width, size=size)
    codes = codes.astype(jnp.dtype(f"uint{width}")).reshape(*lead, *like.shape)
    if dtype == jnp.bool_:
        return codes.astype(dtype)
    return lax.bitcast_convert_type(codes, dtype)


def payload_like(batches: Batches) -> tuple[Any, ...]:
    """Shapes and dtypes of the payload of every batch, without computing any."""
    return tuple(_payload_like(batch, jax.config.read("jax_enable_x64")) for batch in batches)


@functools.lru_cache(maxsize=4096)
def _payload_like(batch: Any, x64: bool) -> Any:
    """Tracing an encoder takes a while, and reducers are compared by their bytes many times."""
    del x64  # What dtypes come out may depend on it.

    def encode():
        key = trees.batch_key(jnp.zeros(2, jnp.uint32), 0, 0)
        x = jnp.zeros((batch.buckets, batch.size), batch.dtype)
        count = jnp.zeros(batch.buckets, jnp.int32)
        return batch.codec.encode(key, x, count, batch.codec.init(batch.like))[0]

    return jax.eval_shape(encode)


def agreed_bytes(batches: Batches, workers: int) -> Fraction:
    """Bytes that one device sends so that its codecs may agree on something before they encode.

    It is what agreeing adds to the state of a codec, such as the scale of every bucket; what only
    some steps agree on, and the state keeps, as adaptive levels are, is left out.
    """
    x64 = jax.config.read("jax_enable_x64")
    return ring(sum(_agreed(batch, x64) for batch in batches), workers)


@functools.lru_cache(maxsize=4096)
def _agreed(batch: Any, x64: bool) -> int:
    """The bytes of an all-reduce of what one batch agrees on."""
    if not batch.codec.agrees:
        return 0

    def agree(x):
        key = trees.batch_key(jnp.zeros(2, jnp.uint32), 0, 0)
        count, state = jnp.zeros(batch.buckets, jnp.int32), batch.codec.init(batch.like)
        after = batch.codec.agree(key, x, count, state, "agree")
        summed = batch.codec.sided and batch.codec.linear
        return state, batch.codec.side(after) if summed else after

    def shapes():
        rows = jax.ShapeDtypeStruct((1, *batch.like.shape), batch.dtype)
        with jax.enable_x64(x64):
            return jax.eval_shape(jax.vmap(agree, axis_name="agree"), rows)

    # In a thread of its own, where no mapped function is around that would want types of its axes.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as alone:
        before, after = alone.submit(shapes).result()
    kept, all_of_it = (
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) for tree in (before, after)
    )
    return max(all_of_it - kept, 0)


def wire_bytes(
    codec_or_reducer: Any, like: PyTree, workers: "int | tuple[int, ...] | None" = None
) -> int:
    """Bytes that one worker sends for a tree like this.

    For a codec or a policy: **payload bytes**, what one worker puts into the collective, once.
    For a reducer: **link bytes**, what one device sends over its link for the whole reduction.
    A bare codec takes every leaf, while `compressed_mean` leaves small ones dense: for what a
    training step sends, see `describe`.

    Args:
        codec_or_reducer: a codec (which takes every leaf), a `Policy`, or a reducer.
        like: the tree, or its shapes and dtypes.
        workers: the number of workers, or one for each axis; needed for a reducer, ignored for a
            codec.

    Raises:
        ValueError: if a reducer comes without `workers`, or the first argument is neither.

    Example:
        >>> import jaxcomp
        >>> like = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
        >>> wire_bytes(jaxcomp.qsgd_inf(bits=4, bucket_size=512), like)
        532480
        >>> wire_bytes(jaxcomp.Dense(), like, workers=8)
        7340032
    """
    if isinstance(codec_or_reducer, Reducer):
        if workers is None:
            raise ValueError(
                "`workers` must be given for a reducer: its link bytes depend on how many there "
                "are. For payload bytes, pass the codec."
            )
        for number in workers if isinstance(workers, tuple) else (workers,):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(
                    "`workers` must be a positive integer, or a tuple of one for each axis, got "
                    f"{workers!r}"
                )
        if isinstance(workers, tuple) and not codec_or_reducer.hierarchical:
            workers = math.prod(workers)  # To a reducer over one axis they are all the same.
        return math.ceil(codec_or_reducer.link_bytes(like, workers))
    if not isinstance(codec_or_reducer, Codec | Policy):
        raise ValueError(
            f"`codec_or_reducer` must be a codec, a Policy or a reducer, got {codec_or_reducer!r}"
        )
    plan = trees.layout(codec_or_reducer, like)
    return fused_bytes(payload_like(plan.batches)) + trees.dense_bytes(plan)


_COLLECTIVE = re.compile(
    r" = (?P<shape>.*?) "
    r"(?P<op>all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
    r"|collective-broadcast|ragged-all-to-all)(?P<start>-start)?\("
)
_CHAIN = re.compile(r"channel_id=\d+(?=, .*\bchain_id=)")
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*[a-z0-9]*)\[(?P<dims>[\d,]*)\](?:\{(?P<layout>[^}]*)\})?")
_BITS = {"pred": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "bf16": 16, "c64": 64, "c128": 128}


def collective_bytes(compiled: Any) -> dict[str, int]:
    """Bytes that one device sends in a compiled program, by kind of collective.

    Read from the compiled HLO in its physical layout (padding of tiles included), with the usual
    ring algorithms: of `n` devices, each sends `n − 1` times what it contributes to an
    all-gather, `2(n − 1)/n` of an all-reduce, `(n − 1)/n` of a reduce-scatter's or all-to-all's
    input. A collective inside a loop counts once.

    Args:
        compiled: what `jax.jit(f).lower(...).compile()` returns, or its text.

    Returns:
        Operation name to bytes; operations that do not occur are left out.

    Example:
        >>> collective_bytes(jax.jit(lambda x: x + 1).lower(1.0).compile())
        {}
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    header = text[: text.find("\n")]
    everyone = 1
    for field in ("replica_count", "num_partitions"):
        found = re.search(rf"{field}=(\d+)", header)
        everyone *= int(found.group(1)) if found else 1
    totals: dict[str, Fraction | int] = {}
    chains: set[str] = set()
    for line in text.splitlines():
        found = _COLLECTIVE.search(line)
        if not found:
            continue
        chain = _CHAIN.search(line)  # A TPU repeats one among the programs that run beside it.
        if chain and chain[0] in chains:
            continue
        chains |= {chain[0]} if chain else set()
        op, group = found["op"], _group_size(line, everyone)
        arrays = list(_ARRAY.finditer(found["shape"]))
        if found["start"]:
            arrays = [a for a in arrays if (a["dtype"], a["dims"]) != ("u32", "")]  # Contexts.
            if op != "all-reduce" and len(arrays) > 1:
                arrays = arrays[len(arrays) // 2 :]  # (operands, results)
        sizes = [_physical_bytes(array) for array in arrays]
        totals[op] = totals.get(op, 0) + _sent(op, sum(sizes), group)
    return {op: math.ceil(size) for op, size in totals.items() if size}


def _sent(op: str, result: int, group: int) -> Fraction | int:
    """Bytes one device sends, from the bytes of the collective's result."""
    if op == "all-reduce":
        return ring(result, group)
    if op == "reduce-scatter":
        return result * (group - 1)
    if op in ("collective-permute", "collective-broadcast"):
        return result
    return Fraction(result * (group - 1), group)


def ring_bytes(size: int, workers: int) -> int:
    """Bytes one device sends in a ring all-reduce of `size` bytes over `workers` devices."""
    return math.ceil(ring(size, workers))


def ring(size: int, workers: int) -> Fraction:
    """The same before it is rounded, so that sums are: XLA may join all-reduces, or not."""
    return Fraction(2 * (workers - 1) * size, workers)


def _group_size(line: str, everyone: int) -> int:
    found = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    if found:
        return int(found.group(1))
    found = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if found:
        return len(found.group(1).split(","))
    found = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line)
    if found:  # By the names of the mesh's axes.
        sizes = dict(re.findall(r"'?([\w.]+)'?=(\d+)", found.group(1)))
        return math.prod(int(sizes[name]) for name in re.findall(r"[\w.]+", found.group(2)))
    return everyone


def _physical_bytes(array: re.Match) -> int:
    """Bytes of an HLO array with its tiles' padding: `u32[4,64]{1,0:T(8,128)}` is 8 × 128 words."""
    dims = [int(d) for d in array["dims"].split(",") if d]
    order, _, tiling = (array["layout"] or "").partition(":")
    tile = re.search(r"T\(([\d,]+)\)", tiling)
    if tile and order:
        sides = [int(t) for t in tile.group(1).split(",")]
        minor_to_major = [int(d) for d in order.split(",")]
        for side, dim in zip(reversed(sides), minor_to_major, strict=False):
            dims[dim] = -(-dims[dim] // side) * side
    name = array["dtype"]
    width = _BITS.get(name) or int(re.findall(r"\d+", name)[0])
    return -(-math.prod(dims) * width // 8)
