"""Gradients of other parameters than those that a transformation moves."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.misuse import lineage
from jaxcomp.types import PyTree


def check_view(updates: PyTree, params: PyTree, offset: PyTree) -> None:
    """Refuses gradients that were taken at the centre, where workers have parameters of their own.

    Such gradients depend on `params` and not on the offset. Gradients that are arguments of the
    traced program may depend on anything, and are taken, as are all where the offset is a constant.

    Args:
        updates: the gradients.
        params: the centre, as given to the update.
        offset: what is added to it, as the state has it.

    Raises:
        ValueError: naming `jaxcomp.view`.
    """
    offsets = [leaf for leaf in jax.tree.leaves(offset) if jnp.size(leaf)]
    if not offsets or not all(map(lineage.is_computed, offsets)):
        return
    rule, grads = _Reached(), jax.tree.leaves(updates)
    known = [(leaf, _CENTRE) for leaf in jax.tree.leaves(params)]
    found = lineage.trace(grads, rule, [*known, *((leaf, _OFFSET) for leaf in offsets)])
    if any(fact & _CENTRE for fact in found) and not any(fact & _OFFSET for fact in found):
        raise ValueError(
            "`updates` must be gradients at this worker's own parameters, got gradients at "
            "`params`, which do not move between exchanges. Take them at jaxcomp.view(params, "
            "state): loss, grads = jaxcomp.value_and_grad(loss_fn, axis_name)(jaxcomp.view(params, "
            "state), batch), with the state of the whole chain."
        )


_CENTRE, _OFFSET = 1, 2


class _Reached:
    """Bit flags: a value depends on the centre, or on the offset."""

    constant = 0

    def unknown(self, atom: Any) -> int:
        del atom
        return 0

    def literal(self, value: Any) -> int:
        del value
        return 0

    def join(self, one: int, other: int) -> int:
        return one | other

    def decide(self, step: lineage.Step, by: int, results: list[int]) -> list[int]:
        del step
        return [by | fact for fact in results]

    def through(self, step: lineage.Step, inputs: list[int]) -> int:
        del step
        reached = 0
        for each in inputs:
            reached |= each
        return reached


def check_shapes(updates: PyTree, like: PyTree, name: str) -> None:
    """Refuses gradients of other shapes than `like`, such as those of each example.

    Args:
        updates: the gradients.
        like: the parameters, or memory of their shapes; another structure is not compared.
        name: what `like` is.

    Raises:
        ValueError: naming the leaf and both shapes.
    """
    if jax.tree.structure(updates) != jax.tree.structure(like):
        return
    pairs = zip(jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(like), strict=True)
    for (path, leaf), expected in pairs:
        if jnp.shape(leaf) != jnp.shape(expected):
            leaf_name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"`updates` must have the shapes of the {name}, got '{leaf_name}' of shape "
                f"{jnp.shape(leaf)} for {jnp.shape(expected)}. Gradients of each example must be "
                "clipped and averaged over this worker's examples before the mean over workers "
                "(docs/data_parallel.md, 'Differential privacy')"
            )
