"""Lookups in sharded tables, which XLA cannot partition under a manual axis.

XLA ends the process when it partitions a gather in a step that is manual over some axes, if the
operand is split over automatic axes, and no dimension of it over all of them at once. Without
manual axes it does not.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxcomp.misuse import lineage
from jaxcomp.types import AxisName, PyTree


def warn(
    gradients: PyTree,
    specs: Sequence[PartitionSpec],
    axis_name: AxisName,
    automatic: tuple[str, ...],
) -> None:
    """Warns of lookups in a sharded table, before XLA ends the process without a Python error.

    Args:
        gradients: the traced gradients, in whose history the loss is.
        specs: the spec of each leaf.
        axis_name: the axes of the workers.
        automatic: the other axes of several devices.
    """
    flat = jax.tree_util.tree_leaves_with_path(gradients)
    shapes = {
        leaf.shape: (jax.tree_util.keystr(path, simple=True, separator="/"), spec)
        for (path, leaf), spec in zip(flat, specs, strict=True)
        if _is_refused(spec, automatic)
    }
    rule = _Lookups(shapes, automatic)
    if shapes:
        lineage.trace([leaf for _, leaf in flat], rule)
    for shape, line in rule.found.items():
        path, spec = shapes[shape]
        warnings.warn(
            f"{path!r}, of spec {spec}, is indexed{line}: where a step is manual over "
            f"{axis_name!r}, XLA may abort the process (Check failed in its partitioner) for a "
            f"lookup in a table that is not split over all automatic axes {automatic} in one "
            "dimension. Look up by jax.nn.one_hot(tokens, rows) @ table, or split one dimension "
            f"over all of them, as in PartitionSpec({automatic}).",
            stacklevel=4,
        )


def _is_refused(spec: PartitionSpec, automatic: tuple[str, ...]) -> bool:
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
    over = [set(entry) & set(automatic) for entry in entries]
    return any(over) and set(automatic) not in over


class _Lookups:
    """The shape of the table that a value is, or None; finds gathers from these."""

    constant = None

    def __init__(self, shapes: Mapping[tuple[int, ...], Any], automatic: tuple[str, ...]):
        self.shapes, self.automatic = shapes, automatic
        self.found: dict[tuple[int, ...], str] = {}

    def unknown(self, atom: Any) -> tuple[int, ...] | None:
        shape = _shape(atom)
        return shape if shape in self.shapes else None

    def literal(self, value: Any) -> None:
        del value

    def join(self, one: Any, other: Any) -> Any:
        return one if one == other else None

    def through(self, step: lineage.Step, inputs: list[Any]) -> Any:
        table = inputs[0] if inputs else None
        if table is None or _shape(step.inputs[0]) != table:
            return None
        if step.name == "gather":
            line = step.line()
            self.found.setdefault(table, line and f" at {line}")
        if step.name == "sharding_constraint":
            spec = getattr(step.params.get("sharding"), "spec", None)
            return table if spec is None or _is_refused(spec, self.automatic) else None
        return table if len(inputs) == 1 and _shape(step.outputs[0]) == table else None

    def decide(self, step: lineage.Step, by: Any, results: list[Any]) -> list[Any]:
        del step, by
        return results


def _shape(atom: Any) -> tuple[int, ...] | None:
    return getattr(getattr(atom, "aval", None), "shape", None)
