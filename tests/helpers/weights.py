"""Weights as files of pieces and back, without a URL."""

import hashlib
import io

import jax
import numpy as np

from jaxcomp.weights import encoding
from jaxcomp_weights import drafts, selections, stores
from jaxcomp_weights.layouts import Layout, Leaf, Tile

CODINGS = ("small", "fast")


def layout_of(arrays, piece):
    """The layout of whole arrays in one part."""
    leaves = tuple(Leaf(f"leaf{n}", x.dtype.name, x.shape) for n, x in enumerate(arrays))
    tiles = tuple(Tile(n, (0,) * x.ndim, x.shape) for n, x in enumerate(arrays))
    return Layout(leaves, (tiles,), piece)


def stream_of(data):
    """A file as a reader opens it."""
    return stores.Stream("a file", io.BytesIO(data), len(data), hashlib.sha256(data).hexdigest())


def snapshot(arrays, layout):
    """The file of a snapshot, and the checksums."""
    sums = []
    data = b"".join(encoding.snapshot([jax.numpy.asarray(x) for x in arrays], layout, 0, sums))
    return data, sums


def patch(old, new, layout, coding, sums):
    """The file of a patch, and the checksums after it."""
    after = list(sums)
    tiles = ([jax.numpy.asarray(x) for x in arrays] for arrays in (old, new))
    return b"".join(encoding.patch(*tiles, layout, 0, coding, after)), after


def begun(layout, data):
    """A draft with a snapshot."""
    draft = drafts.Draft(layout, selections.select(layout, None))
    draft.apply(stream_of(data), 0, snapshot=True)
    return draft


def patched(draft, layout, data):
    """A draft with a patch on top of another one."""
    after = drafts.Draft(layout, selections.select(layout, None), draft.arrays, draft.sums)
    after.apply(stream_of(data), 0, snapshot=False)
    return after


def same(draft, arrays):
    """Whether a draft has these arrays, bit for bit."""
    none = np.zeros(0, np.uint8)
    return all(draft.arrays.get(n, none).tobytes() == x.tobytes() for n, x in enumerate(arrays))
