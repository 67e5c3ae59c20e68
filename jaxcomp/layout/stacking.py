"""Recognises stacked layers by the shapes of a tree, as `flax.linen.scan` makes them."""

import collections
from collections.abc import Sequence
from typing import NamedTuple

from jaxcomp.layout.trees import Layout


class Stack(NamedTuple):
    """Leaves whose first axis is very likely an index of layers or experts.

    Attributes:
        glob: the paths of the leaves, for a rule.
        length: the size of the first axis.
        leaves: the numbers of the leaves.
    """

    glob: str
    length: int
    leaves: tuple[int, ...]


def stacks(layout: Layout) -> tuple[Stack, ...]:
    """The largest subtrees that are very likely stacks; where shapes cannot tell, none.

    All leaves of a stack have the same first axis. Convolutions have biases of one axis. Heads have
    a common first axis too, but the matrices of one attention layer have one pair of sizes, and
    biases of one size; a stack must have several.
    """
    inside = collections.defaultdict(list)
    for number, path in enumerate(layout.paths):
        names = path.split("/")
        for depth in range(len(names)):
            inside["/".join(names[:depth])].append(number)
    found: list[Stack] = []
    for prefix in sorted(inside, key=len):
        leaves = tuple(inside[prefix])
        known = any(set(leaves) <= set(stack.leaves) for stack in found)
        if not known and _stacked([layout.likes[number].shape for number in leaves]):
            glob = f"{prefix}/*" if prefix else "*"
            found.append(Stack(glob, layout.likes[leaves[0]].shape[0], leaves))
    return tuple(found)


def _stacked(shapes: Sequence[tuple[int, ...]]) -> bool:
    first = {shape[:1] for shape in shapes}
    if len(first) != 1 or first <= {(), (0,), (1,)}:
        return False
    matrices = [shape for shape in shapes if len(shape) > 2]
    vectors = [shape for shape in shapes if len(shape) == 2]
    if not vectors or all(shape[0] == shape[1] for shape in matrices):  # As of square windows.
        return False
    sizes = {tuple(sorted(shape[1:])) for shape in matrices}
    return len(matrices) > 1 and (len(sizes) > 1 or len(set(vectors)) > 1)
