"""The leaves that a mean sends dense, and warnings where these are not as its user may think."""

import warnings
from collections.abc import Callable

import jax

from jaxcomp.base import Codec, Reducer, ReducerFacts
from jaxcomp.codecs import low_rank
from jaxcomp.feedback import Link
from jaxcomp.layout.policy import Policy
from jaxcomp.layout.trees import Layout
from jaxcomp.reducers import choose
from jaxcomp.types import PyTree


def warn(source: Link | Reducer, params: PyTree) -> None:
    """Warns of rules without a leaf, of a mean without compression, and of merged layers."""
    if choose.uplink(source) is None or not jax.tree.leaves(params):
        return
    whole = choose.plan(source, params, sizes=(1, 1))
    plan = whole.layout
    warn_of(plan, "compressed_mean", whole.given.facts.for_small_leaves)
    for hint in low_rank.merged_layers(plan):
        warnings.warn(f"{hint}; jaxcomp.describe shows each leaf.", stacklevel=3)


def warn_of(plan: Layout, name: str, advice: str = ReducerFacts.for_small_leaves) -> None:
    """Warns of rules without a leaf, and of a plan without compression, for what has the name."""
    if plan.unused:
        warnings.warn(
            f"no leaf is decided by the policy's rules {plan.unused}: the leaves are {plan.paths}",
            stacklevel=4,
        )
    if plan.paths and not plan.batches:
        reasons = ", ".join(f"'{reason}'" for reason in dict.fromkeys(plan.reasons))
        warnings.warn(
            f"{name} compresses no leaf of these parameters, all of which are sent dense "
            f"({reasons}). jaxcomp.describe shows each; {advice}.",
            stacklevel=4,
        )


def dense_leaves(codec: "Codec | Policy | Link | Reducer") -> Callable[[PyTree], PyTree]:
    """A mask for `optax.masked` of the leaves that `compressed_mean` sends dense.

    With a feedback that has momentum, dense leaves need separate momentum after the mean.

    Args:
        codec: as given to `compressed_mean`.

    Returns:
        A function from a tree to a tree of bools, True for the leaves that are sent dense.

    Raises:
        ValueError: if `codec` is not a codec, `Policy`, `Link` or reducer.

    Example:
        >>> import jax.numpy as jnp, jaxcomp
        >>> like = {"kernel": jnp.zeros((64, 64)), "bias": jnp.zeros(64)}
        >>> dense_leaves(jaxcomp.sign())(like)
        {'bias': True, 'kernel': False}
    """
    source = choose.link_or_reducer(codec)

    def mask(tree: PyTree) -> PyTree:
        layout = choose.plan(source, tree, sizes=(1,)).layout
        dense = [number in layout.dense for number in range(len(layout.likes))]
        return jax.tree.unflatten(layout.treedef, dense)

    return mask
