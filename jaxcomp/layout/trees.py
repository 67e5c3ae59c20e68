"""Pytree ↔ leaves ↔ batches of buckets: the only conversion between gradients and codecs.

`grouping` says which leaves are encoded as one batch.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.backend import xla
from jaxcomp.base import Codec, adapter
from jaxcomp.layout import batches as batches_, grouping, policy as policy_
from jaxcomp.layout.batches import Batch, Piece, batch_keys, padded_buckets
from jaxcomp.layout.policy import Policy
from jaxcomp.numerics import addition, noise
from jaxcomp.types import Array, PyTree


@dataclasses.dataclass(frozen=True)
class Layout:
    """The plan of a tree: its batches and its dense leaves.

    Attributes:
        batches: the batches, each encoded by one call.
        dense: the numbers of the leaves that are sent dense.
        likes: shape and dtype of every leaf.
        paths: path of every leaf, as `"params/Dense_0/kernel"`.
        codecs: codec of every leaf, None for dense.
        reasons: the reason for the codec of every leaf.
        unused: globs of the policy that match no leaf.
        treedef: the structure of the tree.
    """

    batches: tuple[Batch, ...]
    dense: tuple[int, ...]
    likes: tuple[jax.ShapeDtypeStruct, ...]
    paths: tuple[str, ...]
    codecs: tuple[Codec | None, ...]
    reasons: tuple[str, ...]
    unused: tuple[str, ...]
    treedef: Any

    @property
    def dense_likes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of every leaf that is sent dense."""
        return tuple(self.likes[number] for number in self.dense)


class TreePayload(NamedTuple):
    """The payload of every batch, and the dense leaves."""

    batches: tuple[Any, ...]
    dense: tuple[Array, ...]


def layout(
    codec: "Codec | Policy",
    tree: PyTree,
    slices: int = 1,
    runs: int = 1,
    *,
    mixed: bool = False,
    per_row: bool = False,
) -> Layout:
    """Plans the batches of a tree; a bare codec encodes every leaf.

    Args:
        codec: a codec, or a policy.
        tree: arrays, or their shapes and dtypes.
        slices: the number of buckets into which to cut a leaf whose codec has no bucket size.
        runs: the number of runs of about equal size into which the leaves are grouped; runs do not
            share a batch, so that one can be encoded before the gradients of the next are computed.
        mixed: batches are the same for every dtype of the leaves, and each has a dtype that
            represents those of its own; for plans of memory, which is made from parameters and used
            with gradients. Otherwise leaves of different dtypes do not share a batch.
        per_row: no bucket has elements of two rows of a leaf, which is a multiple of
            `grouping.row_bucket` long.

    Raises:
        ValueError: if a leaf is not of a real floating dtype.
    """
    rules = codec if isinstance(codec, Policy) else policy_.everywhere(codec)
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    paths = tuple(path_name(path) for path, _ in flat)
    likes = tuple(_like(path, leaf) for path, (_, leaf) in zip(paths, flat, strict=True))
    dtypes = [addition.wide(like.dtype) if mixed else like.dtype for like in likes]
    chosen = [
        rules.choose(path, like.shape, dtype)
        for path, like, dtype in zip(paths, likes, dtypes, strict=True)
    ]
    dense, groups = [], {}
    for number, (like, (picked, _)) in enumerate(zip(likes, chosen, strict=True)):
        if picked is None or like.size == 0:
            dense.append(number)
            continue
        row = like.shape[-1] if per_row and like.shape else None
        if row is None:
            size = grouping.bucket_of(picked, like.size, slices)
        else:
            size = grouping.row_bucket(picked, row)
        dtype = np.dtype(np.float32) if mixed else like.dtype
        groups.setdefault((picked, dtype, size), []).append(Piece(number, 0, like.size))
    return Layout(
        batches=tuple(
            b.in_dtype_of(likes) for b in grouping.batches(groups, slices, runs, whole=not per_row)
        ),
        dense=tuple(dense),
        likes=likes,
        paths=paths,
        codecs=tuple(picked for picked, _ in chosen),
        reasons=tuple(why for _, why in chosen),
        unused=rules.unused(paths, [like.shape for like in likes]),
        treedef=treedef,
    )


