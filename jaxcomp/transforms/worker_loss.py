"""The loss of one worker, inside of the mapped function, and what follows from it for all."""

import fnmatch
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax

from jaxcomp.backend import axes
from jaxcomp.exchange import over_workers
from jaxcomp.layout import trees
from jaxcomp.mesh import objects, per_worker
from jaxcomp.misuse import batch_scale, uniform
from jaxcomp.transforms import outputs, pmean, weights
from jaxcomp.types import AxisName, PyTree

Weight = str | Callable[..., Any] | float | None
"""The path of a value beside the loss, a function of the batches, a number, or None."""


class WorkerLoss:
    """The work of one worker in a step, inside of the mapped function.

    Attributes:
        loss_fn: the loss, or the function that returns its value.
        own: the function of its own value and gradients.
        axis_name: the axes of the workers.
        paired: whether `loss_fn` returns a pair.
        sums: the globs of values that are added up.
        weight: how much a worker counts.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        own: Callable[..., Any],
        axis_name: AxisName,
        paired: bool,
        sums: tuple[str, ...],
        weight: Weight,
    ):
        self.loss_fn, self.own, self.axis_name, self.paired = loss_fn, own, axis_name, paired
        self.sums, self.weight = sums, weight
        if isinstance(weight, str):
            self.sums = (*sums, weight)

    def run(
        self,
        tx: Any,
        key: Any,
        memory: PyTree,
        args: list,
        placed: int,
        keywords: tuple[str, ...],
        batches: set[int],
    ) -> tuple[Any, PyTree, PyTree]:
        """The value of all workers, the compressed gradients, and the next memory.

        Args:
            tx: the mean.
            key: the key of the step.
            memory: the memory, or None.
            args: the arguments of the loss, those by name last.
            placed: how many are by position.
            keywords: the names of the others.
            batches: the numbers of the batches.
        """
        named = dict(zip(keywords, args[placed:], strict=True))
        found = self._changes(args, placed, keywords, batches)
        (loss, aux), grads = self.own(*args[:placed], **named)
        kept, rest = objects.select(aux, objects.dynamic(aux))
        weight = self._number(kept, [args[number] for number in sorted(batches)])
        share = None if weight is None else weights.share(weight, self.axis_name)
        every = frozenset(axes.names(self.axis_name))
        known = [
            (x, every if number in batches else frozenset())
            for number, arg in enumerate(args)
            for x in jax.tree.leaves(arg)
            if isinstance(x, jax.Array)
        ]
        leaves = jax.tree.leaves(kept)
        if axes.size(self.axis_name) == 1:
            differ = [False] * len(leaves)
        else:
            differ = uniform.differ(leaves, known, self.axis_name)
        means = functools.partial(over_workers.mean, axis_name=self.axis_name)
        beside = outputs.of_all(
            kept, differ, found and found[1:], self.sums, means, share, self.axis_name
        )
        aux = objects.combine(beside, rest, per_worker.is_per_worker)
        grads, memory = pmean.averaged(tx, grads, key, memory, _NO_MEMORY, weight=weight)
        return (means([loss], weight=share)[0], aux), grads, memory

    def _changes(
        self, args: list, placed: int, keywords: tuple[str, ...], batches: set[int]
    ) -> list[batch_scale.Found] | None:
        """How the loss and the values beside it change with the number of examples.

        Raises:
            ValueError: for a loss that is a sum, or a mean of unequal numbers without a weight.
        """

        def value(*args: Any) -> Any:
            named = dict(zip(keywords, args[placed:], strict=True))
            found = self.loss_fn(*args[:placed], **named)
            return found if self.paired else (found, ())

        def arrays(*plain: Any) -> Any:
            found = objects.call(value, list(plain), rest, self.axis_name)
            return found.results if isinstance(found, objects.Returned) else found

        if axes.size(self.axis_name) == 1:  # All that is averaged or added up is the whole.
            return None
        plain, rest = objects.part(tuple(args), batches)
        found = batch_scale.results(arrays, plain, batches)
        if found is None:
            warnings.warn(
                "`loss_fn` is another program for twice the number of examples, so that its sums "
                "cannot be told from its means: values beside the loss that are sums must be named "
                "in `sums`, and the loss must be a mean over its batch.",
                stacklevel=2,
            )
            return None
        loss = found[0].scale
        if loss.grows:
            raise ValueError(
                "`loss_fn` must return the mean over its batch, got a value that is "
                f"{loss.by:g} times as large for twice the examples{_at(loss.at)}: divide a sum by "
                "the number of examples of the batch that the loss gets"
            )
        counted = next((one.scale.counted for one in found if one.scale.counted), "")
        if self.weight is None and counted:
            raise ValueError(
                f"`loss_fn` divides by a number that it counts in its own batch{_at(counted)}. "
                "Where such numbers differ, the mean over the workers is not that over all "
                "examples: give `weight`, the path of that number beside the loss, as in "
                "weight='total_weights', or a function of the batches that returns it; weight=1.0 "
                "if the numbers are equal"
            )
        return found

    def _number(self, aux: PyTree, batches: list) -> Any:
        """How much this worker counts."""
        if not isinstance(self.weight, str):
            return self.weight(*batches) if callable(self.weight) else self.weight
        paths = {trees.path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(aux)}
        found = fnmatch.filter(paths, self.weight)
        if len(found) != 1:
            raise ValueError(
                f"`weight` must be the path of one value beside the loss, {sorted(paths)[:6]}, or "
                f"a glob that names one, got {self.weight!r}, which names {found or 'none'}"
            )
        return paths[found[0]]


def _at(line: str) -> str:
    return f" at {line}" if line else ""


_NO_MEMORY = (
    "`memory` must be given for this codec, link or gate, which needs memory from step to step: "
    "make it with memory = grad_fn.init(params), and call "
    "value, grads, memory = grad_fn(..., key=step, memory=memory)"
)
