"""The bytes of collectives, from shapes alone."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp import checks
from jaxcomp.base import Codec
from jaxcomp.collectives import arguments, moves, shards, sums
from jaxcomp.collectives.transfer import Transfer
from jaxcomp.layout.policy import Policy
from jaxcomp.types import PyTree

_AXIS = "workers"


class LinkBytes(NamedTuple):
    """The bytes that one device sends over its links.

    Attributes:
        forward: those of the collective.
        backward: those of its backward pass, where types know what is the same on all workers.
    """

    forward: int
    backward: int


def wire_bytes(
    collective: Callable[..., PyTree],
    like: PyTree,
    codec: "Codec | Policy | None",
    workers: int,
    *,
    back: "Codec | Policy | None" = None,
    down: "Codec | Policy | None" = None,
    axis: PyTree = None,
    scatter_dimension: PyTree = None,
    split_axis: int | None = None,
    concat_axis: int | None = None,
    tiled: bool | None = None,
    per_row: bool | None = None,
    perm: Sequence[tuple[int, int]] | None = None,
) -> LinkBytes:
    """The bytes that one device sends for one call of a collective, forward and back.

    Args:
        collective: one of this package, such as `jaxcomp.collectives.all_gather`.
        like: one worker's tree, or its shapes and dtypes.
        codec: the codec of the call, or that of the backward pass of `pvary`.
        workers: the number of workers.
        back: as for the call; None for its default, as for all that follow.
        down: as for `psum`.
        axis: as for `all_gather`.
        scatter_dimension: as for `psum_scatter`.
        split_axis: as for `all_to_all`.
        concat_axis: as for `all_to_all`.
        tiled: as for the call.
        per_row: as for the call.
        perm: as for `ppermute`.

    Raises:
        ValueError: for another function, or an argument that it does not have.

    Example:
        >>> import jax, jax.numpy as jnp, jaxcomp
        >>> from jaxcomp import collectives
        >>> like = jax.ShapeDtypeStruct((128, 1024), jnp.float32)
        >>> codecs = {"codec": jaxcomp.qsgd_inf(bits=8), "back": jaxcomp.qsgd_inf(bits=4)}
        >>> wire_bytes(collectives.all_gather, like, workers=8, **codecs)
        LinkBytes(forward=924672, backward=465920)
        >>> wire_bytes(collectives.all_gather, like, None, workers=8)
        LinkBytes(forward=3670016, backward=3670016)
    """
    if collective not in _KINDS:
        names = ", ".join(one.__name__ for one in _KINDS)
        raise ValueError(f"`collective` must be one of {names}, got {collective!r}")
    checks.integer("workers", workers, 1)
    settings = {
        "down": down,
        "axis": axis,
        "scatter_dimension": scatter_dimension,
        "split_axis": split_axis,
        "concat_axis": concat_axis,
        "tiled": tiled,
        "per_row": per_row,
        "perm": perm,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    kind, defaults = _KINDS[collective]
    unknown = settings.keys() - defaults.keys()
    if unknown:
        raise ValueError(
            f"`{min(unknown)}` must be None for {collective.__name__}, which has "
            f"{', '.join(sorted({*defaults, 'back'}))}"
        )
    forward, backward = arguments.policies(codec, back)
    given = {**defaults, **settings}
    if missing := [name for name, value in given.items() if value is inspect.Parameter.empty]:
        raise ValueError(f"`{missing[0]}` must be given for {collective.__name__}")
    for name in {"axis", "scatter_dimension"} & given.keys():
        given[name] = arguments.places(like, given[name])
    if "down" in given:
        given["down"] = forward if down is None else arguments.policy("down", down)
    how = kind(axis_name=_AXIS, codec=forward, back=backward, **{"per_row": True, **given})
    transposed = how.transposed(typed=True)
    return LinkBytes(
        how.link_bytes(like, workers), transposed.link_bytes(_result(how, like, workers), workers)
    )


def _result(how: Transfer, like: PyTree, workers: int) -> PyTree:
    """The shapes and dtypes of what a worker receives."""
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    found = jax.eval_shape(
        jax.vmap(how.run, (None, 0), axis_name=_AXIS, axis_size=workers),
        key,
        jax.tree.map(lambda x: jax.ShapeDtypeStruct((workers, *x.shape), x.dtype), like),
    )
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), found)


def _settings(collective: Callable[..., PyTree]) -> dict[str, Any]:
    """The arguments that say what is sent to whom, with their defaults."""
    others = {"tree", "axis_name", "codec", "back", "key", "site", "replicated"}
    found = inspect.signature(collective).parameters
    return {name: one.default for name, one in found.items() if name not in others}


_KINDS: Mapping[Callable[..., PyTree], tuple[Callable[..., Transfer], dict[str, Any]]]
_KINDS = MappingProxyType(
    {
        function: (kind, _settings(function))
        for function, kind in (
            (shards.all_gather, shards.AllGather),
            (shards.psum_scatter, shards.PsumScatter),
            (sums.psum, sums.Psum),
            (sums.pmean, sums.Psum),
            (sums.pvary, sums.Pvary),
            (moves.all_to_all, moves.AllToAll),
            (moves.ppermute, moves.Ppermute),
        )
    }
)
