"""Warnings of leaves that a mean treats otherwise than its user may think."""

import warnings

import jax

from jaxcomp.base import Reducer, ReducerFacts
from jaxcomp.codecs import low_rank
from jaxcomp.feedback import Link
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
