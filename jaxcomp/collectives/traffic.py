"""The bytes of a step of a fully sharded model, from shapes alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxcomp.collectives import costs, shards, sums
from jaxcomp.collectives.costs import LinkBytes
from jaxcomp.collectives.shard import Home, Links, crossings


def moved(
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
    likes = {}
    for home, like in layer:
        dense = links.weights[0][1].choose(home.path, like.shape)[0] is None
        dtype = links.dtype if links.dtype and dense else like.dtype
        likes[home.path] = jax.ShapeDtypeStruct(home.part(like.shape, sizes), dtype)
    for axis, weights, gradients, at in crossings(homes, wholes, links):
        n, rest = sizes[axis], {path: x for path, x in likes.items() if path not in at}
        if at:
            here = {path: likes[path] for path in at}
            yield (
                axis,
                costs.wire_bytes(
                    shards.all_gather, here, weights, n, back=gradients, axis=at, tiled=False
                ),
            )
            for path, place in at.items():
                shape = likes[path].shape
                longer = (*shape[:place], n, *shape[place:])
                likes[path] = jax.ShapeDtypeStruct(longer, likes[path].dtype)
        if rest:
            yield axis, costs.wire_bytes(sums.pvary, rest, gradients, n)
