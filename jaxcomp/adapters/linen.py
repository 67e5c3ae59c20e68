"""Flax's linen: boxes of arrays, checkpoints in msgpack, and loops of `jax.pmap`."""

import sys
from typing import Any, final

from jaxcomp.base.adapter import Adapter
from jaxcomp.types import PyTree

_OF_REPLICAS = (
    "jaxcomp: data_parallel takes one copy of the parameters and of the state, and the whole "
    "batch. If a leading axis of devices is left from a program of jax.pmap, leave out "
    "flax.jax_utils.replicate and unreplicate, shard, and x[0]."
)

_stored: dict[str, Any] = {}
"""By the name of a class, the module of flax that knows it."""


@final
class Linen(Adapter):
    """Boxes such as `nn.Partitioned`, and checkpoints of `flax.serialization`."""

    module = "flax"
    complete = "__version__"
    hints = {"but the existing parameter it received has shape": _OF_REPLICAS}

    def boxed(self, tree: PyTree, *, add: bool) -> PyTree:
        """The workers' axis has no name of the model's."""
        meta: Any = sys.modules["flax.core.meta"]
        change = meta.add_axis if add else meta.remove_axis
        return change(tree, 0, {meta.PARTITION_NAME: None})

    def store(self, cls: Any) -> None:
        serialization: Any = sys.modules["flax.serialization"]
        if _stored.get(cls.__name__) is serialization:
            return
        _stored[cls.__name__] = serialization  # Before registering, which asks for the hash again.

        def restore(node: Any, state: dict) -> Any:
            if node.stored not in state:  # The name may say which setting the memory belongs to.
                raise ValueError(
                    f"`state` must hold {node.stored!r} to be restored into this target, got "
                    f"{sorted(state)}"
                )
            tree = serialization.from_state_dict(node.tree, state[node.stored])
            return cls.tree_unflatten(node.tree_flatten_with_keys()[1], (tree,))

        serialization.register_serialization_state(
            cls, lambda node: {node.stored: serialization.to_state_dict(node.tree)}, restore
        )
