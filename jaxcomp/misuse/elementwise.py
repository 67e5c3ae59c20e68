"""Refuses optimizers that need whole leaves, or treat leaves differently, where each worker steps
a part of all leaves.

Both ways of stepping are traced with the shapes that they have, for a few steps: the optimizer of
the whole tree, and that of a worker's part. Every element must get its update by one expression.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp.misuse import optax_wrappers
from jaxcomp.misuse.expressions import Expressions, NotElementwiseError, Value
from jaxcomp.numerics import addition
from jaxcomp.types import PyTree

_FEWEST, _MOST = 3, 32
"""Steps whose updates are compared: until the state depends on leaves as in the step before."""


class _Shapes(NamedTuple):
    """A tree's structure, and the shape and dtype of every leaf, as a key of a cache.

    `own` has the dtypes of the parameters, or is empty.
    """

    treedef: Any
    likes: tuple[jax.ShapeDtypeStruct, ...]
    own: tuple[jax.ShapeDtypeStruct, ...]


def check(
    optimizer: Any,
    whole: PyTree,
    part: Sequence[Any],
    dense: Mapping[int, Any],
    given: PyTree | None = None,
) -> None:
    """Raises a `ValueError` unless an optimizer makes the same steps of parts as of whole leaves.

    Args:
        optimizer: the optimizer.
        whole: shapes of the parameters, in the dtypes in which they are stepped.
        part: shapes and dtypes of the arrays that each worker steps a part of, in place of all
            leaves that are not in `dense`.
        dense: shapes and dtypes of the leaves that each worker steps whole, by their numbers.
        given: the parameters in their own dtypes, if these are others.
    """
    leaves, treedef = jax.tree.flatten(whole)
    numbers, kept = tuple(dense), tuple(dense.values())
    own = tuple(
        jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(given)
    )
    shapes = _Shapes(treedef, _likes(leaves), own)
    args = optimizer, shapes, _likes(part), numbers, _likes(kept)
    try:
        reason = _reason(*args)
    except TypeError:  # A tree with static leaves that cannot be hashed.
        reason = _reason.__wrapped__(*args)
    if reason is None:
        return
    culprit = _culprit(*args)
    raise ValueError(
        "`optimizer` must treat every element by itself, since each worker steps a part of all "
        f"leaves, and all leaves alike, got one in which {culprit} does not: {reason}. Elementwise "
        "are optax.sgd, adam, adamw, lion and the like. Clip with `max_norm=`; chain what needs "
        "whole leaves, or names of leaves, after jaxcomp.compressed_mean instead, which gives "
        "every worker all of them"
    )


def _likes(leaves: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of leaves in the dtype in which they are stepped."""
    dtypes = [addition.wide(jnp.result_type(x)) for x in leaves]
    return tuple(
        jax.ShapeDtypeStruct(jnp.shape(x), dtype) for x, dtype in zip(leaves, dtypes, strict=True)
    )


@functools.lru_cache(maxsize=128)
def _reason(
    optimizer: Any, whole: _Shapes, part: tuple, numbers: tuple[int, ...], dense: tuple
) -> str | None:
    """The reason why parts would get other updates than whole leaves; None if they do not."""
    several = len({x.dtype for x in whole.own}) > 1
    if several and (
        reason := _difference(optimizer, whole, whole.own, part, numbers, dense, False)
    ):
        return f"{reason}: leaves of another dtype are stepped in float32"
    return _difference(optimizer, whole, whole.likes, part, numbers, dense, True)


def _difference(
    optimizer: Any,
    whole: _Shapes,
    likes: tuple,
    part: tuple,
    numbers: tuple[int, ...],
    dense: tuple,
    exact: bool,
) -> str | None:
    """The first difference between the updates of whole leaves and of parts."""
    table = Expressions(exact)
    try:
        of_whole = _updates(optimizer, table, jax.tree.unflatten(whole.treedef, likes))
        of_parts, of_dense = (_updates(optimizer, table, likes) for likes in (part, dense))
    except NotElementwiseError as error:
        return str(error)
    except Exception as error:  # Of a mask that names leaves, or of an argument that is missing.
        return f"{type(error).__name__}: {error}".split("\n", 1)[0].rstrip(".")
    own = dict(zip(numbers, of_dense, strict=True))
    tree = jax.tree.unflatten(whole.treedef, range(len(whole.likes)))
    for path, number in jax.tree_util.tree_leaves_with_path(tree):
        for found in [own[number]] if number in own else of_parts:
            steps = min(len(found), len(of_whole[number]))  # Other leaves may settle later.
            if found[:steps] != of_whole[number][:steps]:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                return f"it treats the leaf '{name}' otherwise than a worker's part of it"
    return None


