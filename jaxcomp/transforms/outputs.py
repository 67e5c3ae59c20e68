"""Values that a loss returns beside its own, as they would be of the whole batch.

Inside of the mapped function each worker has computed it for its own part of the batch.
"""

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.backend import axes
from jaxcomp.layout import trees
from jaxcomp.mesh.per_worker import PerWorker, is_per_worker
from jaxcomp.misuse.batch_scale import Found
from jaxcomp.types import Array, AxisName, PyTree

_ROWS = "rows of examples, along dimension "
_COUNT = "equal count on all workers"
_EQUAL, _BY_COUNT = "mean of equal numbers", "mean of counted numbers"


def of_all(
    aux: PyTree,
    differ: Sequence[bool],
    found: Sequence[Found] | None,
    sums: tuple[str, ...],
    means: Callable[..., list[Array]],
    share: Array | None,
    axis_name: AxisName,
) -> PyTree:
    """The values of the whole batch; rows of examples stay split, as `PerWorker`.

    Args:
        aux: this worker's values.
        differ: whether each leaf differs between workers.
        found: how each leaf changes with the number of examples; None if it is not known.
        sums: globs of the paths of leaves that are added up.
        means: the means of arrays over the workers, by `weight=`.
        share: this worker's weight for means of unequal numbers; None if all are equal.
        axis_name: the axes of the workers.

    Raises:
        ValueError: for a sum that `sums` does not name, for other values without a mean, and for a
            glob that names nothing.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(aux)
    paths = [trees.path_name(path) for path, _ in flat]
    for glob in sums:
        if not fnmatch.filter(paths, glob):
            raise ValueError(
                f"`sums` must name values beside the loss, {_named(paths)}, got {glob!r}, which "
                "names none"
            )
    kinds = [
        _kind(path, x, own, None if found is None else found[number], sums)
        for number, (path, (_, x), own) in enumerate(zip(paths, flat, differ, strict=True))
    ]
    wrong = [path for path, kind in zip(paths, kinds, strict=True) if kind == "unnamed sum"]
    if wrong:
        names = ", ".join(map(repr, [*sums, *wrong]))
        raise ValueError(
            "`loss_fn` returns sums or counts over this worker's own examples beside its value, "
            f"{_named(wrong)}, which no mean over the workers gives: name them, as in "
            f"sums=({names}{',' if len(wrong) + len(sums) == 1 else ''}); they are added up"
        )
    for path, (_, x), kind in zip(paths, flat, kinds, strict=True):
        if kind == "unknown":
            raise ValueError(
                "`loss_fn` must return beside its value floating means, which are averaged over "
                f"the workers, rows of examples, or what is the same on all workers, got '{path}' "
                f"of {jnp.result_type(x)}{list(jnp.shape(x))}, which differs between them: name it "
                f"in `sums`, as in sums=({path!r},), if it is a sum, or return it for each example"
            )
    reduced = [_reduced(x, kind, axis_name) for (_, x), kind in zip(flat, kinds, strict=True)]
    for kind, weight in ((_EQUAL, None), (_BY_COUNT, share)):
        numbers = [number for number, one in enumerate(kinds) if one == kind]
        for number, x in zip(
            numbers, means([flat[n][1] for n in numbers], weight=weight), strict=True
        ):
            reduced[number] = x
    return jax.tree.unflatten(treedef, reduced)


def joined(tree: PyTree) -> PyTree:
    """The rows of all workers, one after another, outside of the mapped function."""

    def one(node: Any) -> Any:
        if not is_per_worker(node) or not node.kind.startswith(_ROWS):
            return node
        at = int(node.kind.removeprefix(_ROWS))
        x = jnp.moveaxis(node.tree, 0, at)
        return x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :])

    return jax.tree.map(one, tree, is_leaf=is_per_worker)


def _kind(path: str, x: Any, own: bool, found: Found | None, sums: tuple[str, ...]) -> str:
    """The kind of a value."""
    dtype = jnp.result_type(x)
    named = any(fnmatch.fnmatchcase(path, glob) for glob in sums)
    if not own:  # A constant may still count this worker's examples.
        counts = found is not None and found.scale.by == 2
        return "same" if not counts else _COUNT if named else "unnamed sum"
    if named:
        return "sum"
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return "key"
    if found is not None and found.rows is not None:
        return f"{_ROWS}{found.rows}"
    if found is not None and found.scale.grows:
        return "unnamed sum" if found.scale.by == 2 else "unknown"
    if jnp.issubdtype(dtype, jnp.inexact) and (found is not None or jnp.ndim(x) == 0):
        return _EQUAL if found is not None and not found.scale.counted else _BY_COUNT
    return "unknown"


def _reduced(x: Any, kind: str, axis_name: AxisName) -> PyTree:
    """A value of all workers that is no mean."""
    if kind == "sum":
        return lax.psum(x, axis_name)
    if kind == _COUNT:
        return x * axes.size(axis_name)
    if kind == "key":  # As the state of a stream, which must be one for all: the first worker's.
        raw = axes.first(jax.random.key_data(x), axis_name)
        return jax.random.wrap_key_data(raw, impl=jax.random.key_impl(x))
    if kind.startswith(_ROWS):
        return PerWorker(x[None], kind)
    return x


def _named(paths: Sequence[str]) -> str:
    shown = ", ".join(f"'{path}'" for path in paths[:6])
    return shown + (" …" if paths[6:] else "") if paths else "of which there are none"
