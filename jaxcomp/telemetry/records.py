"""The statistics in an optimizer's state, as plain numbers."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import core

from jaxcomp.transforms.groups import GroupStats
from jaxcomp.transforms.mean import CompressedMeanState, GateState
from jaxcomp.transforms.stats import Stats
from jaxcomp.transforms.wrappers import SkipNonfiniteState
from jaxcomp.types import PyTree

Record = dict[str, float]
"""Numbers of one step by name."""

_NAMED: dict[type, frozenset[str]] = {
    CompressedMeanState: frozenset({"key", "step"}),
    Stats: frozenset({"relative_error", "residual_ratio", "payload_bytes", "link_bytes"}),
    GroupStats: frozenset(GroupStats._fields),
    SkipNonfiniteState: frozenset(SkipNonfiniteState._fields),
    GateState: frozenset({"gate_key", "rounds", "messages"}),
}
"""The fields that mark a mapping as one of our states: those that are never empty."""


def record(state: PyTree) -> Record:
    """The statistics of the last step, as floats by name.

    Args:
        state: the state of any optax transformation with a `compressed_mean(..., stats=True)` in
            it, after a step; or a pytree that holds it, such as flax's `TrainState`,
            `nnx.Optimizer` and `nnx.state(optimizer)`.

    Returns:
        `step`, the number of steps, and each field of `Stats`. With several means in the state,
        such as those of `optax.partition`, a field is "NAME/field": the mean's label, or its number
        where it has none. With groups of leaves, "GROUP/field" is the same for each field of
        `GroupStats`. Then, where the state counts them, the totals `skipped` (of
        `skip_nonfinite`), `rounds` and `messages` (of gates).

    Raises:
        ValueError: if the state holds no statistics, or is being traced.

    Example:
        >>> import jax.numpy as jnp, jaxcomp, optax
        >>> codec = jaxcomp.qsgd_inf(bits=4)
        >>> tx = optax.chain(jaxcomp.compressed_mean(codec, "data", stats=True), optax.sgd(0.1))
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> state = jaxcomp.init_state(tx, jnp.ones((64, 64)), mesh, "data")
        >>> step = jaxcomp.data_parallel(lambda s, x: tx.update(x[0], s), mesh, "data")
        >>> _, state = step(state, jnp.ones((1, 64, 64)))
        >>> found = record(state)
        >>> found["step"], found["payload_bytes"], found["residual_ratio"]
        (1.0, 2080.0, 0.0)
    """
    means = _nodes(state, CompressedMeanState)
    measured = [
        (path, mean, stats) for path, mean in means if (stats := _as(mean.stats, Stats)) is not None
    ]
    if not measured:
        raise ValueError(
            "`state` must hold statistics: make it with compressed_mean(..., stats=True), got "
            f"{'a mean without them' if means else 'a state without compressed_mean'}"
        )
    found = {"step": max(_number(mean.step) for _, mean, _ in measured)}
    labels = _labels([path for path, *_ in measured])
    for label, (_, _, stats) in zip(labels, measured, strict=True):
        prefix = f"{label}/" if len(measured) > 1 else ""
        whole = stats._asdict()
        groups = whole.pop("groups") or {}
        found |= {prefix + name: _number(value) for name, value in whole.items()}
        for group, of_group in groups.items():
            values = _as(of_group, GroupStats)._asdict().items()
            found |= {f"{prefix}{group}/{name}": _number(value) for name, value in values}
    for _, skipping in _nodes(state, SkipNonfiniteState):
        found["skipped"] = found.get("skipped", 0.0) + _number(skipping.skipped)
    for _, gate in _nodes(state, GateState):
        for name in ("rounds", "messages"):
            found[name] = found.get(name, 0.0) + _number(getattr(gate, name))
    return found


def _nodes(state: PyTree, kind: type) -> list[tuple[tuple, Any]]:
    """The nodes of a type with their paths, and those within them."""
    nodes = jax.tree_util.tree_leaves_with_path(
        state, is_leaf=lambda node: _as(node, kind) is not None
    )
    found = [(path, known) for path, node in nodes if (known := _as(node, kind)) is not None]
    inside = [
        (path + below, node)
        for path, whole in found
        for field, child in zip(whole._fields, whole, strict=True)
        for below, node in _nodes({field: child}, kind)
    ]
    return found + inside


def _as(node: Any, kind: type) -> Any:
    """The node as a state of this type; None for another node.

    `nnx.State`, and states as plain dicts, hold mappings in place of named tuples, and leave out
    fields without arrays.
    """
    if isinstance(node, kind):
        return node
    fields: Any = kind._fields  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(node, Mapping) and _NAMED[kind] <= set(node) <= set(fields):
        return kind(**{name: node.get(name, ()) for name in fields})
    return None


def _labels(paths: list[tuple]) -> list[str]:
    """The labels of the means; their numbers where two would have the same."""
    found = []
    for number, path in enumerate(paths):
        # The last name of a dict on the way to a mean, such as a label of `optax.partition`.
        names = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
        if "inner_states" in names:  # In an `nnx.State`, fields are names of mappings too.
            names = names[: len(names) - names[::-1].index("inner_states") + 1]
        found.append(names[-1] if names else str(number))
    return found if len(set(found)) == len(found) else [str(n) for n in range(len(found))]


def _number(value: Any) -> float:
    if isinstance(value, core.Tracer):
        raise ValueError("`state` must be the result of a step, got one that is being traced")
    return float(np.mean(np.asarray(value, np.float64)))
