"""Checks of a codec on slices of a batch, and on the largest values of each dtype."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.base import Codec
from jaxcomp.layout import batches as batches_, trees
from jaxcomp.numerics import addition, noise
from jaxcomp.testing.programs import SEED
from jaxcomp.types import Array, PyTree

_ROWS, _SIZE = 3, 64


def assert_follows_first(codec: Codec) -> None:
    """Checks that a slice of a batch is encoded and decoded as in the whole batch.

    The slice has the buckets from number one on, and a key whose `first` is one. `TwoShot` relies
    on this, because each worker has different buckets, and so does every receiver of a slice.

    Args:
        codec: the codec.

    Raises:
        AssertionError: if a bucket's bits depend on its position in the array, not on its number.
    """
    for batch, x, count in _batches(codec, jnp.float16):
        whole = _there_and_back(batch.codec, 0, x, count)
        # As many rows as the whole, so that nothing is compiled twice; the last is not compared.
        part = _there_and_back(batch.codec, 1, np.roll(x, -1, 0), np.roll(count, -1))
        for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True):
            want, got = np.asarray(a)[1:], np.asarray(b)[:-1]
            if want.tobytes() != got.tobytes():
                raise AssertionError(
                    f"{codec!r} must draw the noise of bucket i of an array from the number "
                    "key.first + i, when it encodes and when it decodes: a part of a batch, with "
                    f"key.first = 1, differs from the same rows of the whole batch in "
                    f"{np.sum(want != got)} of {want.size} values"
                )


def assert_handles_largest(codec: Codec, dtypes: tuple[str, ...] = ("float16", "bfloat16")) -> None:
    """Checks that the largest finite value of a dtype decodes to a finite value.

    Args:
        codec: the codec.
        dtypes: the dtypes to test; for "float64" the largest float32, since scales are float32.

    Raises:
        AssertionError: with the dtype and the input.
    """
    for dtype in dtypes:
        largest = float(addition.limit(dtype))
        for batch, x, count in _batches(codec, dtype):
            real = np.arange(x.shape[1]) < count[:, None]
            inputs = {
                "in every element": np.where(real, largest, 0),
                "of both signs": np.where(real, np.where(x > 0, largest, -largest), 0),
                "in one element": np.where(np.arange(x.shape[1]) == 3, -largest, 0) * real,
            }
            for name, given in inputs.items():
                _, y = _there_and_back(batch.codec, 0, given.astype(dtype), count)
                y = np.asarray(y, np.float64)
                growth = 1 + (codec.variance_bound(x.shape[1]) or 0)
                bound = largest * max(np.sqrt(x.shape[1]), growth) * 1.01
                if not (np.abs(y) <= bound).all():  # False for NaN.
                    raise AssertionError(
                        f"{codec!r} must give finite output for the largest "
                        f"{dtype}, {largest:g}, {name}, below {bound:g}; "
                        f"{np.sum(~(np.abs(y) <= bound))} of {y.size} elements are not"
                    )


def assert_keeps_zeros(codec: Codec) -> None:
    """Checks that zeros among other elements decode to zeros, if the codec says so.

    The padding of such a codec is not set to zero again after decoding.

    Args:
        codec: the codec.

    Raises:
        AssertionError: with the number of zeros that became something else.
    """
    if not codec.facts.keeps_zeros:
        return
    for batch, x, count in _batches(codec, jnp.float16):
        x = np.where(np.arange(x.shape[1]) % 3 == 1, x, 0)
        _, y = _there_and_back(batch.codec, 0, x, count)
        changed = np.sum((x == 0) & (np.asarray(y) != 0))
        if changed:
            raise AssertionError(
                f"{codec!r} has keeps_zeros=True, but decodes {changed} of {np.sum(x == 0)} zeros "
                "to other values"
            )


def _batches(codec: Codec, dtype: Any) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
    """The batches of a few equal leaves, their rows, and how many elements of each are real."""
    drawn = np.random.default_rng(SEED).standard_normal((_ROWS, _SIZE))
    leaves = list(jnp.asarray(drawn, dtype))
    for batch in trees.layout(codec, leaves).batches:
        yield batch, np.asarray(trees.stack(batch, leaves)), np.asarray(batch.counts())


@functools.partial(jax.jit, static_argnums=0)
def _there_and_back(
    codec: Codec, first: Array | int, x: Array, count: Array
) -> tuple[PyTree, Array]:
    """The payload of rows that are numbered from `first`, and what it is decoded to."""
    key = batches_.batch_key(noise.raw(SEED), 0, 0, first)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    payload, _ = codec.encode(key, x, count, codec.init(like))
    return payload, codec.decode(key, payload, like)