def path_name(path) -> str:
    """A leaf's path as a user would write it: `params/Dense_0/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _like(path: str, leaf: Any) -> jax.ShapeDtypeStruct:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.dtype(leaf.dtype).itemsize < 2:
        model = "".join(f" {one.of_leaves}" for one in adapter.present() if one.of_leaves)
        frozen = f"Leave it out with `jaxcomp.freeze(tx, frozen)`, or cast it.{model}"
        is_complex = jnp.issubdtype(leaf.dtype, jnp.complexfloating)
        raise ValueError(
            f"every leaf must have a floating dtype of at least 16 bits, got '{path}' of "
            f"{leaf.dtype}{list(leaf.shape)}. {addition.SPLIT if is_complex else frozen}"
        )
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def stack(batch: Batch, leaves: Sequence[Any]) -> Array:
    """The batch's pieces as `[buckets, size]`, each padded with zeros to whole buckets, or rows."""
    parts = []
    if batch.segments is not None:
        return batch.segments.join(_flat(batch, leaves), batch.slices)
    for piece in batch.pieces:
        flat = jnp.reshape(leaves[piece.leaf], -1).astype(batch.dtype)
        if (piece.start, piece.stop) != (0, flat.shape[0]):
            flat = flat[piece.start : piece.stop]
        padding = padded_buckets(piece, batch.size) * batch.size - flat.shape[0]
        parts += [flat, jnp.zeros(padding, batch.dtype)] if padding else [flat]
    return xla.join(parts).reshape(batch.buckets, batch.size)


def _flat(batch: Batch, leaves: Sequence[Any]) -> list[Array]:
    """The leaves of a batch of whole leaves."""
    own = [jnp.asarray(leaves[piece.leaf]) for piece in batch.pieces]
    return [jnp.reshape(leaf, -1).astype(batch.dtype) for leaf in own]


def stacks(plan: Layout, tree: PyTree) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """The compressed leaves of a tree, an array for each batch, and its dense leaves."""
    leaves = plan.treedef.flatten_up_to(tree)
    return (
        tuple(stack(batch, leaves) for batch in plan.batches),
        tuple(leaves[i] for i in plan.dense),
    )


def assemble(plan: Layout, stacks: Sequence[Array], dense: Sequence[Array]) -> PyTree:
    """The tree whose batches are `stacks` and whose dense leaves are `dense`."""
    return _whole(plan, _unstacked(plan.batches, plan.likes, stacks), dense)


def _whole(plan: Layout, leaves: list[Array | None], dense: Sequence[Array]) -> PyTree:
    """The tree of these leaves, of which the dense ones are still missing."""
    for number, leaf in zip(plan.dense, dense, strict=True):
        leaves[number] = leaf
    return jax.tree.unflatten(plan.treedef, leaves)


