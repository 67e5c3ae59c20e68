"""Moves an optimizer state to a chain with another compressor, with one more, or with none."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxcomp.exchange.stepping import SteppedMemory
from jaxcomp.mesh import data_parallel, per_worker, processes
from jaxcomp.transforms.mean import CompressedMeanState
from jaxcomp.types import AxisName, PyTree


def graft(tx: Any, state: PyTree, params: PyTree, mesh: Mesh, axis_name: AxisName) -> PyTree:
    """Makes a state of `tx` with the moments and counters of another chain's state.

    All optimizer state is kept. The memory of compressors, and all other state that differs
    between workers, is initialised again. A run can thus start or stop using compression, or
    change the codec:

    * from `adamw` to `chain(compressed_mean(...), adamw)`, and back;
    * from one codec, feedback or reducer to another. Unsent residuals of the old one are lost;
    * from a checkpoint that was restored without a target, as dicts and lists.

    An array is found by its name and the names of its parameter (`mu/params/Dense_0/kernel`),
    anywhere in the chain. Several arrays of the same name are matched in their order.

    Args:
        tx: the new transformation.
        state: the state of the old one, on any devices.
        params: the parameters, as for `init_state`.
        mesh: the device mesh.
        axis_name: the axis or axes that the workers are on.

    Returns:
        The state, placed as `init_state` places it. Arrays that are already in place are not
        copied: a step that donates the new state invalidates the old one.

    Raises:
        ValueError: for the state of a `sharded_optimizer`; if an array of the new optimizer's state
            is missing in `state` or has another shape or dtype there, or if an array of `state` has
            no counterpart in the new state.

    Example:
        >>> import optax
        >>> import jaxcomp
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> params = {"w": jnp.ones((64, 64))}
        >>> trained = optax.adam(1e-3).init(params)
        >>> mean = jaxcomp.compressed_mean(jaxcomp.sign(), axis_name="data")
        >>> state = graft(optax.chain(mean, optax.adam(1e-3)), trained, params, mesh, "data")
        >>> type(state[1][0]).__name__
        'ScaleByAdamState'
    """
    for node in jax.tree.leaves(state, is_leaf=_is_stepped):
        if _is_stepped(node):
            raise ValueError(
                "`state` must not be that of jaxcomp.sharded_optimizer, whose moments are rows of "
                "many leaves, and would begin anew: move it to other workers with "
                "jaxcomp.resize_workers, or train on with the same codecs"
            )
    new, typed = data_parallel.init_state(tx, params, mesh, axis_name), _is_typed(state)
    wanted, given = (_remembered(tree, typed) for tree in (new, state))
    if not typed:  # Of memory that `new` has as a node, only the name is left.
        given = {name: x for name, x in given.items() if name in wanted or not _of_memory(name)}
    for name in wanted | given:
        _check("/".join(name), wanted.get(name, []), given.get(name, []))

    def kept(name: tuple[str, ...], leaf: Any) -> Any:
        return processes.put(given[name].pop(0), leaf.sharding)

    return _mapped(kept, new, typed)


def _is_stepped(node: Any) -> bool:
    """Whether a node is the memory of a sharded optimizer."""
    return isinstance(node, SteppedMemory)


def _remembered(tree: PyTree, typed: bool) -> dict[tuple[str, ...], list[Any]]:
    """The arrays of each name, in order, without the memory of compressors."""
    found: dict[tuple[str, ...], list[Any]] = {}

    def note(name: tuple[str, ...], leaf: Any) -> Any:
        found.setdefault(name, []).append(leaf)
        return leaf

    _mapped(note, tree, typed)
    return found


def _mapped(
    f: Callable[[tuple[str, ...], Any], Any], node: Any, typed: bool, name: tuple[str, ...] = ()
) -> Any:
    """Applies `f(name, leaf)` to every leaf outside the memory of compressors."""
    if node is None or _is_mean(node):
        return node
    children, treedef = _children(node)
    if children and not children[0][0]:
        return f(name, node)
    made = [child for _, child in children]
    for number in _in_order([key for (key,), _ in children]):
        (key,), child = children[number]
        if per_worker.marked((key,)) or per_worker.shard_axes((key,)) is not None:
            continue
        made[number] = _mapped(f, child, typed, (*name, *_part_of_name(node, key, typed)))
    return treedef.unflatten(made)


def _children(node: Any) -> tuple[list, Any]:
    return jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)


def _in_order(keys: list) -> list[int]:
    """The order of children; a list that was saved as a dict gets the order of the list."""
    if not all(map(_is_place, keys)):
        return list(range(len(keys)))
    return sorted(range(len(keys)), key=lambda number: int(_text(keys[number])))


def _part_of_name(node: Any, key: Any, typed: bool) -> tuple[str, ...]:
    """The name of a child; its position in a chain or list is not part of it."""
    if _is_place(key):
        return ()
    return (f"{type(node).__name__}.{_text(key)}" if typed and _is_named(node) else _text(key),)


def _text(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)


def _is_place(key: Any) -> bool:
    return isinstance(key, jax.tree_util.SequenceKey) or _text(key).isdecimal()


def _is_named(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def _is_typed(state: PyTree) -> bool:
    """Whether a state has its types; a state restored without a target has lost them."""
    found: list[bool] = []

    def note(node: Any) -> bool:
        found.append(_is_named(node))
        return False

    jax.tree.leaves(state, is_leaf=note)
    return any(found)


def _of_memory(name: tuple[str, ...]) -> bool:
    return any(map(per_worker.stored_as_memory, name))


def _is_mean(node: Any) -> bool:
    """Whether this is the state of a compressed mean, or was before it was saved."""
    fields = set(CompressedMeanState._fields)
    return isinstance(node, CompressedMeanState) or (isinstance(node, dict) and set(node) == fields)


def _check(name: str, wanted: list, given: list) -> None:
    wrong = "`state` must hold what `tx` remembers besides its compressors, and nothing else"
    advice = "Graft between chains with the same optimizer, in which only compressors differ"
    if len(wanted) != len(given):
        raise ValueError(
            f"{wrong}: it has {len(given)} arrays {name!r} where `tx` has {len(wanted)}. {advice}"
        )
    for like, x in zip(wanted, given, strict=True):
        shapes = tuple((jnp.shape(one), jnp.result_type(one).name) for one in (x, like))
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{wrong}: {name!r} is {shapes[0]} where `tx` has {shapes[1]}. {advice}, for the "
                "same parameters"
            )
