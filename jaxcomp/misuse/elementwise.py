"""Finds optimizers that need whole leaves, or treat leaves differently, by trying them out."""

import concurrent.futures
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp.types import PyTree

_SIDE = 3
"""Elements along each dimension of a leaf on which an optimizer is tried."""

_CUT = 2
"""Elements of the first piece."""


def check(optimizer: Any, like: PyTree, dense: Sequence[int]) -> None:
    """Raises a `ValueError` unless an optimizer makes the same steps of pieces as of whole leaves.

    Args:
        optimizer: the optimizer.
        like: the parameters, or their shapes and dtypes.
        dense: the numbers of the leaves that stay whole; all others are cut into pieces.
    """
    leaves, treedef = jax.tree.flatten(like)
    _check(optimizer, treedef, tuple(jnp.ndim(x) for x in leaves), tuple(dense))


@functools.lru_cache(maxsize=128)
def _check(optimizer: Any, treedef: Any, ndims: tuple[int, ...], dense: tuple[int, ...]) -> None:
    # In a thread of its own, outside of any mapped function, so that arrays are computed.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as alone:
        culprit = alone.submit(_culprit, optimizer, treedef, ndims, dense).result()
    if culprit is None:
        return
    raise ValueError(
        "`optimizer` must treat every element by itself, since each worker steps a part of all "
        f"leaves, and all leaves alike, got one in which {culprit} does not. Elementwise are "
        "optax.sgd, adam, adamw, lion and the like. Clip with `max_norm=`; chain what needs whole "
        "leaves after jaxcomp.compressed_mean instead, which gives every worker all of them"
    )


def _culprit(
    optimizer: Any, treedef: Any, ndims: tuple[int, ...], dense: tuple[int, ...]
) -> str | None:
    """The first member of a chain with which whole leaves and pieces get different updates."""
    if len(dense) == len(ndims) or _same(optimizer, treedef, ndims, dense):
        return None
    members = _members(optimizer)
    for number, member in enumerate(members):
        if not _same(optax.chain(*members[: number + 1]), treedef, ndims, dense):
            return f"optax.{_name(member)}"
    return "something"


def _same(optimizer: Any, treedef: Any, ndims: tuple[int, ...], dense: tuple[int, ...]) -> bool:
    """Whether whole leaves and pieces get the same updates."""
    rng = np.random.default_rng(0)
    near = [jnp.asarray(rng.normal(size=(_SIDE,) * n), jnp.float32) for n in ndims]
    slopes = [
        [jnp.asarray(rng.normal(size=p.shape) * 4.0 ** rng.integers(-3, 4)) * scale for p in near]
        for scale in (1.0, 1e4, 1e-3, 30.0)
    ]
    return all(
        _same_steps(optimizer, treedef, [scale * p for p in near], slopes, dense)
        for scale in (1.0, 1e4)
    )


def _same_steps(
    optimizer: Any,
    treedef: Any,
    params: list[Any],
    grads: list[list[Any]],
    dense: tuple[int, ...],
) -> bool:
    """The same for these parameters and the gradients of a few steps."""

    def pieces(leaves: Sequence[Any]) -> list[Any]:
        """All compressed leaves as two slices of rows, each for an optimizer of its own."""
        rows = jnp.concatenate([x.reshape(-1, 1) for i, x in enumerate(leaves) if i not in dense])
        # The cut is within a leaf.
        return [(rows[:_CUT],), (rows[_CUT:],), tuple(leaves[i] for i in dense)]

    try:
        whole = _run(
            optimizer,
            jax.tree.unflatten(treedef, params),
            [jax.tree.unflatten(treedef, g) for g in grads],
        )
        parts = [
            _run(optimizer, own, [pieces(g)[number] for g in grads])
            for number, own in enumerate(pieces(params))
        ]
    except (TypeError, ValueError, KeyError, IndexError):  # Of a mask that names leaves.
        return False
    for number, step in enumerate(whole):
        want = np.concatenate([np.ravel(x) for x in jax.tree.leaves(pieces(jax.tree.leaves(step)))])
        got = np.concatenate([np.ravel(x) for part in parts for x in jax.tree.leaves(part[number])])
        # Relative to the step itself: with a warm-up, first steps are short.
        if not np.allclose(got, want, rtol=1e-4, atol=1e-6 * np.abs(want).max(initial=0)):
            return False
    return True


def _run(optimizer: Any, params: PyTree, grads: Sequence[PyTree]) -> list[PyTree]:
    """The updates of several steps."""
    state, found = optimizer.init(params), []
    for each in grads:
        updates, state = optimizer.update(each, state, params)
        found.append(updates)
    return found


def _members(optimizer: Any) -> list[Any]:
    """The transformations of a chain, as optax keeps them; else the optimizer alone."""
    optimizer = _unwrapped(optimizer)
    found = [_cell(optimizer.init, "init_fns"), _cell(optimizer.update, "update_fns")]
    if None in found or len(found[0]) != len(found[1]):
        return [optimizer]
    members = map(optax.GradientTransformationExtraArgs, *found)
    return [each for member in members for each in _members(member)]


def _unwrapped(optimizer: Any) -> Any:
    """The transformation that optax has extended to take extra arguments."""
    if not optimizer.update.__qualname__.startswith("with_extra_args_support."):
        return optimizer
    return _unwrapped(_cell(optimizer.update, "tx"))


def _cell(function: Any, name: str) -> Any:
    function = getattr(function, "__wrapped__", function)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return next((cell.cell_contents for key, cell in cells if key == name), None)


def _name(member: Any) -> str:
    """The name of the function that made a transformation."""
    return member.update.__qualname__.split(".", 1)[0]