def _unstacked(
    batches: Sequence[Batch],
    likes: Sequence[jax.ShapeDtypeStruct],
    stacks: Sequence[Array | tuple[Array, ...]],
    rows: Mapping[int, int] = MappingProxyType({}),
) -> list[Array | None]:
    """The leaves whose batches are `stacks`, or already cut; None for the others.

    The parts of a leaf are put together in rows of `rows[leaf]`, if it is among them.
    """
    found: list[list[tuple[int, Array]]] = [[] for _ in likes]
    for batch, whole in zip(batches, stacks, strict=True):
        if isinstance(whole, tuple):
            for piece, part in zip(batch.pieces, whole, strict=True):
                found[piece.leaf].append((0, part))
            continue
        flat = whole.reshape(-1)
        if len(batch.pieces) == 1 and batch.pieces[0].stop - batch.pieces[0].start == flat.size:
            found[batch.pieces[0].leaf].append((batch.pieces[0].start, flat))
            continue
        if batch.segments is not None:
            for piece, part in zip(batch.pieces, batch.segments.cut(whole), strict=True):
                found[piece.leaf].append((0, part[: piece.stop]))
            continue
        begins, row = [], 0
        for piece in batch.pieces:
            begins.append(row * batch.size)
            row += padded_buckets(piece, batch.size)
        lengths = [piece.stop - piece.start for piece in batch.pieces]
        parts = xla.cut(flat, begins, lengths)
        for piece, part in zip(batch.pieces, parts, strict=True):
            found[piece.leaf].append((piece.start, part))
    leaves: list[Array | None] = []
    for number, (like, parts) in enumerate(zip(likes, found, strict=True)):
        ordered = [part for _, part in sorted(parts, key=lambda pair: pair[0])]
        ordered = [addition.saturate(part, like.dtype) for part in ordered]
        if not ordered:
            leaves.append(None)
            continue
        if number in rows:
            lanes = math.gcd(rows[number], *(part.size for part in ordered))
            whole = jnp.concatenate([xla.in_rows(part, lanes) for part in ordered])
        else:
            whole = xla.join(ordered)
        leaves.append(whole.reshape(like.shape))
    return leaves


def encode(
    codec: "Codec | Policy", key: Any, tree: PyTree, *, worker: Array | int = 0
) -> TreePayload:
    """Encodes an array or a pytree without a mesh, as worker `worker` would.

    Args:
        codec: a codec, for every leaf, or a `Policy`.
        key: the key of the step: a seed, a raw `uint32[2]` key or a `jax.random.key`.
        tree: floating arrays of any shape, all on the same devices.
        worker: the number of the worker whose private noise is drawn.

    Returns:
        The payload: exactly the arrays that would cross the network.

    Raises:
        ValueError: if `key` is not a key, or a leaf is not floating.

    Example:
        >>> import jaxcomp
        >>> payload = jaxcomp.encode(jaxcomp.qsgd_inf(bits=4), 0, jnp.ones((64, 32)))
        >>> payload.batches[0].words.shape
        (4, 64)
    """
    plan = layout(codec, tree)
    leaves = [jnp.asarray(leaf) for leaf in plan.treedef.flatten_up_to(tree)]
    dense = tuple(leaves[i] for i in plan.dense)
    compressed = [None if i in plan.dense else leaf for i, leaf in enumerate(leaves)]
    return TreePayload(_encode(plan.batches, noise.raw(key), compressed, worker), dense)


# Compile it for eager callers too: it is faster, and one program for a codec and shapes.
@functools.partial(jax.jit, static_argnums=0)
def _encode(
    batches: tuple[Batch, ...], key: Array, leaves: list[Array | None], worker: Array | int
) -> tuple[PyTree, ...]:
    payloads = []
    for own, batch in zip(batch_keys(key, batches, worker), batches, strict=True):
        count, state = batch.counts(), batch.codec.init(batch.like)
        both = batch.codec.leafwise() if batch.slices == 1 else None
        if both is not None:
            payload, _ = both[0](own, _flat(batch, leaves), count, state)
        else:
            payload, _ = batch.codec.encode(own, stack(batch, leaves), count, state)
        payloads.append(payload)
    return tuple(payloads)


