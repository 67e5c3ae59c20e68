"""The statistics in an optimizer's state, as plain numbers."""

from typing import Any

import jax
import numpy as np
from jax import core

from jaxcomp.transforms.mean import CompressedMeanState, GateState
from jaxcomp.transforms.stats import Stats
from jaxcomp.transforms.wrappers import SkipNonfiniteState
from jaxcomp.types import PyTree

Record = dict[str, float]
"""Numbers of one step by name."""


def record(state: PyTree) -> Record:
    """The statistics of the last step, as floats by name.

    Args:
        state: the state of any optax transformation with a `compressed_mean(..., stats=True)` in
            it, after a step.

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
    measured = [(path, mean) for path, mean in means if isinstance(mean.stats, Stats)]
    if not measured:
        raise ValueError(
            "`state` must hold statistics: make it with compressed_mean(..., stats=True), got "
            f"{'a mean without them' if means else 'a state without compressed_mean'}"
        )
    found = {"step": max(_number(mean.step) for _, mean in measured)}
    for number, (path, mean) in enumerate(measured):
        prefix = f"{_label(path, number)}/" if len(measured) > 1 else ""
        whole = mean.stats._asdict()
        groups = whole.pop("groups") or {}
        found |= {prefix + name: _number(value) for name, value in whole.items()}
        for group, stats in groups.items():
            values = stats._asdict().items()
            found |= {f"{prefix}{group}/{name}": _number(value) for name, value in values}
    for _, skipping in _nodes(state, SkipNonfiniteState):
        found["skipped"] = found.get("skipped", 0.0) + _number(skipping.skipped)
    for _, gate in _nodes(state, GateState):
        for name in ("rounds", "messages"):
            found[name] = found.get(name, 0.0) + _number(getattr(gate, name))
    return found


def _nodes(state: PyTree, kind: type) -> list[tuple[tuple, Any]]:
    """The nodes of a type with their paths, those within others of the type left out."""
    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda node: isinstance(node, kind))
    found = [(path, node) for path, node in nodes if isinstance(node, kind)]
    inside = [
        (path + below, node)
        for path, whole in found
        for field, child in zip(whole._fields, whole, strict=True)
        for below, node in _nodes({field: child}, kind)
    ]
    return found + inside


def _label(path: tuple, number: int) -> str:
    """The last name of a dict on the way to a mean, such as a label of `optax.partition`."""
    names = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
    return names[-1] if names else str(number)


def _number(value: Any) -> float:
    if isinstance(value, core.Tracer):
        raise ValueError("`state` must be the result of a step, got one that is being traced")
    return float(np.mean(np.asarray(value, np.float64)))
