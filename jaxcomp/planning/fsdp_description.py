"""The table of a fully sharded model behind `describe`: its leaves, their codecs, its bytes."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxcomp import tables
from jaxcomp.collectives.costs import LinkBytes
from jaxcomp.collectives.crossings import Links, of_weights
from jaxcomp.collectives.fully_sharded import FullySharded
from jaxcomp.layout.policy import NOTHING
from jaxcomp.planning.columns import PATH, SHAPE, short
from jaxcomp.tables import Column
from jaxcomp.types import PyTree


@dataclasses.dataclass(frozen=True)
class ShardedLine:
    """One leaf: the axes that split it, and its codecs over each axis that it crosses."""

    path: str
    shape: tuple[int, ...]
    split: tuple[tuple[str, ...], ...]
    weights: tuple[str, ...]
    gradients: tuple[str, ...]


_COLUMNS = (
    PATH,
    SHAPE,
    Column("split over", lambda line: ", ".join("+".join(names) or "-" for names in line.split)),
    Column("weights", lambda line: " | ".join(dict.fromkeys(line.weights))),
    Column("gradients", lambda line: " | ".join(dict.fromkeys(line.gradients))),
)


@dataclasses.dataclass(frozen=True)
class ShardedDescription:
    """The table that `describe` returns for `jaxcomp.fully_sharded`; `print` it.

    Attributes:
        lines: one for each leaf.
        axes: the axes of the workers, the slowest first.
        sent: by axis, the bytes that one device sends in a step, of weights and of gradients.
        dense: the same without compression, in the dtypes of the parameters or of `dtype`.
    """

    lines: tuple[ShardedLine, ...]
    axes: tuple[str, ...]
    sent: Mapping[str, LinkBytes]
    dense: Mapping[str, LinkBytes]

    def __str__(self) -> str:
        said = []
        for axis in self.axes:
            now, before = self.sent[axis], self.dense[axis]
            said.append(
                f"{axis}: weights {now.forward:,} bytes a device each time they are gathered "
                f"(dense {before.forward:,}), gradients {now.backward:,} (dense "
                f"{before.backward:,})"
            )
        return "\n".join([tables.text(_COLUMNS, self.lines), "", *said])


def of(sharded: FullySharded, params: PyTree) -> ShardedDescription:
    """The description of a fully sharded model.

    Args:
        sharded: what `jaxcomp.fully_sharded` returned.
        params: the parameters, or their shapes and dtypes.
    """
    links = sharded.links
    nothing = tuple((axis, NOTHING) for axis in links.axes)
    dense = dataclasses.replace(sharded, links=Links(nothing, nothing, links.dtype))
    lines = []
    for home, like in zip(sharded.parts.homes(params), jax.tree.leaves(params), strict=True):
        whole = jnp.shape(like)
        judged = whole[1:] if sharded.parts.in_layers(home.path) else whole
        own = [(of_weights(p, {home.path: home}, {home.path: judged})) for _, p in links.weights]
        weights, gradients = (
            tuple(short(policy.choose(home.path, judged)[0]) for policy in way)
            for way in (own, [policy for _, policy in links.gradients])
        )
        gradients = ("frozen",) if home.frozen else gradients
        lines.append(ShardedLine(home.path, whole, home.spec, weights, gradients))
    return ShardedDescription(
        tuple(lines), links.axes, sharded.link_bytes(params), dense.link_bytes(params)
    )