def decode(
    codec: "Codec | Policy",
    key: Any,
    payload: TreePayload,
    like: PyTree,
    *,
    worker: Array | int = 0,
) -> PyTree:
    """Decodes a payload of `encode` with the same codec, key and worker.

    Args:
        codec: the codec given to `encode`.
        key: the key given to `encode`.
        payload: the payload that `encode` returned.
        like: the tree, or its shapes and dtypes.
        worker: the worker given to `encode`.

    Returns:
        A tree with the structure, shapes and dtypes of `like`.

    Raises:
        ValueError: if `payload` does not belong to this codec and tree.
    """
    plan = layout(codec, like)
    if not isinstance(payload, TreePayload) or (len(payload.batches), len(payload.dense)) != (
        len(plan.batches),
        len(plan.dense),
    ):
        raise ValueError(
            f"`payload` must be what `encode` returned for this codec and a tree like `like` "
            f"({len(plan.batches)} batches, {len(plan.dense)} dense leaves), got "
            f"{jax.tree.map(jnp.shape, payload)}"
        )
    leaves = _decode((plan.batches, plan.likes), noise.raw(key), payload.batches, worker)
    return _whole(plan, leaves, payload.dense)


@functools.partial(jax.jit, static_argnums=0)
def _decode(
    static: tuple[tuple[Batch, ...], tuple[jax.ShapeDtypeStruct, ...]],
    key: Array,
    payloads: tuple[PyTree, ...],
    worker: Array | int,
) -> list[Array | None]:
    batches, likes = static

    keys = batch_keys(key, batches, worker)

    def one(number: int, payload: PyTree) -> Array:
        batch = batches[number]
        return batch.codec.decode(keys[number], payload, batch.like)

    def leaves_of(number: int, payload: PyTree) -> tuple[Array, ...] | None:
        batch = batches[number]
        both = batch.codec.leafwise() if batch.slices == 1 else None
        return None if both is None else both[1](keys[number], payload, batch.like)

    return decoded(batches, likes, payloads, one, leaves_of=leaves_of)


def decoded(
    batches: Sequence[Batch],
    likes: Sequence[jax.ShapeDtypeStruct],
    payloads: Sequence[PyTree],
    decode: Callable[[int, PyTree], Array],
    leading: int = 1,
    leaves_of: Callable[[int, PyTree], tuple[Array, ...] | None] = lambda *_: None,
) -> list[Array | None]:
    """The leaves that are in batches, from `decode(number, payload)` of each; None for the others.

    Args:
        batches: the batches of a layout.
        likes: the shapes and dtypes of the same layout.
        payloads: one payload for each batch.
        decode: a function that decodes a batch's payload to `[buckets, size]`.
        leading: the number of axes of the payloads before those of a bucket.
        leaves_of: a function that decodes a batch's payload to its leaves, each flat, where the
            codec can; None where the leaves are cut from what `decode` returns.
    """
    found, rows = [], {}
    for number, (batch, payload) in enumerate(zip(batches, payloads, strict=True)):
        if (leaves := leaves_of(number, payload)) is not None:
            found.append(leaves)
            continue
        one = functools.partial(decode, number)
        lanes = batches_.lanes(payload, batch.size, leading)
        if batch.parted:  # Decoded while the parts of the leaf are joined.
            rows[batch.pieces[0].leaf] = lanes
        else:
            one = xla.compile_separately(one, lanes, batch.buckets * batch.size)
        found.append(one(payload))
    return _unstacked(batches, likes, found, rows)


def roundtrip(
    codec: "Codec | Policy", key: Any, tree: PyTree, *, worker: Array | int = 0
) -> PyTree:
    """`decode(encode(tree))`: the tree as the other workers decode it.

    Example:
        >>> import jaxcomp
        >>> jaxcomp.roundtrip(jaxcomp.sign(), 0, jnp.array([1.0, -2.0, 3.0]))
        Array([ 2., -2.,  2.], dtype=float32)
    """
    payload = encode(codec, key, tree, worker=worker)
    return decode(codec, key, payload, tree, worker=worker)


def dense_bytes(plan: Layout, dtype: Any = None) -> int:
    """The bytes of the dense leaves, in their own dtype or in `dtype`."""
    return sum(
        math.prod(plan.likes[i].shape) * np.dtype(dtype or plan.likes[i].dtype).itemsize
        for i in plan.dense
    )
