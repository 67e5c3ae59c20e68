"""The bytes of a step of a fully sharded model, from shapes alone."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxcomp.collectives import costs, shards, sums
from jaxcomp.collectives.costs import LinkBytes
from jaxcomp.collectives.crossings import Home, Links, crossings, of_weights
from jaxcomp.collectives.shard import may_be_coded


def moved_bytes(
    layer: Sequence[tuple[Home, Any]], links: Links, sizes: Mapping[str, int]
) -> Iterator[tuple[str, LinkBytes]]:
    """The bytes of leaves that travel together, over one axis after another.

    Args:
        layer: the home of each leaf, and shape and dtype of the whole leaf.
        links: the codecs.
        sizes: the sizes of the mesh's axes.
    """
    homes = {home.path: home for home, _ in layer}
    wholes = {home.path: like.shape for home, like in layer}
    likes, first = {}, of_weights(links.weights[0][1], homes, wholes)
    for home, like in layer:
        dense = first.choose(home.path, like.shape)[0] is None
        dtype = links.dtype if links.dtype and dense and may_be_coded(like) else like.dtype
        likes[home.path] = jax.ShapeDtypeStruct(home.part(like.shape, sizes), dtype)
    for axis, weights, gradients, at, _ in crossings(homes, wholes, links):
        trained = {path: x for path, x in likes.items() if not homes[path].frozen}
        n, rest = sizes[axis], {path: x for path, x in trained.items() if path not in at}
        if at:
            for frozen in (False, True):
                here = {
                    path: likes[path]
                    for path in at
                    if homes[path].frozen == frozen and may_be_coded(likes[path])
                }
                places = {path: at[path] for path in here}
                forward, backward = costs.wire_bytes(
                    shards.all_gather, here, weights, n, back=gradients, axis=places, tiled=False
                )
                yield axis, LinkBytes(forward, 0 if frozen else backward)
            plain = [likes[path] for path in at if not may_be_coded(likes[path])]
            size = sum(math.prod(x.shape) * x.dtype.itemsize for x in plain)
            yield axis, LinkBytes((n - 1) * size, 0)
            for path, place in at.items():
                shape = likes[path].shape
                longer = (*shape[:place], n, *shape[place:])
                likes[path] = jax.ShapeDtypeStruct(longer, likes[path].dtype)
        if rest:
            yield axis, costs.wire_bytes(sums.pvary, rest, gradients, n)
