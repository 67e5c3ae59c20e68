"""The checks of a whole traced step."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxcomp.backend import axes
from jaxcomp.misuse import lineage, own_gradients, uniform
from jaxcomp.types import AxisName, PyTree


def check(results: PyTree, known: Sequence[tuple[Any, bool]], axis_name: AxisName) -> None:
    """Refuses collectives that some workers would not reach, and gradients summed twice.

    Args:
        results: the results of the mapped function, traced.
        known: its arguments, each with whether it differs between workers.
        axis_name: the axes of the workers.

    Raises:
        ValueError: as `uniform.check_program` and `own_gradients.check_program` do.
    """
    if axes.size(axis_name) == 1:
        return
    try:
        steps = lineage.history(jax.tree.leaves(results))
        uniform.check_program(steps, known, axis_name)
        own_gradients.check_program(steps, known, axis_name)
    except (AttributeError, KeyError):  # This version of JAX stores equations in another way.
        return
