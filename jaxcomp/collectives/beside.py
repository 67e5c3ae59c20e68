"""Values that a loss returns beside it, as `jax.value_and_grad` returns them of the whole batch."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.backend import axes
from jaxcomp.layout import trees
from jaxcomp.types import Array, PyTree

_MEAN, _ROWS, _SAME = "mean", "rows", "same"


class Beside:
    """A tree of means over the workers, of their rows, and of values that are the same on all.

    It remembers, from inside of the mapped function, which leaf is of which kind.

    Args:
        names: the axes of the workers.
    """

    def __init__(self, names: tuple[str, ...]):
        self.names = names

    def take(self, tree: PyTree) -> list[Any]:
        """The leaves of the tree."""
        flat, self._treedef = jax.tree_util.tree_flatten_with_path(tree)
        self._paths = [trees.path_name(path) for path, _ in flat]
        return [leaf for _, leaf in flat]

    def apart(
        self, leaves: Sequence[Any], differ: Sequence[bool], examples: set[int]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """The numbers to average, the values that are the same on all workers, and the rows.

        Args:
            leaves: the leaves of this worker.
            differ: whether each differs between workers.
            examples: the numbers of examples of this worker's batch.

        Raises:
            ValueError: for a leaf that is none of these.
        """
        self._kinds = [
            self._kind(path, x, examples) if own else _SAME
            for path, x, own in zip(self._paths, leaves, differ, strict=True)
        ]
        means, same, rows = (
            [x for x, one in zip(leaves, self._kinds, strict=True) if one == kind]
            for kind in (_MEAN, _SAME, _ROWS)
        )
        return means, same, rows

    def join(self, means: Sequence[Array], same: Sequence[Array], rows: Sequence[Array]) -> PyTree:
        """The tree of all workers."""
        kinds = {_MEAN: iter(means), _SAME: iter(same), _ROWS: iter(rows)}
        return jax.tree.unflatten(self._treedef, [next(kinds[kind]) for kind in self._kinds])

    def _kind(self, path: str, x: Any, examples: set[int]) -> str:
        if jnp.ndim(x) == 0 and jnp.issubdtype(jnp.result_type(x), jnp.floating):
            return _MEAN
        if jnp.ndim(x) and jnp.shape(x)[0] in examples:
            return _ROWS
        over = repr(self.names[0] if len(self.names) == 1 else self.names)
        raise ValueError(
            "`loss_fn` must return beside its value floating numbers, which are averaged over the "
            "workers, rows of examples, or what is the same on all workers, got "
            f"'{path}' of {jnp.result_type(x)}{list(jnp.shape(x))}, which differs between them: "
            f"return jax.lax.psum(x, {over}) of a count or a sum, jax.lax.pmean(x, {over}) of a "
            f"mean, or jax.lax.all_gather(x, {over}) for the values of all workers"
        )


def same_by_type(leaves: Sequence[Any], names: tuple[str, ...]) -> list[Array]:
    """Values that are the same on all workers, such as whole weights, typed as such."""
    found = [jnp.asarray(x) for x in leaves]
    unknown = [number for number, x in enumerate(found) if set(names) & axes.varying_axes(x)]
    bits = [x.astype(jnp.int32) if x.dtype == bool else x for x in found]
    for number, x in zip(unknown, lax.pmax([bits[n] for n in unknown], names), strict=True):
        found[number] = x.astype(found[number].dtype)
    return found