def _updates(optimizer: Any, table: Expressions, params: PyTree) -> list[tuple[int, ...]]:
    """For each leaf, the expressions of its updates in a few steps."""
    likes = jax.tree.leaves(params)
    begin, state = jax.make_jaxpr(optimizer.init, return_shape=True)(params)
    more: list[Any] = []

    def update(grads: PyTree, state: PyTree, params: PyTree, *value: Any) -> PyTree:
        extra = {"value": value[0]} if value else {}
        return optimizer.update(grads, state, params, **extra)

    trace = jax.make_jaxpr(update, return_shape=True)
    try:
        step, (updates, _) = trace(params, state, params)
    except TypeError:  # Of an optimizer that needs the loss.
        more = [jax.ShapeDtypeStruct((), jnp.float32)]
        step, (updates, _) = trace(params, state, params, *more)
    if jax.tree.structure(updates) != jax.tree.structure(params):
        raise NotElementwiseError("its updates have another structure than the parameters")

    def variables(name: str, time: int) -> list[Value]:
        return [table.leaf((name, time), like, leaf) for leaf, like in enumerate(likes)]

    held, found = table.run(begin, variables("parameter", 0)), []
    for time in range(_MOST):
        losses = [table.scalar(("loss", time)) for _ in more]
        grads, weights = variables("gradient", time), variables("parameter", time)
        results = table.run(step, [*grads, *held, *weights, *losses])
        now, before, held = results[: len(likes)], held, results[len(likes) :]
        for number, x in enumerate(now):
            if x.leaf not in (None, number) or not (x.uniform or x.leaf == number):
                raise NotElementwiseError("an update is computed from another leaf")
        found.append([x.expression for x in now])
        settled = [(x.leaf, x.uniform) for x in before] == [(x.leaf, x.uniform) for x in held]
        if settled and time + 1 >= _FEWEST:
            break
    return list(zip(*found, strict=True))


@functools.lru_cache(maxsize=128)
def copies(optimizer: Any, likes: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[bool, ...]:
    """Which arrays of an optimizer's state are made from the values of the parameters."""
    table = Expressions()
    weights = [table.leaf(("parameter", 0), like, leaf) for leaf, like in enumerate(likes)]
    made = table.run(jax.make_jaxpr(optimizer.init)(likes), weights)
    return tuple(x.leaf is not None for x in made)


def _culprit(optimizer: Any, *shapes: Any) -> str:
    """The first member of a chain with which parts get other updates than whole leaves."""
    members = _members(optimizer)
    for number, member in enumerate(members):
        if _reason.__wrapped__(optax.chain(*members[: number + 1]), *shapes) is not None:
            return _name(member)
    return "something"


def _members(optimizer: Any) -> list[Any]:
    """The transformations of a chain, as optax keeps them; else the optimizer alone."""
    optimizer = _unwrap(optimizer)
    found = [_cell(optimizer.init, "init_fns"), _cell(optimizer.update, "update_fns")]
    if None in found or len(found[0]) != len(found[1]):
        return [optimizer]
    members = map(optax.GradientTransformationExtraArgs, *found)
    return [each for member in members for each in _members(member)]


def _unwrap(optimizer: Any) -> Any:
    """The transformation that optax has extended to take extra arguments."""
    if not optimizer.update.__qualname__.startswith("with_extra_args_support."):
        return optimizer
    return _unwrap(_cell(optimizer.update, "tx"))


def _cell(function: Any, name: str) -> Any:
    function = getattr(function, "__wrapped__", function)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return next((cell.cell_contents for key, cell in cells if key == name), None)


def _name(member: Any) -> str:
    """The name of the function that made a transformation."""
    name = member.update.__qualname__.split(".", 1)[0]
    return f"optax.{name}" if optax_wrappers.is_optax(member.update.__module__) else name
